"""The cases of quantised/cases.py cut into stages, with tied ends: pipelines whose modules' gradients are given.

Only what the stages' engines exchange is at stake here, so no activations are sent: every rank runs its own stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from megazero import zero
from megazero.mesh.grid import data_ranks
from megazero.mesh.levels import make_levels
from megazero.mesh.mesh import Mesh, create_mesh
from megazero.zero.unit import Unit
from tests.dist.quantised import cases as quantised
from tests.dist.quantised.cases import FROZEN, UNITS, Case, Leaf, Sum, expected, expected_at_both, flat

TIED = ((11, 9),)  # the shapes of the unit at both ends
NAME = "shared"  # of it, in the engine


@dataclass(frozen=True)
class Staged(Case):
    """Each stage has the case's units, the first and the last the tied one besides."""

    pp: int = 2
    dp_outermost: bool = False

    def shards(self, world: int) -> tuple[int, ...]:
        h = data_ranks(make_levels(world, self.per_node), 1, self.pp, self.dp_outermost)[0]
        sizes = {"1": 1, "h": h, "d": world // self.pp}
        return tuple(sizes[letter] for letter in self.letters)

    def at(self, stage: int) -> Case:
        """The case of one stage: tied first at the first, last at the last."""
        first, last = stage == 0, stage == self.pp - 1
        return replace(self, units=(*([TIED] if first else []), *UNITS, *([TIED] if last else [])))

    def tied(self, stage: int) -> int | None:
        """Which of the stage's units is the tied one."""
        return {0: 0, self.pp - 1: len(UNITS)}.get(stage)


class Stage(nn.Module):
    def __init__(self, case: Staged, stage: int):
        super().__init__()
        self.tied_at = case.tied(stage)
        torch.manual_seed(17)
        tied = Leaf(TIED, case.dtype)
        torch.manual_seed(stage)
        names = [f"{stage}_{i}" for i in range(len(UNITS))]
        leaves = dict(zip(names, (Leaf(shapes, case.dtype) for shapes in UNITS), strict=True))
        if stage == 0:
            leaves = {"embedding": tied, **leaves}
        elif self.tied_at is not None:
            leaves["head"] = tied
        self.leaves = nn.ModuleDict(leaves)

    def forward(self, gradients):
        return torch.stack([x(g) for x, g in zip(self.leaves.values(), gradients, strict=True)]).sum()


def several(function: Callable, cases: Sequence[Staged], *args: Any) -> list:
    """``function(case, mesh, *args)`` of each; cases with equal shard factors share a mesh, whose groups have threads
    that poll. All have one pipeline."""
    world, meshes, found = torch.distributed.get_world_size(), dict[tuple[int, ...], Mesh](), []
    for case in cases:
        shards = case.shards(world)
        if shards not in meshes:
            meshes[shards] = create_mesh(
                pp=case.pp,
                shards=shards,
                dp_outermost=case.dp_outermost,
                ends=True,
                ranks_per_node=case.per_node,
            )
        found.append(function(case, meshes[shards], *args))
    return found


def make(case: Staged, mesh: Mesh, optimizer=FROZEN, **kwargs) -> tuple[Stage, zero.Engine]:
    mesh._claims.clear()  # engines on one mesh take turns, step by step, on all ranks alike
    model = Stage(case, mesh.pp.index)
    tied = {f"leaves.{n}.held.0": NAME for n in ("embedding", "head") if n in model.leaves}
    engine = zero.shard(
        model,
        mesh=mesh,
        policy=case.policy,
        units=list(model.leaves.values()),
        optimizer=optimizer,
        tied=tied,
        **kwargs,
    )
    return model, engine


def drawn(case: Staged, stage: int, dp_rank: int, index: int, step: int = 0) -> list[list[torch.Tensor]]:
    """Gradients by unit and parameter of one micro-batch; they differ between stages."""
    return quantised.drawn(case.at(stage), dp_rank + 8 * stage, 0, index, step)


def step_with(case: Staged, model: Stage, engine: zero.Engine, step: int = 0, divisor: float = 1.0) -> Any:
    mesh = engine.mesh
    return quantised.take_step(
        case, model, engine, lambda index: drawn(case, mesh.pp.index, mesh.dp_rank, index, step), divisor
    )


def given(case: Staged, unit: Unit, mesh: Mesh, stage: int, u: int) -> list[list[torch.Tensor]]:
    """fp64 [n] by data rank and micro-batch: what a unit of a stage is given in step 0."""
    return [
        [flat(unit, drawn(case, stage, rank, m)[u]) for m in range(case.micro_batches)]
        for rank in range(mesh.dp_size)
    ]


def sums(case: Staged, engine: zero.Engine, codecs: zero.Codecs) -> Sequence[Sum]:
    """By unit: what this rank's gradients of step 0 should be with these codecs."""
    mesh, stage, found = engine.mesh, engine.mesh.pp.index, []
    coded = case.but(codecs=codecs)
    for u, unit in enumerate(engine.units):
        if unit.tied:
            ends = [given(case, unit, mesh, end, case.tied(end) or 0) for end in (0, case.pp - 1)]
            found.append(expected_at_both(coded, unit, mesh, ends)[mesh.dp_rank])
        else:
            found.append(expected(coded, unit, mesh, given(case, unit, mesh, stage, u))[mesh.dp_rank])
    return found
