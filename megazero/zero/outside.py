"""What reads a module's parameters as a whole between steps (state_dict, deepcopy) works inside
``gathered`` alone.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from megazero.zero.unit import Unit

OWN = ("__deepcopy__", "flatten_parameters")  # what the engine sets on modules, besides hooks


def guard_reads(units: Sequence[Unit], hooks: Mapping[nn.Module, list[RemovableHandle]]) -> None:
    """Make state_dict, load_state_dict and deepcopy of every module refuse what is not gathered.

    hooks: the engine's own hooks, by module. A copy goes without them, so it is a plain module.
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
    """Copy the module without the engine, for copy.deepcopy: own parameters, and none of the engine's hooks."""
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
