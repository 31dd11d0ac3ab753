"""Granite 3 (IBM 2024) is Llama with multipliers of embeddings, scores and residual sums, and a divisor of logits."""

from __future__ import annotations

from megazero.families import llama
from megazero.families.config_json.field_groups import biases
from megazero.families.config_json.huggingface import FieldGroup
from megazero.families.config_json.rotary_fields import ROTARY

ATTENTION_MULTIPLIER = FieldGroup(
    ("attention_multiplier",),
    lambda config: {"softmax_scale": config.get("attention_multiplier", 1.0)},
    lambda options: {"attention_multiplier": options.attention_scale},
)
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
GRANITE = llama.relative(
    "granite",
    "GraniteForCausalLM",
    fields={**llama.FIELDS, **{name: name for name in MULTIPLIERS}},
    absent={"max_position_embeddings": 2048, **dict.fromkeys(MULTIPLIERS, 1.0)},
    groups=(ATTENTION_MULTIPLIER, biases(mlp=True), ROTARY),
)
