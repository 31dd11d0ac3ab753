"""Which hooks the engine puts on a module and its parameters; what they do is in hooks.py."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING

from torch import nn
from torch.utils.hooks import RemovableHandle

from megazero.zero.build import Plan
from megazero.zero.outside import guard_reads
from megazero.zero.unit import Unit

if TYPE_CHECKING:
    from megazero.zero.hooks import Hooks


def register(module: nn.Module, plan: Plan, hooks: Hooks) -> None:
    """Watch the forwards of the plan's modules and the gradients of its parameters, and guard reads from outside."""
    handles: dict[nn.Module, list[RemovableHandle]] = {m: [] for m in module.modules()}
    for hooked, needs in plan.needs:
        handles[hooked] += _watch_forward(hooked, needs, hooks)
    _watch_gradients(plan.units, hooks)
    guard_reads(plan.units, handles)


def _watch_forward(module: nn.Module, needs: list[Unit], hooks: Hooks) -> list[RemovableHandle]:
    return [
        module.register_forward_pre_hook(lambda m, args: hooks.pre_forward(needs, args)),
        module.register_forward_hook(
            lambda m, a, out: hooks.post_forward(needs, out),
            always_call=True,  # a forward that raised has stopped using its parameters, too
        ),
    ]


def _watch_gradients(units: list[Unit], hooks: Hooks) -> None:
    # Python's collector does not see into these hooks: a strong reference would keep the engine, its buffers and
    # the mesh's communicators for ever.
    alive = weakref.ref(hooks)
    for unit in units:
        for name in unit.trainable:
            arrived = partial(_gradient_arrived, alive, weakref.ref(unit), name)
            unit.params[name].register_post_accumulate_grad_hook(arrived)


def _gradient_arrived(
    alive: weakref.ref[Hooks], held: weakref.ref[Unit], name: str, param: nn.Parameter
) -> None:
    hooks, unit = alive(), held()
    if hooks is not None and unit is not None:
        hooks.grad_ready(unit, name, param)
