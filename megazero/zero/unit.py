"""A unit: parameters that are gathered together, in one flat buffer with its states.

Glossary (n: elements of the unit; compact: see layout.py)
--------
full      [n], parameter dtype. Storage of the Parameters, which are views of it for life. With P > 1 its
          storage is resized to 0 when released and materialised again by the gather.
message   what the codec makes of an OS slice: m elements of its wire dtype. Messages of nested slices
          concatenate in layout order; ``wire`` is their layout (one region of OS * m elements).
direct    the codec's messages are the parameters themselves (identity in their dtype, one region): gathers
          write in place, nothing is decoded.
copy      [OS/P * m] wire dtype: this rank's P copy, as received. Where P = 1 the decoded ``full`` is the copy.
master    compact [n/OS], at least fp32: what the optimizer updates. A part of ``copy`` where both have one
          dtype and the copy is never dropped (then the refresh's encoding is free).
grad      compact [n/G], at least fp32: sum of this step's gradients; after the step's reduction its OS
          part holds the sum over all data-parallel ranks.
staging   [n], parameter dtype: one micro-batch's raw gradients on their way to ``grad`` where G > 1;
          allocated by the first gradient, freed by the reduce lane.
versions  master_version counts optimizer updates; copy_version says which of them ``copy`` holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import nn

from megazero.comm.codec import Codec, Identity
from megazero.comm.lane import Ticket
from megazero.zero.layout import Layout
from megazero.zero.policy import Levels


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class Unit:
    """Buffers and counters of one unit; what moves between ranks is in movement.py."""

    def __init__(
        self,
        name: str,
        params: Mapping[str, nn.Parameter],
        layout: Layout,
        levels: Levels,
        dtype: torch.dtype,
        device: torch.device,
        lifetime: str,
        codec: Codec | None = None,
    ) -> None:
        self.name, self.params, self.layout, self.levels = name, dict(params), layout, levels
        self.dtype, self.device, self.lifetime = dtype, device, lifetime
        self.sum_dtype = at_least_fp32(dtype)
        self.codec = codec or Identity(dtype)  # of refresh and gather
        self.slots = {slot.name: slot for slot in layout.slots}
        self.trainable = [n for n, p in self.params.items() if p.requires_grad]
        self.direct = isinstance(self.codec, Identity) and self.codec.wire_dtype == dtype
        self.direct = self.direct and len(layout.regions) == 1
        self.wire = self._wire_layout()
        self.full = torch.empty(layout.numel, dtype=dtype, device=device)
        self.copy = self.full if levels.p == 0 else self.new_wire(levels.p)
        self.master = self._make_master()
        self.grad: torch.Tensor | None = None
        self.master_version = 1
        self.copy_version = 0
        self.copy_present = True
        self.full_present = True
        self.staging: torch.Tensor | None = None
        self.ticket: Ticket | None = None  # gather in flight
        self.active = 0  # modules in forward that use it now
        self.in_backward = False
        self.pinned = 0  # open gathered() blocks that hold it
        self.pending: set[str] = set()  # trainable parameters without a gradient in this micro-batch
        self.touched: set[str] = set()  # parameters whose part of grad was written in this step
        self.backwards = 0  # completed backwards in this step

    # -- storage ---------------------------------------------------------------------------------

    def _wire_layout(self) -> Layout:
        """Of the messages of all OS slices, cut by the same sub-axes as the parameters."""
        sizes, indices = self.layout.sizes[: self.levels.os], self.layout.indices[: self.levels.os]
        own = [p.numel for p in self.layout.pieces(self.levels.os)]
        message = (
            self.codec.message_numel(own[0], own[1]) if len(own) > 1 else self.codec.message_numel(own[0])
        )
        return Layout((), ((0, message * prod(sizes)),), sizes, indices)

    def _make_master(self) -> torch.Tensor:
        """A part of the P copy where the two have one dtype and the copy is never dropped; else of its own."""
        levels = self.levels
        if (
            self.direct
            and self.dtype == self.sum_dtype
            and (levels.p == levels.os or self.lifetime == "resident")
        ):
            (own,) = self.wire.within(levels.os, levels.p)
            return self.copy[own.start : own.start + own.numel]
        return torch.zeros(self.layout.level_numel(levels.os), dtype=self.sum_dtype, device=self.device)

    def new_wire(self, level: int) -> torch.Tensor:
        """A buffer for the messages of a level's slice."""
        return torch.empty(self.wire.level_numel(level), dtype=self.codec.wire_dtype, device=self.device)

    def regions_of(self, buffer: torch.Tensor, level: int, base: int, rows: int) -> list[torch.Tensor]:
        """The level's slice inside a compact buffer of level ``base``, as [rows, -1] per region."""
        within = self.layout.within(level, base)
        return [buffer[p.start : p.start + p.numel].view(rows, -1) for p in within]

    def adopt(self, values: Mapping[str, torch.Tensor]) -> None:
        """Take the parameters' values [shape of each] into the master and make the Parameters views of full."""
        self.master.zero_()
        for slot, low, high, at in self.layout.ranges(self.levels.os):
            self.master[at : at + high - low].copy_(values[slot.name].reshape(-1)[low:high])
        for slot in self.layout.slots:
            view = self.full[slot.start : slot.start + slot.numel].view(slot.shape)
            param = self.params[slot.name]
            if param.device != view.device or param.dtype != view.dtype:
                # set_data refuses another device or dtype; swapping keeps the one Parameter object.
                fresh = nn.Parameter(view.new_empty(0), requires_grad=param.requires_grad)
                fresh.__dict__.update(param.__dict__)
                torch.utils.swap_tensors(param, fresh)
            # .data keeps the Parameter's own version counter: gathers into full do not look like edits.
            param.data = view
            param.grad = None
        if self.levels.p:
            self.drop_full()

    def materialise_full(self) -> None:
        if not self.full_present:
            self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
            self.full_present = True

    def drop_full(self) -> None:
        """Free the gathered parameters (P > 1)."""
        if self.full_present:
            self.full.untyped_storage().resize_(0)
            self.full_present = False

    def drop_copy(self) -> None:
        """End of a step for lifetime 'step': the P copy goes, and the full buffer where it is the copy."""
        if self.levels.p:
            self.copy.untyped_storage().resize_(0)
        else:
            self.drop_full()
        self.copy_present, self.copy_version = False, 0

    def open_copy(self) -> torch.Tensor:
        """The buffer a refresh fills with messages: the P copy, or a passing one where full is the copy."""
        if not self.copy_present and self.levels.p:
            self.copy.untyped_storage().resize_(self.copy.numel() * self.copy.element_size())
        elif not self.copy_present:
            self.materialise_full()
        self.copy_present = True
        return self.copy if self.levels.p or self.direct else self.new_wire(0)

    def encode(self, out: torch.Tensor) -> None:
        """The master slice as its message [m] into ``out``."""
        source = self.regions_of(self.master, self.levels.os, self.levels.os, 1)
        message = out.view(1, -1)
        if self.direct:
            self.codec.decode(
                self.codec.encode(source[0]), message
            )  # a cast, or nothing where master is the copy
        else:
            self.codec.encode(*source, out=message)

    def decode(self, messages: torch.Tensor) -> None:
        """The messages of all OS slices into full."""
        if not self.direct:
            rows = prod(self.wire.sizes)
            self.codec.decode(messages.view(rows, -1), *self.regions_of(self.full, 0, 0, rows))

    @property
    def ready(self) -> bool:
        """Full parameters of the current version are there."""
        return self.full_present and self.copy_version == self.master_version and self.ticket is None

    # -- gradients -------------------------------------------------------------------------------

    def stage(self, name: str, param: nn.Parameter) -> None:
        """Move a parameter's fresh gradient into staging (G > 1) or add it to ``grad`` (G = 1)."""
        assert param.grad is not None
        slot = self.slots[name]
        if self.levels.g:
            if self.staging is None:
                self.staging = self.full.new_empty(self.layout.numel)
                for low, high in self.layout.gaps():
                    self.staging[low:high].zero_()
            target = self.staging[slot.start : slot.start + slot.numel].view(slot.shape)
            target.copy_(param.grad)
        else:
            assert self.grad is not None
            target = self.grad[slot.start : slot.start + slot.numel].view(slot.shape)
            if name in self.touched:
                target.add_(param.grad)
            else:
                target.copy_(param.grad)
                self.touched.add(name)
        param.grad = None

    def fill_missing(self) -> None:
        """Parameters without gradient contribute zeros, in staging (every micro-batch) or in grad (at the last)."""
        if self.levels.g:
            if self.staging is None:
                self.staging = self.full.new_zeros(self.layout.numel)
                return
            missing = set(self.slots) - (set(self.trainable) - self.pending)
            buffer = self.staging
        else:
            assert self.grad is not None
            missing, buffer = set(self.slots) - self.touched, self.grad
        for name in missing:
            slot = self.slots[name]
            buffer[slot.start : slot.start + slot.numel].zero_()

    def begin_step(self) -> None:
        if self.grad is None and self.trainable:
            self.grad = torch.zeros(
                self.layout.level_numel(self.levels.g), dtype=self.sum_dtype, device=self.device
            )
        self.backwards = 0
        self.touched.clear()
        self.pending = set(self.trainable)
        self.staging = None
