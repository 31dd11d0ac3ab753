"""Records of files in a store: JSON lines, Parquet rows, sequences of Megatron's files; cut into pieces, and encoded.

A piece is what is fetched and shuffled at once. The files alone decide how they are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megazero.config.options.sections import DataConfig
from megazero.data.indexed import Index, index_of
from megazero.data.preprocess import encode_document
from megazero.data.store import FileStore
from megazero.data.text import JSON_SUFFIXES, lines_between, number_at, read_line, text_at
from megazero.data.tokenizer import Tokenizer, TokenizerInfo, load_tokenizer
from megazero.data.tokenizer_files import tokenizer_options

PIECE_BYTES = 1 << 20
_TAIL = 1 << 16  # bytes fetched with a piece of lines, for the end of its last one
_OPENED = 16  # files whose tables of contents are read at once

Ids = NDArray[np.int32]
Mask = NDArray[np.bool_]
Record = bytes | Mapping[str, Any] | NDArray[Any]  # a JSON line, a row's column by name, tokens


class FilePiece(NamedTuple):
    """Consecutive records of a file of ``size`` bytes: the lines that begin in bytes [first, last), or the rows or
    sequences [first, last).
    """

    address: str
    size: int
    first: int
    last: int


class Encode(Protocol):
    """Makes tokens of a record; worker processes get a copy. A ValueError says what is wrong, not where."""

    @property
    def key(self) -> str:
        """The key of a JSON line, or the column of a Parquet file, that it reads."""

    def __call__(self, record: Record) -> tuple[Ids, Mask]:
        """Return the tokens of a document, with its end, and which of them the loss counts as labels, [n] each."""


class RecordFormat(NamedTuple):
    """What is known of files of a suffix.

    cut: yields the pieces of a file. read: returns a piece's records, each with its place in the file, by the key of
    text. where: says a place as people do, of an open file.
    """

    cut: Callable[[FileStore, str, int], Iterator[FilePiece]]
    read: Callable[[FileStore, FilePiece, str], list[tuple[int, Record]]]
    where: Callable[[FileStore, FilePiece, int], str]


def pieces_of(store: FileStore, words: Sequence[str]) -> tuple[FilePiece, ...]:
    """Return the pieces of the files that addresses, globs or folders name; of a Megatron file they name the prefix.

    Raises ValueError for words that name no file of a known format.
    """
    files: dict[str, int] = {}
    for word in words:
        found = store.find(word) or store.find(f"{word}.idx")
        known = {at: size for at, size in found.items() if _suffix(at) in FORMATS}
        if not known:
            raise ValueError(
                f"{word}: no file there is one of {', '.join(FORMATS)}; uncompress others, or convert them"
            )
        files |= known
    with ThreadPoolExecutor(_OPENED) as threads:
        cuts = threads.map(lambda file: [*FORMATS[_suffix(file[0])].cut(store, *file)], files.items())
        pieces = tuple(piece for cut in cuts for piece in cut)
    if not pieces:
        raise ValueError(f"{' '.join(words)}: every file there is empty")
    return pieces


def records_of(store: FileStore, piece: FilePiece, key: str) -> list[tuple[int, Record]]:
    """Return a piece's records with their places."""
    return FORMATS[_suffix(piece.address)].read(store, piece, key)


def place_of(store: FileStore, piece: FilePiece, place: int) -> str:
    """Say where a record lies."""
    return f"{piece.address}, {FORMATS[_suffix(piece.address)].where(store, piece, place)}"


def _suffix(address: str) -> str:
    return "." + address.rpartition(".")[2]


# -- JSON lines --------------------------------------------------------------------------------------


def _cut_lines(store: FileStore, address: str, size: int) -> Iterator[FilePiece]:
    for first in range(0, size, PIECE_BYTES):
        yield FilePiece(address, size, first, min(first + PIECE_BYTES, size))


def _lines(store: FileStore, piece: FilePiece, key: str) -> list[tuple[int, Record]]:
    with store.open(piece.address, piece.size, PIECE_BYTES + _TAIL) as handle:
        return [*lines_between(handle, piece.first, piece.last)]


def _line(store: FileStore, piece: FilePiece, place: int) -> str:
    with store.open(piece.address, piece.size, PIECE_BYTES) as handle:
        return f"line {number_at(handle, place)}"


# -- Parquet -----------------------------------------------------------------------------------------


