"""Muon's update over the ranks that share the optimizer states: matrices dealt, against a gather of everything.

    python -m benchmarks.links.matrix_updates [--rates none 1gbit 200mbit] [--hidden 256]

Contestants take turns on one engine (zero3): its own update, and one in which every rank gathers every matrix's
momentum by the engine's hops and steps all of them. Seconds are of the matrices' part of an update; bytes are what
the kernel counted at a node's interface. On ranks that share processors what all repeat counts in full.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.steps import Shape, batches, decoder
from megazero import zero
from megazero.comm.hops import start_gather
from megazero.mesh.mesh import create_mesh
from megazero.models import Decoder, initializer


def make(hidden: int, layers: int) -> tuple[Decoder, zero.Engine, Shape]:
    shape = Shape(layers=layers, hidden=hidden, ffn=4 * hidden, sequence=64, micro_batch=1)
    world, node = dist.get_world_size(), harness.ranks_per_node()
    model = decoder(shape, "meta")
    matrices = model.matrices()
    engine = zero.shard(
        model,
        mesh=create_mesh(shards=(world,) * 3, ranks_per_node=node),
        units=model.units(),
        optimizer=partial(zero.Muon, lr=1e-4),
        init=initializer(model, 1),
        traits=lambda name, _: zero.Traits(matrix=name in matrices),
    )
    return model, engine, shape


def gather_everything(engine: zero.Engine) -> None:
    """Update the matrices: every rank gathers and steps all of them."""
    (updates,) = engine.matrices
    muon, folded = updates.optimizer, updates.fold()
    for unit in engine.units:
        layout, os = unit.layout, unit.axes.os
        mine = [matrix for matrix in updates.matrices if matrix.unit is unit]
        if not mine:
            continue
        whole = torch.zeros(layout.numel, dtype=torch.bfloat16)
        (own,) = layout.pieces(os)
        for run in (run for run in updates.runs if run.unit is unit):
            whole[own.start + run.start : own.start + run.stop].copy_(folded[run.leaf])
        for hop in layout.gather_hops(os, 0, 0):
            axis = engine.mesh.data_axes[hop.level - 1]
            start_gather(axis, whole[hop.into], whole[hop.own], "gather", engine.traffic).wait()
        for matrix in mine:
            slot, (rows, columns) = matrix.slot, matrix.slot.shape
            update = muon.direction(whole[slot.start : slot.start + slot.numel].view(rows, columns)).reshape(
                -1
            )
            if matrix.run is not None:
                low, high = matrix.cut.held[tuple(axis.index for axis in engine.mesh.data_axes)]
                weights = unit.master.value[matrix.at : matrix.at + high - low]
                muon.apply(weights, update[low:high], (rows, columns), updates.groups[matrix.run.leaf])


def compare(hidden: int, layers: int, rounds: int, repeats: int) -> dict[str, Any]:
    """Return by contestant the turns: seconds and bytes of one update, of the node that sent most."""
    model, engine, shape = make(hidden, layers)
    (tokens,) = batches(shape, torch.device("cpu"))
    engine.begin_step()
    model(tokens, tokens).sum().backward()
    engine.step()
    (updates,) = engine.matrices
    contestants: dict[str, Callable[[], None]] = {
        "dealt": partial(updates.step, 1.0),
        "every rank all": partial(gather_everything, engine),
    }
    turns = {name: partial(harness.measure_most, each, repeats) for name, each in contestants.items()}
    return harness.take_turns(turns, rounds)


def main() -> None:
    options = harness.parser(
        __doc__,
        rates=["none", "1gbit", "200mbit"],
        hidden=256,
        layers=8,
        nodes=2,
        ranks_per_node=2,
        rounds=(5, "turns of each contestant that count"),
        repeats=(3, "updates of a turn"),
    ).parse_args()
    header = ["rate", "contestant", "ms (range)", "MB sent by a node", "to dealt (range)"]
    rows = []
    for lab in harness.labs_at(options.rates, options.nodes):
        asked = (options.hidden, options.layers, options.rounds, options.repeats)
        found = harness.run(compare, *asked, ranks=options.ranks_per_node, lab=lab)
        rows += [[str(lab.rate), *row] for row in harness.turn_rows(found)]
    print(harness.table(header, rows))


if __name__ == "__main__":
    harness.start(main)
