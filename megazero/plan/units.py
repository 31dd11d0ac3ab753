"""This module says which units a rank holds, with their sizes, from the configuration alone.

It lays units out as zero/layout.py does: parameters begin on blocks, regions are whole blocks of every rank's slice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from megazero.config.model import ModelConfig
from megazero.config.roles import ParameterRole, head_copies, parameter_roles
from megazero.config.wire import Wire
from megazero.plan.communication import UnitShape
from megazero.pp.partition import StageSpec

EMBEDDING, LAYER, HEAD = "embedding", "layer", "head"
WIDTHS = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}  # bytes of an element


@dataclass(frozen=True)
class Parameter:
    """A parameter on one rank. replicated: other tensor-parallel ranks hold it, too. copies: how many in a row do."""

    numel: int
    replicated: bool
    copies: int
    tied: bool = False


@dataclass(frozen=True)
class Module:
    """What one module of a stage needs: its kind, and the numbers of its units among those of the rank."""

    kind: str
    units: tuple[int, ...]


@dataclass(frozen=True)
class RankUnits:
    """The units of one rank in the order of use, and the modules of each of its parts (virtual stages).

    numels: the parameters of each unit on this rank, without padding.
    """

    shapes: tuple[UnitShape, ...]
    numels: tuple[int, ...]
    parts: tuple[tuple[Module, ...], ...]


@lru_cache(maxsize=64)
def module_parameters(model: ModelConfig, tp: int) -> Mapping[str, tuple[Parameter, ...]]:
    """Return the parameters of the embedding, of a layer and of the head on a rank with the largest share."""
    by_module: defaultdict[str, list[Parameter]] = defaultdict(list)
    for role in parameter_roles(model):
        kind, _, rest = role.name.partition(".")
        if kind == "layers":
            if not rest.startswith("0."):
                continue
            kind = LAYER
        by_module[kind].append(_local(model, role, tp))
    if not model.untie_embeddings_and_output_weights:
        table = next(p for p in by_module[EMBEDDING] if p.tied)
        by_module[HEAD].append(table)
    return {kind: tuple(parameters) for kind, parameters in by_module.items()}


def _local(model: ModelConfig, role: ParameterRole, tp: int) -> Parameter:
    tied = role.name == "embedding.tokens.weight" and not model.untie_embeddings_and_output_weights
    if role.name in ("embedding.tokens.weight", "head.weight"):
        return Parameter(model.padded_vocab_size(tp) // tp * model.hidden_size, False, 1, tied)
    copies = head_copies(model, role.name, tp)
    replicated = tp > 1 and (role.split is None or copies > 1)
    share = 1 if role.split is None else tp / copies
    return Parameter(int(prod(role.shape) / share), replicated, copies)


def rank_units(
    model: ModelConfig,
    stages: Sequence[StageSpec],
    tp: int,
    sequence_parallel: bool,
    wire: Wire,
    chunk_numel: int,
    data_ranks: int,
    os: int,
) -> RankUnits:
    """Return the units of the rank that holds ``stages``.

    data_ranks: d, whose slices are whole blocks. os: how many ranks share the optimizer states.
    """
    by_kind = module_parameters(model, tp)
    ends = any(s.embedding for s in stages), any(s.head for s in stages)
    shapes: list[UnitShape] = []
    numels: list[int] = []
    table: int | None = None  # the unit of tied embeddings, where this rank holds both ends
    parts: list[tuple[Module, ...]] = []
    for stage in stages:
        modules: list[Module] = []
        kinds = [EMBEDDING] * stage.embedding + [LAYER] * len(stage.layers) + [HEAD] * stage.head
        for kind in kinds:
            own: list[int] = []
            fresh = by_kind[kind]
            if kind == HEAD and all(ends) and any(p.tied for p in fresh):
                assert table is not None
                own, fresh = [table], tuple(p for p in fresh if not p.tied)
            for group in _chunks(fresh, chunk_numel, apart=not all(ends)):
                if kind == EMBEDDING and any(p.tied for p in group):
                    table = len(shapes)
                own.append(len(shapes))
                numels.append(sum(p.numel for p in group))
                tied = not all(ends) and group[0].tied
                shapes.append(_shape(group, wire, tp, sequence_parallel, data_ranks, os, tied))
            modules.append(Module(kind, tuple(own)))
        parts.append(tuple(modules))
    return RankUnits(tuple(shapes), tuple(numels), tuple(parts))


def _chunks(parameters: Sequence[Parameter], limit: int, apart: bool) -> tuple[tuple[Parameter, ...], ...]:
    """Cut a module's parameters into units. ``apart``: a tied one, which the other end holds, has its own."""
    out: list[list[Parameter]] = []
    room = 0
    for p in parameters:
        if p.tied and apart:
            continue
        if not out or p.numel > room:
            out.append([])
            room = limit
        out[-1].append(p)
        room -= p.numel
    first = [[p] for p in parameters if p.tied and apart]
    return tuple(tuple(group) for group in [*first, *out])


@lru_cache(maxsize=4096)
def _shape(
    group: tuple[Parameter, ...],
    wire: Wire,
    tp: int,
    sequence_parallel: bool,
    data_ranks: int,
    os: int,
    tied: bool,
) -> UnitShape:
    block = wire.block
    quantises = bool(wire.codings)
    exact = [p for p in group if p.numel <= wire.exact_numel or quantises and p.replicated]
    coded = [p for p in group if p not in exact]
    if not coded:
        coded, exact, quantises = list(group), [], False

    def region(parameters: Sequence[Parameter]) -> int:
        used = sum(-(-p.numel // block) * block for p in parameters)
        return -(-used // (block * data_ranks)) * block * data_ranks

    summed = sum(p.numel for p in group if p.replicated and (sequence_parallel or p.copies > 1))
    return UnitShape(region(coded), region(exact), quantises, summed // os, tied)
