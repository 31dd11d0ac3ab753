"""Builds units from a torch module: which parameters are gathered together, and in which order they lie.

Modules that the engine would damage are refused by name before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn

from megazero.comm.codec import at_least_fp32, codecs_of
from megazero.comm.wire import Codecs
from megazero.kernels.arena import Arena
from megazero.kernels.fingerprint import fingerprint
from megazero.mesh.mesh import Mesh
from megazero.mesh.objects import gather_objects
from megazero.zero.agreement import unlike
from megazero.zero.axes import DataAxes, refuse_clashes
from megazero.zero.form import Form
from megazero.zero.layout import UnitLayout, exact_names, groups_of, make_layout
from megazero.zero.optimizer import Traits
from megazero.zero.policy import Policy
from megazero.zero.unit import Unit, make_unit

Init = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class On:
    """A module, or modules, whose parameters are gathered together on axes of their own, not on the mesh's.

    They may lie inside modules that are listed, too. They are gathered with these then, and are not among theirs.
    apart: ranks that the axes do not join hold other parameters under the same names, as expert-parallel ranks do.
    """

    modules: nn.Module | Sequence[nn.Module]
    axes: DataAxes
    apart: bool = False


UnitSpec = nn.Module | Sequence[nn.Module] | On


class Placed(NamedTuple):
    """The modules of one spec, the axes that they lie on, and whether other ranks hold others (``On.apart``)."""

    modules: tuple[nn.Module, ...]
    axes: DataAxes
    apart: bool


# The dtypes that parameters may have.
TRAINED = (torch.bfloat16, torch.float32, torch.float64)
SCALED = (*TRAINED, torch.float16)  # where losses are scaled: gradients in fp16 become zero otherwise
# Frozen: what fp32 holds exactly and every backend sends.
FROZEN = (*SCALED, torch.uint8, torch.int8, torch.bool)
# Classes that reduce or shard by themselves: of torch, megatron-core, DeepSpeed and apex. By name: none is imported.
_WRAPPERS = frozenset(
    {
        "DataParallel",
        "DistributedDataParallel",
        "FullyShardedDataParallel",
        "TorchFullyShardedDataParallel",
        "FSDPModule",
        "ReplicateModule",
        "DeepSpeedEngine",
    }
)


@dataclass(frozen=True)
class MadeUnits:
    """Holds the units in forward order, the units that every hooked module needs, the arena of the buffers that units
    share, and the number of parts.
    """

    units: list[Unit]
    needs: list[tuple[nn.Module, list[Unit]]]
    arena: Arena
    parts: int = 1


def build_units(
    module: nn.Module,
    specs: Iterable[UnitSpec],
    mesh: Mesh,
    policy: Policy,
    traits: Mapping[str, Traits],
    init: Init | None,
    parts: Sequence[Sequence[nn.Module]] = (),
    tied: Mapping[str, str] = MappingProxyType({}),
) -> MadeUnits:
    """Make one Unit per spec, and one more for the parameters that no spec holds (the module's own).

    parts: the specs' modules that run together, if the module runs part by part (virtual pipeline stages).
    tied: parameters of the pipeline's ends, each a unit of its own. It maps the name here to a name common to both.

    A parameter that several modules share belongs to the first spec that holds it; the others' hooks gather
    that unit, too. Raises ValueError for specs that nest (but ``On`` may), for mixed dtypes, for meta parameters
    without init, for axes that clash, for tied parameters on other axes, and for modules and dtypes that training
    would damage.
    """
    _refuse_unfit(module, policy.dtype, policy.loss_scaled)
    spread = _spread([*specs, module], mesh, policy.whole_gradients)
    listed = [m for each in spread[:-1] for m in each.modules]  # what is in none is the module's own
    modules = dict(module.named_modules(remove_duplicate=False))
    _move_buffers(module, mesh.device)
    inner = _nested(spread[:-1], {id(m): n for n, m in modules.items()})
    place_of: dict[int, Placed] = {}
    for each in (*inner, *spread):
        for p in (p for m in each.modules for p in m.parameters()):
            place_of.setdefault(id(p), each)
    names = {id(p): plain_name(n) for n, p in module.named_parameters()}
    _refuse_different_starts(module, place_of, mesh)
    _refuse_names_apart(spread, place_of, names, mesh)
    owner: dict[int, Unit] = {}
    part_of = {id(x): i for i, modules_of in enumerate(parts) for m in modules_of for x in m.modules()}
    maker = UnitMaker(mesh.device, policy, traits, init, tied, Arena())
    units: list[Unit] = []
    for each in spread:
        group, axes, _ = each
        held = {id(p): p for m in group for p in m.parameters() if place_of[id(p)] is each}
        if params := {names[i]: p for i, p in held.items()}:
            if axes is not spread[-1][1] and (ends := tied.keys() & params.keys()):
                raise ValueError(
                    f"{sorted(ends)} are tied over the pipeline's ends, whose slices meet on the mesh's own axes: "
                    "list their module without zero.On"
                )
            label = plain_name(next(n for n, m in modules.items() if m is group[0])) or "root"
            made = maker.units_of(label, params, axes, part_of.get(id(group[0]), 0))
            units += made
            # Bindings keep the Parameter objects, so ids stay valid.
            owner.update((id(p), unit) for unit in made for p in unit.params.values())
    nested = {id(m) for each in inner for m in each.modules}
    needs = _needs(module, [m for m in listed if id(m) not in nested], owner)
    _refuse_shared_between_parts(needs, part_of)
    return MadeUnits(units, needs, maker.arena, max(len(parts), 1))


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise ValueError(f"buffer {name!r} is on the meta device: give it a value before zero.shard")
        if buffer.device != device:
            buffer.data = buffer.data.to(device)


def _needs(
    module: nn.Module, listed: Sequence[nn.Module], owner: Mapping[int, Unit]
) -> list[tuple[nn.Module, list[Unit]]]:
    """Return the modules to hook, each with the units that its forward needs. owner: by the ids of Parameters."""
    needs = [(m, _unique(owner[id(p)] for p in m.parameters() if id(p) in owner)) for m in listed]
    inside = {id(x) for m, _ in needs for x in m.modules()}
    # Parameters read outside every listed module, shared ones (a tied head, say) included.
    outside = (p for m in module.modules() if id(m) not in inside for p in m.parameters(recurse=False))
    rest = _unique(owner[id(p)] for p in outside)
    if rest or all(m is not module for m, _ in needs):
        needs.append((module, rest))  # in its forward released parameters are gathered when read
    return needs


def _refuse_shared_between_parts(
    needs: Iterable[tuple[nn.Module, list[Unit]]], part_of: Mapping[int, int]
) -> None:
    for m, used in needs:
        held = {unit.part for unit in used}
        if len(held | {part_of.get(id(m), part) for part in held}) > 1:
            raise ValueError(f"unit {used[0].name!r} holds parameters of several parts: a part has its own")


def _spread(specs: Iterable[UnitSpec], mesh: Mesh, whole_gradients: bool) -> list[Placed]:
    """Return the modules of each spec, and the axes that they lie on."""
    own = DataAxes.of(mesh)
    placed = [spec if isinstance(spec, On) else On(spec, own) for spec in specs]
    axes = dict.fromkeys(each.axes for each in placed)
    refuse_clashes(mesh, axes)
    used = {each: replace(each, g=0) if whole_gradients else each for each in axes}
    return [Placed(_as_tuple(each.modules), used[each.axes], each.apart) for each in placed]


def _as_tuple(modules: nn.Module | Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    return tuple(modules) if isinstance(modules, Sequence) else (modules,)


def plain_name(name: str) -> str:
    """Return a name without what torch.compile's wrapper of a module adds: checkpoints have the same names."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


@dataclass(frozen=True)
class UnitMaker:
    """Makes the units of one engine. arena: of the buffers that they share. The rest: as in ``build_units``."""

    device: torch.device
    policy: Policy
    traits: Mapping[str, Traits]
    init: Init | None
    tied: Mapping[str, str]
    arena: Arena

    def units_of(
        self, label: str, params: Mapping[str, nn.Parameter], axes: DataAxes, part: int
    ) -> list[Unit]:
        """Make one unit, or one per chunk where the parameters have more than ``policy.chunk_numel`` elements.

        Each tied parameter gets a unit of its own.
        """
        dtype = self.policy.dtype or _one_dtype(label, params)
        values = _initial_values(label, params, self.init, self.device, at_least_fp32(dtype))

        def unit(name: str, names: Sequence[str], tied: bool) -> Unit:
            form = self._form(name, {n: params[n] for n in names}, dtype, axes, part, tied)
            return make_unit(form, values, self.arena)

        groups = groups_of([(n, p.numel()) for n, p in params.items()], self.tied, self.policy.chunk_numel)
        units = [unit(self.tied[name], [name], True) for (name, *_) in groups if name in self.tied]
        chunks = groups[len(units) :]
        for i, names in enumerate(chunks):
            units.append(unit(label if len(chunks) == 1 else f"{label}[{i}]", names, False))
        return units

    def _form(
        self,
        name: str,
        params: Mapping[str, nn.Parameter],
        dtype: torch.dtype,
        axes: DataAxes,
        part: int,
        tied: bool,
    ) -> Form:
        policy = self.policy
        codecs = codecs_of(policy.codecs, dtype, at_least_fp32(dtype), policy.seed)
        layout, quantised = lay_out(
            {n: p.shape for n, p in params.items()},
            self.traits,
            block=policy.block,
            exact_numel=policy.exact_numel,
            quantises=not codecs.exact,
            sizes=axes.sizes,
            indices=axes.indices,
            parts=policy.outer.wires if policy.outer else 1,
        )
        codecs = codecs if quantised else Codecs()
        trainable = tuple(n for n, p in params.items() if p.requires_grad)
        lifetime = policy.lifetime_on(axes)
        return Form(name, params, trainable, layout, axes, dtype, self.device, lifetime, codecs, part, tied)


def lay_out(
    shapes: Mapping[str, Sequence[int]],
    traits: Mapping[str, Traits],
    *,
    block: int,
    exact_numel: int,
    quantises: bool,
    sizes: Sequence[int],
    indices: Sequence[int],
    parts: int = 1,
) -> tuple[UnitLayout, bool]:
    """Lay out a unit's parameters, and return whether something of it is quantised.

    quantises: something has a format. The rest: as ``Policy`` and ``make_layout`` say.
    """
    ordered = sorted(shapes, key=lambda n: repr(traits[n]))  # stable: like traits lie together, few runs
    never = [n for n in shapes if quantises and traits[n].exact]
    exact = exact_names({n: prod(shape) for n, shape in shapes.items()}, never, exact_numel)
    layout = make_layout(
        {n: shapes[n] for n in ordered},
        block=block,
        sizes=sizes,
        indices=indices,
        exact=exact,
        parts=parts,
        used={n: traits[n].used for n in ordered},
    )
    return layout, quantises and len(exact) < len(shapes)


def _initial_values(
    label: str,
    params: Mapping[str, nn.Parameter],
    init: Init | None,
    device: torch.device,
    sum_dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Return the full values of a unit's parameters, each in its parameter's shape.

    They come from the module or, for meta parameters, from ``init``, in at least fp32.
    """
    meta = [n for n, p in params.items() if p.is_meta]
    if meta and init is None:
        raise ValueError(
            f"parameters of unit {label!r} are on the meta device ({meta[0]}, ...): give init=, a function from "
            "the parameter's name to its tensor"
        )
    values = {n: p.detach() for n, p in params.items() if not p.is_meta}
    for name in meta:
        assert init is not None
        value = init(name)
        if tuple(value.shape) != tuple(params[name].shape):
            raise ValueError(
                f"init gave {name!r} shape {tuple(value.shape)}, its shape is {tuple(params[name].shape)}"
            )
        values[name] = value.to(device=device, dtype=sum_dtype)
    return values


def refuse_foreign_parallelism(module: nn.Module) -> None:
    """Raise ValueError for another framework's data parallelism or DTensors, and for expert-parallel parameters."""
    for name, inner in module.named_modules():
        wrapper = next((c for c in _class_names(inner) if c in _WRAPPERS), None)
        if wrapper is not None:
            label = f"submodule {name!r}" if name else "the module"
            raise ValueError(
                f"{label} is a {wrapper}, which reduces or shards gradients by itself, and zero.shard would do so a "
                "second time: give zero.shard the plain module (a wrapper's .module; no fully_shard or replicate)"
            )
    for name, param in module.named_parameters():
        if "DTensor" in _class_names(param):
            raise ValueError(
                f"parameter {name!r} is a DTensor, which another framework has sharded: give zero.shard the module "
                "with plain parameters (for tensor parallelism this rank's own part, and create_mesh(tp=...))"
            )
        if getattr(param, "allreduce", True) is False:
            raise ValueError(
                f"parameter {name!r} has allreduce=False, megatron's sign for experts that are split over an "
                "expert-parallel group: data-parallel ranks hold other experts there, and zero.shard would mix them; "
                "build the module with expert_model_parallel_size 1"
            )


def _class_names(x: object) -> list[str]:
    return [c.__name__ for c in type(x).__mro__]


def _refuse_unfit(module: nn.Module, dtype: torch.dtype | None, loss_scaled: bool = False) -> None:
    """Raise ValueError for modules, and for dtypes of parameters, that training would damage.

    dtype: ``Policy.dtype``, which floating-point parameters are converted to. loss_scaled: ``Policy.loss_scaled``.
    """
    for name, param in module.named_parameters():
        _refuse_dtype(name, param, dtype, SCALED if loss_scaled else TRAINED)
    for name, inner in module.named_modules():
        if isinstance(inner, nn.RNNBase):
            raise ValueError(
                f"module {name or type(inner).__name__!r} is a torch.nn.{inner.mode.partition('_')[0]}: it keeps "
                "references to its weights, and on CUDA moves them out of the engine's buffer; nearest: its cell, "
                "torch.nn.LSTMCell, GRUCell or RNNCell"
            )
        if isinstance(inner, (nn.Embedding, nn.EmbeddingBag)) and inner.max_norm is not None:
            raise ValueError(
                f"module {name or type(inner).__name__!r}: max_norm={inner.max_norm} writes into the weight in every "
                "forward, past the optimizer's own copy of it: use max_norm=None, and clip rows in the forward"
            )
        if isinstance(inner, (nn.Embedding, nn.EmbeddingBag)) and inner.sparse and inner.weight.requires_grad:
            raise ValueError(
                f"module {name or type(inner).__name__!r}: sparse=True gives sparse gradients, and what is reduced "
                "and sharded is dense: use sparse=False"
            )


def _refuse_dtype(
    name: str, param: nn.Parameter, dtype: torch.dtype | None, trained: tuple[torch.dtype, ...]
) -> None:
    legal = trained if param.requires_grad else FROZEN
    converts = dtype is not None and dtype != param.dtype
    if (dtype or param.dtype) in legal and (param.is_floating_point() or not converts):
        return
    kind = "trained" if param.requires_grad else "frozen"
    becomes = f", which Policy(dtype) makes {dtype}" if converts else ""
    if param.is_complex():
        cure = "keep torch.view_as_real of it as the parameter, and torch.view_as_complex in the forward"
    elif not param.is_floating_point():
        cure = "register it as a buffer: it is then left as it is"
    elif param.dtype == torch.float16 or dtype == torch.float16:
        cure = (
            "its gradients need loss scaling; nearest: bfloat16, module.bfloat16() or Policy(dtype=torch.bfloat16), "
            "or losses that you scale and Policy(loss_scaled=True)"
        )
    else:
        cure = "nearest: bfloat16, module.bfloat16() or Policy(dtype=torch.bfloat16)"
    raise ValueError(
        f"parameter {name!r} is {kind} and {param.dtype}{becomes}: {kind} parameters are "
        f"{', '.join(str(d).removeprefix('torch.') for d in legal)}; {cure}"
    )


def _refuse_different_starts(module: nn.Module, place_of: Mapping[int, Placed], mesh: Mesh) -> None:
    """Refuse ranks along a parameter's axes that start from different values of it.

    Each rank contributes its own slices, so different values would mix, or drift apart.
    """
    axes_of = {i: each.axes for i, each in place_of.items()}
    named = [(name, p) for name, p in module.named_parameters() if not p.is_meta]
    for axes in dict.fromkeys(axes_of.values()):
        held = [(name, p.detach()) for name, p in named if axes_of[id(p)] is axes]
        if not (held and axes.axes):
            continue
        # A hash: a sum in fp64 takes a copy in fp64 of the whole parameter, as v.sum(dtype=torch.float64) does, too.
        row = torch.stack([fingerprint(v.reshape(-1)) for _, v in held]).to(mesh.device)
        for at in unlike(mesh, axes, row):
            raise ValueError(
                f"data-parallel ranks start from different values of {held[at][0]!r}: build the module from the same "
                "seed, or load the same weights, on every rank"
            )


def _refuse_names_apart(
    spread: Sequence[Placed], place_of: Mapping[int, Placed], names: Mapping[int, str], mesh: Mesh
) -> None:
    """Refuse one name on two data-parallel ranks that its axes do not join.

    Such ranks would train copies that drift apart, and a checkpoint holds one tensor of a name. Collective where a
    unit has axes of its own, unless it says that the others hold other parameters (``On.apart``).
    """
    own = spread[-1].axes  # of the module's own parameters
    if all(each.axes is own or each.apart for each in spread):
        return
    first = {  # of the ranks that share a unit on these axes
        axes: int(mesh.gather_along(axes.axes, torch.tensor([mesh.rank], device=mesh.device)).min())
        for axes in dict.fromkeys(each.axes for each in spread)
    }
    held = {names[i]: first[each.axes] for i, each in place_of.items() if not each.apart}
    place = [mesh.pp.index, mesh.tp.index]
    seen: dict[str, int] = {}
    for there, theirs in gather_objects([place, held]):
        for name, rank in theirs.items() if there == place else ():
            if seen.setdefault(name, rank) != rank:
                raise ValueError(
                    f"ranks {seen[name]} and {rank} hold a parameter {name!r}, but its unit's axes do not "
                    "join them: put the unit on axes that do (the ranks along further axes hold replicas), or give "
                    "different parameters different names"
                )


def _one_dtype(label: str, params: Mapping[str, nn.Parameter]) -> torch.dtype:
    dtypes = {p.dtype for p in params.values()}
    if len(dtypes) > 1:
        raise ValueError(
            f"unit {label!r} mixes dtypes {sorted(map(str, dtypes))}: one flat buffer has one; "
            "say Policy(dtype=...) to convert all, or split the unit"
        )
    return dtypes.pop()


def _nested(spread: Sequence[Placed], names: Mapping[int, str]) -> list[Placed]:
    """Return the specs whose modules lie inside others that are listed.

    Raises ValueError for such a spec on the same axes, and for a module of another one.
    """
    by_module = {id(m): each for each in spread for m in each.modules}
    found: dict[int, Placed] = {}
    for m in (m for each in spread for m in each.modules):
        if id(m) not in names:
            raise ValueError(f"unit {type(m).__name__} is not a submodule of the module that is sharded")
        for inner in list(m.modules())[1:]:
            if (each := by_module.get(id(inner))) is None:
                continue
            if each.axes is by_module[id(m)].axes:
                raise ValueError(
                    f"unit {names[id(inner)]!r} lies inside unit {names[id(m)]!r}: a parameter has one unit; list one"
                )
            found[id(each)] = each
    return list(found.values())


def _unique(units: Iterable[Unit]) -> list[Unit]:
    return list(dict.fromkeys(units))
