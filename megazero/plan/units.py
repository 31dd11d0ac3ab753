"""Which units a rank holds, with their sizes, from the configuration alone.

Which parameters lie together, and how, are the engine's own rules (zero/layout.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby, islice
from typing import NamedTuple

from megazero.config import RunConfig
from megazero.config.layout.wire import Wire
from megazero.config.model.spec import EMBEDDING, HEAD, ParameterSpec, padded_spec
from megazero.mesh.dealing import Cut
from megazero.plan.communication import UnitShape
from megazero.pp.partition import StageSpec
from megazero.products import PLAIN
from megazero.zero.layout import exact_names, groups_of, region_numel

Group = tuple[ParameterSpec, ...]  # parameters of a unit, in the order of their modules
Joined = tuple[str, ...]  # the kinds of modules whose parameters are gathered together
ShapeCounts = tuple[tuple[UnitShape, int], ...]  # how many units there are of each shape
WIDTHS = {word: int(word[-2:]) // 8 for word in PLAIN}  # bytes of an element


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

    def __init__(self, stages: Sequence[StageSpec], rule: UnitRule) -> None:
        first, embeds, last = (
            any(getattr(s, name) for s in stages) for name in ("embedding", "embeds", "head")
        )
        # A tied head takes the weight of an embedding that is here, too.
        here, whole = embeds and last, first and last
        self._units = [rule.joined_modules(stage) for stage in stages]  # of each part
        self._made = {unit: rule.units_of(unit, here, whole) for unit in chain.from_iterable(self._units)}
        self.layers = Counter(rule.kinds[i] for s in stages for i in s.layers)
        self.matrices_apart: Counter[int] = Counter()
        for kind, number in self.layers.items():
            for matrix in rule.matrices[kind]:
                self.matrices_apart[matrix.apart] += number * matrix.numel
        self.counts = self._counts(self._units)
        self.elements = sum(shape.elements * number for shape, number in self.counts)

    @cached_property
    def modules(self) -> Mapping[str, int]:
        """Return, for each kind of module that is here, the elements of the units that it needs.

        Tied to an embedding that is here, too, or calling it, the head needs the unit of the table.
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
    def _laid_out(self) -> tuple[tuple[UnitShape, ...], tuple[Group, ...], tuple[tuple[Module, ...], ...]]:
        shapes, groups, parts = list[UnitShape](), list[Group](), list[tuple[Module, ...]]()
        for units in self._units:
            modules: list[Module] = []
            for unit in units:
                made, first = self._made[unit], len(shapes)
                shapes += made.shapes
                groups += made.groups
                for kind, needs in zip(unit, made.needs, strict=True):
                    # The head needs the table of an embedding that is here, too: the rank's first module.
                    table = [self._table] if kind == HEAD and self._table is not None else []
                    modules.append(Module(kind, (*table, *(first + number for number in needs))))
            parts.append(tuple(modules))
        return tuple(shapes), tuple(groups), tuple(parts)

    @property
    def shapes(self) -> tuple[UnitShape, ...]:
        return self._laid_out[0]

    @property
    def groups(self) -> tuple[Group, ...]:
        """The parameters of each unit."""
        return self._laid_out[1]

    @property
    def parts(self) -> tuple[tuple[Module, ...], ...]:
        return self._laid_out[2]


class LayerMatrix(NamedTuple):
    """A parameter of a layer that is a matrix, or a stack of them, one of each expert.

    cut: one matrix as it is stepped, held by nobody. stacked: how many there are on a rank. numel: of what a rank
    holds of them all. apart: as ``UnitShape``'s.
    """

    cut: Cut
    stacked: int
    numel: int
    apart: int


@dataclass(frozen=True)
class ModuleUnits:
    """The units of joined modules, and the parameters of each. needs: the numbers of the units of each module.
    table: the number of the unit whose weight is the head's, too, on this rank.
    """

    shapes: tuple[UnitShape, ...]
    groups: tuple[Group, ...]
    needs: tuple[tuple[int, ...], ...]
    table: int | None = None


