"""Qwen2 and Qwen2.5 (Yang et al. 2024) are Llama with biases on the query, key and value linears alone."""

from __future__ import annotations

from megazero.families import llama
from megazero.families.family import Family
from megazero.families.huggingface import HuggingFace, rotary_options

QWEN2 = Family(
    name="qwen2",
    defaults={**llama.DEFAULTS, "add_qkv_bias": True},
    names=llama.NAMES,
    hugging_face=HuggingFace(
        "qwen2",
        fields=llama.FIELDS,
        absent={**llama.ABSENT, "num_query_groups": 32},
        tied=False,
        only={"hidden_act": ("silu",), "use_sliding_window": (False,), "use_mrope": (False,)},
        further=rotary_options,
    ),
)
