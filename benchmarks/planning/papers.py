"""The planner's answers to what papers measured: AMSP's table IV, ZeRO++'s tables 2 and 4, BLOOM's layout.

Nothing is fitted: every cluster keeps the default of the one constant that could be, ``efficiency`` of its link
between nodes. Other systems than this engine are described by what their papers say of how they run a step
(Execution, Layout); shapes that a paper does not give are assumed here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megazero.config import RunConfig, World, make_config
from megazero.config.model.spec import training_flops
from megazero.config.options.cluster import Cluster, load_cluster
from megazero.plan.base_layout import BaseLayout
from megazero.plan.layout import Layout
from megazero.plan.options import with_stand_ins
from megazero.plan.seconds import Collectives
from megazero.plan.simulate import ENGINE, Execution, simulate

LLAMAS = {
    "LLaMA-7B": {"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 11008, "num_attention_heads": 32},
    "LLaMA-13B": {"num_layers": 40, "hidden_size": 5120, "ffn_hidden_size": 13824, "num_attention_heads": 40},
    "LLaMA-30B": {"num_layers": 60, "hidden_size": 6656, "ffn_hidden_size": 17920, "num_attention_heads": 52},
}
# Assumed: the paper says that layers and hidden sizes were adjusted to the sizes of models.
GPTS = {
    "138B": {"num_layers": 76, "hidden_size": 12288, "num_attention_heads": 96},
    "91B": {"num_layers": 112, "hidden_size": 8192, "num_attention_heads": 64},
    "49B": {"num_layers": 60, "hidden_size": 8192, "num_attention_heads": 64},
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
# AMSP: sums in bf16 by all-reduce; parameters are broadcast after the update and not hidden (section VI-A).
AMSP = Execution(early_refresh=True)
# DeepSpeed's reduce-scatters are not hidden (AMSP, section VI-C and figure 14), nor its broadcasts.
DEEPSPEED = Execution(behind=False, early_refresh=True)
# DeepSpeed gathers at most 5e7 elements ahead, a fraction of a layer here: taken as none.
NOT_AHEAD = Execution(ahead=False)
# (1 IB: baseline, ZeRO++; 8 IB: baseline, ZeRO++), TFLOPs per GPU of table 2
TABLE_2 = {
    ("138B", 2048): (19.96, 37.90, 47.55, 55.30),
    ("138B", 1024): (11.25, 21.81, 34.19, 44.38),
    ("91B", 2048): (19.99, 38.06, 47.74, 56.26),
    ("91B", 1024): (11.27, 21.93, 34.49, 44.36),
    ("49B", 2048): (20.06, 38.08, 48.05, 56.24),
    ("49B", 1024): (11.27, 21.95, 34.54, 44.46),
    ("18B", 2048): (25.98, 46.40, 47.31, 53.65),
    ("18B", 1024): (14.15, 30.57, 31.27, 37.87),
}
# MFU at 1024 GPUs: section VI-B1
AMSP_MFU = {
    "LLaMA-7B": {"AMSP": 0.51, "ZeRO-1": 0.36, "MiCS": 0.35, "ZeRO-3": 0.04},
    "LLaMA-13B": {"AMSP": 0.52, "MiCS": 0.33},
    "LLaMA-30B": {"AMSP": 0.42, "MiCS": 0.29},
}
AMSP_CHOICE = {"LLaMA-7B": (1, 1, 8), "LLaMA-13B": (4, 4, 8), "LLaMA-30B": (8, 8, 32)}


def layout_on(
    cluster: Cluster, values: dict[str, Any], sums: int | None = None, all_reduce: bool = False
) -> Layout:
    """Return the layout that the options, by name, mean on a cluster."""
    world = World(cluster.world_size, cluster.ranks_per_node)
    config: RunConfig = make_config(
        with_stand_ins({**values, "ranks_per_node": cluster.ranks_per_node}), world
    )
    return Layout(BaseLayout(config, world, cluster, Collectives(cluster)), config.zero, sums, all_reduce)


# -- AMSP ----------------------------------------------------------------------------------------------


def amsp_values(model: str) -> dict[str, Any]:
    return {
        **LLAMAS[model],
        "model_family": "llama",
        "vocab_size": 32000,
        "seq_length": 4096,
        "params_dtype": "bf16",
        "micro_batch_size": 1,
        "global_batch_size": 1024,
        "recompute_granularity": "full" if model == "LLaMA-30B" else "none",
    }


def whole_attention_mfu(layout: Layout, seconds: float) -> float:
    """Return MFU with all of the score matrix counted, as AMSP does."""
    model, batch = layout.config.model, layout.config.batch.global_batch_size
    assert model.seq_length and batch
    half = 6 * model.query_projection_size * model.num_layers * model.seq_length**2
    flops = batch * (training_flops(model, [model.seq_length]) + half)
    cluster = layout.base.cluster
    return flops / seconds / cluster.world_size / cluster.device.peak("bf16")


@dataclass(frozen=True)
class Mfu:
    """MFU of one system on one model: the paper's (None: not given), predicted as it ran, and for this engine."""

    system: str
    shard: tuple[int, int, int]
    paper: float | None
    as_run: float
    here: float
    fits: bool


