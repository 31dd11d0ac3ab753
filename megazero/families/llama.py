"""Llama 1 to 3 and models of its shape have RMSNorm, rotary positions, SwiGLU and no biases."""

from __future__ import annotations

from dataclasses import replace

from megazero.families.config_json.field_groups import WHOLE_HEADS, biases
from megazero.families.config_json.huggingface import HuggingFace
from megazero.families.config_json.rotary_fields import ROTARY
from megazero.families.family import Family, TensorNames

DEFAULTS = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
# embed_positions and embed_norm, which no Llama has, make these names express every mixture. Qwen3 and OLMo 2 have
# norms of queries and keys. OLMo 2 has norms of outputs, and then none of inputs.
NAMES = TensorNames(
    model={
        "embedding.tokens": "model.embed_tokens",
        "embedding.positions": "model.embed_positions",
        "embedding.norm": "model.embed_norm",
        "head.norm": "model.norm",
        "head": "lm_head",
    },
    layer_prefix="model.layers.",
    layer={
        "input_norm": "input_layernorm",
        "attention.q_proj": "self_attn.q_proj",
        "attention.k_proj": "self_attn.k_proj",
        "attention.v_proj": "self_attn.v_proj",
        "attention.o_proj": "self_attn.o_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "attention_output_norm": "post_attention_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate_proj": "mlp.gate_proj",
        "mlp.up_proj": "mlp.up_proj",
        "mlp.down_proj": "mlp.down_proj",
        "mlp_output_norm": "post_feedforward_layernorm",
    },
    needs={"transformer_block_type": ("sequential", "parallel", "parallel-two-norms", "output-norm")},
)
# Of the four norms of a layer (Gemma 2 and 3), the one before the MLP has another name.
SANDWICH_NAMES = replace(
    NAMES,
    layer={**NAMES.layer, "mlp_norm": "pre_feedforward_layernorm"},
    needs={"transformer_block_type": "sandwich"},
)
FIELDS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
}
ABSENT = {"num_query_groups": None, "kv_channels": None, "norm_epsilon": 1e-6}
SILU = {"hidden_act": ("silu",)}

LLAMA = Family(
    name="llama",
    defaults=DEFAULTS,
    names=(NAMES, SANDWICH_NAMES),
    hugging_face=HuggingFace(
        "llama",
        "LlamaForCausalLM",
        FIELDS,
        ABSENT,
        tied=False,
        only=SILU,
        groups=(biases(mlp=True), ROTARY, WHOLE_HEADS),
    ),
)
