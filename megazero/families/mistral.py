"""Mistral (Jiang et al. 2023) is Llama whose attention looks back through a window at most."""

from __future__ import annotations

from megazero.families import llama
from megazero.families.config_json.layer_groups import window
from megazero.families.config_json.rotary_fields import ROTARY

MISTRAL = llama.relative(
    "mistral",
    "MistralForCausalLM",
    absent={"num_query_groups": 8, "max_position_embeddings": 131072},
    groups=(ROTARY, window(4096)),
)
