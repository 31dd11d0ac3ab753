"""Fields of config.json for mixtures of experts.

A loss that balances experts is training's, as dropout is: its factor, router_aux_loss_coef, is not read.
"""

from __future__ import annotations

from typing import Any

from megazero.families.config_json.field_groups import chosen
from megazero.families.config_json.huggingface import Config, FieldGroup
from megazero.families.config_json.known_fields import MORE_TOKENS
from megazero.families.layer_kinds import frequency_of, layer_kinds

TOPK = {"moe_router_topk": "num_experts_per_tok"}
# Two spellings of the count, of transformers 4 and 5. Both have the first in files of their own.
COUNT = {"num_experts": "num_experts", **TOPK}
LOCAL_COUNT = {"num_experts": "num_local_experts", **TOPK}
OTHER_COUNT = {"num_local_experts": "num_experts"}
OTHER_LOCAL_COUNT = {"num_experts": "num_local_experts"}


def renormalised(absent: bool) -> FieldGroup:
    """Return norm_topk_prob: probabilities add up to 1. ``absent`` is what an absent field means."""
    return chosen("norm_topk_prob", "moe_router_pre_softmax", (True, False), absent)


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


def _read_deepseek(config: Config) -> dict[str, Any]:
    return {**by_sigmoids(config), **_beside_experts(config)}


def by_sigmoids(config: Config) -> dict[str, Any]:
    """Return the options of a router that chooses by sigmoids with a bias, in groups."""
    topk = config["num_experts_per_tok"] or 0
    if bool(config["norm_topk_prob"]) != (topk > 1):
        raise ValueError(
            f"norm_topk_prob = {config['norm_topk_prob']!r} is not supported with num_experts_per_tok = {topk}: "
            "probabilities of several experts add up to 1, that of one is its sigmoid"
        )
    return {
        **{"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        **_scaled(config),
        **_groups(config, topk, best=2),
    }


def _read_deepseek_v2(config: Config) -> dict[str, Any]:
    method, normed = config["topk_method"], config["norm_topk_prob"]
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"topk_method = {method!r} is none of greedy, group_limited_greedy")
    if normed:
        raise ValueError(
            f"norm_topk_prob = {normed!r} is not supported: transformers' class does not add probabilities up to 1"
        )
    return {
        **{"moe_router_score_function": "softmax", "moe_router_pre_softmax": True},
        **_scaled(config),
        **_beside_experts(config),
        **(_groups(config, config["num_experts_per_tok"] or 0, best=1) if method != "greedy" else {}),
    }


def _beside_experts(config: Config) -> dict[str, Any]:
    """Return the options of shared experts and of dense layers."""
    layers, dense = config.get("num_hidden_layers") or 0, config["first_k_dense_replace"]
    shared = config["n_shared_experts"]
    if not shared:
        raise ValueError(f"n_shared_experts = {shared!r} is not supported (only above 0)")
    return {
        "moe_shared_expert_intermediate_size": shared * config["moe_intermediate_size"],
        **_in_layers([i >= dense for i in range(layers)]),
    }


def _scaled(config: Config) -> dict[str, Any]:
    factor = config.get("routed_scaling_factor", 1.0)
    return {"moe_router_topk_scaling_factor": None if factor == 1 else factor}


def _write_deepseek_v2(options: Any) -> dict[str, Any]:
    limited = options.moe_router_group_topk is not None
    method = "group_limited_greedy" if limited else "greedy"
    return {**_write_deepseek(options), "topk_method": method, "norm_topk_prob": False}


def _write_deepseek(options: Any) -> dict[str, Any]:
    shared = options.moe_shared_expert_intermediate_size
    experts = [kind.experts for kind in layer_kinds(options)]
    return {
        **write_sigmoids(options),
        **({} if shared is None else {"n_shared_experts": shared // options.expert_width}),
        "first_k_dense_replace": [*experts, True].index(True),
    }


def write_sigmoids(options: Any) -> dict[str, Any]:
    kept = options.moe_router_group_topk
    return {
        "n_routed_experts": options.num_experts or 0,
        "moe_intermediate_size": options.expert_width,
        "norm_topk_prob": options.moe_router_topk > 1,
        "routed_scaling_factor": options.moe_router_topk_scaling_factor or 1.0,
        "n_group": options.moe_router_num_groups if kept else 1,
        "topk_group": kept or 1,
    }


def _groups(config: Config, topk: int, best: int) -> dict[str, Any]:
    """Return the options of groups that count by their ``best`` experts, by default topk // topk_group."""
    groups, kept = config.get("n_group") or 1, config.get("topk_group") or 1
    if groups == kept:
        return {}
    own = {"moe_router_group_best": best} if topk // kept != best else {}
    return {"moe_router_num_groups": groups, "moe_router_group_topk": kept, **own}


DEEPSEEK_COUNT = {
    "num_experts": "n_routed_experts",
    **TOPK,
    "moe_ffn_hidden_size": "moe_intermediate_size",
}
# Of families whose layers behind the last one predict further tokens.
FURTHER, NO_FURTHER = {"mtp_num_layers": MORE_TOKENS}, {"mtp_num_layers": 0}
OTHER_DEEPSEEK_COUNT = {"num_local_experts": "n_routed_experts"}


def deepseek(**absent: Any) -> FieldGroup:
    """Return layers, router and shared experts of mixtures as DeepSeek-V3's (arXiv 2412.19437).

    The first layers are dense. Experts are chosen by sigmoids with a bias, in groups. Every token goes to the shared
    experts. ``absent`` is what absent fields mean: number and width of experts, of shared ones, the dense layers, and
    whether probabilities add up to 1.
    """
    names = {*absent, "routed_scaling_factor", "n_group", "topk_group"}
    return FieldGroup(names, lambda config: _read_deepseek({**absent, **config}), _write_deepseek)


def deepseek_v2(**absent: Any) -> FieldGroup:
    """Return the same of DeepSeek-V2's (arXiv 2405.04434), whose probabilities are softmax's over all experts."""
    names = {*absent, "routed_scaling_factor", "n_group", "topk_group"}
    return FieldGroup(names, lambda config: _read_deepseek_v2({**absent, **config}), _write_deepseek_v2)
