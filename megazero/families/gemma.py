"""Gemma 2 (Gemma Team 2024) and Gemma 3 (2025) are Llama with norms of 1 + weight on both sides of attention and MLP.

Their MLP has a gate of GELU, embeddings are scaled, and most layers have a window. Gemma 2 caps scores and logits.
Gemma 3 has norms of queries and keys, and another base of rotary positions in layers with a window.
"""

from __future__ import annotations

from typing import Any

from megazero.families import llama
from megazero.families.config_json.field_groups import WHOLE_HEADS, biases, gelu, soft_caps
from megazero.families.config_json.huggingface import Config, FieldGroup
from megazero.families.config_json.layer_groups import every_nth_full, two_rotaries
from megazero.families.config_json.rotary_fields import ROTARY, rotary

CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
CHOICES = {
    "swiglu": False,
    "geglu": True,
    "apply_layernorm_1p": True,
    "scale_embeddings": True,
    "transformer_block_type": "sandwich",
}


def _read_scale(config: Config) -> dict[str, Any]:
    return {"softmax_scale": config.get("query_pre_attn_scalar", 256) ** -0.5}


def _write_scale(options: Any) -> dict[str, Any]:
    scalar = options.attention_scale**-2
    return {"query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-9 * scalar else scalar}


# Files have hidden_act, too, which transformers does not read.
UNREAD = FieldGroup(("hidden_act",), write=lambda _: {"hidden_act": "gelu_pytorch_tanh"})
GROUPS = (
    biases(mlp=False),
    gelu("hidden_activation", "gelu_pytorch_tanh"),
    FieldGroup(("query_pre_attn_scalar",), _read_scale, _write_scale),
    UNREAD,
)
ABSENT = {"num_query_groups": 4, "kv_channels": 256, "norm_epsilon": 1e-6}

GEMMA2 = llama.relative(
    "gemma2",
    "Gemma2ForCausalLM",
    choices={**CHOICES, **CAPS},
    names=(llama.SANDWICH_NAMES,),
    absent={**ABSENT, "max_position_embeddings": 8192},
    tied=True,
    only={},
    groups=(*GROUPS, ROTARY, every_nth_full(2), soft_caps(**CAPS), WHOLE_HEADS),
)
GEMMA3 = llama.relative(
    "gemma3",
    "Gemma3ForCausalLM",
    model_type="gemma3_text",
    choices={**CHOICES, "qk_norm": "head"},
    names=(llama.SANDWICH_NAMES,),
    absent={**ABSENT, "max_position_embeddings": 131072},
    tied=True,
    only={"attn_logit_softcapping": (None,)},  # transformers does not apply it
    groups=(
        *GROUPS,
        two_rotaries(
            every_nth_full(6, "sliding_window_pattern"),
            rotary(absent_base=1e6),
            base=1e4,
            local="rope_local_base_freq",
        ),
        soft_caps(final_logit_softcapping=None),
        WHOLE_HEADS,
    ),
)
