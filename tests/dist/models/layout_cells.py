"""Layouts, message formats and options of a small model; which cells are legal, the configuration says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megazero.config.errors import ConfigError
from megazero.config.read.parse import make_config
from megazero.config.run import World

# A small model that every layout here can cut.
MODEL: Mapping[str, Any] = {
    "model_family": "llama",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "seq_length": 8,
    "vocab_size": 40,
    "make_vocab_size_divisible_by": 8,
    "mock_data": True,
    "lr": 3e-3,
    "train_iters": 10,
    "micro_batch_size": 1,
    "eval_iters": 0,
}
PP, TP = "pipeline_model_parallel_size", "tensor_model_parallel_size"
VIRTUAL, SCHEDULE, MAPPING = (
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_schedule",
    "use_tp_pp_dp_mapping",
)


@dataclass(frozen=True)
class Column:
    """It says how ``world`` ranks, ``node`` to a node, are laid out."""

    name: str
    world: int
    node: int
    options: Mapping[str, Any]

    @property
    def dp(self) -> int:
        return self.world // (self.options.get(PP, 1) * self.options.get(TP, 1))


LAYOUTS = (
    Column("DP 4, 2 nodes", 4, 2, {}),
    Column("TP 2 x DP 4, 2 nodes", 8, 4, {TP: 2}),
    Column("PP 2 x DP 2 gpipe, 2 nodes", 4, 2, {PP: 2, SCHEDULE: "gpipe"}),
    Column("PP 2 x DP 2 1f1b, 2 nodes", 4, 2, {PP: 2, SCHEDULE: "1f1b"}),
    Column("PP 2 x DP 2 interleaved, 2 nodes", 4, 2, {PP: 2, SCHEDULE: "interleaved", VIRTUAL: 2}),
    Column("PP 2 x DP 2 zb-h1, 2 nodes", 4, 2, {PP: 2, SCHEDULE: "zb-h1"}),
    Column("PP 2 x DP 2 tp-pp-dp, 2 nodes", 4, 2, {PP: 2, MAPPING: True}),
    Column("PP 2 x DP 4 tp-pp-dp, 2 nodes", 8, 4, {PP: 2, MAPPING: True}),
    Column("PP 2 x TP 2 x DP 2, 2 nodes", 8, 4, {PP: 2, TP: 2}),
    Column("PP 4 x DP 2 zb-h1, 4 nodes", 8, 2, {PP: 4, SCHEDULE: "zb-h1"}),
    Column("PP 4 x TP 2, 4 nodes", 8, 2, {PP: 4, TP: 2}),
)
QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_exact_numel": 64}
STATE: Mapping[str, Mapping[str, Any]] = {
    "ddp": {"zero_preset": "ddp"},
    "zero1": {"zero_preset": "zero1"},
    "zero2": {"zero_preset": "zero2"},
    "zero3": {"zero_preset": "zero3"},
    "zero3, parameters gathered for the step": {"zero_preset": "zero3", "zero_params_lifetime": "gathered"},
    "zero3, gradients whole for the step": {"zero_preset": "zero3", "zero_gradients_lifetime": "step"},
    "mics, hsdp": {"zero_preset": "mics"},
    "hpz": {"zero_preset": "hpz"},
    "hpz, resident": {"zero_preset": "hpz", "zero_params_lifetime": "resident"},
    "zeropp": {"zero_preset": "zeropp", "zero_exact_numel": 64},
    "zeropp, INT8 weights": {
        "zero_preset": "zeropp",
        "zero_quantized_weights_delta": False,
        "zero_exact_numel": 64,
    },
    "zeropp, gradients whole for the step": {
        "zero_preset": "zeropp",
        "zero_gradients_lifetime": "step",
        "zero_exact_numel": 64,
    },
    "zero1, quantised": {"zero_preset": "zero1", **QUANTIZED},
    "zero3, quantised": {"zero_preset": "zero3", **QUANTIZED},
}
MODEL_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "tied embeddings": {"untie_embeddings_and_output_weights": False},
    "untied embeddings": {"untie_embeddings_and_output_weights": True},
    "sequence parallel": {"sequence_parallel": True},
    "recompute selective": {"recompute_granularity": "selective"},
    "recompute full": {"recompute_granularity": "full"},
    "loss in chunks of 3 tokens": {"loss_chunk_tokens": 3},
    "GPT": {"model_family": "gpt", "num_query_groups": None},
    "BLOOM": {"model_family": "bloom", "num_query_groups": None},
    "OLMo 2 (norms over all heads)": {"model_family": "olmo2"},
    "Falcon (one key/value head, parallel blocks)": {"model_family": "falcon", "num_query_groups": 1},
    "batch ramp-up": {"rampup_batch_size": "ramp"},  # sizes by layout
}


def values_of(layout: Column, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a cell's configuration. It has four micro-batches a step."""
    values = {**MODEL, "global_batch_size": 4 * layout.dp, **layout.options, **options}
    if values.get("rampup_batch_size"):
        values["rampup_batch_size"] = (2 * layout.dp, 2 * layout.dp, 8 * layout.dp)
    return values


def refusals(layout: Column, options: Mapping[str, Any]) -> list[str]:
    """Return why a cell is refused. The list is empty if the cell is legal."""
    try:
        make_config(values_of(layout, options), World(layout.world, layout.node))
    except ConfigError as error:
        return list(error.errors)
    return []
