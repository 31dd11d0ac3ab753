"""A unit: parameters that are gathered together, in one flat buffer with its states.

Glossary (n: elements of the unit; "compact" is explained in layout.py)
--------
full      [n], parameter dtype. The storage of the Parameters, which are views of it for life. With P > 1 a release
          resizes the storage to 0, and a gather allocates it again. With P = 1 it stays, and the Parameters are
          hidden while it is behind the master.
message   A codec's encoding of a slice: m elements of its wire dtype. Messages of nested slices concatenate in layout
          order. ``wire`` is the layout of the messages that gathers send, ``refresh_wire`` of those that refreshes
          send; each has one region. Refreshes send one message per OS slice. Gathers send the messages received or,
          with the delta refresh, R, whose message is a P slice.
direct    Whether the codec's messages are the parameters themselves (identity in their dtype, one region). Then
          gathers write in place and decode nothing.
copy      This rank's P copy, as gathers send it: OS/P messages as received, or R. If P = 1 it is ``full``.
R         Compact [n/P], parameter dtype, for the delta refresh (P < OS). Every holder of the P copy has the same R,
          bit for bit. A refresh encodes dtype(master) - R and adds the decoded values, at the owner too. (With the
          raw difference, residuals below a rounding step of large weights would inflate the scales.) The next
          difference contains the rounding error of this one. R advances once per master version. Checkpoints save
          it as the weights.
master    Compact [n/OS], at least fp32. The optimizer updates it. It is a part of ``copy`` if both have one dtype and
          the copy is never dropped (then the refresh's encoding is free).
grad      Compact [n/G], at least fp32. The sum of this step's gradients. After the step's reduction its OS part holds
          the sum over all data-parallel ranks.
staging   [n], parameter dtype. One micro-batch's raw gradients on their way to ``grad`` if G > 1. The first ``stage``
          takes it from the arena; waiting for its reduction frees it.
arrived   Gradients of the micro-batch that wait to be staged together.
residual  Compact, at least fp32, of level ``axes.crossing``, for error feedback, in units of the divided gradient.
          Other ranks' rows hold the rounding error of this rank's messages across nodes.
lost      As ``residual``, but only with replicas. This step's errors until the step is known to be good. Without
          replicas other ranks' rows of ``grad`` hold them.
carry     Compact [n/OS]. Residuals of another layout, summed over senders, from a load. Replicas hold the same. It is
          added to the next step's sum.
versions  master_version counts optimizer updates; copy_version is the one that ``copy`` holds.
prepared  The master version of which an update has left this rank's part of the next refresh: dtype(master) in its
          place in ``copy``, or, with the delta refresh, dtype(master) - R of the coded region in the OS part of
          ``grad``, until gradients come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from math import prod

import torch
from torch import nn

from megazero.comm.codec import Codec, Identity, at_least_fp32
from megazero.comm.lane import Ticket
from megazero.comm.wire import Codecs
from megazero.kernels.adamw import NOTHING, Refresh
from megazero.kernels.add_to import add_each
from megazero.kernels.arena import Arena, Frame, Take
from megazero.kernels.fingerprint import fingerprint
from megazero.zero.axes import DataAxes
from megazero.zero.layout import Slice, UnitLayout
from megazero.zero.parameters import Binding, Read, Released, hide, refuse_read, released_class

# Gradients of a unit wait for each other and are staged in one operation: one at a time, 9 of a small layer took 9
# launches. Large ones do not wait, so that a layer's gradients and its staging are not there at once.
STAGED_BYTES = 32 << 20


class Unit:
    """Holds the buffers, versions and counters of one unit. gather.py and reduce.py move them between ranks."""

    def __init__(
        self,
        name: str,
        params: Mapping[str, nn.Parameter],
        values: Mapping[str, torch.Tensor],
        layout: UnitLayout,
        axes: DataAxes,
        dtype: torch.dtype,
        device: torch.device,
        lifetime: str,
        codecs: Codecs[Codec],
    ) -> None:
        self.name, self.params, self.layout, self.axes = name, dict(params), layout, axes
        self.dtype, self.device, self.lifetime = dtype, device, lifetime
        self.sum_dtype = at_least_fp32(dtype)
        self.codecs = codecs
        self.delta = codecs.delta and axes.p < axes.os
        self.slots = {slot.name: slot for slot in layout.slots}
        self.trainable = [n for n, p in self.params.items() if p.requires_grad]
        self.part = 0  # of the module: a virtual pipeline stage
        self.tied = False  # the pipeline's other end holds the same parameter, in a unit of the same name
        self.full = torch.empty(layout.numel, dtype=dtype, device=device)
        self.full_slice = Slice(layout, self.full, 0)
        self.full_present = self.copy_present = True
        self._plan_wire()
        self.copy = self._make_copy()
        self.master = self._make_master()
        self.master_slice = Slice(layout, self.master, axes.os)
        self.grad: torch.Tensor | None = None
        self.residual: torch.Tensor | None = None
        self.lost: torch.Tensor | None = None
        self.carry: torch.Tensor | None = None
        self.fallen: set[str] = set()  # kinds, of rounding.KINDS, whose error was above its bound
        self.master_version = 1
        self.copy_version = self.prepared = 0
        self.arena = Arena()  # until an engine gives it the one of all its units
        self.staging: Slice | None = None
        self.staged: Frame | None = None  # has the staging
        self.ticket: Ticket | None = None  # gather in flight
        self.released: type[Released] = released_class(self)  # the Parameters' class while they are hidden
        self.shown: list[type] = []  # their own classes meanwhile; empty: they can be read
        self.read: Read = refuse_read  # what an operation on hidden Parameters does
        self.active = 0  # modules in forward that use it now
        self.in_backward = False
        self.pinned = 0  # open gathered() blocks that hold it
        self.writers = 0  # those of them that are to write
        self.seen: list[int] = []  # fingerprints of the parameters, in the layout's order, while it is pinned
        self.pending: set[str] = set()  # trainable parameters without a gradient in this micro-batch
        self.arrived: dict[str, torch.Tensor] = {}  # gradients that wait to be staged, arrived_bytes in all
        self.arrived_bytes = 0
        self.touched: set[str] = set()  # parameters whose part of grad was written in this step
        self.backwards = 0  # completed backwards in this step
        self.bindings = self._adopt(values)

    # -- storage ---------------------------------------------------------------------------------

    def _plan_wire(self) -> None:
        """Choose the codecs and layouts of what refreshes and gathers send."""
        identity = Identity(self.dtype)
        self.refresh_codec = self.codecs.weights or identity
        self.codec = identity if self.delta else self.refresh_codec  # of gathers
        self.direct = isinstance(self.codec, Identity) and self.codec.wire_dtype == self.dtype
        self.direct = self.direct and len(self.layout.regions) == 1
        self.refresh_wire = self._wire_layout(self.refresh_codec, self.axes.os)
        self.wire = self._wire_layout(self.codec, self.axes.p) if self.delta else self.refresh_wire
        self.refresh_hops = self.refresh_wire.gather_hops(self.axes.os, self.axes.p, self.axes.p)
        self.gather_hops = self.wire.gather_hops(self.axes.p, 0, 0)
        # The bytes that a gather ahead of use adds to the memory held: full parameters; if P = 1, transient messages.
        self.gather_bytes = 0
        if self.axes.p:
            self.gather_bytes = self.full.nbytes
        elif self.delta or not self.direct:
            self.gather_bytes = self.refresh_wire.level_numel(0) * self.refresh_codec.wire_dtype.itemsize

    def _make_copy(self) -> torch.Tensor:
        """Return the P copy, which holds what gathers send."""
        if not self.axes.p:
            return self.full
        numel = self.wire.level_numel(self.axes.p)
        return torch.empty(numel, dtype=self.codec.wire_dtype, device=self.device)

    def _wire_layout(self, codec: Codec, level: int) -> UnitLayout:
        """Return the layout of the messages of all slices of a level, cut by the same sub-axes as the parameters."""
        sizes, indices = self.layout.sizes[:level], self.layout.indices[:level]
        message = codec.message_numel(*(p.numel for p in self.layout.pieces(level)))
        return UnitLayout((), ((0, message * prod(sizes)),), sizes, indices)

    def _make_master(self) -> torch.Tensor:
        """Return a part of the P copy if the two have one dtype and the copy is never dropped, else a new buffer."""
        axes = self.axes
        kept = axes.p == axes.os or self.lifetime == "resident"
        if self.direct and self.dtype == self.sum_dtype and kept and not self.delta:
            (own,) = self.wire.within(axes.os, axes.p)
            return self.copy[own.span]
        return torch.zeros(self.layout.level_numel(axes.os), dtype=self.sum_dtype, device=self.device)

    def send_exactly(self, kind: str) -> None:
        """Fall back to exact messages of 'weights' or 'gradients' for good, from the next step on.

        This is called between steps, when nothing is in flight or gathered.
        """
        self.fallen.add(kind)
        if kind == "gradients":
            self.codecs = replace(self.codecs, gradients_intra=None, gradients_inter=None)
            return
        if self.codecs.weights is None:  # a checkpoint's fallback, in a run that is exact anyway
            return
        self.codecs = replace(self.codecs, weights=None)
        self._plan_wire()
        # Rounded, or in another format: stale even if the step that found out was skipped.
        self.copy_version = 0
        hide(self)
        if self.delta:  # R goes on
            return
        self.copy = self.full  # frees the old one before the new one is made
        self.copy = self._make_copy()
        if self.axes.p and not self.copy_present:
            self.copy.untyped_storage().resize_(0)

    def _adopt(self, values: Mapping[str, torch.Tensor]) -> list[Binding]:
        """Take the parameters' values [shape of each] into the master, and make the Parameters views of full."""
        self.master.zero_()
        for slot, low, high, at in self.layout.ranges(self.axes.os):
            self.master[at : at + high - low].copy_(values[slot.name].reshape(-1)[low:high])
        if self.delta:
            self.copy.zero_()
            for slot, low, high, at in self.layout.ranges(self.axes.p):
                self.copy[at : at + high - low].copy_(values[slot.name].reshape(-1)[low:high])
            self.copy_version = self.master_version
        whole = {slot.name: self.full[slot.start : slot.start + slot.numel] for slot in self.layout.slots}
        bindings = [
            Binding(s.name, self.params[s.name], whole[s.name].view(s.shape)) for s in self.layout.slots
        ]
        if self.axes.p:
            self.drop_full()
        elif self.stale:
            hide(self)
        return bindings

    def outdate(self) -> None:
        """Note that the master weights have changed, and hide the parameters until a refresh has landed.

        With P = 1 they would read as the old values, or as some slices of the new ones. In a ``gathered`` block they
        stay what they are; its end hides them (``Gatherer.drop_all``).
        """
        self.master_version += 1
        if not self.pinned:
            hide(self)

    def check_unwritten(self, when: str, cure: str) -> None:
        """Raise RuntimeError if the user wrote into a parameter since the engine last took its values."""
        for binding in self.bindings:
            if binding.written:
                raise RuntimeError(
                    f"parameter {binding.name!r} of unit {self.name!r} was written in place {when}: the engine keeps "
                    f"what its optimizer holds, so the write is lost on some layouts; {cure}"
                )

    def note_values(self) -> None:
        """Note fingerprints of the gathered parameters. Values that differ from them later were written."""
        values = [self.full[slot.start : slot.start + slot.numel] for slot in self.layout.slots]
        self.seen = torch.stack([fingerprint(v) for v in values]).tolist()

    def take_written(self) -> None:
        """Copy writes to the gathered parameters since ``note_values``, or the last call, into the master weights.

        With P = 1 the parameters are the P copy, and with fp32 the master may be a part of it: there a write takes
        effect as it is made. Elsewhere it would go with the gathered buffer. To undo it everywhere, a block would
        have to copy the model wherever the parameters are the only copy. So writes are kept everywhere, as plain
        torch keeps them. Version counters do not see writes through ``.data`` or numpy; fingerprints do.

        A write in a block without ``write`` stays marked: the next step is refused.
        """
        before = self.seen
        self.note_values()
        changed = {s.name for s, a, b in zip(self.layout.slots, before, self.seen, strict=True) if a != b}
        if not (changed or self.writers):
            return
        for slot, low, high, at in self.layout.ranges(self.axes.os):
            if slot.name in changed:
                values = self.full[slot.start + low : slot.start + high]
                own = self.master[at : at + high - low]
                # What was not written keeps its bits below the parameters' precision.
                own.copy_(torch.where(values == own.to(self.dtype), own, values.to(own.dtype)))
        if self.delta and self.axes.p:  # with P = 1, R is full itself
            for slot, low, high, at in self.layout.ranges(self.axes.p):
                if slot.name in changed:
                    self.copy[at : at + high - low].copy_(self.full[slot.start + low : slot.start + high])
        self.outdate()
        for binding in self.bindings:
            if self.writers:
                binding.accept()
            elif binding.name in changed:
                binding.reject()

    def materialise_full(self) -> None:
        if not self.full_present:
            self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
            self.full_present = True

    def drop_full(self) -> None:
        """Free the gathered parameters (P > 1, or at the end of a step for lifetime 'step')."""
        hide(self)
        if self.full_present:
            self.full.untyped_storage().resize_(0)
            self.full_present = False

    def drop_copy(self) -> None:
        """At the end of a step, for lifetime 'step', free the P copy, and the full buffer where it is the copy."""
        if self.axes.p:
            self.copy.untyped_storage().resize_(0)
        else:
            self.drop_full()
        self.copy_present, self.copy_version = False, 0

    def open_refresh(self, take: Take) -> torch.Tensor:
        """Return the buffer that a refresh fills with messages: the P copy if that keeps them, else a transient one
        from ``take``.
        """
        if not self.copy_present and self.axes.p:
            self.copy.untyped_storage().resize_(self.copy.numel() * self.copy.element_size())
        elif not self.copy_present:
            self.materialise_full()
        self.copy_present = True
        if not self.delta and (self.axes.p or self.direct):
            return self.copy
        return take(self.refresh_wire.level_numel(self.axes.p), self.refresh_codec.wire_dtype)

    def left_by_updates(self) -> Refresh:
        """Return what an update in one pass leaves for the refresh, over the first region of the OS slice.

        It is nothing where the master is the copy, where messages are quantised anew, and where the copy is dropped
        after the step.
        """
        axes = self.axes
        if self.delta and self.codecs.weights is not None:
            return Refresh(held=self.copy_slice.rows(axes.os, 1)[0].view(-1))
        if self.delta or not self.direct or self.dtype == self.sum_dtype or self.lifetime == "step":
            return NOTHING
        (own,) = self.wire.within(axes.os, axes.p)
        return Refresh(copy=self.copy[own.span])

    def open_residual(self) -> torch.Tensor:
        """Return the residual, which starts as zeros."""
        assert self.axes.crossing is not None
        if self.residual is None:
            numel = self.layout.level_numel(self.axes.crossing)
            self.residual = torch.zeros(numel, dtype=self.sum_dtype, device=self.device)
        return self.residual

    @property
    def stale(self) -> bool:
        """Whether the P copy is behind the master weights."""
        return self.copy_version != self.master_version

    @property
    def ready(self) -> bool:
        """Whether full parameters of the current version are present. In a ``gathered`` block they are current."""
        return self.full_present and (self.pinned > 0 or not self.stale) and self.ticket is None

    # -- gradients -------------------------------------------------------------------------------

    def take_gradient(self, name: str, param: nn.Parameter) -> None:
        """Take a parameter's fresh gradient [the parameter's shape and dtype].

        Gradients wait for the unit's others, then move together; ``STAGED_BYTES`` bounds what waits.
        """
        assert param.grad is not None
        if param.grad.layout != torch.strided:
            raise RuntimeError(
                f"the gradient of parameter {name!r} of unit {self.name!r} is {param.grad.layout}, and what is "
                "reduced and sharded is dense: leave sparse=True out, or give the parameter a hook first: "
                "register_hook(lambda gradient: gradient.to_dense())"
            )
        self.arrived[name] = param.grad
        self.arrived_bytes += param.grad.nbytes
        param.grad = None
        self.pending.discard(name)
        if not self.pending or self.arrived_bytes > STAGED_BYTES:
            self.stage()

    def stage(self) -> None:
        """Move the gradients that have arrived into staging (G > 1), or add them to ``grad`` (G = 1)."""
        self._open_grad()
        if self.axes.g:
            if self.staging is None:
                self.staging = self._new_staging()
                self.staging.clear_padding()
            targets = self.staging.parts
        else:
            assert self.grad is not None
            targets = self.grad_slice.parts
        added = [name for name in self.arrived if name in self.touched]
        copied = [name for name in self.arrived if name not in self.touched]
        if copied:
            torch._foreach_copy_([targets[n] for n in copied], [self.arrived[n] for n in copied])
        if added:
            add_each([targets[n] for n in added], [self.arrived[n] for n in added])
        if not self.axes.g:
            self.touched.update(copied)
        self._forget_arrived()

    def _forget_arrived(self) -> None:
        self.arrived.clear()
        self.arrived_bytes = 0

    def _open_grad(self) -> None:
        """Discard the differences that an update left in ``grad``: gradients come next.

        A refresh that ran ahead of a use that did not come may still be reading them, on a stream of its own.
        """
        if self.delta and self.prepared:
            self.prepared = 0
            if self.ticket is not None and self.ticket.event is not None:
                torch.cuda.current_stream(self.device).wait_event(self.ticket.event)

    def _new_staging(self) -> Slice:
        self.staged = self.arena.frame(self.device)
        make = partial(Slice, self.layout, level=0)
        return self.staged.bind(self.layout.numel, self.dtype, self.name, make)

    def _fill_missing(self) -> None:
        """Let parameters without a gradient add zeros: to staging in every micro-batch, to grad in the last."""
        if self.axes.g:
            if self.staging is None:
                self.staging = self._new_staging()
                self.staging.buffer.zero_()
                return
            missing = set(self.slots) - (set(self.trainable) - self.pending)
            buffer = self.staging.buffer
        else:
            assert self.grad is not None
            missing, buffer = set(self.slots) - self.touched, self.grad
            self.grad_slice.clear_padding()  # a block that was not finite came back so with its padding
        for name in missing:
            slot = self.slots[name]
            buffer[slot.start : slot.start + slot.numel].zero_()

    def close_micro_batch(self, last: bool) -> tuple[Slice, Frame] | None:
        """Return the staging of a micro-batch whose gradients have all arrived, and the arena's frame it lies in.

        Where G = 1 there is none.

        last: this is the step's last micro-batch. Afterwards the unit waits for the next micro-batch's gradients.
        """
        if self.arrived:
            self.stage()
        if self.axes.g or last:
            self._open_grad()
            self._fill_missing()
        handed = None
        if self.staging is not None and self.staged is not None:
            handed = self.staging, self.staged
        self.staging = self.staged = None
        self.pending = set(self.trainable)
        self.backwards += 1
        return handed

    @cached_property
    def copy_slice(self) -> Slice:
        """The P copy where it has elements, not messages: R, or with P = 1 ``full``. It is then never replaced."""
        assert self.delta or not self.axes.p
        return Slice(self.layout, self.copy, self.axes.p)

    @cached_property
    def grad_slice(self) -> Slice:
        assert self.grad is not None
        return Slice(self.layout, self.grad, self.axes.g)

    def begin_step(self) -> None:
        """Forget the last step's gradients, and count backwards from 0."""
        if self.grad is None and self.trainable:
            self.grad = torch.zeros(
                self.layout.level_numel(self.axes.g), dtype=self.sum_dtype, device=self.device
            )
        self.backwards = 0
        self._forget_arrived()
        self.touched.clear()
        self.pending = set(self.trainable)
        if self.staged is not None:  # of a step that was given up
            self.staged.close()
        self.staging = self.staged = None
