"""What a run's samples can come from: SOURCES. No numpy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megazero.config.options.data_inputs import PARTS, TOKENIZERS, missing_file, parse_data_path
from megazero.config.options.data_stages import parse_stages

if TYPE_CHECKING:
    from megazero.config.options.sections import DataConfig


@dataclass(frozen=True)
class DataKind:
    """What is known of one kind of data before it is opened.

    parts: 'module:name' of what makes, of a DataConfig, the function that opens each part (data/source.py: OpenPart).
    faults: yields error lines for options that name no such data. missing: yields a line for each file of some of
    SPLITS that is not there.
    """

    parts: str
    faults: Callable[[DataConfig], Iterator[str]]
    missing: Callable[[DataConfig, Collection[str]], Iterator[str]] = lambda data, splits: iter(())


def data_kind(data: DataConfig) -> DataKind:
    """Return what is known of the data that the options name."""
    return SOURCES["mock" if data.mock_data else data.data_source]


def _named_twice(data: DataConfig) -> Iterator[str]:
    """Yield an error for data that are named in no way or in two, and for parts of them without those to train on."""
    named, staged = [name for name in PARTS if getattr(data, name)], _stages_name_all(data)
    whole = sum(map(bool, (data.data_path, data.mock_data, named)))
    if whole > 1 or not (whole or staged):
        yield "exactly one of --data-path and --mock-data is required; --train-data-path may stand for --data-path"
    if named and not (data.train_data_path or staged):
        yield f"--{named[0].replace('_', '-')} needs --train-data-path"


def _stages_name_all(data: DataConfig) -> bool:
    """Tell whether every stage names the data that it trains on. Words that are no stages are reported elsewhere."""
    try:
        return all(stage.data_path for stage in parse_stages(data.data_stages))
    except ValueError:
        return True


def _missing_files(data: DataConfig, splits: Collection[str]) -> Iterator[str]:
    said = [data.data_path, *(getattr(data, f"{split}_data_path") for split in splits)]
    said += [stage.data_path for stage in parse_stages(data.data_stages)]
    prefixes = dict.fromkeys(prefix for words in said for prefix in parse_data_path(words)[0])
    return filter(None, map(missing_file, prefixes))


def _stream_faults(data: DataConfig) -> Iterator[str]:
    yield from _named_twice(data)
    if data.tokenizer_type is None:
        yield f"--data-source stream needs --tokenizer-type, which makes tokens of its text: {', '.join(TOKENIZERS)}"


SOURCES: Mapping[str, DataKind] = MappingProxyType(
    {
        "indexed": DataKind("megazero.data.build:indexed_parts", faults=_named_twice, missing=_missing_files),
        "stream": DataKind("megazero.data.stream:stream_parts", faults=_stream_faults),
        "mock": DataKind("megazero.data.mock:mock_parts", faults=_named_twice),
    }
)
# In the place of the data for who reads none: a plan, and verification, which makes its own tokens.
NO_DATA: Mapping[str, Any] = MappingProxyType({"mock_data": True})
