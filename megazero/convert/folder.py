"""A folder of Hugging Face weights. Its safetensors files are mapped, not read."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from megazero.bounded import load_json
from megazero.config.model.published import CONFIG_FILE
from megazero.config.read.files import read_json

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
# safetensors' names of the dtypes that weights may have. Buffers of other dtypes are passed over by name.
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
_MAX_HEADER = 100 << 20  # the limit of the safetensors library


@dataclass(frozen=True)
class Entry:
    """One tensor of a safetensors file. start, stop: its bytes in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_entries(file: Path) -> dict[str, Entry]:
    """Return the tensors of a safetensors file by name, from its header.

    Raises ValueError if it is no such file, if it is shorter or longer than its header says, or if two tensors share
    bytes: then others are in no tensor.
    """
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise ValueError(f"'{file}' is no safetensors file, or is cut off: get it again")
        try:
            header = load_json(stream.read(length))
            header.pop("__metadata__", None)
            entries = {name: _entry(file, 8 + length, **told) for name, told in header.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"'{file}' has a damaged header ({error}): get it again") from None
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            raise ValueError(
                f"'{file}': '{name}' begins at byte {entry.start}, and what is before it ends at {end}: get it again"
            )
        end = entry.stop
    if end != size:
        raise ValueError(f"'{file}' is {size} bytes long and its header says {end}: get it again")
    return entries


def _entry(file: Path, base: int, dtype: str, shape: list[int], data_offsets: list[int]) -> Entry:
    start, stop = data_offsets
    if any(type(number) is not int or number < 0 for number in (start, stop - start, *shape)):
        raise ValueError(f"bytes {start} to {stop} for shape {shape}, which are no sizes")
    if dtype in DTYPES and stop - start != prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{stop - start} bytes for shape {shape} in {dtype}")
    return Entry(file, dtype, tuple(shape), base + start, base + stop)


@dataclass(frozen=True)
class Folder:
    """A folder with config.json and safetensors files. ``config`` is config.json, ``entries`` are all tensors."""

    path: Path
    config: Mapping[str, Any]
    entries: Mapping[str, Entry]
    _maps: dict[Path, mmap.mmap] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Folder:
        """Read config.json and the headers of the files. Raises ValueError for a folder that is not whole."""
        root = Path(path)
        config = read_json(root / CONFIG_FILE, "it says what the model is")
        entries: dict[str, Entry] = {}
        index = _read_index(root)
        for file in _files(root, index):
            for name, entry in read_entries(file).items():
                if name in entries:
                    raise ValueError(
                        f"'{name}' is in '{entries[name].file}' and in '{file}': remove one of them"
                    )
                entries[name] = entry
        _check_index(root / INDEX_FILE, index or {}, entries)
        return cls(root, config, entries)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self.entries.items()}

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of most of the weights' elements."""
        counts: dict[torch.dtype, int] = {}
        for entry in self.entries.values():
            if entry.dtype in DTYPES:
                dtype = DTYPES[entry.dtype]
                counts[dtype] = counts.get(dtype, 0) + prod(entry.shape)
        if not counts:
            raise ValueError(f"'{self.path}' holds no weights in any of {', '.join(DTYPES)}")
        return max(counts, key=lambda dtype: counts[dtype])

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as a view of the mapped file: to be read only. It takes no memory of its own."""
        entry = self.entries[name]
        if entry.dtype not in DTYPES:
            raise ValueError(
                f"'{name}' is stored as {entry.dtype}; weights are read in {', '.join(DTYPES)} (a quantised model "
                "has to be dequantised first)"
            )
        if entry.start == entry.stop:
            return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            flat = torch.frombuffer(
                self._map(entry.file), dtype=DTYPES[entry.dtype], count=prod(entry.shape), offset=entry.start
            )
        return flat.view(entry.shape)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with open(file, "rb") as stream:
                self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[file]


def _read_index(root: Path) -> dict[str, str] | None:
    """Return which file has which tensor, or None without an index."""
    index = root / INDEX_FILE
    if not index.exists():
        return None
    named = read_json(index, "it says which file has which tensor").get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        raise ValueError(
            f"'{index}' is damaged (its weight_map does not name a file for each tensor): get it again"
        )
    return named


def _files(root: Path, named: Mapping[str, str] | None) -> Iterator[Path]:
    """Yield the files that the index names, or the single file without one."""
    index, found = root / INDEX_FILE, sorted(root.glob("*.safetensors"))
    if named is not None:
        for name in sorted(set(named.values())):
            if name != os.path.basename(name):
                raise ValueError(f"'{index}' names '{name}', which is not a file of the folder")
            if not (root / name).is_file():
                raise ValueError(f"'{root / name}' is missing, and '{index}' names it: get it again")
            yield root / name
    elif (root / SINGLE_FILE).is_file():
        yield root / SINGLE_FILE
    elif found:
        raise ValueError(
            f"'{index}' is missing: there are {len(found)} files such as '{found[0].name}', and nothing says that "
            "these are all. Get the index again"
        )
    else:
        other = next((p.name for p in sorted(root.glob("*")) if p.suffix in (".bin", ".pt", ".pth")), None)
        hint = f" ('{other}' can be saved so by transformers' save_pretrained)" if other else ""
        raise ValueError(f"'{root}' has no '{SINGLE_FILE}': weights are read from safetensors files{hint}")


def _check_index(index: Path, named: Mapping[str, str], entries: Mapping[str, Entry]) -> None:
    wrong = [name for name, file in named.items() if name not in entries or entries[name].file.name != file]
    if wrong:
        raise ValueError(
            f"'{index}' says that '{wrong[0]}' is in '{named[wrong[0]]}', where it is not"
            f"{f' ({len(wrong)} such tensors)' if len(wrong) > 1 else ''}: index and files are not of one model"
        )
