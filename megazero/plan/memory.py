"""A rank's memory at the peak of a step, item by item, in bytes.

Model states follow zero/weights.py and zero/gradients.py: the P copy as it was received, gradients summed in at least
fp32 over G, and over OS the master weights with the optimizer's moments. activations.py has the memory of a
micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import cycle, islice

from megazero.comm.made_once import made_once
from megazero.comm.wire import Coding
from megazero.config.layout.shards import Shards
from megazero.config.layout.wire import Wire
from megazero.config.model.section import ModelConfig
from megazero.config.model.spec import EMBEDDING, is_layer, model_spec, parameter_count
from megazero.config.options.optimizers import OptimizerConfig
from megazero.mesh.grid import Grid, expert_shards
from megazero.plan.communication import Formats, OuterFormat, UnitShape, axes_of
from megazero.plan.gathers import Copies
from megazero.plan.units import WIDTHS, RankUnits
from megazero.zero.plan import EXCHANGE, UnitCut, UnitPlan

# Of all that is allocated: what the blocks of CUDA's allocator leave unused between tensors of unequal sizes.
ALLOCATOR_MARGIN = 0.06
STREAMS = 2  # of each lane (comm/lane.py): chains that are under way at once
PENDING_REDUCTIONS = 2  # units whose reductions may be in flight before a backward waits (zero/policy.py)
WAITING = 1 + PENDING_REDUCTIONS  # units whose gradients may be staged at once
SQUARE = 8  # bytes of an element's error, squared
GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """The bytes of each item."""

    parameters: float
    gradients: float
    optimizer: float
    residuals: float
    gathered: float
    staging: float
    activations: float
    head: float
    margin: float

    @property
    def model_states(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.residuals

    @property
    def total(self) -> float:
        return sum(getattr(self, f.name) for f in fields(self))

    def items(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, eq=False)
class States:
    """The model state of a rank, as memory and bytes need it from a layout."""

    grid: Grid
    shards: Shards
    formats: Formats
    prefetch_bytes: int
    on_host: bool = False  # the ranks compute on processors, in their hosts' memory
    outer: OuterFormat | None = None

    @property
    def anchors(self) -> int:
        return self.anchors_of(self.outer)

    @staticmethod
    def anchors_of(outer: OuterFormat | None) -> int:
        """Return how many values outer steps keep beside a master weight: the anchor and the outer momentum."""
        return 0 if outer is None else 1 + outer.momentum

    @made_once
    def plan(self, unit: UnitShape) -> UnitPlan[Coding]:
        """Return what moves for a unit."""
        return unit.plan(self._cut(unit.apart), self.formats)

    @made_once
    def _cut(self, apart: int) -> UnitCut:
        return UnitCut.of(axes_of(apart, self.grid), self.shards.whole_gradients)

    def owned(self, units: RankUnits) -> tuple[float, float]:
        """Return the elements of a rank's OS slices, and how many of them are of the layers' matrices."""
        elements = sum(n * u.elements / self.plan(u).shards[2] for u, n in units.counts)
        matrices = units.matrices_apart.items()
        return elements, sum(n / expert_shards(self.shards.factors, apart)[2] for apart, n in matrices)

    def copies(self, units: RankUnits) -> Copies:
        """Return how long the copies of a rank's parameters live."""
        uses = [[module.units for module in part] for part in units.parts]
        kept = self.shards.keep_gathered or self.shards.p == 1  # P = 1: the refresh leaves whole parameters
        return Copies(uses, kept, self.prefetch_bytes, self.shards.whole_gradients)

    def staged(self, unit: UnitShape) -> bool:
        """Return whether each micro-batch's gradients are reduced (G > 1)."""
        return self.plan(unit).cut.g > 0

    def copy_bytes(self, unit: UnitShape) -> float:
        """Return the bytes of the P copy, without the master weights if they are a part of it."""
        plan, (p, _, os) = self.plan(unit), self.plan(unit).shards
        inside = plan.master_in_copy(kept=p == os or self.shards.lifetime == "resident")
        return plan.copy_bytes - (unit.elements / os * self.formats.width if inside else 0.0)

    def reduction_messages(self, unit: UnitShape, micro_batches: int) -> float:
        """Return the most bytes that a reduction's hop has at once: sent, received, and their sum for the next."""
        plan, most, left = self.plan(unit), 0.0, float(unit.elements)
        for hop in plan.reduction(True, micro_batches == 1):
            if hop.verb != EXCHANGE:
                break
            own = hop.sent / (hop.axis.size - 1)  # exact rows are sent from where they lie, with the own one
            passing = 2 * hop.sent if hop.format else hop.sent + (own if hop.axis.size > 2 else 0.0)
            left /= hop.axis.size
            most = max(most, passing + (left * self.formats.sums if hop.level < plan.cut.g else 0.0))
        return most

    def chain_bytes(self, unit: UnitShape, micro_batches: int) -> float:
        """Return the most bytes that a unit's reduction has at once, the sum of tied parameters' ends included.

        There a rank has both ends' OS slices in one buffer (zero/reduce.py).
        """
        ends = 2 * unit.elements / self.plan(unit).shards[2] * self.formats.sums if unit.tied else 0.0
        return max(self.reduction_messages(unit, micro_batches), ends)

    def sampled_bytes(self, counts: Sequence[tuple[UnitShape, int]]) -> tuple[float, float]:
        """Return the bytes in which the rounding of one unit's weights, and of its gradients, is measured.

        Every unit is measured in turn, the largest included. What was sent is decoded, the error is taken, and its
        squares in fp64 (zero/rounding.py): of this rank's sum between two quantised hops, else of the other ranks'
        rows.
        """
        largest = max((u.elements for u, _ in counts if u.quantised), default=0)
        largest *= 2 * self.formats.sums + SQUARE
        of_weights = largest / self.shards.os if self.formats.codecs.weights is not None else 0.0
        axes = [a for a in self.grid.data_axes if a.size > 1]
        coded = [a.link in self.formats.codecs.gradients for a in axes]
        of_gradients, parts = 0.0, 1
        for i, axis in enumerate(axes):
            parts *= axis.size
            if coded[i]:
                rows = 1 if any(coded[i + 1 : i + 2]) else axis.size - 1
                of_gradients = max(of_gradients, largest / parts * rows)
        return of_weights, of_gradients


