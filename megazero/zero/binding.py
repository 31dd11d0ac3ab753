"""A Parameter bound to its part of a unit's buffer, and the check that the user has not replaced it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Binding:
    """Binds one Parameter object, the same before and after, whose data is ``view`` of the unit's ``full``
    from here on.

    The engine writes into ``full``, never through the Parameter, so its version counter moves only when the
    user writes.
    """

    def __init__(self, name: str, param: nn.Parameter, view: torch.Tensor) -> None:
        self.name, self.param, self.view = name, param, view
        # As nn.Module.to does: between CPU and CUDA, and between dtypes, .data takes the tensor and keeps hooks.
        if not torch._has_compatible_shallow_copy_type(param, view):
            _become(name, param, view)
        # .data keeps the Parameter's own version counter: gathers into full do not look like edits.
        param.data = view
        param.grad = None
        self.version = param._version

    @property
    def written(self) -> bool:
        """Whether the user wrote into the parameter since ``accept``.

        Writes into ``param.data`` are seen inside ``gathered`` alone (access.py).
        """
        return self.param._version != self.version

    def accept(self) -> None:
        self.version = self.param._version

    def reject(self) -> None:
        """Note a write that torch's version counter did not see."""
        self.version = -1

    def check_place(self) -> None:
        """Raise RuntimeError if the Parameter's data is not the unit's buffer any more."""
        param, view = self.param, self.view
        if param.dtype == view.dtype and param.device == view.device and param.is_set_to(view):
            return
        changes = [
            f"its {what} was {before} and is {now}"
            for what, before, now in (
                ("dtype", view.dtype, param.dtype),
                ("device", view.device, param.device),
                ("shape", tuple(view.shape), tuple(param.shape)),
            )
            if before != now
        ]
        raise RuntimeError(
            f"parameter {self.name!r} was given other data after zero.shard ("
            f"{' and '.join(changes) or 'another tensor of the same dtype and device'}), which the engine does not "
            "train: call module.to(...) and the like before zero.shard, or choose Policy(dtype=...); write values "
            "in place, inside `with engine.gathered(write=True)`"
        )


@contextmanager
def recurrent_weights_kept(module: nn.Module) -> Iterator[None]:
    """Keep recurrent weights in place during bindings: torch's LSTM, GRU and RNN hold weak references, and may move
    them.

    With weak references a Parameter cannot leave the meta device. On CUDA ``flatten_parameters``, which many
    forwards call, would move the weights out of the unit's buffer; from here on it does nothing.
    """
    recurrent = [m for m in module.modules() if isinstance(m, nn.RNNBase)]
    for m in recurrent:
        m._flat_weight_refs = []
        m.flatten_parameters = _leave_weights  # type: ignore[method-assign]
    try:
        yield
    finally:
        for m in recurrent:
            m._flat_weight_refs = [w if w is None else weakref.ref(w) for w in m._flat_weights]


def _leave_weights() -> None:
    """Leave the weights where they are; cuDNN then gathers the weights of a call itself."""


def _become(name: str, param: nn.Parameter, like: torch.Tensor) -> None:
    """Move a Parameter from the meta device to another one: the same object with the same hooks.

    Setting .data cannot do this, because .data does not leave the meta device.
    """
    hooks = (param._backward_hooks, param._post_accumulate_grad_hooks)  # type: ignore[attr-defined]
    fresh = nn.Parameter(like.new_empty(0), requires_grad=param.requires_grad)
    fresh.__dict__.update(param.__dict__)
    try:
        torch.utils.swap_tensors(param, fresh)
    except RuntimeError as error:
        raise ValueError(
            f"parameter {name!r} cannot leave {param.device}, since something else holds on to it ({error}): drop "
            f"what refers to it, or build the module on {like.device}"
        ) from error
    param._backward_hooks, param._post_accumulate_grad_hooks = hooks  # type: ignore[attr-defined]
