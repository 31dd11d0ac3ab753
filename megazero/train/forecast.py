"""The planner's forecast of a run. It chooses for --zero-preset auto, and refuses a run that would not fit.

Memory needs no cluster file: it follows from the configuration, and devices report how much they have. Step times
need one (config/options/cluster.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megazero.config import RunConfig, World
from megazero.config.layout.shards import AUTO
from megazero.config.options.cluster import Cluster, Cores, Device, InterNode, IntraNode, cluster_of_run
from megazero.config.options.sections import ZeroConfig
from megazero.config.run import all_options
from megazero.mesh.mesh import Mesh
from megazero.mesh.objects import gather_objects
from megazero.ops.memory import host_memory, mapped_memory, peak_memory, resident_memory, use_libraries
from megazero.plan.base_layout import BaseLayout
from megazero.plan.layout import Layout
from megazero.plan.memory import GIB, Memory, saved_width
from megazero.plan.report import describe, layout_flags, memory_items, size_unit, stage_lines, table
from megazero.plan.search import CHOICES, ZERO, Search, smallest_layout
from megazero.plan.seconds import Collectives
from megazero.plan.simulate import simulate
from megazero.products import PRODUCTS

# Options that are given up for a layout that fits, one group after the other: the first costs the least.
RELEASED = (("loss_chunk_tokens",), ZERO, ("recompute_granularity",), ("micro_batch_size",), CHOICES)


@dataclass(frozen=True)
class Forecast:
    """The prediction for a run of ``layout``.

    seconds: of a step, without a meeting of replicas, or None without a cluster file. resident: bytes in use
    before the model is built, on a CPU without mapped files. copied: bytes of host memory for --async-save's copy on
    a rank. on_host: whether the ranks compute in host memory, too. met: seconds that meetings of replicas add
    to ``interval`` steps.
    """

    layout: Layout
    seconds: float | None
    resident: int = 0
    copied: float = 0.0
    on_host: bool = False
    interval: int = 1
    met: float = 0.0

    def before_the_model(self, device: torch.device) -> Forecast:
        """Return the forecast with the bytes in use now, including what torch loads at its first use."""
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(
                device
            )  # the health check has taken 1 GiB and more for a while
        else:
            use_libraries(device)
        return replace(self, resident=resident_memory(device))

    def grown(self, device: torch.device) -> int:
        """Return how many bytes the memory has grown at its peak since before the model was built.

        Mapped files are left out (training data, torch's code): their pages are the system's cache.
        """
        mapped = mapped_memory() if device.type == "cpu" else 0
        return peak_memory(device) - mapped - self.resident

    def refuse_without(self, room: float | None) -> None:
        """Raise ValueError if the run needs more than ``room`` bytes on some rank (None: not known)."""
        if room is not None and self.layout.config.planning.memory_check:
            refuse_too_large(self.layout, room, self.copied if self.on_host else 0.0)

    @property
    def memory(self) -> Memory:
        """The memory of the rank that needs most, at the peak of a step."""
        return self.layout.memory

    @property
    def total(self) -> float:
        """The bytes of the memory that the ranks compute in."""
        return self.memory.total + (self.copied if self.on_host else 0.0)

    def lines(self) -> list[str]:
        """Return what to print at the start."""
        unit, name = size_unit(self.total)
        items = memory_items(self.memory, unit)
        lines = [f"predicted memory of the fullest rank: {self.total / unit:.2f} {name} = {items}"]
        if self.copied and self.on_host:
            lines[0] += f", --async-save's copy {self.copied / unit:.2f}"
        elif self.copied:
            lines.append(
                f"--async-save's copy in host memory: {self.copied / GIB:.2f} GiB on the fullest rank"
            )
        meets = f", and {self.met:.4g} s more in every {self.interval}." if self.met else ""
        return lines + (
            []
            if self.seconds is None
            else [f"predicted time of a step: {self.seconds:.4g} s{meets}", *stage_lines(self.layout)]
        )

    def facts(self, device: torch.device) -> dict[str, Any]:
        """Return the prediction in bytes and seconds, as the first rank's lines measure: what it sends in a step, and
        the peak of its memory, on a CPU with mapped files."""
        sent = self.layout.bytes_by_stage[0].items()
        mapped = mapped_memory() if device.type == "cpu" else 0
        return {
            "memory": self.memory.items(),
            "in_use_before": self.resident + mapped,
            "seconds": self.seconds,
            "bytes": {f"{kind}_{link}_bytes": size for (kind, link), size in sorted(sent)},
        }

    def beside(self, mesh: Mesh, step_seconds: Sequence[float]) -> str | None:
        """Return predicted beside measured, or None if there was no step. Collective.

        step_seconds: of this run's latest iterations. Their median excludes the warm-up of the first ones.
        """
        own = torch.tensor([float(self.grown(mesh.device))], dtype=torch.float64)
        most = float(mesh.gather_rows(own.to(mesh.device)).max())
        if not step_seconds:
            return None
        # A CPU's resident size includes freed memory that glibc keeps.
        measured = "measured" if mesh.device.type == "cuda" else "is what the resident size grew by"
        unit, name = size_unit(max(self.total, most))
        words = [f"memory {self.total / unit:.3f} {name} predicted, {most / unit:.3f} {measured}"]
        if self.seconds is not None:
            words.append(f"step {self.seconds:.4g} s predicted, {median(step_seconds):.4g} measured")
        return "; ".join(words)


def foresee(
    config: RunConfig, world: World, device: torch.device
) -> tuple[RunConfig, Forecast | None, list[str]]:
    """Choose for --zero-preset auto, and predict. Collective. Returns the configuration, the forecast and notes.

    There is no forecast if the planner does not know the dtype. Raises ValueError, the same on all ranks, if the
    cluster file does not match these nodes or if the run would not fit.
    """
    name, notes = config.planning.cluster, list[str]()
    room = room_of(device, config.ranks_per_node(world))
    try:
        if name is not None:
            cluster = cluster_of_run(name, world.world_size, config.ranks_per_node(world))
            cluster = cluster if room is None else cluster.with_room(room)
            if device.type == "cpu" and not cluster.on_host:  # a file by hand that says nothing of processors
                ranks = config.ranks_per_node(world)
                cluster = replace(cluster, cores=Cores(ranks, ranks))
        else:
            cluster = _unknown_cluster(config, world, room, device)
        base = BaseLayout(config, world, cluster, Collectives(cluster))
    except ValueError:
        if name is not None or config.training.loss_chunk_tokens == AUTO:
            raise
        return config, None, notes
    if config.zero.zero_preset == AUTO:
        config, notes = choose(config, base)
    layout = Layout(base, config.zero)
    if config.training.loss_chunk_tokens == AUTO:
        config, size = layout.config, layout.loss_chunk
        said = (
            "whole: chunks would save less than 5% of the peak" if size is None else f"{size} tokens at once"
        )
        notes.append(f"--loss-chunk-tokens auto: {said}")
        layout = Layout(BaseLayout(config, world, cluster, base.collectives), config.zero)
    timing, interval = simulate(layout) if name is not None else None, config.outer.outer_interval
    forecast = Forecast(
        layout,
        timing.seconds - timing.bill["outer"] if timing else None,
        copied=copied_bytes(layout),
        on_host=device.type == "cpu",
        interval=interval,
        met=timing.bill["outer"] * interval if timing else 0.0,
    )
    forecast.refuse_without(room)
    return config, forecast, notes


def copied_bytes(layout: Layout) -> float:
    """Return the bytes of host memory that --async-save's copy takes on the rank that has the most to save."""
    config, base = layout.config, layout.base
    if not config.checkpoint.async_save:
        return 0.0
    states = layout.states
    outer, sums = states.outer, states.formats.sums
    anchors = 0 if outer is None else (1 + outer.momentum + outer.feedback) * sums

    def saved(elements: float, matrices: float) -> float:
        width = saved_width(config.precision.params_dtype, config.optimizer, layout.wire, matrices / elements)
        return elements * (width + anchors)

    return max(saved(*states.owned(layout.units(rank))) for rank in base.distinct_ranks)


def choose(config: RunConfig, base: BaseLayout) -> tuple[RunConfig, list[str]]:
    """Return the configuration with the planner's choice for --zero-preset auto, and why. Collective.

    Only the ZeRO section changes. The first rank chooses: the others' files may differ.
    """
    found: Any = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        search = Search(given_values(config), base.cluster, config.planning.loss_policy)
        best = search.best(bases=[base])
        if best:
            found = best[0].layout.config.zero, table(best)
        else:
            smallest, room = smallest_layout(given_values(config), base.cluster), base.cluster.device.room
            found = (
                _too_large(smallest, room) if smallest else "--zero-preset auto: no sharding is legal here"
            )
    found = gather_objects(found, ZeroConfig)[0]
    if isinstance(found, str):
        raise ValueError(found)
    zero, lines = found
    config = replace(config, zero=zero)
    flags = " ".join(layout_flags(config))
    return config, [f"--zero-preset auto chose the first of these by {base.cluster.name}: {flags}", *lines]


def given_values(config: RunConfig, released: Sequence[str] = ZERO) -> dict[str, Any]:
    """Return the options that the planner may not choose: all that have a value but ``released``."""
    options = all_options()
    values = {
        name: value
        for name, value in config.values().items()
        if value is not None and (options[name].section != "zero" or value != options[name].default)
    }
    values |= {"pipeline_schedule": config.pipeline_schedule}
    return {name: value for name, value in values.items() if name not in released}


def refuse_too_large(layout: Layout, room: float, copied: float = 0.0) -> None:
    """Raise ValueError if the layout, without the allocator's margin, needs more than ``room`` bytes on some rank.

    copied: what --async-save takes of the room.
    """
    if layout.memory.total - layout.memory.margin + copied > room:
        raise ValueError(_too_large(layout, room, copied))


def _too_large(layout: Layout, room: float, copied: float = 0.0) -> str:
    fitting = next(_fitting(layout.config, layout.base.cluster, room - copied), None)
    cure = (
        "no layout fits on these ranks: take more nodes"
        if fitting is None
        else f"nearest that fits: {fitting}"
    )
    needed, items = (layout.memory.total + copied) / GIB, memory_items(layout.memory)
    items += f", --async-save's copy {copied / GIB:.2f}" if copied else ""
    return (
        f"this run does not fit: {describe(layout)} needs {needed:.2f} GiB of {room / GIB:.2f} on the fullest rank "
        f"({items}); {cure}; --no-memory-check starts it all the same"
    )


def _fitting(config: RunConfig, cluster: Cluster, room: float) -> Iterator[str]:
    """Yield layouts that fit, the one that gives up the least first, by their flags."""
    released: tuple[str, ...] = ()
    for more in RELEASED:
        released += more
        layout = smallest_layout(given_values(config, released), cluster)
        if layout is not None and layout.memory.total <= room:
            yield f"{describe(layout)} ({' '.join(layout_flags(layout.config))})"


def _unknown_cluster(config: RunConfig, world: World, room: float | None, on: torch.device) -> Cluster:
    """Return a cluster of these ranks for what concerns memory alone. Raises ValueError for fp64."""
    per_node = config.ranks_per_node(world)
    rates: dict[str, Any] = {f"{name}_tflops": 1.0 for name in PRODUCTS}
    if config.precision.params_dtype == "fp64":
        raise ValueError("no cluster computes in fp64")
    gib = GIB if room is None else room / GIB
    device = Device("these ranks", gib, 1.0, 1.0, reserved_gib=0.0, **rates)
    nodes = -(-world.world_size // per_node)
    cores = Cores(os.cpu_count() or 1, per_node) if on.type == "cpu" else None
    return Cluster("these ranks", nodes, per_node, device, IntraNode(1.0), InterNode(1.0), cores=cores)


# -- what there is --------------------------------------------------------------------------------


def room_of(device: torch.device, local_ranks: int) -> float | None:
    """Return the bytes that each rank may take: the least of all ranks, or None if that is not known. Collective.

    On a CPU the ranks of a node share what the system calls available.
    """
    own: float | None
    if device.type == "cuda":
        own = float(torch.cuda.mem_get_info(device)[0])
    else:
        available = host_memory().get("MemAvailable")
        own = None if available is None else available / local_ranks
    return min((room for room in gather_objects(own) if room is not None), default=None)