def model_states(units: RankUnits, states: States, optimizer: OptimizerConfig) -> dict[str, float]:
    """Return the bytes of parameters, gradients, optimizer and residuals on one rank."""
    sums, master = states.formats.sums, max(states.formats.width, 4)
    residuals = 0.0
    if states.outer is not None and states.outer.feedback:
        own = sum(n * u.elements * u.apart for u, n in units.counts)
        residuals = 2 * own / states.grid.dp * sums  # of what was taken up, and of what is on its way
    owned, matrices = states.owned(units)
    moments = optimizer.moment_bytes(master, matrices / owned)
    return {
        "parameters": sum(n * states.copy_bytes(u) for u, n in units.counts),
        "gradients": sum(n * u.elements / states.plan(u).shards[1] for u, n in units.counts) * sums,
        "optimizer": owned * (master * (1 + states.anchors) + moments),
        "residuals": residuals,
    }


def checkpoint_bytes(
    model: ModelConfig, dtype: str, optimizer: OptimizerConfig, wire: Wire, outer: OuterFormat | None = None
) -> int:
    """Return the bytes of a checkpoint's tensors, on all ranks together (zero/records.py: save_records).

    With outer steps it has the replica's own weights and the anchor. Generators and descriptions, some KB for each
    rank, are left out.
    """
    elements = parameter_count(model)
    own = saved_width(dtype, optimizer, wire, model_spec(model).layer_matrices / elements)
    if outer is not None:
        own += max(WIDTHS[dtype], 4) * (1 + outer.momentum + outer.feedback)
    return int(elements * own)


def saved_width(dtype: str, optimizer: OptimizerConfig, wire: Wire, matrices: float) -> float:
    """Return the bytes that a checkpoint has for each parameter.

    dtype: the parameters'. matrices: the share of the parameters that are matrices of layers.
    """
    width, sums = WIDTHS[dtype], max(WIDTHS[dtype], 4)
    master = sums if width != sums or wire.delta else 0
    return width + master + optimizer.moment_bytes(sums, matrices)


def gathered(units: RankUnits, states: States, kind: str) -> float:
    """Return the bytes of gathered parameters during the backward of a module of this kind.

    They are the parameters of the module in use, of the next one, and of as many more as the bound allows. On CPUs
    gloo holds a second copy of what it gathers among more than two ranks until the gather ends.
    """
    width, p = states.formats.width, states.shards.p
    modules = units.gathered_modules(p)
    full = sum(n * u.elements for u, n in units.counts if u.apart < p) * width
    if not full:
        return 0.0
    if states.shards.keep_gathered:
        return full
    beside = [other for other in modules if is_layer(other) or is_layer(kind) and other == EMBEDDING]
    following = max((modules[other] for other in beside), default=0) * width
    held = modules[kind] * width + following + states.prefetch_bytes
    if held >= full:  # then all stays from one use to the next, and nothing is on its way
        return full
    copied = states.on_host and any(a.role == "p" and a.size > 2 for a in states.grid.data_axes)
    return held + (following if copied else 0.0)


def pool(units: RankUnits, states: States, micro_batches: int, sure: bool = False) -> float:
    """Return the bytes of the pool of transient buffers: what a step takes of it, or an outer step after it."""
    return max(_step_pool(units, states, micro_batches, sure), _outer_pool(units, states))


def _outer_pool(units: RankUnits, states: States) -> float:
    """Return the bytes of an outer step's chains (zero/outer.py): as many as may be in flight."""
    outer, d = states.outer, states.grid.dp
    if outer is None:
        return 0.0
    order = units.reduced(WAITING)
    sizes: dict[UnitShape, float] = {}
    for unit in set(order):
        part = unit.elements * unit.apart / d * outer.sums  # what a message decodes to
        own = unit.elements / states.plan(unit).shards[2] * outer.sums  # the sums, and the difference
        sizes[unit] = 2 * own + part + outer.message(states.plan(unit))
    return _window(order, WAITING, sizes)


