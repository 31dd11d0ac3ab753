"""gpt-oss (OpenAI 2025): sinks in attention, windows in every other layer, and experts with biases in all layers.

The activation of its experts is (up + 1) gate sigmoid(1.702 gate), of values that are clamped. Folders have one
tensor of all experts, [experts, in, out], in which columns of gate and up alternate. Published ones are in MXFP4.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megazero.families import llama
from megazero.families.config_json.expert_fields import EVERY_LAYER, LOCAL_COUNT, OTHER_LOCAL_COUNT
from megazero.families.config_json.field_groups import single, unread
from megazero.families.config_json.huggingface import Config, FieldGroup
from megazero.families.config_json.layer_groups import every_nth_full
from megazero.families.config_json.rotary_fields import rotary

_ALL, _EVEN, _ODD = slice(None), slice(0, None, 2), slice(1, None, 2)
_EXPERTS = {
    "gate_proj": ("gate_up_proj", _EVEN),
    "up_proj": ("gate_up_proj", _ODD),
    "down_proj": ("down_proj", _ALL),
}
NAMES = replace(
    llama.mixture_names(
        {"mlp.router": "mlp.router", **{f"mlp.experts.{own}": f"mlp.experts.{{}}.{own}" for own in _EXPERTS}},
        gated_mlp=True,
        add_bias_linear=True,
    ),
    together={
        f"{own}.{kind}": (f"{tensor}{suffix}", columns)
        for own, (tensor, columns) in _EXPERTS.items()
        for kind, suffix in (("weight", ""), ("bias", "_bias"))
    },
)

_ROTARY = rotary(absent_base=150000.0)
# What its class has where config.json has no scaling.
_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


def _read_rotary(config: Config) -> dict[str, Any]:
    said = config.get("rope_parameters") or config.get("rope_scaling")
    return _ROTARY.read(config if said else {**config, "rope_scaling": _YARN})


def _write_rotary(options: Any) -> dict[str, Any]:
    written = _ROTARY.write(options)
    return {**written, "rope_scaling": written["rope_scaling"] or {"rope_type": "default"}}


GPT_OSS = llama.relative(
    "gpt_oss",
    "GptOssForCausalLM",
    choices={
        **{
            "swiglu": False,
            "quick_geglu": True,
            "activation_func_clamp_value": 7.0,
            "glu_linear_offset": 1.0,
        },
        **{"add_bias_linear": True, "softmax_type": "learnable"},
    },
    names=(NAMES,),
    fields={**llama.FIELDS, **LOCAL_COUNT, "activation_func_clamp_value": "swiglu_limit"},
    absent={
        **{"num_query_groups": 8, "kv_channels": 64, "max_position_embeddings": 131072, "norm_epsilon": 1e-5},
        **{"num_experts": 128, "moe_router_topk": 4, "activation_func_clamp_value": 7.0},
    },
    aliases={**OTHER_LOCAL_COUNT, "experts_per_token": "num_experts_per_tok"},
    only={**llama.SILU, "swiglu_alpha": (1.702,)},
    groups=(
        single("attention_bias", "add_attention_bias", True),
        FieldGroup(_ROTARY.names, _read_rotary, _write_rotary),
        every_nth_full(2, width=128),
        unread(initial_context_length=4096),
        EVERY_LAYER,
    ),
)
