"""SmolLM3 (Bakouch et al. 2025) is Llama with rotary positions in three layers of four."""

from __future__ import annotations

from megazero.families import llama
from megazero.families.config_json.field_groups import biases
from megazero.families.config_json.huggingface import HuggingFace
from megazero.families.config_json.layer_groups import UNTURNED_LAYERS
from megazero.families.config_json.rotary_fields import rotary
from megazero.families.family import Family

SMOLLM3 = Family(
    name="smollm3",
    defaults={**llama.DEFAULTS, "untie_embeddings_and_output_weights": False},
    names=(llama.NAMES,),
    hugging_face=HuggingFace(
        "smollm3",
        "SmolLM3ForCausalLM",
        fields=llama.FIELDS,
        absent={**llama.ABSENT, "num_query_groups": 4, "max_position_embeddings": 32768},
        tied=True,
        only=llama.SILU,
        groups=(biases(mlp=True), rotary(absent_base=2e6), UNTURNED_LAYERS),
    ),
)
