"""Assembles whole parameters from the slices of all ranks.

It uses the decoder's checkpoint placements, which know shards, padding and replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from megazero.checkpoint.placement import Placement, Places
from megazero.config import RunConfig
from megazero.config.model.spec import model_spec
from megazero.models.placements import decoder_placements
from megazero.moe import ExpertParallel
from megazero.tp import TensorParallel
from megazero.verify.reference import Tensors

# Of a rank: its place, a parameter's name there, the first flat element of the rank's own tensor, values [m]. A place
# is an index among neighbours in the world with different parts: tensor-parallel ranks, or expert-parallel ones, of
# which each tensor-parallel group is a part.
Piece = tuple[int, str, int, np.ndarray]
_END = {"head.weight": "embedding.tokens.weight"}  # the last stage's own copy of a tied embedding


@dataclass
class FullTensors:
    """Parameters that were assembled from all ranks.

    whole: the parameters in the shapes that one rank has; of replicas, the values seen first are kept. differing: the
    parameters whose replicas are not the same bits, with the ranks over which they differ. faults: elements that
    nobody has, and padding that is not zero.
    """

    whole: Tensors = field(default_factory=dict)
    local: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)
    differing: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


class Assembler:
    """The placements of a configuration's parameters over its tensor- and expert-parallel ranks."""

    def __init__(self, config: RunConfig) -> None:
        self.config, parallel = config, config.parallel
        self.tp, self.ep = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
        self.tied = not config.model.untie_embeddings_and_output_weights
        self.both = _END["head.weight"] if config.model.embeds_at_both_ends else None
        self.one_rank = decoder_placements(config.model, TensorParallel())
        self.of_place = lru_cache(maxsize=None)(self._of_place)

    @property
    def places(self) -> range:
        return range(max(self.tp, self.ep))

    def _of_place(self, place: int) -> Mapping[str, Places]:
        tp, ep = (TensorParallel(None, place % self.tp, self.tp), ExpertParallel(place % self.ep, self.ep))
        return decoder_placements(self.config.model, tp, ep=ep)

    def part(self, name: str, place: int) -> int:
        """Return the first place that holds the part of a parameter that ``place`` does.

        Each tensor-parallel rank has one of its own.
        """
        shared = self.ep > 1 and model_spec(self.config.model).parameters[name].experts
        return place if shared else place % self.tp

    def name(self, held: str) -> str:
        """Return the name in the whole model of a parameter that a stage calls ``held``."""
        return _END.get(held, held) if self.tied else held

    @property
    def replicated(self) -> set[str]:
        """The parameters that every tensor-parallel rank holds whole."""
        whole = self.one_rank
        return {name for name, p in self.of_place(0).items() if p.local_shape == whole[name].local_shape}

    def assemble(self, pieces: Iterable[Piece]) -> FullTensors:
        """Assemble whole parameters from the pieces of every rank. The pieces may come in any order."""
        out = FullTensors()
        for place in self.places:
            for name, placement in self.of_place(place).items():
                if self.part(name, place) == place:
                    out.local[place, name] = np.full(int(np.prod(placement.local_shape)), np.nan)
        for place, own, low, values in pieces:
            name = self.name(own)
            ends = own != name or own == self.both
            over = "the pipeline's two ends" if ends else "data-parallel replicas"
            local = out.local[self.part(name, place), name]
            _put(out, local[low : low + len(values)], values, name, over)
        self._join(out)
        return out

    def split(self, whole: Tensors, place: int) -> Tensors:
        """Return the flat local fp64 arrays [elements] of the ranks of a place. Their padding is zero."""
        out = {}
        for name, places in self.of_place(place).items():
            stored = dict[str, np.ndarray]()
            for placement, values in self.one_rank[name].held(whole[name]):
                stored[placement.name] = np.zeros(placement.shape)
                for rows, view in _boxes(placement, stored[placement.name]):
                    view[...] = values[rows]
            local = np.zeros(places.local_shape)
            for placement, values in places.held(local):
                for rows, view in _boxes(placement, stored[placement.name]):
                    values[rows] = view
            out[name] = local.reshape(-1)
        return out

    def _join(self, out: FullTensors) -> None:
        stored: dict[str, np.ndarray] = {}
        for (place, name), flat in out.local.items():
            places = self.of_place(place)[name]
            if np.isnan(flat).any():
                out.faults.append(f"{name}: {np.isnan(flat).sum()} elements are missing or not finite")
            for placement, values in places.held(flat.reshape(places.local_shape)):
                whole = stored.setdefault(placement.name, np.full(placement.shape, np.nan))
                covered = np.zeros(len(values), dtype=bool)
                for rows, view in _boxes(placement, whole):
                    _put(out, view, values[rows], name, "tensor-parallel ranks")
                    covered[rows] = True
                if values[~covered].any():
                    out.faults.append(f"{name}: padding is not zero")
        for name, places in self.one_rank.items():
            out.whole[name] = np.zeros(places.local_shape)
            for placement, values in places.held(out.whole[name]):
                for rows, view in _boxes(placement, stored[placement.name]):
                    values[rows] = view


def _put(out: FullTensors, view: np.ndarray, values: np.ndarray, name: str, over: str) -> None:
    """Fill the elements that are nobody's yet (NaN).

    Where one is filled already, the values must be the same bits.
    """
    fresh = np.isnan(view)
    if not (fresh | (view == values)).all():
        out.differing.setdefault(name, over)
    view[...] = np.where(fresh, values, view)


def _boxes(placement: Placement, stored: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield (local rows, view of the stored tensor) of each segment."""
    whole = stored.T if placement.transposed else stored
    if whole.ndim > 1:
        whole = whole[:, placement.offset1 : placement.offset1 + placement.local_shape[1]]
    for s in placement.segments:
        yield slice(s.local, s.local + s.length), whole[s.stored : s.stored + s.length]
