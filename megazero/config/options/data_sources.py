"""What a run's samples can come from: SOURCES. No numpy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megazero.config.options.data_inputs import (
    PARTS,
    SPLITS,
    missing_file,
    parse_data_path,
    parse_weighted_splits,
)

if TYPE_CHECKING:
    from megazero.config.options.sections import DataConfig


@dataclass(frozen=True)
class DataKind:
    """What is known of one kind of data before it is opened.

    parts: 'module:name' of what makes, of a DataConfig, the function that opens each part (data/source.py: DataPart,
    OpenPart). faults: yields error lines for options that name no such data. missing: yields a line for each file of
    some of SPLITS that is not there.
    """

    parts: str
    faults: Callable[[DataConfig], Iterator[str]]
    missing: Callable[[DataConfig, Collection[str]], Iterator[str]] = lambda data, splits: iter(())


def data_kind(data: DataConfig) -> DataKind:
    """Return what is known of the data that the options name."""
    return SOURCES["mock" if data.mock_data else "indexed"]


def _named_twice(data: DataConfig) -> Iterator[str]:
    """Yield an error for data that are named in no way or in two, and for parts of them without those to train on."""
    apart, weighted = PARTS[: len(SPLITS)], PARTS[len(SPLITS) :]
    # A file stays where it could not be read, which has been reported.
    forms = (("data_path",), ("mock_data",), apart, (*weighted, *(f"{name}_path" for name in weighted)))
    given = [[name for name in form if getattr(data, name)] for form in forms]
    if sum(map(bool, given)) != 1:
        also = "; --train-data-path or --train-weighted-split-paths may stand in the place of --data-path"
        yield f"exactly one of --data-path and --mock-data is required{also}"
    for names, train in ((given[2], apart[0]), (given[3], weighted[0])):
        if names and not any(name.startswith("train") for name in names):
            yield f"--{names[0]} needs --{train}".replace("_", "-")


def _missing_files(data: DataConfig, splits: Collection[str]) -> Iterator[str]:
    prefixes = parse_data_path(data.data_path)[0]
    for split in splits:
        prefixes += parse_data_path(getattr(data, f"{split}_data_path"))[0]
        groups = parse_weighted_splits(getattr(data, f"{split}_weighted_split_paths")).values()
        prefixes += [prefix for blend in groups for prefix in blend.prefixes]
    return filter(None, map(missing_file, dict.fromkeys(prefixes)))


SOURCES: Mapping[str, DataKind] = MappingProxyType(
    {
        "indexed": DataKind("megazero.data.build:indexed_parts", faults=_named_twice, missing=_missing_files),
        "mock": DataKind("megazero.data.mock:mock_parts", faults=_named_twice),
    }
)
# In the place of the data for who reads none: a plan, and verification, which makes its own tokens.
NO_DATA: Mapping[str, Any] = MappingProxyType({"mock_data": True})
