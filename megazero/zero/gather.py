"""Weights: when units are gathered and dropped, and what a gather sends, hop by hop.

``Gatherer`` decides when: at use, ahead of use by the recorded order, never behind. ``gather_chain`` is what moves
for one unit, a chain for comm.lane: it yields each collective's Work and goes on when that has finished. It takes the
sub-axes outermost first, one collective and one message per sub-axis: first, once per update, the refresh of the P
copy over the axes between P and OS (qwZ, ZeRO++ section 4.1), then the gather over P.

What a gather waits for on CUDA. Its chain runs on a stream of the lane. It waits for the compute enqueued before the
lane's last ``follow``, not for compute enqueued since, so a gather may overlap compute that was enqueued before it.
``follow`` is called at every drop, and when gathers begin outside of a step (``begin_step``, evaluation,
``gathered``, ``refresh``, a forward between steps). That is enough:

- Memory. Transient buffers (full, copy) are allocated inside chains, so the allocator reuses blocks of one stream.
  Such a block was freed in a chain of that stream (then stream order suffices) or by a drop. Before a drop the
  compute stream has waited for every chain that wrote or read the buffer, and every reader has been enqueued; work
  after the drop comes after those. Messages are taken and closed inside one chain (kernels/arena.py).
- Data. Master weights, R and measured errors change on the compute stream, between the last drop of a step and the
  next gathers, with nothing in flight (``drop_all``). Chains of one unit follow each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from math import prod

import torch
from torch import Tensor

from megazero.comm.codec import Blockwise
from megazero.comm.hops import start_gather
from megazero.comm.lane import Chain, Lane
from megazero.comm.wire import mixes
from megazero.kernels.arena import Take, part_of, view_of
from megazero.zero.context import Context
from megazero.zero.plan import coming, window
from megazero.zero.program import EVALUATION, Program, Segment
from megazero.zero.rounding import WEIGHTS
from megazero.zero.slices import Slice
from megazero.zero.unit import Unit


class Gatherer:
    """Keeps the units in use gathered, and starts the gathers of the next ones."""

    def __init__(self, units: Sequence[Unit], modules: int, context: Context, lane: Lane) -> None:
        """modules: the number of hooked modules that need units; modules joined into one unit count separately."""
        self.units, self.context, self.lane = units, context, lane
        self.window, self.sizes = window(len(units), modules), [unit.plan.ahead_bytes for unit in units]
        self.program = Program()
        self.index = {u: i for i, u in enumerate(units)}
        self.whole = not any(u.axes.p for u in units)  # nothing is released
        # Units by their places: gathered, kept or on the way before use; to keep for an upcoming module, those in use
        # among them.
        self.ahead, self.coming = set[int](), set[int]()

    def use(self, units: Sequence[Unit]) -> None:
        """Note that a module needs these units now, start the next gathers, and return when these are gathered."""
        needs = tuple(self.index[u] for u in units)
        self.program.use(needs)
        self.ahead.difference_update(needs)
        for unit in units:
            if unit.weights.missing:
                self._launch(unit)
        self.prefetch()
        for unit in units:
            self.ensure(unit)

    def ensure(self, unit: Unit) -> None:
        """Gather the unit without a note in the order of use (for recompute, or reading from outside)."""
        weights = unit.weights
        if weights.missing:
            self._launch(unit)
        if weights.ticket is not None:
            self.lane.wait(weights.ticket)
            weights.landed()
        assert weights.ready, f"unit {unit.name}: copy {weights.version}, master {weights.master.version}"
        weights.show()

    def prefetch(self) -> None:
        """Start gathers of what comes next: all that the next module needs, and more within the policy's bytes.

        Units in use that are needed again within the bytes are noted and stay: after a drop they would be gathered
        again at once.
        """
        if self.whole and not any(u.weights.missing for u in self.units):
            return
        self.coming.clear()
        later, budget = islice(self.program.upcoming(), self.window), self.context.policy.prefetch_bytes
        for place in coming(later, self._here, self.ahead, self._stays, self.sizes, budget):
            self.coming.add(place)
            if place not in self.ahead and self.units[place].weights.missing:
                self._launch(self.units[place])
                self.ahead.add(place)

    def release(self, unit: Unit) -> None:
        """Drop the gathered parameters unless they are used now or soon."""
        weights = unit.weights
        if not unit.axes.p or weights.in_use or weights.ticket is not None:
            return
        if self._kept(unit):
            weights.hide()
        elif self.index[unit] in self.coming:
            self.ahead.add(self.index[unit])
            weights.hide()
        elif weights.full_present:
            self.ahead.discard(self.index[unit])
            self.lane.follow()
            weights.drop_full()

    def drop_all(self) -> None:
        """Finish the chains in flight and drop every gathered buffer (not the P copies)."""
        self.lane.drain()
        self.lane.follow()
        self.ahead.clear()
        self.coming.clear()
        for weights in (unit.weights for unit in self.units):
            weights.landed()
            if weights.form.axes.p and not weights.pinned:
                weights.drop_full()
            elif weights.stale and not weights.pinned:  # outdated in a ``gathered`` block
                weights.hide()

    def _here(self, place: int) -> bool:
        """Whether the unit is in use now, or stays from its last use: neither missing nor here for a later module."""
        return place not in self.ahead and not self.units[place].weights.missing

    def _stays(self, place: int) -> bool:
        """Whether the unit stays gathered between its uses whatever comes next."""
        return not self.units[place].axes.p or self._kept(self.units[place])

    def _kept(self, unit: Unit) -> bool:
        evaluating = self.program.current == Segment(EVALUATION)
        return self.context.policy.keep_gathered and not evaluating and self.program.returns_to(unit.part)

    def _launch(self, unit: Unit) -> None:
        self.context.issued.add("g", unit)
        moves = gather_chain(unit, self.context)
        hops = (*unit.plan.refresh, *unit.plan.gather) if unit.weights.stale else unit.plan.gather
        if hops:
            unit.weights.launched(self.lane.submit(unit.name, unit.axes.hop_specs(hops), moves))
        else:
            deque(moves, maxlen=0)


def gather_chain(unit: Unit, context: Context) -> Chain:
    """Make the full parameters present: refresh the P copy if it is stale, then all-gather it over the P axes.

    Every rank, the owner too, decodes the message into ``full`` ([n], parameter dtype), so all forwards read the same
    bits.
    """
    weights = unit.weights
    if weights.stale:
        yield from _refresh(unit, context)
    weights.materialise_full()
    if not weights.gather_hops:
        return
    with context.frame() as frame:
        every = weights.full
        if not weights.direct:
            every = frame.take(weights.wire.level_numel(0), weights.codec.wire_dtype)
        for hop in weights.gather_hops:
            own = weights.copy if hop.level == unit.axes.p else part_of(every, hop.own)
            into = part_of(every, hop.into)
            yield start_gather(unit.axes.axis(hop.level), into, own, "gather", context.traffic)
        if not weights.direct:
            rows = prod(weights.wire.sizes)
            messages = view_of(every, Tensor.view, rows, -1)
            weights.codec.decode(messages, *weights.full_slice.rows(0, rows))
            if mixes(weights.codec):
                weights.full_slice.clear_padding()


def _refresh(unit: Unit, context: Context) -> Chain:
    """Bring the P copy up to the current master.

    Each OS slice (or its difference to R) is encoded once per update, and the messages are all-gathered over
    the axes between P and OS.
    """
    weights = unit.weights
    with context.frame() as frame:
        messages = weights.open_refresh(frame.take)
        _encode(unit, messages)
        for hop in weights.refresh_hops:
            own, into = part_of(messages, hop.own), part_of(messages, hop.into)
            yield start_gather(unit.axes.axis(hop.level), into, own, "refresh", context.traffic)
        if unit.delta or not (unit.axes.p or weights.direct):  # else they were received in the P copy
            rows = prod(weights.refresh_wire.sizes[unit.axes.p :])
            regions = weights.copy_slice.rows(unit.axes.p, rows)
            received = view_of(messages, Tensor.view, rows, -1)
            if unit.delta and isinstance(weights.refresh_codec, Blockwise):
                weights.refresh_codec.decode_add(received, *regions)
            else:
                weights.refresh_codec.decode(received, *regions)
            # R, too: the next difference is taken to it, and a checkpoint holds it.
            if mixes(weights.refresh_codec):
                weights.copy_slice.clear_padding()
    weights.refreshed()
    if context.rounding.measures(unit, weights.refresh_codec):
        with context.frame() as frame:
            sent = used_weights(unit, frame.take)
            context.rounding.note(unit, weights.refresh_codec, WEIGHTS, unit.master.value, sent, frame)


def _encode(unit: Unit, messages: torch.Tensor) -> None:
    """Write the message of this rank's OS slice into its place in ``messages``, those of the P slice."""
    axes, weights = unit.axes, unit.weights
    (own,) = weights.refresh_wire.within(axes.os, axes.p)
    message = view_of(part_of(messages, own.span), Tensor.view, 1, -1)
    source, *exact = unit.master.slice.rows(axes.os, 1)
    if unit.delta and isinstance(weights.refresh_codec, Blockwise):
        held = weights.copy_slice.rows(axes.os, 1)[0]
        weights.refresh_codec.encode_difference(source, held, *exact, out=message)
    else:  # without a format it is a cast, or nothing where master is the copy
        weights.refresh_codec.encode(source, *exact, out=message)


def used_weights(unit: Unit, take: Take | None = None) -> torch.Tensor:
    """Return this rank's OS slice as forwards see it, once the P copy is current: compact [n/OS],
    master's dtype. It lies in a buffer from ``take``; without one it is a new tensor.
    """
    take = take or (lambda numel, dtype: torch.empty(numel, dtype=dtype, device=unit.device))
    axes, weights, numel = unit.axes, unit.weights, unit.layout.level_numel(unit.axes.os)
    out = take(numel, unit.sum_dtype)
    if unit.delta or not axes.p:
        Slice(unit.layout, out, axes.os).copy_(weights.copy_slice, axes.os)
        return out
    (own,) = weights.wire.within(axes.os, axes.p)
    message, read = weights.copy[own.span].view(1, -1), take(numel, unit.dtype)
    weights.codec.decode(message, *Slice(unit.layout, read, axes.os).rows(axes.os, 1))
    return out.copy_(read)
