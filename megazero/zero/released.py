"""Parameters whose values are not gathered. A read gathers the unit or raises; it never sees freed memory.

A hidden Parameter is the same object with another class, whose ``__torch_function__`` sees what torch is
asked to do with it. Shape, dtype, gradient and hooks are there as ever. Other operations are handed to
``Unit.read``: inside a forward or backward they gather the unit, as a module does that holds it; elsewhere
they raise. Gathered Parameters have their own class, so that forwards pay nothing. To hide and show one takes
0.15 us each.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map


class Holder(Protocol):
    """What is asked of a unit here. shown: its Parameters' own classes while they are hidden, else empty."""

    name: str
    params: dict[str, nn.Parameter]
    shown: list[type]
    released: type[Released]
    read: Read
    full: torch.Tensor
    levels: Any


Read = Callable[[Any, str, Callable[[], Any]], Any]  # unit, what is done to which parameter, the operation


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What needs no values: these run on a hidden Parameter.
_METADATA = _names(
    """__len__ size dim ndimension numel nelement element_size stride storage_offset is_contiguous is_floating_point
    is_complex is_inference is_same_size is_set_to get_device untyped_storage _has_compatible_shallow_copy_type
    requires_grad_ retain_grad grad backward register_hook register_post_accumulate_grad_hook new_empty new_zeros
    new_ones new_full empty_like zeros_like ones_like full_like rand_like randn_like"""
)
_VALUES = _names("data T mT H mH real imag")  # attributes that are tensors over the values
_POINTERS = _names("data data_ptr numpy __array__ __dlpack__ storage")  # outlive an operation
_CONVERSIONS = _names("to type cpu cuda float double half bfloat16 contiguous")
_WRITES = _names(
    "__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__"
)


class Released(nn.Parameter):
    """The class of a hidden Parameter. A subclass for each unit says which unit it is."""

    unit: ClassVar[weakref.ref[Holder]]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Released parameter: {tuple(self.shape)}, {self.dtype}"

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name, owner = getattr(func, "__name__", str(func)), getattr(func, "__self__", None)
        attribute = getattr(owner, "__name__", "")
        if name in ("__set__", "__delete__") and attribute == "data" and args[0] is args[1]:
            return None
        if name in _METADATA or name in ("__get__", "__set__", "__delete__") and attribute not in _VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in _CONVERSIONS and isinstance(args[0], Released):
            probe = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
            result = func(probe, *args[1:], **kwargs)
            if result is probe or not isinstance(result, torch.Tensor):  # nothing is converted
                return args[0] if result is probe else result
        unit = cls.unit()
        found = next((x for x in tree_leaves((args, kwargs)) if isinstance(x, cls)), None)
        param = next((n for n, p in unit.params.items() if p is found), "") if unit else ""
        deed = attribute if name in ("__get__", "__set__") else name
        what = f"parameter {param!r} of unit {unit.name!r}" if unit else "a parameter whose engine is gone"
        writes = name in _WRITES or name == "__set__" or name.endswith("_") and not name.endswith("__")
        writes = writes and any(isinstance(x, cls) for x in tree_leaves(args[:1]))
        if writes or kwargs.get("out") is found is not None:
            raise RuntimeError(
                f"{what} was written ({deed}) while it is released: use `with engine.gathered(write=True):`"
            )
        if unit is None or deed in _POINTERS:
            raise RuntimeError(_refusal(what, deed))
        return unit.read(unit, _refusal(what, deed), lambda: func(*args, **kwargs))


def _refusal(what: str, deed: str) -> str:
    return (
        f"{what} was read ({deed}) while it is released: its values are there in the forwards of the modules that "
        "hold it and, on every rank together, in `with engine.gathered():`"
    )


def refuse_read(unit: Holder, refusal: str, operation: Callable[[], Any]) -> Any:
    raise RuntimeError(refusal)


def released_class(unit: Holder) -> type[Released]:
    return type("Released", (Released,), {"unit": weakref.ref(unit)})


def hide(unit: Holder) -> None:
    """Hide the unit's Parameters: from here on they have no values."""
    if not unit.shown:
        unit.shown = [type(p) for p in unit.params.values()]
        for param in unit.params.values():
            param.__class__ = unit.released


def show(unit: Holder) -> None:
    """Restore the class of the unit's Parameters: they are gathered."""
    for param, own in zip(unit.params.values(), unit.shown, strict=False):
        param.__class__ = own
    unit.shown = []


def outliving(units: Sequence[Holder], output: Any) -> Any:
    """Return ``output`` with copies of those tensors that lie in the units' buffers, freed when the use ends."""
    buffers = {unit.full.untyped_storage()._cdata for unit in units if unit.levels.p}

    def lies_inside(x: Any) -> bool:
        strided = isinstance(x, torch.Tensor) and x.layout == torch.strided
        return strided and x.untyped_storage()._cdata in buffers

    copies: dict[int, Any] = {}

    def outside(x: Any) -> Any:
        if lies_inside(x):
            return x.clone()
        if id(x) not in copies and any(map(lies_inside, tensors_in(_attributes(x)))):
            copies[id(x)] = other = copy.copy(x)
            for name, value in _attributes(x).items():
                object.__setattr__(other, name, tree_map(outside, value))  # frozen dataclasses, too
        return copies.get(id(x), x)

    if not buffers or not any(map(lies_inside, tensors_in(output))):
        return output
    return tree_map(outside, output)


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a module's output: of pytrees, and of objects (dataclasses, say) in their attributes."""
    seen, queue = set[int](), tree_leaves(output)
    for leaf in queue:  # which grows
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif id(leaf) not in seen:
            seen.add(id(leaf))
            queue += tree_leaves(_attributes(leaf))


def _attributes(x: Any) -> Mapping[str, Any]:
    """Return an object's attributes by name, where they may hold what a module computed."""
    if isinstance(x, (torch.Tensor, nn.Module, ModuleType, type)):
        return {}
    if is_dataclass(x):  # with slots, maybe
        return {f.name: getattr(x, f.name) for f in fields(x) if hasattr(x, f.name)}
    return getattr(x, "__dict__", {})
