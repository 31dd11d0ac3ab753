"""Training runs that others published, and what the planner says of them.

``published.yaml`` has the runs. Every second row of a table, from its first, has set the rates of the cluster files;
the others are held out. Other systems than this engine are described by how they run a step (SYSTEMS), the same for
all runs of a system. Pure: no torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from megazero.config import World, make_config
from megazero.config.model.spec import training_flops
from megazero.config.options.cluster import Cluster, load_cluster
from megazero.mesh.levels import INTER, INTRA
from megazero.plan.base_layout import BaseLayout
from megazero.plan.communication import UnitShape
from megazero.plan.layout import LOCAL, Chain, Layout, TimedHop, UnitChains
from megazero.plan.options import with_stand_ins
from megazero.plan.seconds import Collectives
from megazero.plan.simulate import ENGINE, Execution, Timing, simulate

DATA = Path(__file__).with_suffix(".yaml")
SPEED_UP = "speed-up"
WHOLE = (
    1 << 40
)  # elements, bytes: other systems move a module's parameters at once, and bound no gathers ahead
# What a cluster file has where nobody measured: the rates of data sheets.
DATA_SHEET: Mapping[str, Any] = {
    "product_us": 0.0,
    "attention_efficiency": None,
    "attention_half_keys": 0.0,
    "memory_efficiency": 1.0,
    "contention": 0.0,
}
SHEET_PRODUCTS = {"h100": 0.65, "h100-500w": 0.65}  # shares of the peak; else 0.75


@dataclass(frozen=True)
class System:
    """How a system runs a step.

    all_reduce: sums of gradients return to all ranks. rings: a collective is one ring over all of its ranks, for each
    "unit" of parameters or each "tensor"; else it is taken hop by hop, as here. overlaps_tensor: products run beside
    the tensor-parallel messages of their pieces, so that one piece of them shows. formats: options of messages.
    """

    execution: Execution = ENGINE
    all_reduce: bool = False
    rings: str = ""
    overlaps_tensor: bool = False
    formats: Mapping[str, Any] = field(default_factory=dict)


EARLY = Execution(early_refresh=True)  # the update's weights return before the next forward
EXPOSED = Execution(behind=False, early_refresh=True)  # and nothing hides the gradients
INT4 = {"zero_quantized_gradients": True}
SYSTEMS = {
    "megazero": System(),
    "fsdp": System(rings="unit"),
    "megatron": System(rings="unit", overlaps_tensor=True),
    "nanotron": System(EARLY, all_reduce=True, rings="tensor"),
    "amsp": System(EARLY, all_reduce=True),
    "deepspeed zero-1": System(EXPOSED, all_reduce=True),
    "deepspeed mics": System(EXPOSED, all_reduce=True, rings="tensor"),
    "deepspeed zero-3": System(replace(EXPOSED, ahead=False), rings="tensor"),
    # It gathers at most 5e7 elements ahead, a fraction of such layers: taken as none.
    "zero++": System(
        Execution(ahead=False),
        formats={
            **INT4,
            "zero_quantized_weights": True,
            "zero_gradient_bits_intra_node": 4,
            "zero_gradient_transform": "none",
        },
    ),
    "megatron, exposed": System(EXPOSED, rings="unit"),
    "sdp4bit": System(
        EXPOSED,
        formats={
            **INT4,
            "zero_quantized_weights_delta": True,
            "zero_gradient_bits_intra_node": 8,
            "zero_gradient_transform": "hadamard",
        },
    ),
}


@dataclass(frozen=True)
class Run:
    """A published run; the fields are those of published.yaml. held_out: it did not set rates."""

    source: str
    url: str
    cluster: str
    system: str
    unit: str
    model: str
    shape: Mapping[str, Any]
    gpus: int
    seq: int
    micro: int
    shard: str
    recompute: str
    measured: float
    held_out: bool
    assumed: str = ""
    node: int | None = None
    link: float | None = None
    tp: int = 1
    pp: int = 1
    virtual: int = 1
    accum: int = 1
    sums: int | None = None
    recomputed: float = 1.0
    compile: bool = False
    whole: bool = False
    dtype: str = "bf16"
    device: Mapping[str, Any] = field(default_factory=dict)
    inter: Mapping[str, Any] = field(default_factory=dict)
    sheet: bool = False  # predicted with the rates of data sheets

    @cached_property
    def d(self) -> int:
        """The ranks that share the data."""
        return self.gpus // (self.tp * self.pp)

    def on(self) -> Cluster:
        """Return the cluster of the run."""
        cluster = load_cluster(self.cluster)
        node = self.node or cluster.ranks_per_node
        device, inter = dict(self.device), dict(self.inter)
        if self.sheet:
            device = {**DATA_SHEET, "matmul_efficiency": SHEET_PRODUCTS.get(self.cluster, 0.75)}
            inter = {"exchange_share": 1.0}
        if self.link is not None:
            inter["gbits_per_s"] = self.link
        return replace(
            cluster,
            nodes=max(1, self.gpus // node),
            ranks_per_node=node,
            device=replace(cluster.device, **device),
            inter_node=replace(cluster.inter_node, **inter),
        )

    def shards(self, node: int) -> tuple[int, ...]:
        """Return P, G and OS."""
        d, h = self.d, min(self.d, max(1, node // self.tp))
        named = {
            "zero3": (d, d, d),
            "zero3-kept": (d, d, d),
            "hsdp": (h, h, h),
            "zero1": (1, 1, d),
            "ddp": (1, 1, 1),
        }
        return named.get(self.shard) or tuple(map(int, self.shard.split(",")))

    def options(self, node: int) -> dict[str, Any]:
        """Return the run's options by their names here."""
        gpt = self.shape["model_family"] == "gpt"
        return {
            **self.shape,
            **({"hidden_dropout": 0.0, "attention_dropout": 0.0} if gpt else {}),
            "seq_length": self.seq,
            "params_dtype": self.dtype,
            "micro_batch_size": self.micro,
            "global_batch_size": self.micro * self.accum * self.d,
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "num_virtual_stages_per_pipeline_rank": self.virtual if self.virtual > 1 else None,
            "sequence_parallel": self.tp > 1,
            "recompute_granularity": self.recompute,
            "compile": self.compile,
            "zero_shard": self.shards(node),
            "zero_params_lifetime": "step" if self.shard == "zero3-kept" else None,
            "ranks_per_node": node,
        }


