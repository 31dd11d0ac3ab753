"""megatron-core's torch_dist: a directory of torch.distributed.checkpoint with tensors and arguments.

Layers that are alike lie in one tensor per kind, [layers, ...]; others in one each. So do a layer's experts, whose
tensor has a dim for them behind that of layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megazero.checkpoint.errors import CheckpointError
from megazero.checkpoint.metadata import METADATA_FILE, Description, read_metadata
from megazero.checkpoint.reading import StoredTensors
from megazero.checkpoint.records import stored_name
from megazero.config.read.files import read_json
from megazero.convert.megatron.names import own_spelling
from megazero.convert.megatron.saved import read_saved

CONFIG_FILE, COMMON_FILE = "metadata.json", "common.pt"
_KIND, _COMMON_OBJECT = "weights", "common_state/shard_0_1"
_STACKED = re.compile(r"^(.*\.)?layers\.(?!\d)")
_EXPERTS = re.compile(r"\.mlp\.experts\.experts\.(?!\d)")


class _Place(NamedTuple):
    """Where a tensor lies: under which name, and in which row of it if layers or experts are stacked.

    expert: of the layer in that row; None if the row is the tensor.
    """

    name: str
    row: int | None = None
    expert: int | None = None

    @property
    def dims(self) -> int:
        """Return how many dims of the stored tensor are not those of the one that lies here."""
        return (self.row is not None) + (self.expert is not None)


class TorchDist:
    """The weights of one iteration's folder under ``names.NAMES``. Tensors are read when they are asked for.

    saved: what lies beside them, such as arguments and iteration. shapes, dtypes: of each tensor, padding included.
    """

    def __init__(self, path: Path) -> None:
        backend = read_json(path / CONFIG_FILE, "it says how the tensors are stored").get("sharded_backend")
        if backend != "torch_dist":
            raise CheckpointError(
                f"'{path}' is stored as {backend}: torch_dist alone is read; load and save it with "
                "Megatron's --ckpt-format torch_dist (or --ckpt-convert-format torch_dist)"
            )
        description = read_metadata(path)
        self.path = path
        self.saved: Mapping[str, Any] = _common(path, description)
        named = {stored_name(_KIND, name): tensor for name, tensor in description.tensors.items()}
        self._stored = StoredTensors(path, Description(named, {}), _KIND)
        self._last: tuple[tuple[str, int] | None, torch.Tensor] = (None, torch.empty(0))

    @cached_property
    def _places(self) -> dict[str, _Place]:
        places: dict[str, _Place] = {}
        for name, shape in self._stored.shapes.items():
            for there, place in _parts(name, shape):
                if (ours := own_spelling(there)) is None:
                    continue
                if ours in places:
                    raise CheckpointError(
                        f"'{self.path}' has {ours} twice: as {places[ours].name} and as {name}"
                    )
                places[ours] = place
        return places

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._stored.shapes[place.name][place.dims :] for name, place in self._places.items()}

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: self._stored.dtypes[place.name] for name, place in self._places.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor on the CPU."""
        place = self._places[name]
        if place.row is None:
            return self._stored.read(place.name)
        row = self._row(place.name, place.row)
        return row if place.expert is None else row[place.expert]

    def _row(self, name: str, row: int) -> torch.Tensor:
        """Return a row. That of the last call stays: a layer's experts are asked for one after the other."""
        if self._last[0] != (name, row):
            self._last = ((name, row), self._stored.read(name, row, 1)[0])
        return self._last[1]


def _parts(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, _Place]]:
    """Yield the tensors of layers and experts that lie in one, each under a name with its numbers."""
    if not shape:
        yield name, _Place(name)
        return
    layers, experts = bool(_STACKED.match(name)), bool(_EXPERTS.search(name))
    for row in range(shape[0]) if layers or experts else (None,):
        there = _STACKED.sub(rf"\g<1>layers.{row}.", name) if layers else name
        if not experts:
            yield there, _Place(name, row)
        elif not layers:
            yield _EXPERTS.sub(f".mlp.experts.{row}.", there), _Place(name, row)
        else:
            for expert in range(shape[1]):
                yield _EXPERTS.sub(f".mlp.experts.{expert}.", there), _Place(name, row, expert)


def _common(path: Path, description: Description) -> dict[str, Any]:
    """Return what lies beside the tensors: in a file of its own, or from megatron-core 0.19 on in one of theirs."""
    if (path / COMMON_FILE).is_file():
        return read_saved(path / COMMON_FILE)
    if _COMMON_OBJECT not in description.objects:
        raise CheckpointError(f"'{path}' has neither {COMMON_FILE} nor '{_COMMON_OBJECT}': get it again")
    place = description.objects[_COMMON_OBJECT]
    with open(path / place.file, "rb") as file:
        file.seek(place.start)
        return read_saved(path / place.file, file.read(place.length))


def is_torch_dist(path: Path) -> bool:
    """Tell whether megatron-core's dist_checkpointing has written the folder, in whichever way of its own."""
    return (path / CONFIG_FILE).is_file()


def is_other_dcp(path: Path) -> bool:
    """Tell whether torch.distributed.checkpoint has written the folder without megatron-core's description."""
    return (path / METADATA_FILE).is_file() and not is_torch_dist(path)
