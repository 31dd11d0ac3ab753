"""Fields of config.json for mixtures of experts.

A loss that balances experts is training's, as dropout is: its factor, router_aux_loss_coef, is not read.
"""

from __future__ import annotations

from typing import Any

from megazero.families.config_json.huggingface import Config, FieldGroup
from megazero.families.layer_kinds import frequency_of, layer_kinds

TOPK = {"moe_router_topk": "num_experts_per_tok"}
# Two spellings of the count, of transformers 4 and 5. Both have the first in files of their own.
COUNT = {"num_experts": "num_experts", **TOPK}
LOCAL_COUNT = {"num_experts": "num_local_experts", **TOPK}
OTHER_COUNT = {"num_local_experts": "num_experts"}
OTHER_LOCAL_COUNT = {"num_experts": "num_local_experts"}


def renormalised(absent: bool) -> FieldGroup:
    """Return norm_topk_prob: probabilities add up to 1. ``absent`` is what an absent field means."""
    return FieldGroup(
        ("norm_topk_prob",),
        lambda config: {"moe_router_pre_softmax": not config.get("norm_topk_prob", absent)},
        lambda options: {"norm_topk_prob": not options.moe_router_pre_softmax},
    )


def shared_expert(absent: int) -> FieldGroup:
    """Return the width of the MLP beside the experts, which such layers have. ``absent`` is an absent field's."""

    def read(config: Config) -> dict[str, Any]:
        width = config.get("shared_expert_intermediate_size", absent)
        if not width:
            raise ValueError(f"shared_expert_intermediate_size = {width!r} is not supported (only above 0)")
        return {"moe_shared_expert_intermediate_size": width}

    def write(options: Any) -> dict[str, Any]:
        width = options.moe_shared_expert_intermediate_size
        return {} if width is None else {"shared_expert_intermediate_size": width}

    return FieldGroup(("shared_expert_intermediate_size",), read, write)


def _in_layers(chosen: list[bool]) -> dict[str, Any]:
    """Return the options of experts in these layers: none where no layer has them."""
    return (
        {"moe_layer_freq": frequency_of(chosen, "moe_layer_freq")} if any(chosen) else {"num_experts": None}
    )


def _read_sparse(config: Config) -> dict[str, Any]:
    layers, every = config.get("num_hidden_layers") or 0, config.get("decoder_sparse_step", 1)
    if every < 1:
        raise ValueError(f"decoder_sparse_step = {every} is not at least 1")
    dense = config.get("mlp_only_layers") or []
    return _in_layers([(i + 1) % every == 0 and i not in dense for i in range(layers)])


def _write_sparse(options: Any) -> dict[str, Any]:
    dense = [i for i, kind in enumerate(layer_kinds(options)) if not kind.experts]
    return {
        "num_experts": options.num_experts or 0,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        "moe_intermediate_size": options.expert_width,
    }


# Of Qwen's mixtures: every so many layers have experts, but for those that are listed.
SPARSE_LAYERS = FieldGroup(("decoder_sparse_step", "mlp_only_layers"), _read_sparse, _write_sparse)


def _read_every(config: Config) -> dict[str, Any]:
    said = {name: config[name] for name in ("num_experts", "num_local_experts") if name in config}
    if none := [f"{name} = {count!r}" for name, count in said.items() if not count]:
        raise ValueError(f"{none[0]} is not supported: all layers of this family have experts")
    return {}


# Of mixtures without dense layers, where intermediate_size is the width of an expert.
EVERY_LAYER = FieldGroup((), _read_every, lambda options: {"intermediate_size": options.expert_width})
