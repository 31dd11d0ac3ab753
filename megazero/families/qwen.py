"""Qwen2, Qwen2.5 (Yang et al. 2024) and Qwen3 (2025) are Llama with windows that a switch turns on.

Qwen2 has biases on the query, key and value linears alone. Qwen3 has a norm over each head of the
queries and of the keys. Their mixtures of experts have experts in some layers or in all; Qwen2's have an MLP beside
them that every token goes to, behind a gate. Qwen3-Next (2025) has softmax attention with a gate in every fourth
layer, and gated delta net in the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megazero.families import llama
from megazero.families.config_json.expert_fields import (
    COUNT,
    OTHER_COUNT,
    SPARSE_LAYERS,
    renormalised,
    shared_expert,
)
from megazero.families.config_json.field_groups import biases, single, unread
from megazero.families.config_json.huggingface import Config, FieldGroup
from megazero.families.config_json.layer_groups import (
    LINEAR_LAYERS,
    SWITCHED_WINDOW,
    SWITCHED_WINDOWS,
    switched_windows,
)
from megazero.families.config_json.rotary_fields import ROTARY, rotary
from megazero.families.layer_kinds import GATED_DELTA_NET

ABSENT = {"num_query_groups": 32, "max_position_embeddings": 32768}
QWEN2 = llama.relative(
    "qwen2",
    "Qwen2ForCausalLM",
    choices={"add_qkv_bias": True},
    absent=ABSENT,
    groups=(ROTARY, SWITCHED_WINDOWS),
)
QWEN3 = llama.relative(
    "qwen3",
    "Qwen3ForCausalLM",
    choices={"qk_norm": "head"},
    absent={**ABSENT, "kv_channels": 128},
    groups=(biases(mlp=False), ROTARY, SWITCHED_WINDOWS),
)
MIXTURE = {**llama.FIELDS, **COUNT, "moe_ffn_hidden_size": "moe_intermediate_size"}
QWEN2_MOE = llama.relative(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    choices={"add_qkv_bias": True, "moe_router_pre_softmax": True, "moe_shared_expert_gate": True},
    fields=MIXTURE,
    absent={
        **ABSENT,
        **{"num_query_groups": 16, "num_experts": 60, "moe_router_topk": 4, "moe_ffn_hidden_size": 1408},
    },
    aliases=OTHER_COUNT,
    groups=(
        single("qkv_bias", "add_qkv_bias", True, "qkv_bias"),
        ROTARY,
        switched_windows(lambda layer, first: layer % 2 == 0 and layer < first),
        SPARSE_LAYERS,
        renormalised(False),
        shared_expert(5632),
    ),
)
QWEN3_MOE = llama.relative(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    choices={"qk_norm": "head"},
    fields=MIXTURE,
    absent={
        **ABSENT,
        # Its class has no width of heads; files have one, which its attention reads.
        **{"num_query_groups": 4, "kv_channels": None},
        **{"num_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 768},
    },
    aliases=OTHER_COUNT,
    groups=(biases(mlp=False), ROTARY, SWITCHED_WINDOW, SPARSE_LAYERS, renormalised(False)),
)
_LINEAR = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4}
_LINEAR |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 128)
_POSITIONS = rotary(share="partial_rotary_factor", absent_share=0.25)
_DELTA = {
    **{"qk_norm": "head", "apply_layernorm_1p": True, "rotary_percent": 0.25, "attention_output_gate": True},
    **{"experimental_attention_variant": GATED_DELTA_NET, "linear_attention_freq": (4,)},
}
QWEN3_NEXT = llama.relative(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    choices={**_DELTA, "moe_shared_expert_gate": True},
    fields={**MIXTURE, **{name: name for name in _LINEAR}},
    absent={
        **{"num_query_groups": 2, "kv_channels": 256, "max_position_embeddings": 32768},
        **{"num_experts": 512, "moe_router_topk": 10, "moe_ffn_hidden_size": 512},
        **_LINEAR,
    },
    aliases=OTHER_COUNT,
    groups=(
        biases(mlp=False),
        _POSITIONS,
        LINEAR_LAYERS,
        unread(use_sliding_window=False),
        SPARSE_LAYERS,
        renormalised(True),
        shared_expert(512),
    ),
)


def _of_text(config: Config) -> dict[str, Any]:
    """Read positions, of which images have several. Those of text are all the same."""
    rope = config.get("rope_parameters") or {}
    return _POSITIONS.read({**config, "rope_parameters": {n: v for n, v in rope.items() if n[:5] != "mrope"}})


# Qwen3.5's text: Qwen3-Next without experts, whose input linears of the gated delta net are tensors of their own.
QWEN3_5 = llama.relative(
    "qwen3_5",
    "Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    choices=_DELTA,
    names=(
        replace(
            llama.NAMES,
            layer={
                **llama.NAMES.layer,
                **{f"attention.in_{part}": ("linear_attn.in_proj_qkv", n) for n, part in enumerate("qkv")},
                **{f"attention.in_{part}": f"linear_attn.in_proj_{part}" for part in "zba"},
            },
            needs={
                **llama.NAMES.needs,
                "experimental_attention_variant": GATED_DELTA_NET,
                "num_experts": None,
            },
        ),
    ),
    fields={**llama.FIELDS, **{name: name for name in _LINEAR}},
    absent={"num_query_groups": 4, "kv_channels": 256, "max_position_embeddings": 32768, **_LINEAR},
    groups=(
        biases(mlp=False),
        FieldGroup(_POSITIONS.names, _of_text, _POSITIONS.write),
        LINEAR_LAYERS,
        unread(attn_output_gate=True, mamba_ssm_dtype="float32"),
        FieldGroup(("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")),
    ),
)
