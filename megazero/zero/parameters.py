"""The module's Parameters while an engine has them: bound to a unit's buffer, and hidden while that is released.

A Parameter stays one object, whose data is a view of its unit's buffer (``Binding``). While its values are not
gathered, a read gathers the unit or raises; it never sees freed memory, nor, with P = 1, values from before an
update. For that the object's class is swapped for one whose ``__torch_function__`` intercepts every operation
(``Released``). Shape, dtype, gradient and hooks can be read as ever. Other operations are handed to ``Weights.read``.
Inside a forward or backward they gather the unit, as a module that holds it does; elsewhere they raise. Gathered
Parameters have their own class, so forwards pay nothing. To hide or show one takes 0.15 us (``Weights.hide``).

state_dict, load_state_dict and deepcopy read a module's parameters as a whole; they work inside ``gathered`` alone
(``guard_reads``).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from types import ModuleType
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from megazero.zero.form import Form


class Binding:
    """Makes ``view``, a part of the unit's ``full``, the data of a Parameter, which stays the same object.

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
        """Whether the user wrote into the parameter since ``accept``, but for writes through ``.data``."""
        return self.param._version != self.version

    def accept(self) -> None:
        self.version = self.param._version

    def check_place(self) -> None:
        """Raise RuntimeError if the Parameter's data is not the unit's buffer any more."""
        param, view = self.param, self.view
        if param.dtype == view.dtype and not param.is_meta and param.is_set_to(view):
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


Read = Callable[[str, Callable[[], Any]], Any]  # what is done to which parameter, the operation


class Holder(Protocol):
    """What is asked of a unit's weights here. pinned: how many open ``gathered`` blocks hold them."""

    form: Form
    full: torch.Tensor
    pinned: int
    read: Read


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
    """The class of a hidden Parameter. Each unit has a subclass, which refers to it."""

    holder: ClassVar[weakref.ref[Holder]]

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
        holder = cls.holder()
        found = next((x for x in tree_leaves((args, kwargs)) if isinstance(x, cls)), None)
        param = next((n for n, p in holder.form.params.items() if p is found), "") if holder else ""
        deed = attribute if name in ("__get__", "__set__") else name
        what = (
            f"parameter {param!r} of unit {holder.form.name!r}"
            if holder
            else "a parameter whose engine is gone"
        )
        writes = name in _WRITES or name == "__set__" or name.endswith("_") and not name.endswith("__")
        writes = writes and any(isinstance(x, cls) for x in tree_leaves(args[:1]))
        if writes or kwargs.get("out") is found is not None:
            raise RuntimeError(
                f"{what} was written ({deed}) while it is released: use `with engine.gathered(write=True):`"
            )
        if holder is None or deed in _POINTERS:
            raise RuntimeError(_refusal(what, deed))
        return holder.read(_refusal(what, deed), lambda: func(*args, **kwargs))


def _refusal(what: str, deed: str) -> str:
    return (
        f"{what} was read ({deed}) while it is released: its values are there in the forwards of the modules that "
        "hold it and, on every rank together, in `with engine.gathered():`"
    )


def refuse_read(refusal: str, operation: Callable[[], Any]) -> Any:
    raise RuntimeError(refusal)


def released_class(holder: Holder) -> type[Released]:
    return type("Released", (Released,), {"holder": weakref.ref(holder)})


def outliving(held: Sequence[Holder], output: Any) -> Any:
    """Return ``output`` with copies of those tensors that lie in the full parameters, freed when the use ends."""
    buffers = {each.full.untyped_storage()._cdata for each in held if each.form.axes.p}

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
    if isinstance(output, torch.Tensor):
        yield output
        return
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


def guard_reads(every: Sequence[Holder], hooks: Mapping[nn.Module, list[RemovableHandle]]) -> None:
    """Make state_dict, load_state_dict and deepcopy of every module refuse parameters that are not gathered.

    hooks: the engine's own hooks, by module. Copies lack them, so a copy is a plain module.
    """
    owner = {id(p): each for each in every for p in each.form.params.values()}
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
    original: weakref.ref[nn.Module], held: list[Holder], hooks: list[int], memo: dict[int, Any]
) -> nn.Module:
    """Copy the module without the engine, for copy.deepcopy: its own parameters and no engine hooks."""
    _refuse_sharded(held, "gathered()", "copy.deepcopy(module)")
    module = original()
    assert module is not None
    attributes = vars(module)
    ours = attributes.pop("__deepcopy__")
    try:
        copied = copy.deepcopy(module, memo)
    finally:
        attributes["__deepcopy__"] = ours
    for name, held_hooks in vars(copied).items():
        if "_hooks" in name and isinstance(held_hooks, dict):
            for key in hooks:
                held_hooks.pop(key, None)
    return copied


def _refuse_sharded(held: list[Holder], inside: str, call: str) -> None:
    """Refuse outside of ``gathered``: parameters may be absent, stale, or overwritten from the master weights."""
    if not all(each.pinned for each in held):
        raise RuntimeError(
            f"the module's parameters are sharded: use `with engine.{inside}: {call}`, or a sharded checkpoint"
        )
