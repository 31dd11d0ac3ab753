"""Megatron's indexed dataset, byte for byte: PREFIX.bin holds tokens, PREFIX.idx says where sequences lie.

``.idx`` is little-endian and unpadded. It holds ``MMIDIDX\\0\\0``, the uint64 version (1), the uint8 dtype code,
uint64 S (the number of sequences), uint64 D, int32[S] lengths in tokens and int64[S] byte offsets into ``.bin``. Last
is int64[D], the sequence at which each document begins (from 0), closed by S. So D is the number of documents + 1.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from megazero.config.options.data_inputs import missing_file
from megazero.files import temporary_beside

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: tuple[np.dtype[Any], ...] = tuple(
    np.dtype(name) for name in ("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2")
)
UINT16_VOCABULARY = 65500  # Megatron stores 16 bits strictly below this size, 32 from it on


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


def mask_prefix(prefix: str | Path) -> str:
    return f"{prefix}.mask"


def has_mask(prefix: str | Path) -> bool:
    return idx_path(mask_prefix(prefix)).is_file()


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype that Megatron's preprocessing picks for a vocabulary."""
    return np.dtype("<u2") if vocab_size < UINT16_VOCABULARY else np.dtype("<i4")


def dtype_code(dtype: DTypeLike) -> int:
    wanted = np.dtype(dtype)
    if wanted not in DTYPES:
        names = ", ".join(known.name for known in DTYPES)
        raise ValueError(f"dtype {wanted.name} has no code in an .idx file; it knows {names}")
    return DTYPES.index(wanted) + 1


def encode_index(lengths: ArrayLike, documents: ArrayLike, dtype: DTypeLike) -> bytes:
    """Return the whole ``.idx``. ``lengths`` is int32 [S], in tokens. ``documents`` is int64 [D], from 0 to S."""
    sizes = np.ascontiguousarray(lengths, dtype="<i4")
    bounds = np.ascontiguousarray(documents, dtype="<i8")
    offsets = np.zeros(len(sizes), dtype="<i8")
    np.cumsum(sizes[:-1], dtype=np.int64, out=offsets[1:])
    offsets *= np.dtype(dtype).itemsize
    header = HEADER.pack(MAGIC, VERSION, dtype_code(dtype), len(sizes), len(bounds))
    return header + sizes.tobytes() + offsets.tobytes() + bounds.tobytes()


class IndexedWriter:
    """Writes PREFIX.bin and PREFIX.idx. They take their names together when the block ends without an error.

    >>> with IndexedWriter("corpus_text_document", dtype=token_dtype(32000)) as writer:
    ...     writer.add_document([1, 2, 3])
    """

    def __init__(self, prefix: str | Path, *, dtype: DTypeLike) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype)
        dtype_code(self.dtype)
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._lengths: list[NDArray[np.int32]] = []
        self._documents: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
        self._sequences = 0
        self._temporary = temporary_beside(bin_path(self.prefix))
        self._bin = open(self._temporary, "wb")  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> IndexedWriter:
        return self

    def add_document(self, tokens: ArrayLike, lengths: Sequence[int] | None = None) -> None:
        """Add one document of one sequence, or of several whose ``lengths`` add up to the number of ``tokens``
        (integers, [n]).

        A document without tokens and lengths is recorded as one with no sequence, as Megatron does.
        Raises ValueError for a token that ``dtype`` cannot hold.
        """
        values = np.asarray(tokens)
        if lengths is None:
            lengths = [values.size] if values.size else []
        if sum(lengths) != values.size:
            raise ValueError(
                f"sequence lengths add up to {sum(lengths)}, the document has {values.size} tokens"
            )
        if values.size and self.dtype.kind in "iu":
            limits, low, high = np.iinfo(self.dtype), values.min(), values.max()
            if low < limits.min or high > limits.max:
                wrong = low if low < limits.min else high
                raise ValueError(
                    f"token {wrong} does not fit {self.dtype.name} ({limits.min}..{limits.max}); "
                    f"use a wider dtype (int32)"
                )
        raw = np.ascontiguousarray(values, self.dtype).tobytes()
        self.add_encoded(raw, np.asarray(lengths, np.int32), np.asarray([len(lengths)], np.int64))

    def add_encoded(self, raw: bytes, lengths: NDArray[np.int32], documents: NDArray[np.int64]) -> None:
        """Append bytes already in the file's dtype. ``lengths`` is int32, the tokens of each sequence. ``documents``
        is int64, the sequences of each document.
        """
        self._bin.write(raw)
        self._lengths.append(lengths)
        self._documents.append(self._sequences + np.cumsum(documents))
        self._sequences += len(lengths)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._bin:
                if kind is not None:
                    return
                self._bin.flush()
                os.fsync(self._bin.fileno())
            self._commit()
        finally:
            self._temporary.unlink(missing_ok=True)

    def _commit(self) -> None:
        lengths = np.concatenate([np.zeros(0, np.int32), *self._lengths])
        index = encode_index(lengths, np.concatenate(self._documents), self.dtype)
        temporary = temporary_beside(idx_path(self.prefix))
        try:
            with open(temporary, "wb") as handle:
                handle.write(index)
                handle.flush()
                os.fsync(handle.fileno())
            os.replace(self._temporary, bin_path(self.prefix))
            os.replace(temporary, idx_path(self.prefix))  # the index last: a .bin alone is not a dataset
        finally:
            temporary.unlink(missing_ok=True)