def amsp_rows(model: str) -> list[Mfu]:
    """Return AMSP's choice, ZeRO-1, MiCS and ZeRO-3 at 1024 GPUs."""
    cluster = load_cluster("a800-amsp")
    inside = (16, 16, 16) if model == "LLaMA-30B" else (8, 8, 8)
    d = cluster.world_size
    systems = {
        "AMSP": (AMSP_CHOICE[model], AMSP, True),
        "ZeRO-1": ((1, 1, d), DEEPSPEED, True),
        "MiCS": (inside, DEEPSPEED, True),
        "ZeRO-3": ((d, d, d), replace(DEEPSPEED, ahead=False), False),
    }
    out = []
    for system, (shard, execution, all_reduce) in systems.items():
        values = {**amsp_values(model), "zero_shard": shard}
        run, own = layout_on(cluster, values, 2, all_reduce), layout_on(cluster, values)
        out.append(
            Mfu(
                system,
                shard,
                AMSP_MFU[model].get(system),
                whole_attention_mfu(run, simulate(run, execution).seconds),
                whole_attention_mfu(own, simulate(own, ENGINE).seconds),
                own.fits,
            )
        )
    return out


# -- ZeRO++ --------------------------------------------------------------------------------------------

ZEROPP = {
    "zero_quantized_weights": True,
    "zero_quantized_gradients": True,
    "zero_gradient_bits_intra_node": 4,
    "zero_gradient_transform": "none",
}


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


@dataclass(frozen=True)
class Speedup:
    """One row of ZeRO++'s table 2 on one cluster. Times are in seconds."""

    model: str
    tokens: int
    paper: float
    baseline: float
    zeropp: float

    @property
    def predicted(self) -> float:
        return self.baseline / self.zeropp

    @property
    def residual(self) -> float:
        return self.predicted / self.paper - 1


def zeropp_rows(links: int) -> list[Speedup]:
    """Return the 8 rows of table 2 at 1 or 8 InfiniBand links."""
    cluster = load_cluster(f"dgx2-v100-{links}ib")
    d, h = cluster.world_size, cluster.ranks_per_node
    out = []
    for (model, tokens), (base1, own1, base8, own8) in TABLE_2.items():
        values = gpt_values(model, tokens, d)
        baseline = layout_on(cluster, {**values, "zero_shard": (d, d, d)}, sums=2)
        zeropp = layout_on(cluster, {**values, "zero_shard": (h, d, d), **ZEROPP}, sums=2)
        times = [simulate(layout, NOT_AHEAD).seconds for layout in (baseline, zeropp)]
        paper = own1 / base1 if links == 1 else own8 / base8
        out.append(Speedup(model, tokens, paper, *times))
    return out


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
