"""Apertus (Swiss AI 2025, arXiv 2509.14233) is Llama with xIELU in the MLP, no gate, and norms of heads."""

from __future__ import annotations

from dataclasses import replace

from megazero.families import llama
from megazero.families.config_json.field_groups import biases
from megazero.families.config_json.rotary_fields import rotary

NAMES = replace(
    llama.NAMES,
    layer={
        **llama.NAMES.layer,
        "input_norm": "attention_layernorm",
        "mlp_norm": "feedforward_layernorm",
    },
    needs={"xielu": True, "transformer_block_type": "sequential"},
    constants={"mlp.act_fn.beta": 0.5, "mlp.act_fn.eps": -1e-6},
)
APERTUS = llama.relative(
    "apertus",
    "ApertusForCausalLM",
    names=(NAMES,),
    choices={"swiglu": False, "xielu": True, "qk_norm": "head"},
    absent={"norm_epsilon": 1e-5, "max_position_embeddings": 65536},
    only={"hidden_act": ("xielu",)},
    groups=(biases(mlp=False), rotary(absent_base=None, says_none=True)),
)
