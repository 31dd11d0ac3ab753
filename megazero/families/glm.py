"""GLM-4 (Team GLM 2024) is Llama whose rotary positions turn neighbouring channels of half of each head.

Gate and up projection are one linear, and queries, keys and values have biases. The models of 2025 (model_type glm4)
have norms on both sides of attention and MLP. In GLM-4.5 (GLM-4.5 Team 2025, model_type glm4_moe) layers behind the
first ones have experts, and rotary positions turn channels that are far apart.
"""

from __future__ import annotations

from dataclasses import replace

from megazero.families import llama
from megazero.families.config_json.expert_fields import (
    DEEPSEEK_COUNT,
    FURTHER,
    NO_FURTHER,
    OTHER_DEEPSEEK_COUNT,
    deepseek,
)
from megazero.families.config_json.field_groups import chosen, single
from megazero.families.config_json.huggingface import FieldGroup
from megazero.families.config_json.rotary_fields import rotary
from megazero.families.family import PLAIN_LAYER, Family, TensorNames, gate_and_up

CHOICES = {"add_qkv_bias": True, "rotary_interleaved": True, "rotary_percent": 0.5}
ABSENT = {
    "num_query_groups": 2,
    "kv_channels": 128,
    "norm_epsilon": 1.5625e-7,
    "max_position_embeddings": 131072,
}


def _qkv_bias(absent: bool) -> FieldGroup:
    """Return attention_bias, which o does not have. ``absent`` is what an absent field means."""
    return single("attention_bias", "add_qkv_bias", absent, "qkv_bias")


def _names(block: str, **norms: str) -> TensorNames:
    """Return the names of a layer with these norms."""
    return replace(
        llama.NAMES,
        layer={**llama.NAMES.layer, **gate_and_up("mlp.gate_up_proj"), **norms},
        needs={
            **PLAIN_LAYER,
            **llama.DEFAULTS,
            "rotary_interleaved": True,
            "add_attention_bias": False,
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
        groups=(_qkv_bias(True), rotary(share="partial_rotary_factor", absent_share=0.5)),
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
GLM4_MOE = llama.relative(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    choices={
        "rotary_percent": 0.5,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    names=(llama.DEEPSEEK_NAMES,),
    fields={**llama.FIELDS, **DEEPSEEK_COUNT, **FURTHER},
    absent={
        **NO_FURTHER,
        **{"num_query_groups": 8, "norm_epsilon": 1e-5, "max_position_embeddings": 131072},
        **{"num_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 1408},
    },
    aliases=OTHER_DEEPSEEK_COUNT,
    groups=(
        _qkv_bias(False),
        chosen("use_qk_norm", "qk_norm", ("none", "head"), False),
        rotary(share="partial_rotary_factor", absent_share=0.5),
        deepseek(
            num_experts_per_tok=8,
            moe_intermediate_size=1408,
            n_shared_experts=1,
            first_k_dense_replace=1,
            norm_topk_prob=True,
        ),
    ),
)
