"""Phi-3 and Phi-4 (Abdin et al. 2024) are Llama with q, k, v in one linear, gate and up projection in another."""

from __future__ import annotations

from dataclasses import replace

from megazero.families import llama
from megazero.families.family import FILLING_HEADS, Family
from megazero.families.field_groups import rotary
from megazero.families.huggingface import FieldGroup, HuggingFace
from megazero.families.layer_groups import window

NAMES = replace(
    llama.NAMES,
    layer={
        "input_norm": "input_layernorm",
        "attention.q_proj": ("self_attn.qkv_proj", 0),
        "attention.k_proj": ("self_attn.qkv_proj", 1),
        "attention.v_proj": ("self_attn.qkv_proj", 2),
        "attention.o_proj": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate_proj": ("mlp.gate_up_proj", 0),
        "mlp.up_proj": ("mlp.gate_up_proj", 1),
        "mlp.down_proj": "mlp.down_proj",
    },
    needs={
        "position_embedding_type": "rope",
        "rotary_scaling": "none",
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "add_attention_bias": False,
        "add_qkv_bias": False,
        "embed_layernorm": False,
        "qk_norm": "none",
        "transformer_block_type": "sequential",
    },
    equal=FILLING_HEADS,
)
# The original length scales longrope alone, which rotary positions refuse.
ORIGINAL_LENGTH = FieldGroup(("original_max_position_embeddings",), lambda _: {}, lambda _: {})
PHI3 = Family(
    name="phi3",
    defaults=llama.DEFAULTS,
    names=(NAMES,),
    hugging_face=HuggingFace(
        "phi3",
        "Phi3ForCausalLM",
        fields={name: field for name, field in llama.FIELDS.items() if name != "kv_channels"},
        absent={"num_query_groups": None, "max_position_embeddings": 4096, "norm_epsilon": 1e-5},
        tied=False,
        only=llama.SILU,
        groups=(rotary(share="partial_rotary_factor"), window(None), ORIGINAL_LENGTH),
    ),
)
