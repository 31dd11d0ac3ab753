"""Modules whose gradients are given, and what their quantised reduction may differ by (tests only).

The model of a reduction works on whole unit buffers of all ranks at once, from the definition of the layout, the
codecs and what issue each hop rounds; it shares no code with zero/gather.py or zero/reduce.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from hashlib import blake2b
from math import prod
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from megazero import zero
from megazero.comm.codec import Blockwise
from megazero.mesh.mesh import create_mesh
from megazero.zero.unit import Unit

Q8, Q4, Q2 = Blockwise(8, 16), Blockwise(4, 16), Blockwise(2, 8)
H8, H4 = (Blockwise(bits, 16, hadamard=16) for bits in (8, 4))
# Two units: parameters that end inside a block, one below the threshold of EXACT; a unit of one parameter.
UNITS = (((5, 9), (7, 13), (5,)), ((33, 9),))
EXACT = 8
SGD = partial(torch.optim.SGD, lr=0.1)
FROZEN = partial(torch.optim.SGD, lr=0.0)
# world, ranks per node, tensor parallel size
EIGHT_RANKS = pytest.param(8, 4, 2, marks=pytest.mark.slow)
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, fused=True)


@dataclass(frozen=True)
class Case:
    """One engine: layout by letters ('hrd': P = h, G = a rack's, OS = d), nodes as ranks per node, racks as nodes."""

    letters: str
    per_node: int
    codecs: zero.Codecs
    micro_batches: int = 1
    tp: int = 1
    dtype: torch.dtype = torch.float32
    units: Sequence[Sequence[tuple[int, ...]]] = UNITS
    options: dict[str, Any] = field(default_factory=dict)
    rack: int = 0

    @property
    def levels(self) -> tuple[int, ...]:
        return (self.rack,) if self.rack else ()

    def shards(self, world: int) -> tuple[int, ...]:
        d = world // self.tp
        h = min(d, self.per_node // self.tp)
        sizes = {"1": 1, "h": h, "r": min(d, h * self.rack), "d": d}
        return tuple(sizes[letter] for letter in self.letters)

    @property
    def policy(self) -> zero.Policy:
        return zero.Policy(**{"block": 16, "exact_numel": EXACT, **self.options, "codecs": self.codecs})

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)


class Leaf(nn.Module):
    """Parameters p whose gradients are the g that forward is given."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype):
        super().__init__()
        self.held = nn.ParameterList(nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes)

    def forward(self, gradients):
        return torch.stack([(p * g).sum() for p, g in zip(self.held, gradients, strict=True)]).sum()


class Leaves(nn.Module):
    def __init__(self, case: Case):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Leaf(shapes, case.dtype) for shapes in case.units)

    def forward(self, gradients):
        return torch.stack([x(g) for x, g in zip(self.layers, gradients, strict=True)]).sum()


def replicated(name: str) -> bool:
    """With tensor parallelism: the last parameter of the first unit, as norms are."""
    return name == "layers.0.held.2"


def make(case: Case, optimizer=FROZEN, model: nn.Module | None = None, **kwargs) -> tuple[Any, zero.Engine]:
    world = torch.distributed.get_world_size()
    mesh = create_mesh(
        tp=case.tp,
        shards=case.shards(world),
        ranks_per_node=case.per_node,
        level_sizes=case.levels,
    )
    model = model or Leaves(case)
    if case.tp > 1:
        kwargs["traits"] = lambda name, p: zero.Traits(replicated=replicated(name))
    engine = zero.shard(
        model, mesh=mesh, policy=case.policy, units=model.layers, optimizer=optimizer, **kwargs
    )
    return model, engine


@lru_cache(maxsize=4096)
def _normal(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def drawn(case: Case, dp_rank: int, tp_rank: int, index: int, step: int = 0) -> list[list[torch.Tensor]]:
    """Gradients by unit and parameter of one rank's micro-batch: normal, of another size in each parameter."""
    out = []
    for u, shapes in enumerate(case.units):
        out.append([])
        for k, shape in enumerate(shapes):
            twin = 0 if replicated(f"layers.{u}.held.{k}") else tp_rank
            seed = ((((dp_rank * 8 + twin) * 8 + index) * 64 + step) * 8 + u) * 8 + k
            out[-1].append((_normal(shape, seed) * 3.0 ** (k - u)).to(case.dtype))
    return out


def take_step(case: Case, model, engine, gradients, divisor: float = 1.0) -> zero.StepInfo:
    """gradients(micro-batch): as ``drawn``'s, of this rank."""
    engine.begin_step(case.micro_batches, divisor)
    for index in range(case.micro_batches):
        model(gradients(index)).backward()
    return engine.step()


def step_with(case: Case, model, engine, step: int = 0, divisor: float = 1.0) -> zero.StepInfo:
    """A step on this rank's ``drawn`` gradients."""
    dp, tp = engine.mesh.dp_rank, engine.mesh.tp.index
    return take_step(case, model, engine, lambda index: drawn(case, dp, tp, index, step), divisor)


def flat(unit: Unit, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """fp64 [n]: one unit's gradients, in its buffer's order, padding zero."""
    out = torch.zeros(unit.layout.numel, dtype=torch.float64)
    for slot in unit.layout.slots:
        values = gradients[int(slot.name.rsplit(".", 1)[1])]
        out[slot.start : slot.start + slot.numel] = values.reshape(-1).double()
    return out


def owned(unit: Unit) -> torch.Tensor:
    """Positions in the unit buffer of this rank's compact OS slice."""
    return torch.cat([torch.arange(p.start, p.start + p.numel) for p in unit.layout.pieces(unit.axes.os)])


def reduced(unit: Unit) -> torch.Tensor:
    """Compact [n/OS], padding included: the gradient slice that the optimizer was given."""
    within = unit.layout.within(unit.axes.os, unit.axes.g)
    return torch.cat([unit.gradients.grad[p.start : p.start + p.numel] for p in within]).double()


def digest(*tensors: torch.Tensor) -> str:
    """Equal for equal bits. Of copies: a numpy view would pin a storage that the engine frees."""
    hashed = blake2b(digest_size=8)
    for tensor in tensors:
        hashed.update(tensor.detach().clone().view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def bits_of(engine: zero.Engine) -> dict:
    """All of this rank that an update changes, as digests: master, optimizer state, R."""
    out: dict = {"state": engine.state()}
    for unit in engine.units:
        held = [unit.master.value]
        if unit.delta:
            held.append(unit.weights.copy)
        out[unit.name] = digest(*held)
    for i, state in enumerate(engine.optimizer.torch.state.values()):
        out[i] = digest(*(x for x in state.values() if isinstance(x, torch.Tensor)))
    return out


def full_masters(engine: zero.Engine) -> dict[str, torch.Tensor]:
    """fp64 [n] by unit, from every rank's slice. Collective; one tensor-parallel rank."""
    every: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, [(owned(u), u.master.value.double()) for u in engine.units])
    out = {}
    for i, unit in enumerate(engine.units):
        out[unit.name] = torch.full((unit.layout.numel,), torch.nan, dtype=torch.float64)
        for slices in every:
            out[unit.name][slices[i][0]] = slices[i][1]
    return out


def several(function: Callable, cases: Sequence[Case], *args: Any) -> list:
    """One pool call for many cases."""
    return [function(case, *args) for case in cases]


class Sum(NamedTuple):
    """fp64 [n] each: the exact sum, how far the decoded one may be; fp32's slack."""

    value: torch.Tensor
    bound: torch.Tensor
    slack: torch.Tensor


def expected(case: Case, unit: Unit, mesh, every: Sequence[Sequence[torch.Tensor]]) -> list[Sum]:
    """By data rank: what its gradient should be, where it owns. every[data rank][micro-batch]: fp64 [n]."""
    return _Model(case, unit, [(a.size, a.link) for a in mesh.data_axes]).run(every)


def expected_at_both(
    case: Case, unit: Unit, mesh, ends: Sequence[Sequence[Sequence[torch.Tensor]]]
) -> list[Sum]:
    """By data rank: the same of a parameter that a pipeline's ends share; both ends' sums are rounded once more."""
    model = _Model(case, unit, [(a.size, a.link) for a in mesh.data_axes])
    found = []
    for first, last in zip(*(model.run(every) for every in ends), strict=True):
        sent = [model._add(x, model.rounding(x, mesh.ends.link)) for x in (first, last)]
        total = Sum(*(a + b for a, b in zip(*sent, strict=True)))
        found.append(model._rounded(total, 1))
    return found


def bound_of_any(codec: Blockwise, largest: torch.Tensor) -> torch.Tensor:
    """Per block of [n]: the most that the codec loses of any values whose magnitudes are at most these."""
    if codec.transform is None:
        return codec.error_bound(largest.float()[None])[0].double()
    size = codec.transform.size
    mixed = largest.view(-1, size).mean(1).repeat_interleave(size)  # of all signs
    return size * (1 + 2**-16) * bound_of_any(replace(codec, hadamard=0), mixed)


class _Model:
    def __init__(self, case: Case, unit: Unit, axes: list[tuple[int, str]]) -> None:
        self.case, self.layout, self.cuts, self.axes = case, unit.layout, unit.axes, axes
        self.ranks = range(prod(size for size, _ in axes))
        exact = case.policy.exact_numel
        coded = [s for s in self.layout.slots if s.numel > exact and not (case.tp > 1 and replicated(s.name))]
        self.coded = sum(self.layout.regions[0]) if coded else 0  # elements of the region that is rounded
        self.digits = [self._digit(j) for j in range(len(axes))]

    def _digit(self, j: int) -> torch.Tensor:
        """int [n]: index along axis j of the ranks that own an element."""
        out = torch.empty(self.layout.numel, dtype=torch.long)
        cuts = prod(size for size, _ in self.axes[: j + 1])
        for start, n in self.layout.regions:
            out[start : start + n] = torch.arange(n) // (n // cuts) % self.axes[j][0]
        return out

    def index(self, rank: int, j: int) -> int:
        return rank // prod(size for size, _ in self.axes[:j]) % self.axes[j][0]

    def group(self, rank: int, j: int) -> list[int]:
        stride = prod(size for size, _ in self.axes[:j])
        first = rank - self.index(rank, j) * stride
        return [first + i * stride for i in range(self.axes[j][0])]

    def codec(self, link: str) -> Blockwise | None:
        return self.case.codecs.gradients.get(link)

    def rounding(self, held: Sum, link: str) -> torch.Tensor:
        """fp64 [n]: the most that one message across a link loses of a sum, which itself may be off."""
        out, codec = torch.zeros_like(held.bound), self.codec(link)
        if codec is not None and self.coded:
            largest = (held.value.abs() + held.bound + held.slack)[: self.coded] * (1 + 2**-20)
            bound = bound_of_any(codec, largest)
            out[: self.coded] = bound.repeat_interleave(codec.block)
        return out

    def run(self, every: Sequence[Sequence[torch.Tensor]]) -> list[Sum]:
        cuts, total = self.cuts, [self._nothing() for _ in self.ranks]
        for m in range(self.case.micro_batches):
            raw = [
                self._nothing()._replace(value=every[r][m], slack=every[r][m].abs() * 2**-24)
                for r in self.ranks
            ]
            part = self.down(raw, 0, cuts.g)
            total = [
                Sum(*(a + b for a, b in zip(x, y, strict=True))) for x, y in zip(total, part, strict=True)
            ]
            total = [self._rounded(x, 1) for x in total]
        total = self.down(total, cuts.g, cuts.all)
        for j in range(cuts.all - 1, cuts.os - 1, -1):
            lost = [self.rounding(x, self.axes[j][1]) for x in total]
            total = [self._add(x, q) for x, q in zip(total, lost, strict=True)]
            total = [self._joined(total, r, j) for r in self.ranks]
        return total

    def _nothing(self) -> Sum:
        return Sum(*(torch.zeros(self.layout.numel, dtype=torch.float64) for _ in range(3)))

    def _add(self, held: Sum, lost: torch.Tensor) -> Sum:
        return held._replace(bound=held.bound + lost)

    def _rounded(self, held: Sum, times: int) -> Sum:
        most = held.value.abs() + held.bound + held.slack
        return held._replace(slack=held.slack + times * 2**-24 * most)

    def down(self, held: list[Sum], first: int, last: int) -> list[Sum]:
        """Reduce-scatter over axes first .. last - 1. Hops between two codecs are fused, so that nothing keeps its
        own contribution exact."""
        whole = False
        for j in range(first, last):
            fused = j + 1 < last and all(self.codec(link) is not None for _, link in self.axes[j : j + 2])
            whole = whole or fused
            held = self._hop(held, j, whole)
            whole = fused
        return held

    def _hop(self, held: list[Sum], j: int, whole: bool) -> list[Sum]:
        lost = [self.rounding(x, self.axes[j][1]) for x in held]
        out = []
        for rank in self.ranks:
            mine = self.digits[j] == self.index(rank, j)
            total = self._nothing()
            for peer in self.group(rank, j):
                part = held[peer] if peer == rank and not whole else self._add(held[peer], lost[peer])
                total = Sum(*(a + b for a, b in zip(total, part, strict=True)))
                total = self._rounded(total, 1)
            out.append(Sum(*(x * mine for x in total)))
        return out

    def _joined(self, held: list[Sum], rank: int, j: int) -> Sum:
        """The way back of replicas: every share from its owner."""
        out = self._nothing()
        for peer in self.group(rank, j):
            share = self.digits[j] == self.index(peer, j)
            out = Sum(*(a + b * share for a, b in zip(out, held[peer], strict=True)))
        return out
