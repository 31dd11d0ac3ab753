"""GLM-4 (Team GLM 2024) is Llama whose rotary positions turn neighbouring channels of half of each head.

Gate and up projection are one linear, and queries, keys and values have biases. The models of 2025 (model_type glm4)
have norms on both sides of attention and MLP.
"""

from __future__ import annotations

from dataclasses import replace

from megazero.families import llama
from megazero.families.config_json.huggingface import FieldGroup
from megazero.families.config_json.rotary_fields import rotary
from megazero.families.family import Family, TensorNames

CHOICES = {"add_qkv_bias": True, "rotary_interleaved": True, "rotary_percent": 0.5}
ABSENT = {
    "num_query_groups": 2,
    "kv_channels": 128,
    "norm_epsilon": 1.5625e-7,
    "max_position_embeddings": 131072,
}
BIAS = FieldGroup(
    ("attention_bias",),
    lambda config: {"add_qkv_bias": config.get("attention_bias", True)},
    lambda options: {"attention_bias": options.qkv_bias},
)


def _names(block: str, **norms: str) -> TensorNames:
    """Return the names of a layer with these norms."""
    mlp = {"mlp.gate_proj": ("mlp.gate_up_proj", 0), "mlp.up_proj": ("mlp.gate_up_proj", 1)}
    return replace(
        llama.NAMES,
        layer={**llama.NAMES.layer, **mlp, **norms},
        needs={
            "position_embedding_type": "rope",
            "rotary_interleaved": True,
            "normalization": "RMSNorm",
            "swiglu": True,
            "add_bias_linear": False,
            "add_attention_bias": False,
            "embed_layernorm": False,
            "qk_norm": "none",
            "transformer_block_type": block,
        },
    )


def _family(name: str, architecture: str, names: TensorNames) -> Family:
    return llama.relative(
        name,
        architecture,
        choices={**CHOICES, "transformer_block_type": names.needs["transformer_block_type"]},
        names=(names,),
        absent=ABSENT,
        groups=(BIAS, rotary(share="partial_rotary_factor", absent_share=0.5)),
    )


GLM = _family("glm", "GlmForCausalLM", _names("sequential"))
GLM4 = _family(
    "glm4",
    "Glm4ForCausalLM",
    _names(
        "sandwich",
        attention_output_norm="post_self_attn_layernorm",
        mlp_norm="post_attention_layernorm",
        mlp_output_norm="post_mlp_layernorm",
    ),
)
