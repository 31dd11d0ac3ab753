"""dots.llm1 (Huo et al. 2025) is Qwen3 with a mixture of experts as DeepSeek-V3's."""

from __future__ import annotations

from megazero.families import llama
from megazero.families.config_json.expert_fields import DEEPSEEK_COUNT, OTHER_DEEPSEEK_COUNT, deepseek
from megazero.families.config_json.field_groups import biases, unread
from megazero.families.config_json.layer_groups import LATER_WINDOWS
from megazero.families.config_json.rotary_fields import ROTARY

DOTS1 = llama.relative(
    "dots1",
    "Dots1ForCausalLM",
    choices={
        "qk_norm": "head",
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    names=(llama.DEEPSEEK_NAMES,),
    fields={**llama.FIELDS, **DEEPSEEK_COUNT},
    absent={"num_query_groups": 32, "max_position_embeddings": 2048, "moe_ffn_hidden_size": 1408},
    aliases=OTHER_DEEPSEEK_COUNT,
    groups=(
        biases(mlp=False),
        ROTARY,
        LATER_WINDOWS,
        unread(scoring_func="noaux_tc", moe_layer_freq=1),
        deepseek(
            num_experts_per_tok=None,
            moe_intermediate_size=1408,
            n_shared_experts=None,
            first_k_dense_replace=0,
            norm_topk_prob=False,
        ),
    ),
)
