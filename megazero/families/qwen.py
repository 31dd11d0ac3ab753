"""Qwen2, Qwen2.5 (Yang et al. 2024) and Qwen3 (2025) are Llama with windows that a switch turns on.

Qwen2 has biases on the query, key and value linears alone. Qwen3 has a norm over each head of the
queries and of the keys. Its mixtures of experts are Qwen3 whose MLPs are experts, in some layers or in all.
"""

from __future__ import annotations

from megazero.families import llama
from megazero.families.config_json.field_groups import biases
from megazero.families.config_json.layer_groups import SPARSE_LAYERS, SWITCHED_WINDOW, SWITCHED_WINDOWS
from megazero.families.config_json.rotary_fields import ROTARY

ABSENT = {"num_query_groups": 32, "max_position_embeddings": 32768}
QWEN2 = llama.relative(
    "qwen2",
    "Qwen2ForCausalLM",
    choices={"add_qkv_bias": True},
    absent=ABSENT,
    groups=(ROTARY, SWITCHED_WINDOWS),
)
QWEN3 = llama.relative(
    "qwen3",
    "Qwen3ForCausalLM",
    choices={"qk_norm": "head"},
    absent={**ABSENT, "kv_channels": 128},
    groups=(biases(mlp=False), ROTARY, SWITCHED_WINDOWS),
)
QWEN3_MOE = llama.relative(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    choices={"qk_norm": "head"},
    # Its class has no width of heads; files have one, which its attention reads.
    absent={**ABSENT, "num_query_groups": 4, "kv_channels": None},
    groups=(biases(mlp=False), ROTARY, SWITCHED_WINDOW, SPARSE_LAYERS),
)
