"""Phi-3 and Phi-4 (Abdin et al. 2024) are Llama with q, k, v in one linear, gate and up projection in another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megazero.families import llama
from megazero.families.config_json.field_groups import unread
from megazero.families.config_json.huggingface import Config, FieldGroup
from megazero.families.config_json.layer_groups import window
from megazero.families.config_json.rotary_fields import rotary
from megazero.families.family import FILLING_HEADS, PLAIN_LAYER, gate_and_up, qkv

NAMES = replace(
    llama.NAMES,
    layer={
        "input_norm": "input_layernorm",
        **qkv("self_attn.qkv_proj"),
        "attention.o_proj": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        **gate_and_up("mlp.gate_up_proj"),
        "mlp.down_proj": "mlp.down_proj",
    },
    needs={
        **PLAIN_LAYER,
        **llama.DEFAULTS,
        "rotary_scaling": ("none", "longrope"),
        "add_attention_bias": False,
        "add_qkv_bias": False,
    },
    equal=FILLING_HEADS,
)
_ROTARY = rotary(share="partial_rotary_factor")


def _read_rotary(config: Config) -> dict[str, Any]:
    """Return the options of rotary positions, whose only scaling is longrope, under its older names, too."""
    scaling = config.get("rope_scaling") or {}
    older = {name: "longrope" for name in ("rope_type", "type") if scaling.get(name) in ("su", "yarn")}
    if older:
        config = {**config, "rope_scaling": {**scaling, **older}}
    read = _ROTARY.read({"original_max_position_embeddings": 4096, "max_position_embeddings": 4096, **config})
    if read["rotary_scaling"] not in ("none", "longrope"):
        raise ValueError(f"rope_type = {read['rotary_scaling']!r} is none of default, longrope")
    return read


def _write_rotary(options: Any) -> dict[str, Any]:
    """Return the fields of rotary positions. transformers 4 takes exactly three for longrope."""
    fields = _ROTARY.write(options)
    if scaling := fields["rope_scaling"]:
        factors = {name: scaling.get(name) for name in ("short_factor", "long_factor")}
        fields["rope_scaling"] = {"type": scaling["rope_type"], **factors}
    return fields


_UNREAD = unread(
    attention_bias=False, mlp_bias=False, lm_head_bias=False, full_attn_mod=1, interpolate_factor=1
)
PHI3 = llama.relative(
    "phi3",
    "Phi3ForCausalLM",
    names=(NAMES,),
    fields=llama.WITHOUT_HEAD_DIM,
    absent={"max_position_embeddings": 4096, "norm_epsilon": 1e-5},
    groups=(FieldGroup(_ROTARY.names, _read_rotary, _write_rotary), window(None), _UNREAD),
)
