"""A unit's weights: full parameters, the P copy, their versions and uses. gather.py moves them between ranks.

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
master    The master's value is a part of ``copy`` if both have one dtype and the copy is never dropped (then the
          refresh's encoding is free).
version   The version of the master that ``copy`` holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import prod

import torch

from megazero.comm.codec import Codec, Identity
from megazero.comm.lane import Ticket
from megazero.kernels.arena import Take
from megazero.kernels.fingerprint import fingerprint
from megazero.zero.form import Form
from megazero.zero.layout import UnitLayout
from megazero.zero.masters import Master
from megazero.zero.parameters import Binding, Read, Released, refuse_read, released_class
from megazero.zero.slices import Slice


class Weights:
    """Holds the weights of one unit, and counts their uses.

    ticket: of the gather in flight. active: how many modules in forward use them now. in_backward: a backward does.
    pinned: how many open ``gathered`` blocks hold them. writers: how many of these are to write.
    """

    def __init__(self, form: Form, values: Mapping[str, torch.Tensor]) -> None:
        """values: of the parameters, [shape of each]."""
        self.form = form
        self.full = torch.empty(form.layout.numel, dtype=form.dtype, device=form.device)
        self.full_slice = Slice(form.layout, self.full, 0)
        self.full_present = self.copy_present = True
        self._plan_wire()
        self.copy = self._make_copy()
        self.master = Master(form, self._room_for_master(), values)
        self.version = 0
        self.ticket: Ticket | None = None
        self.released: type[Released] = released_class(self)  # the Parameters' class while they are hidden
        self.shown: list[type] = []  # their own classes meanwhile; empty: they can be read
        self.read: Read = refuse_read  # what an operation on hidden Parameters does
        self.active, self.in_backward = 0, False
        self.pinned = self.writers = 0
        # Fingerprints of the parameters, in the layout's order, while blocks may write.
        self.seen: list[int] = []
        self.bindings = self._adopt(values)

    # -- storage ---------------------------------------------------------------------------------

    def _plan_wire(self) -> None:
        """Choose the codecs and layouts of what refreshes and gathers send."""
        form, axes, plan = self.form, self.form.axes, self.form.plan
        identity, self.direct = Identity(form.dtype), plan.direct
        self.refresh_codec = form.codecs.weights or identity
        self.codec = identity if form.delta else self.refresh_codec  # of gathers
        self.refresh_wire = self._wire_layout(self.refresh_codec, axes.os)
        self.wire = self._wire_layout(self.codec, axes.p) if form.delta else self.refresh_wire
        self.refresh_hops = self.refresh_wire.gather_hops((hop.level for hop in plan.refresh), axes.p)
        self.gather_hops = self.wire.gather_hops((hop.level for hop in plan.gather), 0)

    def _make_copy(self) -> torch.Tensor:
        """Return the P copy, which holds what gathers send."""
        if not self.form.axes.p:
            return self.full
        numel = self.wire.level_numel(self.form.axes.p)
        return torch.empty(numel, dtype=self.codec.wire_dtype, device=self.form.device)

    def _wire_layout(self, codec: Codec, level: int) -> UnitLayout:
        """Return the layout of the messages of all slices of a level, cut by the same sub-axes as the parameters."""
        layout = self.form.layout
        sizes, indices = layout.sizes[:level], layout.indices[:level]
        message = codec.message_numel(*(p.numel for p in layout.pieces(level)))
        return UnitLayout((), ((0, message * prod(sizes)),), sizes, indices)

    def _room_for_master(self) -> torch.Tensor | None:
        """Return a part of the P copy if the two have one dtype and the copy is never dropped, else None."""
        form, axes = self.form, self.form.axes
        if not form.plan.master_in_copy(kept=axes.p == axes.os or form.lifetime == "resident"):
            return None
        (own,) = self.wire.within(axes.os, axes.p)
        return self.copy[own.span]

    def _adopt(self, values: Mapping[str, torch.Tensor]) -> list[Binding]:
        """Take the parameters' values into R, and make the Parameters views of full."""
        form, layout = self.form, self.form.layout
        if form.delta:
            self.copy.zero_()
            for slot, low, high, at in layout.ranges(form.axes.p):
                self.copy[at : at + high - low].copy_(values[slot.name].reshape(-1)[low:high])
            self.version = self.master.version
        whole = {slot.name: self.full[slot.start : slot.start + slot.numel] for slot in layout.slots}
        bindings = [Binding(s.name, form.params[s.name], whole[s.name].view(s.shape)) for s in layout.slots]
        if form.axes.p:
            self.drop_full()
        elif self.stale:
            self.hide()
        return bindings

    def materialise_full(self) -> None:
        if not self.full_present:
            self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
            self.full_present = True

    def drop_full(self) -> None:
        """Free the gathered parameters (P > 1, or at the end of a step for lifetime 'step')."""
        self.hide()
        if self.full_present:
            self.full.untyped_storage().resize_(0)
            self.full_present = False

    def drop_copy(self) -> None:
        """At the end of a step, for lifetime 'step', free the P copy, and the full buffer where it is the copy."""
        if self.form.axes.p:
            self.copy.untyped_storage().resize_(0)
        else:
            self.drop_full()
        self.copy_present, self.version = False, 0

    @cached_property
    def copy_slice(self) -> Slice:
        """The P copy where it has elements, not messages: R, or with P = 1 ``full``. It is then never replaced."""
        assert self.form.delta or not self.form.axes.p
        return Slice(self.form.layout, self.copy, self.form.axes.p)

    # -- refreshes and gathers ---------------------------------------------------------------------

    @property
    def stale(self) -> bool:
        """Whether the P copy is behind the master weights."""
        return self.version != self.master.version

    @property
    def ready(self) -> bool:
        """Whether full parameters of the current version are present. In a ``gathered`` block they are current."""
        return self.full_present and (self.pinned > 0 or not self.stale) and self.ticket is None

    @property
    def missing(self) -> bool:
        """Whether full parameters are neither present nor on their way."""
        return self.ticket is None and not self.ready

    def launched(self, ticket: Ticket) -> None:
        """Note a gather in flight."""
        self.ticket = ticket

    def landed(self) -> None:
        """Note that no gather is in flight."""
        self.ticket = None

    def open_refresh(self, take: Take) -> torch.Tensor:
        """Return the buffer that a refresh fills with messages: the P copy if that keeps them, else a transient one
        from ``take``.
        """
        p = self.form.axes.p
        if not self.copy_present and p:
            self.copy.untyped_storage().resize_(self.copy.numel() * self.copy.element_size())
        elif not self.copy_present:
            self.materialise_full()
        self.copy_present = True
        if not self.form.delta and (p or self.direct):
            return self.copy
        return take(self.refresh_wire.level_numel(p), self.refresh_codec.wire_dtype)

    def refreshed(self) -> None:
        """Note that the P copy holds the master's version: a refresh has ended, or R was loaded with the master."""
        self.version = self.master.version

    def outdate(self) -> None:
        """Note that the master weights have changed, and hide the parameters until a refresh has landed.

        With P = 1 they would read as the old values, or as some slices of the new ones. In a ``gathered`` block they
        stay what they are; its end hides them (``Gatherer.drop_all``).
        """
        self.master.changed()
        if not self.pinned:
            self.hide()

    # -- uses --------------------------------------------------------------------------------------

    def hide(self) -> None:
        """Hide the Parameters: from here on they have no values."""
        if not self.shown:
            self.shown = [type(p) for p in self.form.params.values()]
            for param in self.form.params.values():
                param.__class__ = self.released

    def show(self) -> None:
        """Restore the class of the Parameters: they are gathered."""
        for param, own in zip(self.form.params.values(), self.shown, strict=False):
            param.__class__ = own
        self.shown = []

    def read_by(self, read: Read) -> None:
        """Let operations on hidden Parameters be handed to ``read``."""
        self.read = read

    @property
    def in_use(self) -> bool:
        """Whether a forward, a backward or a ``gathered`` block needs full parameters."""
        return self.active > 0 or self.in_backward or self.pinned > 0

    def begin_forward(self) -> None:
        self.active += 1

    def end_forward(self) -> None:
        self.active -= 1

    def forget_forwards(self) -> None:
        """Forget forwards that were interrupted."""
        self.active = 0

    def begin_backward(self) -> None:
        self.in_backward = True

    def end_backward(self) -> None:
        self.in_backward = False

    def pin(self, write: bool) -> None:
        """Note a ``gathered`` block that holds the full parameters, which are present."""
        if write and not self.writers:
            self.seen = self._fingerprints()
        self.pinned += 1
        self.writers += write

    def unpin(self, write: bool) -> None:
        """Note the end of a ``gathered`` block, and take what was written in it."""
        self._take_written()
        self.pinned -= 1
        self.writers -= write

    # -- writes of the user ------------------------------------------------------------------------

    def check_unwritten(self, when: str, cure: str) -> None:
        """Raise RuntimeError if the user wrote into a parameter since the engine last took its values."""
        for binding in self.bindings:
            if binding.written:
                raise RuntimeError(
                    f"parameter {binding.name!r} of unit {self.form.name!r} was written in place {when}: the engine "
                    f"keeps what its optimizer holds, so the write is lost on some layouts; {cure}"
                )

    def _fingerprints(self) -> list[int]:
        values = [self.full[slot.start : slot.start + slot.numel] for slot in self.form.layout.slots]
        return torch.stack([fingerprint(v) for v in values]).tolist()

    def _take_written(self) -> None:
        """Copy writes to the gathered parameters since the last call into the master weights.

        With P = 1 the parameters are the P copy, and with fp32 the master may be a part of it: there a write takes
        effect as it is made. Elsewhere it would go with the gathered buffer. To undo it everywhere, a block would
        have to copy the model wherever the parameters are the only copy. So writes are kept everywhere, as plain
        torch keeps them. In blocks that may write, fingerprints find those, too, that version counters do not see,
        through ``.data`` or numpy.

        A write in a block without ``write`` stays marked: the next step is refused.
        """
        layout = self.form.layout
        changed = {binding.name for binding in self.bindings if binding.written}
        if self.writers:
            before, self.seen = self.seen, self._fingerprints()
            changed |= {s.name for s, a, b in zip(layout.slots, before, self.seen, strict=True) if a != b}
        elif not changed:
            return
        for slot, low, high, at in layout.ranges(self.form.axes.os):
            if slot.name in changed:
                values = self.full[slot.start + low : slot.start + high]
                own = self.master.value[at : at + high - low]
                # What was not written keeps its bits below the parameters' precision.
                own.copy_(torch.where(values == own.to(self.form.dtype), own, values.to(own.dtype)))
        if self.form.delta and self.form.axes.p:  # with P = 1, R is full itself
            for slot, low, high, at in layout.ranges(self.form.axes.p):
                if slot.name in changed:
                    self.copy[at : at + high - low].copy_(self.full[slot.start + low : slot.start + high])
        self.outdate()
        for binding in self.bindings if self.writers else ():
            binding.accept()
