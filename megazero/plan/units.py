"""Which units a rank holds, with their sizes, from the configuration alone.

It lays units out as zero/layout.py does: parameters begin on blocks, regions are whole blocks of every rank's slice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import chain, groupby, islice
from typing import NamedTuple, TypeVar

from megazero.config.layout.wire import Wire
from megazero.config.model.section import ModelConfig
from megazero.config.model.spec import EMBEDDING, HEAD, ParameterSpec, padded_spec
from megazero.mesh.dealing import Cut
from megazero.plan.communication import UnitShape
from megazero.pp.partition import StageSpec

Parameter = TypeVar("Parameter")
Joined = tuple[str, ...]  # the kinds of modules whose parameters are gathered together
ShapeCounts = tuple[tuple[UnitShape, int], ...]  # how many units there are of each shape
WIDTHS = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}  # bytes of an element


@dataclass(frozen=True)
class Module:
    """What one module of a stage needs: its kind, and the numbers of its units among those of the rank."""

    kind: str
    units: tuple[int, ...]


class RankUnits:
    """The units of one rank in the order of use, and the modules of each of its parts (virtual stages).

    counts: how many units there are of each shape. elements: of all of them. layers: how many there are of each kind.
    matrices_apart: elements of the layers' matrices, by how many data-parallel neighbours hold other ones.
    """

    def __init__(
        self,
        stages: Sequence[StageSpec],
        joined: int,
        made: Mapping[Joined, ModuleUnits],
        kinds: tuple[str, ...],
        matrices: Mapping[str, Sequence[LayerMatrix]],
    ) -> None:
        """joined: how many layers are gathered together. kinds: of all layers of the model. matrices: of a layer, by
        kind."""
        self._made = made
        self._units = [joined_modules(stage, joined, kinds) for stage in stages]  # of each part
        self.layers = Counter(kinds[i] for s in stages for i in s.layers)
        self.matrices_apart: Counter[int] = Counter()
        for kind, number in self.layers.items():
            for matrix in matrices[kind]:
                self.matrices_apart[matrix.apart] += number * matrix.numel
        self.counts = self._counts(self._units)
        self.elements = sum(shape.elements * number for shape, number in self.counts)

    @cached_property
    def modules(self) -> Mapping[str, int]:
        """Return, for each kind of module that is here, the elements of the units that it needs.

        Tied to an embedding that is here, too, the head needs the unit of the table.
        """
        return self._elements(lambda shape: True)

    def gathered_modules(self, p: int) -> Mapping[str, int]:
        """Return the same of the units that are gathered if P = ``p``, of which experts may leave one rank."""
        return self._elements(lambda shape: shape.apart < p)

    def _elements(self, counts: Callable[[UnitShape], bool]) -> Mapping[str, int]:
        sizes: dict[str, int] = {}
        for unit in dict.fromkeys(chain.from_iterable(self._units)):
            elements = sum(shape.elements for shape in self._made[unit].shapes if counts(shape))
            sizes |= {kind: max(sizes.get(kind, 0), elements) for kind in unit}
        if self._table is not None:
            table = self._made[EMBEDDING,].shapes[self._table]
            sizes[HEAD] += table.elements * counts(table)
        return sizes

    @property
    def _table(self) -> int | None:
        embedding = self._made.get((EMBEDDING,))
        return embedding.table if embedding else None

    def reduced(self, most: int) -> tuple[UnitShape, ...]:
        """Return the units in the order of a backward's reductions. Of neighbours of one kind ``most`` are enough."""
        order: list[Joined] = []
        for units in reversed(self._units):
            for _, alike in groupby(reversed(units), key=lambda unit: unit[0]):
                order += islice(alike, most)
        return tuple(shape for unit in order for shape in reversed(self._made[unit].shapes))

    def _counts(self, parts: Iterable[Sequence[Joined]]) -> ShapeCounts:
        found: Counter[UnitShape] = Counter()
        for unit, number in Counter(chain.from_iterable(parts)).items():
            for shape in self._made[unit].shapes:
                found[shape] += number
        return tuple(found.items())

    @cached_property
    def part_counts(self) -> Sequence[ShapeCounts]:
        """How many units of each shape each part is the first to use."""
        alike = {units: self._counts([units]) for units in set(self._units)}
        return [alike[units] for units in self._units]

    @cached_property
    def _laid_out(self) -> tuple[tuple[UnitShape, ...], tuple[tuple[Module, ...], ...]]:
        shapes: list[UnitShape] = []
        parts: list[tuple[Module, ...]] = []
        for units in self._units:
            modules: list[Module] = []
            for unit in units:
                own = list(range(len(shapes), len(shapes) + len(self._made[unit].shapes)))
                shapes += self._made[unit].shapes
                if unit == (HEAD,) and self._table is not None:
                    own.insert(0, self._table)  # the embedding is the first module of the rank
                modules += [Module(kind, tuple(own)) for kind in unit]
            parts.append(tuple(modules))
        return tuple(shapes), tuple(parts)

    @property
    def shapes(self) -> tuple[UnitShape, ...]:
        return self._laid_out[0]

    @property
    def parts(self) -> tuple[tuple[Module, ...], ...]:
        return self._laid_out[1]


@lru_cache(maxsize=4096)
def joined_modules(stage: StageSpec, joined: int, kinds: tuple[str, ...]) -> tuple[Joined, ...]:
    """Return what is gathered together, in order of use, as models/decoder.py: units_of_parts."""
    runs = (stage.layers[i : i + joined] for i in range(0, len(stage.layers), joined))
    layers = tuple(tuple(kinds[i] for i in run) for run in runs)
    return ((EMBEDDING,),) * stage.embedding + layers + ((HEAD,),) * stage.head


