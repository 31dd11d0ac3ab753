"""DeepSeek-V2 and V3 (DeepSeek-AI 2024, arXiv 2405.04434 and 2412.19437) are Llama with latent attention and experts
behind the first layers.

Moonlight (Moonshot AI 2025) says that it is deepseek_v3. Kimi K2 (2025) is of that shape, too, under its own name;
what is trained of it here is written as deepseek_v3, which transformers computes without code of theirs.
"""

from __future__ import annotations

from typing import Any

from megazero.families import llama
from megazero.families.config_json.expert_fields import (
    DEEPSEEK_COUNT,
    FURTHER,
    NO_FURTHER,
    OTHER_COUNT,
    OTHER_DEEPSEEK_COUNT,
    deepseek,
    deepseek_v2,
)
from megazero.families.config_json.field_groups import chosen, unread
from megazero.families.config_json.huggingface import Config, FieldGroup
from megazero.families.config_json.rotary_fields import ROTARY

FIELDS = {
    **llama.WITHOUT_HEAD_DIM,
    **DEEPSEEK_COUNT,
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
del FIELDS["num_query_groups"]
# Norms of latents have their class's epsilon there, whatever rms_norm_eps says.
CHOICES = {"multi_latent_attention": True, "qk_norm": "head", "latent_norm_epsilon": 1e-6}
ABSENT = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
}


def _read_heads(config: Config) -> dict[str, Any]:
    """Read what transformers derives from other fields, and writes, too."""
    said = {**dict.fromkeys(("num_key_value_heads", "head_dim", "qk_head_dim")), **config}
    turned = config.get("qk_rope_head_dim", ABSENT["qk_pos_emb_head_dim"])
    wanted = {"num_key_value_heads": config.get("num_attention_heads"), "head_dim": turned}
    wanted["qk_head_dim"] = turned + config.get("qk_nope_head_dim", ABSENT["qk_head_dim"])
    for name, value in wanted.items():
        if said[name] not in (None, value):
            raise ValueError(f"{name} = {said[name]!r} is not supported with latent attention (only {value})")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("mscale_all_dim") and (rope.get("attention_factor") or not rope.get("mscale")):
        raise ValueError("mscale_all_dim is supported with mscale, and without attention_factor, alone")
    return {**CHOICES}


HEADS = FieldGroup(
    ("num_key_value_heads", "head_dim", "qk_head_dim"),
    _read_heads,
    lambda options: {"num_key_value_heads": options.num_attention_heads},
)
# The same code as transformers' class, and how many ranks share experts.
ASIDE = FieldGroup(("auto_map", "ep_size"))

DEEPSEEK_V2 = llama.relative(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    choices={**CHOICES, "moe_router_pre_softmax": True},
    names=(llama.DEEPSEEK_NAMES,),
    fields=FIELDS,
    absent={**ABSENT, "max_position_embeddings": 2048, "num_experts": 64, "moe_ffn_hidden_size": 1407},
    aliases={**OTHER_DEEPSEEK_COUNT, **OTHER_COUNT},
    only={**llama.SILU, "attention_bias": (False,), "mlp_bias": (False,)},
    groups=(
        ROTARY,
        HEADS,
        ASIDE,
        unread(scoring_func="softmax", moe_layer_freq=1),
        deepseek_v2(
            **{"num_experts_per_tok": None, "moe_intermediate_size": 1407, "n_shared_experts": 2},
            **{"first_k_dense_replace": 0, "topk_method": "greedy", "norm_topk_prob": False},
        ),
    ),
)
DEEPSEEK_V3 = llama.relative(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    choices={**CHOICES, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    names=(llama.DEEPSEEK_NAMES,),
    fields={**FIELDS, **FURTHER},
    absent={
        **{
            **ABSENT,
            **NO_FURTHER,
            "max_position_embeddings": 4096,
            "num_experts": 256,
            "moe_ffn_hidden_size": 2048,
        },
        "moe_router_topk": 8,
    },
    aliases=OTHER_DEEPSEEK_COUNT,
    only={**llama.SILU, "attention_bias": (False,)},
    groups=(
        ROTARY,
        HEADS,
        ASIDE,
        chosen("rope_interleave", "rotary_interleaved", (False, True), True),
        unread(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1),
        deepseek(
            **{"num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1},
            **{"first_k_dense_replace": 3, "norm_topk_prob": True},
            **{"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
        ),
    ),
    other_types=("kimi_k2",),
)
