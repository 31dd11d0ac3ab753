"""Megatron's mp_rank_TT(_PPP) folders: one file of torch.save for each tensor- and pipeline-parallel rank.

A rank's layers are numbered from 0 in each of its virtual stages. The stages follow each other in the order
(virtual stage, pipeline rank), so their numbers of layers say which layer of the model each is. The gate and the up
projection of a gated MLP are one tensor, of which each rank has its part of both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megazero.checkpoint.errors import CheckpointError
from megazero.convert.megatron.names import LAYER, own_spelling, split_dim
from megazero.convert.megatron.saved import read_saved

FILES = ("model_optim_rng.pt", "model_rng.pt")
OF_MIXTURES = (
    "mixtures are read as torch_dist alone; load and save it with Megatron's --ckpt-format torch_dist"
)
_SHOWN = 5
_FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(_\d+)?")


class _LegacyRank(NamedTuple):
    tp: int
    pp: int


class Legacy:
    """The weights of one iteration's folder (``saved.Stored``). The files are mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        files = _files(path)
        self._tp, self._pp = (max(each) + 1 for each in zip(*files, strict=True))
        missing = (
            f"mp_rank_{t:02d}" + f"_{p:03d}" * (self._pp > 1) for t, p in self._grid() if (t, p) not in files
        )
        if first := list(islice(missing, _SHOWN)):  # a folder's name may have any number
            more = ", ..." if self._tp * self._pp - len(files) > len(first) else ""
            raise CheckpointError(f"'{path}' lacks {', '.join(first)}{more}: every rank's folder is needed")
        self._ranks = {rank: read_saved(file) for rank, file in files.items()}
        self.saved: Mapping[str, Any] = self._ranks[_LegacyRank(0, 0)]
        version = self.saved.get("checkpoint_version", 0)
        if version < 2:
            raise CheckpointError(
                f"'{path}' has checkpoint_version {version}, which orders queries, keys and values otherwise; load "
                "and save it with Megatron-LM 2.0 or later"
            )

    def _grid(self) -> Iterator[_LegacyRank]:
        return (_LegacyRank(tp, pp) for tp in range(self._tp) for pp in range(self._pp))

    @cached_property
    def _parts(self) -> dict[str, list[torch.Tensor]]:
        """Map each tensor to the parts of the tensor-parallel ranks, or to one where each rank has all of it."""
        parts: dict[str, list[torch.Tensor]] = {}
        for tp in range(self._tp):
            first = 0
            for stage in self._stages(tp):
                found = {name: value for name, value in _flat(stage) if own_spelling(name) is not None}
                layers = 0
                for there, value in found.items():
                    name, number = _numbered(str(own_spelling(there)), first)
                    layers = max(layers, number)
                    if not isinstance(value, torch.Tensor):
                        raise CheckpointError(
                            f"'{self.path}': '{there}' is no plain tensor (of fp8, perhaps); save the weights in bf16"
                        )
                    held = parts.setdefault(name, [])
                    if len(held) <= tp:  # the last stage may hold a copy of the embedding
                        held.append(value)
                first += layers
        return {name: held if split_dim(name) is not None else held[:1] for name, held in parts.items()}

    def _stages(self, tp: int) -> Iterator[Mapping[str, Any]]:
        """Yield the weights of each stage, in the order of the model."""
        virtual = sum(re.fullmatch(r"model\d+", name) is not None for name in self.saved)
        keys = [f"model{i}" for i in range(virtual)] or ["model"]
        for key in keys:
            for pp in range(self._pp):
                model = self._ranks[_LegacyRank(tp, pp)].get(key)
                if not isinstance(model, dict):
                    raise CheckpointError(f"'{self.path}': rank {tp}, {pp} holds no '{key}'")
                yield model

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._shape(name, held) for name, held in self._parts.items()}

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: held[0].dtype for name, held in self._parts.items()}

    def _shape(self, name: str, held: list[torch.Tensor]) -> tuple[int, ...]:
        dim, shape = split_dim(name), list(held[0].shape)
        if dim is not None:
            shape[dim] = sum(part.shape[dim] for part in held)
        return tuple(shape)

    def tensor(self, name: str, gated: bool) -> torch.Tensor:
        held, dim = self._parts[name], split_dim(name)
        if len(held) == 1 or dim is None:
            return held[0]
        if gated and ".linear_fc1." in name:
            halves = zip(*(part.chunk(2) for part in held), strict=True)
            return torch.cat([part for half in halves for part in half])
        return torch.cat(held, dim)


def is_legacy(path: Path) -> bool:
    return any(path.glob("mp_rank_*"))


def _files(path: Path) -> dict[_LegacyRank, Path]:
    files = {}
    for folder in sorted(path.glob("mp_rank_*")):
        ranks = _FOLDER.fullmatch(folder.name)
        if ranks is None or ranks[3]:
            raise CheckpointError(f"'{folder}' is of expert-parallel ranks: {OF_MIXTURES}")
        file = next((folder / name for name in FILES if (folder / name).is_file()), None)
        if file is None:
            raise CheckpointError(f"'{folder}' holds no {FILES[0]}: get it again")
        files[_LegacyRank(int(ranks[1]), int(ranks[2] or 0))] = file
    return files


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested dicts with their keys joined by dots, as Megatron's older models save them."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _numbered(name: str, first: int) -> tuple[str, int]:
    """Return the name with the layer's number in the model, and how many layers the stage has at least."""
    found = LAYER.fullmatch(name)
    if found is None:
        return name, 0
    return f"decoder.layers.{first + int(found[1])}.{found[2]}", int(found[1]) + 1