class LayerMatrix(NamedTuple):
    """A parameter of a layer that is a matrix, or a stack of them, one of each expert.

    cut: one matrix as it is stepped, held by nobody. stacked: how many there are on a rank. numel: of what a rank
    holds of them all. apart: as ``UnitShape``'s.
    """

    cut: Cut
    stacked: int
    numel: int
    apart: int


@lru_cache(maxsize=64)
def layer_matrices(model: ModelConfig, tp: int, ep: int) -> Mapping[str, tuple[LayerMatrix, ...]]:
    """Return the matrices of each kind of layer on one of ``tp`` ranks, and of ``ep`` that share the experts."""

    def described(p: ParameterSpec) -> LayerMatrix:
        *_, rows, columns = p.local_shape(1)  # those that ranks cut are stepped whole
        shared = p.cut is not None and p.copies(tp) < tp
        cut = Cut(rows, columns, held={}, shared=shared)
        return LayerMatrix(cut, max(p.experts, 1), p.local_numel(tp), apart_of(p, tp, ep))

    layers = padded_spec(model, tp, ep).layers
    return {layer.kind: tuple(described(p) for p in layer.parameters if p.multiplies) for layer in layers}


def apart_of(parameter: ParameterSpec, tp: int, ep: int) -> int:
    """Return how many data-parallel neighbours hold other elements of a parameter: of experts that ranks share."""
    return max(1, ep // tp) if parameter.experts else 1


def rank_units(
    model: ModelConfig,
    stages: Sequence[StageSpec],
    tp: int,
    sequence_parallel: bool,
    wire: Wire,
    joined: int,
    chunk_numel: int,
    data_ranks: int,
    os: int,
    ep: int = 1,
) -> RankUnits:
    """Return the units of the rank that holds ``stages``.

    joined: layers that are gathered together. data_ranks: d, whose slices are whole blocks. os: how many ranks share
    the optimizer states. ep: how many share the experts.
    """
    whole = any(s.embedding for s in stages) and any(s.head for s in stages)
    spec = padded_spec(model, tp, ep)
    kinds = tuple(layer.kind for layer in spec.by_place)
    made = {
        unit: _module_units(model, unit, tp, ep, sequence_parallel, wire, chunk_numel, data_ranks, os, whole)
        for unit in dict.fromkeys(unit for stage in stages for unit in joined_modules(stage, joined, kinds))
    }
    return RankUnits(stages, joined, made, kinds, layer_matrices(model, tp, ep))


@dataclass(frozen=True)
class ModuleUnits:
    """The units of joined modules. table: the number of the unit whose weight is the head's, too, on this rank."""

    shapes: tuple[UnitShape, ...]
    table: int | None = None


@lru_cache(maxsize=4096)
def _module_units(
    model: ModelConfig,
    unit: Joined,
    tp: int,
    ep: int,
    sequence_parallel: bool,
    wire: Wire,
    chunk_numel: int,
    data_ranks: int,
    os: int,
    whole: bool,
) -> ModuleUnits:
    """whole: the rank holds the embedding and the head."""
    modules = padded_spec(model, tp, ep).modules
    parameters = tuple(p for kind in unit for p in modules[kind].parameters)
    if unit == (HEAD,) and whole:
        parameters = tuple(p for p in parameters if not p.tied)
    # The pipeline's other end holds a tied parameter too, unless this rank is both: it has a unit of its own.
    ends = [] if whole else [p for p in parameters if p.tied]
    others = [p for p in parameters if whole or not p.tied]
    apart = partial(apart_of, tp=tp, ep=ep)
    # Experts that data-parallel ranks share are units of their own.
    by_axes = [list(each) for _, each in groupby(sorted(others, key=apart), key=apart)]
    cut = [chunk for own in by_axes for chunk in chunks(own, [p.local_numel(tp) for p in own], chunk_numel)]
    groups = [*((p,) for p in ends), *map(tuple, cut)]
    shapes = tuple(
        _shape(
            group, wire, tp, sequence_parallel, data_ranks, os, not whole and group[0].tied, apart(group[0])
        )
        for group in groups
    )
    shared = [
        i for i, group in enumerate(groups) if whole and unit == (EMBEDDING,) and any(p.tied for p in group)
    ]
    return ModuleUnits(shapes, *shared)


def chunks(parameters: Sequence[Parameter], numels: Sequence[int], limit: int) -> list[list[Parameter]]:
    """Cut a module's parameters, of so many elements each, into units."""
    out: list[list[Parameter]] = []
    room = 0
    for parameter, numel in zip(parameters, numels, strict=True):
        if not out or numel > room:
            out.append([])
            room = limit
        out[-1].append(parameter)
        room -= numel
    return out


def _shape(
    group: tuple[ParameterSpec, ...],
    wire: Wire,
    tp: int,
    sequence_parallel: bool,
    data_ranks: int,
    os: int,
    tied: bool,
    apart: int,
) -> UnitShape:
    block = wire.block
    quantises = bool(wire.codings)
    data_ranks //= apart
    numels = {p: p.local_numel(tp) for p in group}
    exact = [p for p in group if numels[p] <= wire.exact_numel or quantises and p.exact(tp)]
    coded = [p for p in group if p not in exact]
    if not coded:
        coded, exact, quantises = list(group), [], False

    def region(parameters: Sequence[ParameterSpec]) -> int:
        used = sum(-(-numels[p] // block) * block for p in parameters)
        return -(-used // (block * data_ranks)) * block * data_ranks

    summed = sum(numels[p] for p in group if p.partial(tp, sequence_parallel))
    return UnitShape(region(coded), region(exact), quantises, summed // os, tied, apart)