class UnitRule:
    """How the modules of a rank are cut into units, whatever its stages.

    kinds: those of all layers of the model. matrices: of a layer of each kind.
    """

    def __init__(self, config: RunConfig, wire: Wire, data_ranks: int, os: int) -> None:
        """data_ranks: d, whose slices are whole blocks. os: how many ranks share the optimizer states."""
        parallel, self.zero = config.parallel, config.zero
        self.tp, self.ep = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
        self.sequence_parallel = parallel.sequence_parallel
        self.wire, self.data_ranks, self.os = wire, data_ranks, os
        self.spec = padded_spec(config.model, self.tp, self.ep)
        self.kinds = tuple(layer.kind for layer in self.spec.by_place)
        self.matrices = {
            layer.kind: tuple(self._matrix(p) for p in layer.parameters if p.multiplies)
            for layer in self.spec.layers
        }
        self._made: dict[tuple[Joined, bool, bool], ModuleUnits] = {}

    def apart(self, parameter: ParameterSpec) -> int:
        """Return how many data-parallel neighbours hold other elements of a parameter (of shared experts)."""
        return max(1, self.ep // self.tp) if parameter.experts else 1

    def _matrix(self, p: ParameterSpec) -> LayerMatrix:
        *_, rows, columns = p.local_shape(1)  # those that ranks cut are stepped whole
        shared = p.cut is not None and p.copies(self.tp) < self.tp
        cut = Cut(rows, columns, held={}, shared=shared)
        return LayerMatrix(cut, max(p.experts, 1), p.local_numel(self.tp), self.apart(p))

    def joined_modules(self, stage: StageSpec) -> tuple[Joined, ...]:
        """Return what is gathered together, in order of use, as models/decoder.py: units_of_parts."""
        joined = self.zero.zero_unit_layers
        runs = (stage.layers[i : i + joined] for i in range(0, len(stage.layers), joined))
        layers = tuple(tuple(self.kinds[i] for i in run) for run in runs)
        return ((EMBEDDING,),) * stage.embeds + layers + ((HEAD,),) * stage.head

    def units_of(self, unit: Joined, here: bool, whole: bool) -> ModuleUnits:
        """Return the units of joined modules. here: the rank holds an embedding and the head; whole: the first and
        the last stage."""
        key = unit, here, whole
        if key not in self._made:
            self._made[key] = self._units_of(unit, here, whole)
        return self._made[key]

    def _units_of(self, unit: Joined, here: bool, whole: bool) -> ModuleUnits:
        members = [self.spec.modules[kind].parameters for kind in unit]
        if unit == (HEAD,) and here:
            members = [tuple(p for p in members[0] if not p.tied)]
        parameters = [(at, p) for at, member in enumerate(members) for p in member]
        # The pipeline's other end holds a tied parameter too, unless this rank is both.
        tied = frozenset() if whole else {each for each in parameters if each[1].tied}
        found: list[list[tuple[int, ParameterSpec]]] = []
        # Experts that data-parallel ranks share are units of their own.
        for _, alike in groupby(sorted(parameters, key=self._apart_of), key=self._apart_of):
            numels = [(each, each[1].local_numel(self.tp)) for each in alike]
            found += groups_of(numels, tied, self.zero.zero_chunk_numel)
        owner = {each: number for number, group in enumerate(found) for each in group}
        needs = (dict.fromkeys(owner[at, p] for p in member) for at, member in enumerate(members))
        groups = tuple(tuple(p for _, p in group) for group in found)
        shapes = tuple(self._shape(ps, group[0] in tied) for ps, group in zip(groups, found, strict=True))
        table = None
        if here and unit == (EMBEDDING,):
            table = next((i for i, group in enumerate(groups) if any(p.tied for p in group)), None)
        return ModuleUnits(shapes, groups, tuple(map(tuple, needs)), table)

    def _apart_of(self, each: tuple[int, ParameterSpec]) -> int:
        return self.apart(each[1])

    def _shape(self, group: Sequence[ParameterSpec], tied: bool) -> UnitShape:
        tp, wire, apart = self.tp, self.wire, self.apart(group[0])
        numels = {p: p.local_numel(tp) for p in group}
        never = {p for p in group if wire.codings and p.exact(tp)}
        exact = exact_names(numels, never, wire.exact_numel)
        coded, others = (
            region_numel(
                (numels[p] for p in group if (p in exact) is each), wire.block, self.data_ranks // apart
            )
            for each in (False, True)
        )
        summed = sum(numels[p] for p in group if p.partial(tp, self.sequence_parallel))
        if not coded:
            return UnitShape(others, 0, False, summed // self.os, tied, apart)
        return UnitShape(coded, others, bool(wire.codings), summed // self.os, tied, apart)
