"""The verb ``shard``: from a torch module to an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from megazero.comm.hops import Traffic
from megazero.comm.timing import no_timing
from megazero.comm.wire import Codecs, Coding
from megazero.mesh.mesh import Mesh
from megazero.zero.axes import DataAxes
from megazero.zero.build import Init, On, UnitSpec, build_units, plain_name, refuse_foreign_parallelism
from megazero.zero.by_matrix import Muon
from megazero.zero.elementwise import OptimizerFactory, default_adamw
from megazero.zero.engine import Engine
from megazero.zero.optimizer import SliceOptimizer, Traits
from megazero.zero.policy import Outer, Policy
from megazero.zero.scalars import StepInfo, StepPart

__all__ = [
    "Codecs",
    "Coding",
    "DataAxes",
    "Engine",
    "Muon",
    "On",
    "Outer",
    "Policy",
    "StepInfo",
    "StepPart",
    "Traits",
    "UnitSpec",
    "default_adamw",
    "shard",
]


def shard(
    module: nn.Module,
    *,
    mesh: Mesh,
    policy: Policy | None = None,
    units: Iterable[UnitSpec] = (),
    optimizer: OptimizerFactory | None = None,
    clip_norm: float | None = None,
    traits: Callable[[str, nn.Parameter], Traits] | None = None,
    init: Init | None = None,
    parts: Sequence[Sequence[nn.Module]] = (),
    tied: Mapping[str, str] = MappingProxyType({}),
    timed: Callable[[str], Any] = no_timing,
    traffic: Traffic | None = None,
) -> Engine:
    """Shard a torch module's parameters, gradients and optimizer states over the mesh's data-parallel axes.

    mesh: what ``create_mesh`` returned; its cuts are the shard factors P, G, OS.
    units: modules (or tuples of modules) whose parameters are gathered together, in forward order. Parameters
        of no listed module form one more unit, which is gathered around the whole forward. ``On(modules, axes)``
        puts a unit on other axes than the mesh's (``DataAxes.over``).
    optimizer: makes an elementwise torch optimizer from a list of param groups. The default is AdamW, fused. Muon
        (``partial(zero.Muon, lr=...)``) needs ``traits`` that mark matrices.
    clip_norm: the limit of the global gradient norm.
    traits: gives each parameter's optimizer options and tensor-parallel replication. By default 1-D
        parameters have no weight decay.
    init: for modules on the meta device. It returns a parameter's full tensor for its name, and is called
        unit by unit.
    parts: for a module that runs part by part (virtual pipeline stages): the listed modules of each part.
        Every part has a backward for each micro-batch; ``Engine.segment`` says which one runs.
    tied: parameters that the other end of the pipeline holds, too. It maps the name here to a name common to
        both. The ends sum their gradients once per step; this needs ``create_mesh(ends=True)``.
    timed: a factory of context managers. It is called with 'optimizer' and, for waits, with 'exposed_' and the hop's
        name: 'exposed_refresh_inter', 'exposed_gather_intra', ... (``log/time_bill.py`` lists them).
    traffic: counters of the bytes that this rank sends. By default the engine has its own.

    Returns the engine. This is collective, and every rank must pass the same. Raises ValueError for units that nest
    or mix dtypes, for policies that the shard factors do not allow, for modules that another framework parallelised,
    for a mesh on another CUDA device than the current one, for parameters and modules that training would damage, and
    for optimizers that are neither elementwise (the factory is tried on a few small tensors) nor by matrix.
    """
    refuse_foreign_parallelism(module)
    _refuse_other_device(mesh.device)
    policy = policy or Policy()
    choose = traits or _no_decay_for_vectors
    named = ((plain_name(n), p) for n, p in module.named_parameters())
    chosen = {n: replace(choose(n, p), frozen=not p.requires_grad) for n, p in named}
    if tied and mesh.ends is None:
        raise ValueError(f"tied={dict(tied)} needs the axis of the pipeline's ends: create_mesh(ends=True)")
    made = build_units(module, units, mesh, policy, chosen, init, parts, tied)
    _refuse_no_matrices(module, chosen)
    slices = SliceOptimizer(made.units, chosen, optimizer or default_adamw())
    if traits is None and slices.matrices is not None:
        raise ValueError(
            f"{type(slices.torch).__name__} steps whole matrices and has to know which: give traits=, which returns "
            "Traits(matrix=True) for them (weights of linears between the embedding and the head, as a rule)"
        )
    mesh.claim()
    return Engine(
        module, mesh, policy, made, chosen, slices, clip_norm, timed, traffic or Traffic(mesh.links)
    )


def _refuse_other_device(device: torch.device) -> None:
    """Raise ValueError unless the mesh's CUDA device is the current one, whose streams kernels and NCCL take."""
    if device.type != "cuda" or device.index is None:
        return
    current = torch.cuda.current_device()
    if device.index != current:
        raise ValueError(
            f"the mesh is on {device}, and kernels would be launched on the current device, cuda:{current}: call "
            f"torch.cuda.set_device({device.index}) before zero.shard"
        )


def _refuse_no_matrices(module: nn.Module, traits: Mapping[str, Traits]) -> None:
    for name, param in module.named_parameters():
        if traits[plain_name(name)].matrix and param.ndim not in (2, 3):
            raise ValueError(
                f"traits say matrix=True of {name!r}, whose shape is {tuple(param.shape)}: a matrix has two "
                "dimensions, a stack of them three; leave it out"
            )


def _no_decay_for_vectors(name: str, param: nn.Parameter) -> Traits:
    return Traits(options=(("weight_decay", 0.0),)) if param.ndim < 2 else Traits()