def _parquet(store: FileStore, address: str, size: int) -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ValueError(
            f"{address}: Parquet files are read by pyarrow: pip install 'megazero[stream]'"
        ) from None
    try:
        return parquet.ParquetFile(store.open(address, size, _TAIL))
    except OSError as error:  # pyarrow's errors of a damaged file are ValueErrors and OSErrors
        raise ValueError(f"{address}: {error}") from None


def _cut_rows(store: FileStore, address: str, size: int) -> Iterator[FilePiece]:
    contents, first = _parquet(store, address, size).metadata, 0
    for group in range(contents.num_row_groups):
        last = first + contents.row_group(group).num_rows
        yield FilePiece(address, size, first, last)
        first = last


def _rows(store: FileStore, piece: FilePiece, key: str) -> list[tuple[int, Record]]:
    file = _parquet(store, piece.address, piece.size)
    if key not in (names := file.schema_arrow.names):
        raise ValueError(
            f"{piece.address} has no column {key!r}; name one with --stream-key: {', '.join(names)}"
        )
    group = [cut.first for cut in _cut_rows(store, piece.address, piece.size)].index(piece.first)
    values = file.read_row_group(group, columns=[key]).column(key).to_pylist()
    return [(piece.first + i, {key: value}) for i, value in enumerate(values)]


# -- Megatron's files --------------------------------------------------------------------------------


@cache
def _index(store: FileStore, address: str, size: int) -> Index:
    index = index_of(address, np.frombuffer(store.read(address, 0, size), np.uint8))
    if index[0].kind not in "iu":
        raise ValueError(f"{address} holds {index[0].name} values, not tokens")
    return index


def _cut_sequences(store: FileStore, address: str, size: int) -> Iterator[FilePiece]:
    dtype, lengths, *_ = _index(store, address, size)
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    bounds = [0, *np.flatnonzero(np.diff(ends // PIECE_BYTES)) + 1, len(lengths)]
    yield from (
        FilePiece(address, size, int(a), int(b)) for a, b in zip(bounds, bounds[1:], strict=False) if b > a
    )


def _sequences(store: FileStore, piece: FilePiece, key: str) -> list[tuple[int, Record]]:
    dtype, lengths, offsets, _ = _index(store, piece.address, piece.size)
    begin, last = int(offsets[piece.first]), piece.last - 1
    end = int(offsets[last]) + int(lengths[last]) * dtype.itemsize
    raw = store.read(f"{piece.address.removesuffix('.idx')}.bin", begin, end)
    return [
        (i, np.frombuffer(raw, dtype, int(lengths[i]), int(offsets[i]) - begin))
        for i in range(piece.first, piece.last)
    ]


FORMATS: Mapping[str, RecordFormat] = {
    **dict.fromkeys(sorted(JSON_SUFFIXES), RecordFormat(_cut_lines, _lines, _line)),
    ".parquet": RecordFormat(_cut_rows, _rows, lambda store, piece, place: f"row {place + 1}"),
    ".idx": RecordFormat(_cut_sequences, _sequences, lambda store, piece, place: f"sequence {place}"),
}


# -- tokens ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EncodeText:
    """Plain text under ``key``, all of which the loss counts. options: of ``load_tokenizer``, by name."""

    options: tuple[tuple[str, Any], ...]
    info: TokenizerInfo
    key: str

    @classmethod
    def of(cls, data: DataConfig, info: TokenizerInfo) -> EncodeText:
        known = {"kind": data.tokenizer_type, "vocab_size": info.eod, **tokenizer_options(vars(data))}
        return cls(
            tuple(known.items()), info, data.stream_key
        )  # a null tokenizer has the eod beyond its size

    def __call__(self, record: Record) -> tuple[Ids, Mask]:
        if isinstance(record, np.ndarray):
            ids, top = record.astype(np.int32), self.info.vocab_size - 1
            if len(ids) and not 0 <= ids.min() <= ids.max() <= top:
                raise ValueError(f"a token is outside 0..{top}: it was made with another tokenizer")
        else:
            fields = read_line(record) if isinstance(record, bytes) else record
            text = text_at(fields, self.key)
            ids = np.array(encode_document(_tokenizer(self.options), text, append_eod=True)[0], np.int32)
        return ids, np.ones(len(ids), np.bool_)


@lru_cache(maxsize=1)
def _tokenizer(options: tuple[tuple[str, Any], ...]) -> Tokenizer:
    """Return the process's one tokenizer: loading it costs more than encoding a document."""
    return load_tokenizer(**dict(options))
