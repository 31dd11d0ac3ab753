"""The planner's memory beside what papers say of it: ZeRO++'s table 4, BLOOM's layout.

published.py has their times. Shapes that a paper does not give are assumed here.
"""

from __future__ import annotations

from typing import Any

from megazero.config import RunConfig, World, make_config
from megazero.config.options.cluster import Cluster, load_cluster
from megazero.plan.base_layout import BaseLayout
from megazero.plan.layout import Layout
from megazero.plan.options import with_stand_ins
from megazero.plan.seconds import Collectives

# Assumed: the paper says that layers and hidden sizes were adjusted to the sizes of models.
GPTS = {
    "18B": {"num_layers": 40, "hidden_size": 6144, "num_attention_heads": 48},
    "7.5B": {"num_layers": 37, "hidden_size": 4096, "num_attention_heads": 32},
}
BLOOM = {
    "model_family": "bloom",
    "num_layers": 70,
    "hidden_size": 14336,
    "num_attention_heads": 112,
    "vocab_size": 250880,
    "seq_length": 2048,
    "params_dtype": "bf16",
    "global_batch_size": 2048,
}
BLOOM_LAYOUT = {
    "tensor_model_parallel_size": 4,
    "pipeline_model_parallel_size": 12,
    "pipeline_partition": "type:transformer|embedding",
    "zero_preset": "zero1",
    "micro_batch_size": 2,
    "recompute_granularity": "full",
}


def layout_on(cluster: Cluster, values: dict[str, Any]) -> Layout:
    """Return the layout that the options, by name, mean on a cluster."""
    world = World(cluster.world_size, cluster.ranks_per_node)
    config: RunConfig = make_config(
        with_stand_ins({**values, "ranks_per_node": cluster.ranks_per_node}), world
    )
    return Layout(BaseLayout(config, world, cluster, Collectives(cluster)), config.zero)


def gpt_values(model: str, tokens: int, ranks: int, recompute: str = "full") -> dict[str, Any]:
    return {
        **GPTS[model],
        "model_family": "gpt",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "vocab_size": 50257,
        "seq_length": 1024,
        "params_dtype": "fp16",
        "micro_batch_size": tokens // 1024,
        "global_batch_size": tokens // 1024 * ranks,
        "recompute_granularity": recompute,
    }


def table_4() -> list[tuple[str, int, str, bool, dict[str, float]]]:
    """Return (model, tokens, system, runs in the paper, GiB by recompute) on 4 nodes of 16 V100 of 32 GB."""
    cluster = load_cluster("dgx2-v100-8ib").with_nodes(4)
    d, h = cluster.world_size, cluster.ranks_per_node
    systems = {"ZeRO-3": (d, d, d), "hpZ": (h, d, d), "MiCS": (h, h, h)}
    out = []
    for model in ("7.5B", "18B"):
        for tokens in (1024, 2048):
            for system, shard in systems.items():
                sizes = {}
                for recompute in ("full", "none"):
                    values = {**gpt_values(model, tokens, d, recompute), "zero_shard": shard}
                    sizes[recompute] = layout_on(cluster, values).memory.total / 2**30
                out.append((model, tokens, system, not (model == "18B" and system == "MiCS"), sizes))
    return out


def bloom_layout() -> Layout:
    """Return BLOOM's published layout on 48 nodes of 8 A100."""
    return layout_on(load_cluster("a100"), {**BLOOM, **BLOOM_LAYOUT})