class Ring(Layout):
    """A layout whose collectives are rings over all of their ranks, ``tensors`` of them for a unit, one by one."""

    tensors = 1

    def _make_chains(self, unit: UnitShape) -> UnitChains:
        chains, (p, g, os) = super()._make_chains(unit), self.shards.factors
        replicas = self.grid.dp // os
        return replace(
            chains,
            refresh=self._ring(chains.refresh, os // p - 1),
            gather=self._ring(chains.gather, p - 1),
            every=self._ring(chains.every, g - 1),
            last=self._ring(chains.last, os - 1 + replicas - 1),
        )

    def _ring(self, chain: Chain, steps: int) -> Chain:
        """Return a chain that waits for these steps of each ring in place of the latencies of its hops."""
        links = {hop.link for hop in chain} - {LOCAL}
        if not links:
            return chain
        wait = self.tensors * steps * self.base.collectives.latency(INTER if INTER in links else INTRA)
        wait = max(wait, sum(hop.latency for hop in chain))
        bare = (hop._replace(seconds=hop.seconds - hop.latency, latency=0.0) for hop in chain)
        return TimedHop(INTER if INTER in links else INTRA, wait, latency=wait), *bare


def runs() -> Iterator[Run]:
    """Yield the published runs in the order of the file."""
    content = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    names = {each.name for each in fields(Run)}
    for table in content["tables"]:
        heads, *lines = (line.split() for line in table["rows"].splitlines())
        common = {**{name: value for name, value in table.items() if name in names}, **table["settings"]}
        for number, line in enumerate(lines):
            cells = {head: yaml.safe_load(cell) for head, cell in zip(heads, line, strict=True)}
            row = {**common, **cells}
            system = row["system"].replace("_", " ")
            yield Run(
                **{**row, "system": system, "model": str(row["model"]), "shard": str(row["shard"])},
                shape=content["models"][row["model"]],
                held_out=number % 2 == 1,
            )


def layout_of(run: Run, system: System) -> Layout:
    """Return the layout of a run by a system."""
    cluster = run.on()
    if not system.formats:  # exact sums are reduced by rings, not by all-to-alls
        cluster = replace(cluster, inter_node=replace(cluster.inter_node, exchange_share=1.0))
    # ZeRO++ gathers and reduces tensor by tensor: nearer to this engine's units than to whole layers.
    moved = (
        {}
        if run.system in ("megazero", "zero++")
        else {"zero_chunk_numel": WHOLE, "zero_prefetch_bytes": WHOLE}
    )
    world = World(cluster.world_size, cluster.ranks_per_node)
    values = {**run.options(cluster.ranks_per_node), **moved, **system.formats}
    config = make_config(with_stand_ins(values), world)
    base = BaseLayout(config, world, cluster, Collectives(cluster))
    layout = (Ring if system.rings else Layout)(base, config.zero, run.sums, system.all_reduce)
    if isinstance(layout, Ring) and system.rings == "tensor":
        layout.tensors = sum(each.multiplies for each in base.spec.layers[0].parameters)
    return layout


@dataclass(frozen=True)
class Outcome:
    """What was predicted of a run, in its unit, beside what was measured. timing: of its step."""

    run: Run
    predicted: float
    timing: Timing

    @property
    def ratio(self) -> float:
        """How many times as fast as measured the run is predicted to be; of a speed-up, as large."""
        ratio = self.predicted / self.run.measured
        return 1 / ratio if self.run.unit == "seconds" else ratio


def predict(run: Run) -> Outcome:
    """Return what the planner says of a run."""
    system = SYSTEMS[run.system]
    shown = 1 / run.tp if system.overlaps_tensor else 1.0
    execution = replace(system.execution, recomputed=run.recomputed, tensor=shown)
    layout = layout_of(run, system)
    timing = simulate(layout, execution)
    if run.unit == SPEED_UP:
        baseline = layout_of(replace(run, shard="zero3"), replace(system, formats={}))
        return Outcome(run, simulate(baseline, execution).seconds / timing.seconds, timing)
    return Outcome(run, _in_unit(run, layout, timing.seconds), timing)


def _in_unit(run: Run, layout: Layout, seconds: float) -> float:
    """Return a step's seconds as what the run's source gives."""
    if run.unit == "seconds":
        return seconds
    config = layout.config
    samples, model = run.micro * run.accum * run.d, config.model
    if run.unit == "tokens/s":
        return samples * run.seq / seconds / run.gpus
    flops = samples * training_flops(model, [run.seq])
    if run.whole:
        flops += samples * 6 * model.query_projection_size * model.num_layers * run.seq**2
    rate = flops / seconds / run.gpus
    if run.unit == "tflops":
        return rate / 1e12
    assert run.unit == "mfu", run.unit
    return 100 * rate / layout.base.cluster.device.peak(run.dtype)


@dataclass(frozen=True)
class Errors:
    """Errors of some outcomes, as shares: of the median run and of the worst. bias: the median ratio less 1."""

    number: int
    median: float
    worst: float
    bias: float

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> Errors:
        ratios = [outcome.ratio for outcome in outcomes]
        off = [abs(ratio - 1) for ratio in ratios]
        return cls(len(ratios), statistics.median(off), max(off), statistics.median(ratios) - 1)


def by_source(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Return the outcomes of each source, in the order of the file."""
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.run.source, []).append(outcome)
    return found
