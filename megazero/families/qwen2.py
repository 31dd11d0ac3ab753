"""Qwen2 and Qwen2.5 (Yang et al. 2024) are Llama with biases on the query, key and value linears alone."""

from __future__ import annotations

from megazero.families import llama
from megazero.families.config_json.huggingface import HuggingFace
from megazero.families.config_json.layer_groups import SWITCHED_WINDOWS
from megazero.families.config_json.rotary_fields import ROTARY
from megazero.families.family import Family

ABSENT = {**llama.ABSENT, "num_query_groups": 32, "max_position_embeddings": 32768}
QWEN2 = Family(
    name="qwen2",
    defaults={**llama.DEFAULTS, "add_qkv_bias": True},
    names=(llama.NAMES,),
    hugging_face=HuggingFace(
        "qwen2",
        "Qwen2ForCausalLM",
        fields=llama.FIELDS,
        absent=ABSENT,
        tied=False,
        only=llama.SILU,
        groups=(ROTARY, SWITCHED_WINDOWS),
    ),
)
