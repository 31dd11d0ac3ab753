"""The passes of a step: hooks on the module that say "this unit is needed now" and "this gradient is there".

One Passes per engine. A pass is one micro-batch's forward and backward, or one evaluation forward. Nothing is
inferred from the hooks' order but the order of use.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megazero.zero.build import Plan
from megazero.zero.gathering import Gathering
from megazero.zero.reducing import Reducing
from megazero.zero.unit import Unit


class Passes:
    """Counts a step's backwards and tells gathering and reducing what the module's hooks see.

    micro_batches: of the step that is open; 0: none is. backwards: of them that are done.
    """

    def __init__(self, module: nn.Module, plan: Plan, gathering: Gathering, reducing: Reducing) -> None:
        self.units, self.gathering, self.reducing = plan.units, gathering, reducing
        self.micro_batches = self.backwards = 0
        self._forward_uses: list[Unit] = []
        self._in_backward = False
        for hooked, needs in plan.needs:
            self._hook_forward(hooked, needs)
        self._hook_gradients()
        self._guard_state_dicts(module)

    def open_step(self, micro_batches: int) -> None:
        self.micro_batches, self.backwards = micro_batches, 0
        self.begin()

    def check_done(self) -> None:
        """Raises RuntimeError unless the open step has had its backwards."""
        if not self.micro_batches:
            raise RuntimeError("step() without begin_step()")
        if self.backwards != self.micro_batches:
            raise RuntimeError(
                f"step() after {self.backwards} backwards of {self.micro_batches}: every micro-batch that "
                "begin_step() announced needs one backward"
            )

    def abort(self) -> None:
        """Forget a forward or backward that was broken off."""
        self._in_backward = False
        for unit in self.units:
            unit.active, unit.in_backward = 0, False

    def begin(self) -> None:
        """A pass begins."""
        self.gathering.order.begin()
        self._forward_uses.clear()

    @property
    def more(self) -> bool:
        """Another pass of this step follows the current one."""
        return self.backwards + int(self._in_backward) < self.micro_batches

    # -- hooks -----------------------------------------------------------------------------------

    def _hook_forward(self, module: nn.Module, needs: list[Unit]) -> None:
        module.register_forward_pre_hook(lambda m, a: self._pre_forward(needs))
        module.register_forward_hook(
            lambda m, a, out: self._post_forward(needs, out),
            always_call=True,  # a forward that raised has stopped using its parameters, too
        )

    def _hook_gradients(self) -> None:
        # Python's collector does not see into these hooks: a strong reference would keep the engine, its buffers and
        # the mesh's communicators for ever.
        passes = weakref.ref(self)
        for index, unit in enumerate(self.units):
            for name in unit.trainable:
                unit.params[name].register_post_accumulate_grad_hook(
                    partial(_grad_arrived, passes, index, name)
                )

    def _guard_state_dicts(self, root: nn.Module) -> None:
        owner = {id(p): unit for unit in self.units for p in unit.params.values()}
        for module in root.modules():
            held = list(dict.fromkeys(owner[id(p)] for p in module.parameters() if id(p) in owner))
            module.register_state_dict_pre_hook(
                lambda *_, held=held: _refuse_sharded(held, "state_dict", "gathered()")
            )
            module.register_load_state_dict_pre_hook(
                lambda *_, held=held: _refuse_sharded(held, "load_state_dict", "gathered(write=True)")
            )

    def _pre_forward(self, needs: list[Unit]) -> None:
        recompute = torch._C._current_graph_task_id() != -1
        for unit in needs:
            if recompute:
                self.gathering.ensure(unit)
                continue
            if unit not in self._forward_uses:
                self._forward_uses.append(unit)
            unit.active += 1
            self.gathering.use(unit)

    def _post_forward(self, needs: list[Unit], output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        for unit in needs:
            unit.active -= 1
            self.gathering.release(unit)
        self._poll()
        if torch.is_grad_enabled() and output is not None:
            self._watch_backward(needs, output)

    def _watch_backward(self, needs: list[Unit], output: Any) -> None:
        """The units are needed again when a gradient reaches the module's output."""
        tensors = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: self._pre_backward(needs))
        if not tensors and any(u.levels.p for u in needs):
            raise TypeError(
                f"a module of unit {needs[0].name!r} returned a {type(output).__name__}, in which the engine sees "
                "no tensors: return tensors, tuples, lists or dicts, or register the class as a pytree node"
            )

    def _pre_backward(self, needs: list[Unit]) -> None:
        self._open_backward()
        for unit in needs:
            if not unit.in_backward:
                unit.in_backward = True
                self.gathering.use(unit)
        self._poll()

    def _grad_ready(self, unit: Unit, name: str, param: nn.Parameter) -> None:
        self._open_backward()
        if name not in unit.pending:
            raise RuntimeError(
                f"{name} got a second gradient in one micro-batch: call backward once for each"
            )
        unit.stage(name, param)
        unit.pending.discard(name)
        if not unit.pending:
            if len(unit.trainable) == len(unit.params):
                # Whatever used these parameters has run backward, or a gradient would be missing. Frozen ones
                # give no such sign: their unit stays gathered to the end of the backward.
                self._end_use(unit)
            self.reducing.completed(unit)
        self._poll()

    def _open_backward(self) -> None:
        if self._in_backward:
            return
        if self.backwards >= self.micro_batches:
            raise RuntimeError(
                f"backward number {self.backwards + 1} in a step of {self.micro_batches} micro-batches: "
                "call begin_step(micro_batches) with the right number before the step's first forward"
            )
        self._in_backward = True
        self.reducing.open(self._forward_uses)
        torch.autograd.Variable._execution_engine.queue_callback(self._close_backward)  # type: ignore[attr-defined]

    def _close_backward(self) -> None:
        """End of one micro-batch's backward: units that still lack gradients contribute zeros."""
        self.reducing.close()
        self._in_backward = False
        self.backwards += 1
        for unit in self.units:
            self._end_use(unit)
        self.begin()

    def _end_use(self, unit: Unit) -> None:
        if unit.in_backward:
            unit.in_backward = False
            self.gathering.release(unit)

    def _poll(self) -> None:
        self.gathering.lane.poll()
        self.reducing.lane.poll()


def _grad_arrived(passes: weakref.ref[Passes], index: int, name: str, param: nn.Parameter) -> None:
    alive = passes()
    if alive is not None:
        alive._grad_ready(alive.units[index], name, param)


def _refuse_sharded(held: list[Unit], call: str, inside: str) -> None:
    """Outside of ``gathered`` parameters may be absent, stale, or overwritten from the master weights."""
    if not all(u.pinned for u in held):
        raise RuntimeError(
            f"the module's parameters are sharded: use `with engine.{inside}: module.{call}(...)`, or a sharded "
            "checkpoint"
        )
