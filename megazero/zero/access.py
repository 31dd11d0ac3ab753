"""Access to parameters between steps: reads outside ``gathered`` are refused, writes inside it are kept.

state_dict, load_state_dict and deepcopy read a module's parameters as a whole; they work inside ``gathered`` alone.

With P = 1 the parameters are the P copy, and with fp32 the master weights may be a part of it: there a write takes
effect as it is made. Elsewhere it would go with the gathered buffer. To undo it everywhere, a block would have to
copy the model wherever the parameters are the only copy. So writes are kept everywhere, as plain torch keeps them,
those before an exception included. Version counters do not see writes through ``.data`` or numpy. Fingerprints do,
at one pass over the values when a block begins and one when it ends (3 GB/s on one core, without a buffer of the
values' size).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megazero.zero.unit import Unit

OWN = ("__deepcopy__", "flatten_parameters")  # what the engine sets on modules, besides hooks


def guard_reads(units: Sequence[Unit], hooks: Mapping[nn.Module, list[RemovableHandle]]) -> None:
    """Make state_dict, load_state_dict and deepcopy of every module refuse parameters that are not gathered.

    hooks: the engine's own hooks, by module. Copies lack them, so a copy is a plain module.
    """
    owner = {id(p): unit for unit in units for p in unit.params.values()}
    for module, own in hooks.items():
        held = list(dict.fromkeys(owner[id(p)] for p in module.parameters() if id(p) in owner))
        # Functions, not partials: a deep copy of the module would copy what partials hold.
        own = [
            *own,
            module.register_state_dict_pre_hook(
                lambda *_, held=held: _refuse_sharded(held, "gathered()", "module.state_dict()")
            ),
            module.register_load_state_dict_pre_hook(
                lambda *_, held=held: _refuse_sharded(
                    held, "gathered(write=True)", "module.load_state_dict(...)"
                )
            ),
        ]
        # copy.deepcopy looks for it on the object, and calls it before it reads any parameter.
        module.__deepcopy__ = partial(_copy_plain, weakref.ref(module), held, [h.id for h in own])  # type: ignore[assignment]


def _copy_plain(
    original: weakref.ref[nn.Module], held: list[Unit], hooks: list[int], memo: dict[int, Any]
) -> nn.Module:
    """Copy the module without the engine, for copy.deepcopy: its own parameters and no engine hooks."""
    _refuse_sharded(held, "gathered()", "copy.deepcopy(module)")
    module = original()
    assert module is not None
    attributes = vars(module)
    ours: dict[str, Any] = {name: attributes.pop(name) for name in OWN if name in attributes}
    try:
        copied = copy.deepcopy(module, memo)
    finally:
        attributes.update(ours)
    for name, held_hooks in vars(copied).items():
        if "_hooks" in name and isinstance(held_hooks, dict):
            for key in hooks:
                held_hooks.pop(key, None)
    return copied


def _refuse_sharded(held: list[Unit], inside: str, call: str) -> None:
    """Refuse outside of ``gathered``: parameters may be absent, stale, or overwritten from the master weights."""
    if not all(u.pinned for u in held):
        raise RuntimeError(
            f"the module's parameters are sharded: use `with engine.{inside}: {call}`, or a sharded checkpoint"
        )


PIECE = 1 << 16  # values of a pass: their products stay in cache (2.2 GB/s with 2^20, 2.7 with 2^14)


def take_written(unit: Unit) -> None:
    """Copy writes to the gathered parameters since the last call, or ``note``, into the master weights.

    A write in a block without ``write`` stays marked: the next step is refused.
    """
    before = unit.seen
    note(unit)
    changed = {s.name for s, a, b in zip(unit.layout.slots, before, unit.seen, strict=True) if a != b}
    if not (changed or unit.writers):
        return
    for slot, low, high, at in unit.layout.ranges(unit.levels.os):
        if slot.name in changed:
            values = unit.full[slot.start + low : slot.start + high]
            own = unit.master[at : at + high - low]
            # What was not written keeps its bits below the parameters' precision.
            own.copy_(torch.where(values == own.to(unit.dtype), own, values.to(own.dtype)))
    if unit.delta and unit.levels.p:  # with P = 1, R is full itself
        for slot, low, high, at in unit.layout.ranges(unit.levels.p):
            if slot.name in changed:
                unit.copy[at : at + high - low].copy_(unit.full[slot.start + low : slot.start + high])
    unit.master_version += 1
    for binding in unit.bindings:
        if unit.writers:
            binding.accept()
        elif binding.name in changed:
            binding.reject()


def note(unit: Unit) -> None:
    """Note fingerprints of the gathered parameters. Values that differ from them later were written."""
    values = [unit.full[slot.start : slot.start + slot.numel] for slot in unit.layout.slots]
    unit.seen = torch.stack([fingerprint(v) for v in values]).tolist()


def fingerprint(values: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit hash, a scalar int64, of ``values`` and their places: 1-D, contiguous, any dtype."""
    aligned = all(n * values.itemsize % 4 == 0 for n in (values.numel(), values.storage_offset()))
    weights = _weights(values.device)
    pieces = values.view(torch.int32 if aligned else torch.uint8).split(PIECE)
    sums = torch.stack([(piece * weights[: len(piece)]).sum() for piece in pieces])
    return fingerprint(sums) if len(sums) > 1 else sums[0]


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return odd numbers [PIECE], int64, the same on every rank: a change of one value always shows."""
    drawn = torch.randint(-(1 << 62), 1 << 62, (PIECE,), generator=torch.Generator().manual_seed(0))
    return (drawn * 2 + 1).to(device)
