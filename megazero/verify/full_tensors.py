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
from megazero.models.placements import decoder_placements
from megazero.tp import TensorParallel
from megazero.verify.reference import Tensors

# Of a tensor-parallel rank: a parameter's name there, the first flat element of the rank's own tensor, values [m].
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
    """The placements of a configuration's parameters over its tensor-parallel ranks."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.tp = config, config.parallel.tensor_model_parallel_size
        self.tied = not config.model.untie_embeddings_and_output_weights
        self.of_rank = lru_cache(maxsize=None)(self._of_rank)

    def _of_rank(self, size: int, rank: int) -> Mapping[str, Places]:
        return decoder_placements(self.config.model, TensorParallel(None, rank, size))

    def name(self, held: str) -> str:
        """Return the name in the whole model of a parameter that a stage calls ``held``."""
        return _END.get(held, held) if self.tied else held

    @property
    def replicated(self) -> set[str]:
        """The parameters that every tensor-parallel rank holds whole."""
        whole, part = self.of_rank(1, 0), self.of_rank(self.tp, 0)
        return {name for name, p in part.items() if p.local_shape == whole[name].local_shape}

    def assemble(self, pieces: Iterable[Piece]) -> FullTensors:
        """Assemble whole parameters from the pieces of every rank. The pieces may come in any order."""
        out = FullTensors()
        for rank in range(self.tp):
            for name, placement in self.of_rank(self.tp, rank).items():
                out.local[rank, name] = np.full(int(np.prod(placement.local_shape)), np.nan)
        for rank, own, low, values in pieces:
            name = self.name(own)
            ends = own != name or self.tied and own in _END.values()
            over = "the pipeline's two ends" if ends else "data-parallel replicas"
            _put(out, out.local[rank, name][low : low + len(values)], values, name, over)
        self._join(out)
        return out

    def split(self, whole: Tensors, tp_rank: int) -> Tensors:
        """Return the flat local fp64 arrays [elements] of a tensor-parallel rank. Their padding is zero."""
        out = {}
        for name, places in self.of_rank(self.tp, tp_rank).items():
            stored = dict[str, np.ndarray]()
            for placement, values in self.of_rank(1, 0)[name].held(whole[name]):
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
        for (rank, name), flat in out.local.items():
            places = self.of_rank(self.tp, rank)[name]
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
        for name, places in self.of_rank(1, 0).items():
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
