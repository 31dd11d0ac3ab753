"""A folder of Hugging Face weights. Its safetensors files are mapped, not read."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from megazero.config.model.published import CONFIG_FILE
from megazero.config.read.files import read_json

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
# safetensors' names of the dtypes that weights may have. Buffers of other dtypes are passed over by name.
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


class Entry(NamedTuple):
    """One tensor of a safetensors file. dtype: its name there."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def _opened(file: Path) -> Any:
    """Return the library's view of a file, which it has checked against its header: no byte is in no tensor, or in
    two."""
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"'{file}' is no whole safetensors file ({error}): get it again") from None


@dataclass(frozen=True)
class Folder:
    """A folder with config.json and safetensors files. ``config`` is config.json, ``entries`` are all tensors.

    ``files`` are the library's views of the files.
    """

    path: Path
    config: Mapping[str, Any]
    entries: Mapping[str, Entry]
    files: Mapping[Path, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Folder:
        """Read config.json and the headers of the files. Raises ValueError for a folder that is not whole."""
        root = Path(path)
        config = read_json(root / CONFIG_FILE, "it says what the model is")
        entries: dict[str, Entry] = {}
        index = _read_index(root)
        files = {file: _opened(file) for file in _files(root, index)}
        for file, opened in files.items():
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                if name in entries:
                    raise ValueError(
                        f"'{name}' is in '{entries[name].file}' and in '{file}': remove one of them"
                    )
                told = opened.get_slice(name)
                entries[name] = Entry(file, told.get_dtype(), tuple(told.get_shape()))
        _check_index(root / INDEX_FILE, index or {}, entries)
        return cls(root, config, entries, files)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self.entries.items()}

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of most of the weights' elements."""
        counts = Counter[str]()
        for entry in self.entries.values():
            if entry.dtype in DTYPES:
                counts[entry.dtype] += prod(entry.shape)
        if not counts:
            raise ValueError(f"'{self.path}' holds no weights in any of {', '.join(DTYPES)}")
        return DTYPES[counts.most_common(1)[0][0]]

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as a view of the mapped file: to be read only. It takes no memory of its own."""
        entry = self.entries[name]
        if entry.dtype not in DTYPES:
            raise ValueError(
                f"'{name}' is stored as {entry.dtype}; weights are read in {', '.join(DTYPES)} (a quantised model "
                "has to be dequantised first)"
            )
        return self.files[entry.file].get_tensor(name)


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
