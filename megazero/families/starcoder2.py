"""StarCoder2 (Lozhkov et al. 2024) has LayerNorm, rotary positions, GELU, biases, tied embeddings and a window."""

from __future__ import annotations

from dataclasses import replace

from megazero.families import llama
from megazero.families.config_json.field_groups import gelu
from megazero.families.config_json.huggingface import FieldGroup, HuggingFace
from megazero.families.config_json.layer_groups import window
from megazero.families.config_json.rotary_fields import ROTARY
from megazero.families.family import Family

NAMES = replace(
    llama.NAMES,
    layer={**llama.NAMES.layer, "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
    needs={"gated_mlp": False, "transformer_block_type": "sequential"},
)
BIASES = FieldGroup(
    ("use_bias",),
    lambda config: dict.fromkeys(("add_bias_linear", "add_attention_bias"), config.get("use_bias", True)),
    lambda options: {"use_bias": options.add_bias_linear},
)
# Of files, which transformers does not read.
UNREAD = FieldGroup(
    ("activation_function", "layer_norm_epsilon", "mlp_type", "norm_type", "scale_attn_weights")
)
STARCODER2 = Family(
    name="starcoder2",
    defaults={
        "position_embedding_type": "rope",
        "normalization": "LayerNorm",
        "swiglu": False,
        "add_bias_linear": True,
        "untie_embeddings_and_output_weights": False,
    },
    names=(NAMES,),
    hugging_face=HuggingFace(
        "starcoder2",
        "Starcoder2ForCausalLM",
        fields={**llama.FIELDS, "norm_epsilon": "norm_epsilon"},
        absent={"num_query_groups": 2, "kv_channels": None, "norm_epsilon": 1e-5, "init_method_std": 0.018042}
        | {"max_position_embeddings": 4096},
        tied=True,
        groups=(BIASES, ROTARY, gelu("hidden_act", "gelu_pytorch_tanh"), window(None), UNREAD),
    ),
)
