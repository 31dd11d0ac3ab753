"""SmolLM3 (Bakouch et al. 2025) is Llama with rotary positions in three layers of four."""

from __future__ import annotations

from megazero.families import llama
from megazero.families.config_json.field_groups import biases
from megazero.families.config_json.layer_groups import UNTURNED_LAYERS
from megazero.families.config_json.rotary_fields import rotary

SMOLLM3 = llama.relative(
    "smollm3",
    "SmolLM3ForCausalLM",
    absent={"num_query_groups": 4, "max_position_embeddings": 32768},
    tied=True,
    groups=(biases(mlp=True), rotary(absent_base=2e6), UNTURNED_LAYERS),
)
