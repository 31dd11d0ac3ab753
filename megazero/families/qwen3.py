"""Qwen3 (Yang et al. 2025) is Llama with a norm over each head of the queries and of the keys."""

from __future__ import annotations

from megazero.families import llama, qwen2
from megazero.families.config_json.field_groups import biases
from megazero.families.config_json.huggingface import HuggingFace
from megazero.families.config_json.layer_groups import SWITCHED_WINDOWS
from megazero.families.config_json.rotary_fields import ROTARY
from megazero.families.family import Family

QWEN3 = Family(
    name="qwen3",
    defaults={**llama.DEFAULTS, "qk_norm": "head"},
    names=(llama.NAMES,),
    hugging_face=HuggingFace(
        "qwen3",
        "Qwen3ForCausalLM",
        fields=llama.FIELDS,
        absent={**qwen2.ABSENT, "kv_channels": 128},
        tied=False,
        only=llama.SILU,
        groups=(biases(mlp=False), ROTARY, SWITCHED_WINDOWS),
    ),
)