class IndexedDataset:
    """Reads PREFIX.bin and PREFIX.idx through memory maps. Everything about the files is checked on opening.

    ``lengths`` is int32 [S], the tokens of each sequence. ``offsets`` is int64 [S], in bytes into .bin. ``documents``
    is int64 [D]. Raises ValueError for files that are missing, empty, truncated, foreign or at odds with each other.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        if missing := missing_file(self.prefix):
            raise ValueError(missing)
        self.dtype, self.lengths, self.offsets, self.documents = read_index(idx_path(prefix))
        self.tokens = int(self.lengths.sum(dtype=np.int64))
        self._check_bin()
        self._bin: NDArray[np.uint8] = (
            np.memmap(bin_path(prefix), mode="r") if self.tokens else np.zeros(0, np.uint8)
        )

    def _check_bin(self) -> None:
        path, size = bin_path(self.prefix), bin_path(self.prefix).stat().st_size
        wanted = self.tokens * self.dtype.itemsize
        if size != wanted:
            what = (
                "is empty" if size == 0 else "is truncated" if size < wanted else "is longer than its index"
            )
            raise ValueError(
                f"{path} {what}: {size} bytes, but {idx_path(self.prefix).name} lists {self.tokens} tokens of "
                f"{self.dtype.name}, {wanted} bytes; copy both files again or rerun megazero preprocess"
            )
        ends = self.offsets + self.lengths.astype(np.int64) * self.dtype.itemsize
        if len(ends) and (self.offsets.min() < 0 or ends.max() > size):
            raise ValueError(
                f"{idx_path(self.prefix)} points outside {path} ({size} bytes): damaged; build it again"
            )

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.lengths)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return tokens [length] of one sequence from ``offset`` on (to its end by default), in the file's dtype.
        They are a read-only view.
        """
        count = int(self.lengths[sequence]) - offset if length is None else length
        start = int(self.offsets[sequence]) + offset * self.dtype.itemsize
        return self._bin[start : start + count * self.dtype.itemsize].view(self.dtype)

    __getitem__ = get

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError when the files cannot have been made with a vocabulary of this size."""
        if self.dtype.kind not in "iu":
            raise ValueError(f"{self.prefix} holds {self.dtype.name} values, not tokens")
        if vocab_size - 1 > np.iinfo(self.dtype).max:
            raise ValueError(
                f"{self.prefix} stores {self.dtype.name} tokens (at most {np.iinfo(self.dtype).max}) but the "
                f"vocabulary has {vocab_size}: it was made with another tokenizer; "
                f"run megazero preprocess with this one"
            )

    def check_tokens(self, text: NDArray[np.int64], vocab_size: int) -> None:
        """Raise ValueError if a text of these files holds a token outside a vocabulary."""
        low, top = int(text.min()), int(text.max())
        if low < 0 or top >= vocab_size:
            raise ValueError(
                f"{self.prefix} holds token {low if low < 0 else top}, the tokenizer's vocabulary is "
                f"0..{vocab_size - 1}: the data was made with another tokenizer; name that one, or run megazero "
                "preprocess with this one"
            )

    def fingerprint(self) -> dict[str, Any]:
        """Return the sha256 of .idx and the size of .bin, which identify the index: every copy has the same."""
        with open(idx_path(self.prefix), "rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
        return {"idx_sha256": digest, "bin_bytes": bin_path(self.prefix).stat().st_size}


Index = tuple[np.dtype[Any], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]


def read_index(path: Path) -> Index:
    """Read an .idx through a memory map."""
    return index_of(path, np.memmap(path, mode="r") if path.stat().st_size else np.zeros(0, np.uint8))


def index_of(path: str | Path, raw: NDArray[np.uint8]) -> Index:
    """Return the dtype, lengths, offsets and documents that the bytes of an .idx hold. path: for errors."""
    size, head = len(raw), raw[: HEADER.size].tobytes()
    if size == 0:
        raise ValueError(f"{path} is empty; copy it again or rerun megazero preprocess")
    if head[: len(MAGIC)] != MAGIC[: len(head)]:
        raise ValueError(
            f"{path} is not a Megatron index: it starts with {head[:9]!r}, not {MAGIC!r}; "
            f"make one with megazero preprocess"
        )
    if size < HEADER.size:
        raise ValueError(f"{path} is truncated: {size} bytes, the header alone has {HEADER.size}")
    _, version, code, sequences, bounds = HEADER.unpack(head)
    if version != VERSION:
        raise ValueError(f"{path} has index version {version}; only version {VERSION} can be read")
    if not 1 <= code <= len(DTYPES):
        raise ValueError(f"{path} has dtype code {code}; codes are 1 to {len(DTYPES)}")
    wanted = HEADER.size + sequences * 12 + bounds * 8
    if size == wanted + sequences and sequences:
        raise ValueError(f"{path} is a multimodal index (it lists modes); only text data can be read")
    if size != wanted:
        what = "truncated" if size < wanted else "longer than it says"
        raise ValueError(
            f"{path} is {what}: {size} bytes, its header ({sequences} sequences, {bounds} document bounds) "
            f"asks for {wanted}; copy it again or rerun megazero preprocess"
        )
    at = HEADER.size
    lengths = raw[at : at + 4 * sequences].view("<i4")
    offsets = raw[at + 4 * sequences : at + 12 * sequences].view("<i8")
    documents = raw[at + 12 * sequences :].view("<i8")
    good = bounds > 0 and documents[0] == 0 and documents[-1] == sequences and np.all(np.diff(documents) >= 0)
    if not good or (sequences and lengths.min() < 0):
        raise ValueError(f"{path} is damaged: lengths or document bounds are out of order; build it again")
    return DTYPES[code - 1], lengths, offsets, documents
