"""Mistral (Jiang et al. 2023) is Llama whose attention looks back through a window at most."""

from __future__ import annotations

from megazero.families import llama
from megazero.families.config_json.huggingface import HuggingFace
from megazero.families.config_json.layer_groups import window
from megazero.families.config_json.rotary_fields import ROTARY
from megazero.families.family import Family

MISTRAL = Family(
    name="mistral",
    defaults=llama.DEFAULTS,
    names=(llama.NAMES,),
    hugging_face=HuggingFace(
        "mistral",
        "MistralForCausalLM",
        fields=llama.FIELDS,
        absent={**llama.ABSENT, "num_query_groups": 8, "max_position_embeddings": 131072},
        tied=False,
        only=llama.SILU,
        groups=(ROTARY, window(4096)),
    ),
)
