"""OLMo 2 (Walsh et al. 2024) is Llama whose norms follow attention and MLP, with norms of all queries and keys.

OLMoE (Muennighoff et al. 2024) has its norms before attention and MLP, and experts in all layers.
In OLMo 3 (Olmo Team 2025) three layers of four have a window, and rotary positions that are not scaled.
"""

from __future__ import annotations

from megazero.families import llama
from megazero.families.config_json.expert_fields import COUNT, EVERY_LAYER, OTHER_COUNT, renormalised
from megazero.families.config_json.field_groups import biases
from megazero.families.config_json.layer_groups import every_nth_full, two_rotaries
from megazero.families.config_json.rotary_fields import ROTARY, rotary

CHOICES = {"transformer_block_type": "output-norm", "qk_norm": "all-heads"}
ABSENT = {"norm_epsilon": 1e-5, "max_position_embeddings": 2048}
OLMO2 = llama.relative(
    "olmo2",
    "Olmo2ForCausalLM",
    choices=CHOICES,
    fields=llama.WITHOUT_HEAD_DIM,
    absent=ABSENT,
    groups=(biases(mlp=False), ROTARY),
)
OLMOE = llama.relative(
    "olmoe",
    "OlmoeForCausalLM",
    choices={"qk_norm": "all-heads", "moe_router_pre_softmax": True},
    fields={**llama.WITHOUT_HEAD_DIM, **COUNT},
    absent={"norm_epsilon": 1e-5, "max_position_embeddings": 4096, "num_experts": 64, "moe_router_topk": 8},
    aliases=OTHER_COUNT,
    only={**llama.SILU, "clip_qkv": (None,)},
    groups=(biases(mlp=False), ROTARY, EVERY_LAYER, renormalised(False)),
)
OLMO3 = llama.relative(
    "olmo3",
    "Olmo3ForCausalLM",
    choices=CHOICES,
    fields=llama.WITHOUT_HEAD_DIM,
    absent=ABSENT,
    groups=(biases(mlp=False), two_rotaries(every_nth_full(4), rotary(absent_base=None), base=5e5)),
)