def _step_pool(units: RankUnits, states: States, micro_batches: int, sure: bool) -> float:
    """Return the bytes of the pool of transient buffers (kernels/arena.py).

    Staging holds the unit whose gradients arrive, and earlier ones whose reductions may still be in flight. On CUDA
    the pool has memory per stream: staging on the compute stream, and on each of a lane's two streams the largest
    buffers of one chain. On CPUs there is one pool, and a chain holds its buffers from its first collective to its
    end; all chains of a lane that may have begun count.

    sure: count two chains of a lane if only the ranks' timing bounds how many are in flight.
    """
    order = units.reduced(WAITING)
    chains = {u: states.chain_bytes(u, micro_batches) for u in set(order)}
    staged = {u: u.elements * states.formats.width if states.staged(u) else 0.0 for u in chains}
    if not states.on_host:
        messages = max(states.plan(u).transient_bytes for u in chains) + max(chains.values())
        return (
            _window(order, WAITING, staged, micro_batches)
            + STREAMS * messages
            + max(states.sampled_bytes(units.counts))
        )
    if any(map(states.staged, chains)):
        going = _window(order, WAITING, {u: staged[u] + chains[u] for u in chains}, micro_batches)
    elif sure or states.shards.os < states.grid.dp:
        # Sums go back to replicas over the axes that they came by, so the next chain cannot begin.
        going = _window(order, STREAMS, chains)
    else:  # nothing bounds them
        going = sum(n * chains[u] for u, n in units.counts)
    coming = _coming(units, states)
    of_weights, of_gradients = states.sampled_bytes(units.counts)
    going, coming = going + of_gradients, coming + of_weights
    # Differences are sent once a step, around the first forward: no reduction is under way then.
    return max(going, coming) if states.formats.codecs.delta else going + coming


def _coming(units: RankUnits, states: States) -> float:
    """Return the bytes of the messages of gathers that may be in flight: as many as may run ahead of use."""
    messages = sum(n * states.plan(u).transient_bytes for u, n in units.counts)
    if not messages:
        return 0.0
    ahead = sum(n * states.plan(u).ahead_bytes for u, n in units.counts)
    neighbours = (size for kind, size in units.modules.items() if is_layer(kind))
    two = sorted((*units.modules.values(), *neighbours), reverse=True)[:2]
    now = sum(two) / units.elements * ahead + states.prefetch_bytes
    return messages * min(1.0, now / ahead)


def _window(
    order: Sequence[UnitShape], number: int, sizes: Mapping[UnitShape, float], passes: int = 1
) -> float:
    """Return the largest sum over this many neighbours, of so many passes over the units at most.

    The first unit follows the last.
    """
    number = min(number, passes * len(order))
    around = [sizes[unit] for unit in islice(cycle(order), len(order) + number - 1)]
    return max(sum(around[i : i + number]) for i in range(len(order)))


class RankMemory:
    """What a rank holds beside activations, in bytes, each part counted when it is first asked for."""

    def __init__(
        self, units: RankUnits, states: States, optimizer: OptimizerConfig, micro_batches: int
    ) -> None:
        """micro_batches: of a step's, the first WAITING count."""
        self.units, self.states, self.optimizer, self.micro_batches = units, states, optimizer, micro_batches

    @cached_property
    def _items(self) -> Mapping[str, float]:
        return model_states(self.units, self.states, self.optimizer)

    @cached_property
    def _gathered(self) -> Mapping[str, float]:
        """The gathered parameters, by the kind of module that a backward is at."""
        return {kind: gathered(self.units, self.states, kind) for kind in self.units.modules}

    @cached_property
    def _pools(self) -> tuple[float, float]:
        """The pool's bytes that are sure, and those if the ranks' timing lets more chains be in flight."""
        sure, most = (pool(self.units, self.states, self.micro_batches, sure) for sure in (True, False))
        return sure, most

    def at_peak(self, moments: Mapping[str, Mapping[str, float]], updates: float | None) -> Memory:
        """Return the rank's memory at the worst moment of a backward, with a margin.

        The margin is what the allocator leaves unused; on CPUs, what many chains in flight at once take.

        moments: the bytes of activations at each (plan/activations.py). Model state and the pool stay meanwhile.
        updates: bytes of matrices on their way in an update. Nothing else is in flight then, so they use the pool.
        None: the pool, whose bytes take the longest to count, is left out.
        """
        sure, most_in_flight = self._pools if updates is not None else (0.0, 0.0)
        always = {**self._items, "staging": max(sure, updates or 0.0)}
        each = [{**always, **items, "gathered": self._gathered[kind]} for kind, items in moments.items()]
        most = max(each, key=lambda items: sum(items.values()))
        if self.states.on_host:
            return Memory(**most, margin=max(most_in_flight - always["staging"], 0.0))
        return Memory(**most, margin=ALLOCATOR_MARGIN * sum(most.values()))
