"""Calibrates the planner on the ranks at hand: every point, then the cluster file."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megazero.calibrate.collectives import measure_wire
from megazero.calibrate.model import DoesNotFit, measure_modules
from megazero.calibrate.options import CalibrationRequest
from megazero.calibrate.points import STEP, STRIDE, modules, sizes, wires
from megazero.calibrate.rates import find_host, measure_device
from megazero.calibrate.record import Rows, cluster_text, links, write_cluster
from megazero.calibrate.timing import Clock
from megazero.config import ConfigError, RunConfig, make_config
from megazero.config.options.cluster import CALIBRATED, Cluster, parse_cluster
from megazero.mesh.launch import Launch
from megazero.mesh.mesh import discover_ranks_per_node
from megazero.mesh.objects import gather_objects
from megazero.models.dtypes import DTYPES
from megazero.train.distributed import start_rank

TIMEOUT = timedelta(minutes=10)


def join(request: CalibrationRequest, launch: Launch) -> tuple[RunConfig, torch.device, tuple[str, ...]]:
    """Choose the device and join the other ranks. Returns notes, too. Collective.

    Raises ValueError, perhaps on one rank alone.
    """
    config = make_config({**request.values, "micro_batch_size": 1, "global_batch_size": None})
    device, notes = start_rank(config.training, launch, TIMEOUT)
    return config, device, (*request.notes, *notes)


def calibrate(
    request: CalibrationRequest,
    launch: Launch,
    config: RunConfig,
    device: torch.device,
    notes: tuple[str, ...],
) -> None:
    """Measure and write the cluster file. Collective. Raises ConfigError, ValueError, the same on every rank."""
    try:
        per_node = discover_ranks_per_node(launch, config.parallel.ranks_per_node)
        run = Calibration(request, config, launch, per_node, device)
        for note in notes:
            run.say(note)
        run.measure()
        if launch.rank == 0:
            run.write()
        if dist.is_initialized():
            dist.barrier()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class Calibration:
    """One calibration. All ranks have the same rows.

    Raises ConfigError on every rank where the first cannot write the cluster file.
    """

    def __init__(
        self,
        request: CalibrationRequest,
        config: RunConfig,
        launch: Launch,
        per_node: int,
        device: torch.device,
    ) -> None:
        self.request, self.config, self.first = request, config, launch.rank == 0
        self.world, self.per_node = launch.world_size, per_node
        host = find_host()
        self.clock = Clock(device, request.options.calibrate_rounds, host["ranks"] / host["count"])
        self.done = dict[str, Rows]()  # by point
        refused = gather_objects(_unwritable(request.options.output) if self.first else "")[0]
        if refused:
            raise ConfigError([f"--cluster-output: {refused}"])

    def say(self, text: str) -> None:
        if self.first:
            print(text, file=sys.stderr, flush=True)

    def point(self, name: str, rows: Iterable[dict[str, Any]]) -> None:
        """Measure the rows of a point. Collective."""
        found = self.done[name] = list(rows)
        worst = max((row.get("spread", 0.0) for row in found), default=0.0)
        self.say(f"{name}: {len(found)} rows, spread at most {worst:.0%}")

    def measure(self) -> None:
        """Measure everything. Collective."""
        self.point("device", [measure_device(self.config, self.clock)])
        dtype = DTYPES[self.config.precision.params_dtype]
        options = self.request.options
        ladder = sizes(options.calibrate_largest_bytes, STRIDE if options.pays else STEP)
        for wire in wires(self.world // self.per_node, self.per_node, options.pays):
            self.point(f"collectives {wire}", measure_wire(wire, ladder, self.per_node, dtype, self.clock))
        cluster = self.cluster()
        points = modules(self.per_node, options.calibrate_micro_batches)
        for size in islice(points, 1 if options.pays else None):
            self.point(f"{size}", self._modules(size, cluster))

    def _modules(self, size: Any, cluster: Cluster) -> Iterator[dict[str, Any]]:
        try:
            yield from measure_modules(size, self.request.values, cluster, self.clock)
        except ConfigError as error:  # the model does not run so: nothing to know of it
            self.say(f"{size}: not measured: {'; '.join(error.errors)}")
        except DoesNotFit as error:
            self.say(f"{size}: not measured: memory: {error}")
        if self.clock.device.type == "cuda":
            torch.cuda.empty_cache()  # the next size needs pieces of another size

    def sections(self) -> dict[str, Any]:
        """Return the cluster file of the measurements so far."""
        done = self.done
        collectives, layers = (
            [row for name, rows in done.items() if name.startswith(kind) for row in rows]
            for kind in ("collectives", "modules")
        )
        (device,) = done["device"]
        options = self.request.options
        return {
            "name": options.cluster_name,
            "rates": CALIBRATED,
            "source": f"measured by megazero calibrate, {options.calibrate_rounds} rounds, torch {torch.__version__}",
            "nodes": self.world // self.per_node,
            "ranks_per_node": self.per_node,
            **device,
            **links(collectives, device["device"]["memory_gbytes_per_s"], self.per_node),
            "collectives": collectives,
            "layers": layers,
        }

    def cluster(self) -> Cluster:
        return parse_cluster(cluster_text(self.sections()), "the calibration")

    def write(self) -> None:
        output = self.request.options.output
        cluster = write_cluster(output, self.sections())
        print(f"{output}: {len(cluster.collectives)} collectives, {len(cluster.layers)} modules", flush=True)


def _unwritable(output: Path) -> str:
    """Return why the file cannot be written, or ''."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.touch()
    except OSError as error:
        return f"{error}"
    return ""
