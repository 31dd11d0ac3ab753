"""The indexed files: byte for byte Megatron's, and one clear error for every bad one."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.data.indexed import HEADER, IndexedDataset, IndexedWriter, bin_path, idx_path, token_dtype
from tests.messages import refused


def write(prefix: Path, documents: list[list[int]], dtype: str = "u2") -> Path:
    with IndexedWriter(prefix, dtype=dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


@settings(max_examples=30, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 120), max_size=9), max_size=8),
    dtype=st.sampled_from(["u1", "i1", "i2", "i4", "i8", "f8", "f4", "u2"]),
)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], dtype: str) -> None:
    data = IndexedDataset(write(tmp_path_factory.mktemp("d") / "x", documents, dtype))
    kept = [document for document in documents if document]
    assert [data.get(i).tolist() for i in range(len(data))] == kept
    assert data.dtype == np.dtype(dtype) and data.tokens == sum(map(len, kept))
    assert np.diff(data.documents).tolist() == [1 if document else 0 for document in documents]


def test_header_is_the_documented_one(tmp_path: Path) -> None:
    write(tmp_path / "x", [[1, 2], [], [3]])
    wanted = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 4)
    wanted += np.array([2, 1], "<i4").tobytes() + np.array([0, 4, 0, 1, 1, 2], "<i8").tobytes()
    assert (tmp_path / "x.idx").read_bytes() == wanted
    assert (tmp_path / "x.bin").read_bytes() == np.array([1, 2, 3], "<u2").tobytes()


@pytest.mark.parametrize("dtype", ["u2", "i4"])
def test_megatron_reads_ours_and_we_read_theirs(tmp_path: Path, dtype: str) -> None:
    theirs = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    random = np.random.default_rng(0)
    documents = [random.integers(0, 60000, n).tolist() for n in (5, 1, 0, 300, 17)]
    write(tmp_path / "ours", documents, dtype)
    builder = theirs.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.dtype(dtype).type)
    for document in documents:
        builder.add_document(document, [len(document)] if document else [])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()
    read = theirs.IndexedDataset(str(tmp_path / "ours"))
    ours = IndexedDataset(tmp_path / "theirs")
    assert len(read) == len(ours) == 4
    for i in range(4):
        assert np.array_equal(read[i], ours[i])
        assert np.array_equal(read.get(i, 1, 0), ours.get(i, 1, 0))
    assert np.array_equal(read.document_indices, ours.documents)


def test_dtype_follows_megatron() -> None:
    assert [token_dtype(v).name for v in (100, 65499, 65500, 100_000)] == [
        "uint16",
        "uint16",
        "int32",
        "int32",
    ]


def patch(path: Path, at: int, raw: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[at : at + len(raw)] = raw
    path.write_bytes(data)


BREAK = {
    "does not exist": lambda p: idx_path(p).unlink(),
    ".bin does not exist": lambda p: bin_path(p).unlink(),
    "idx is empty": lambda p: idx_path(p).write_bytes(b""),
    "bin is empty": lambda p: bin_path(p).write_bytes(b""),
    "idx is truncated": lambda p: idx_path(p).write_bytes(idx_path(p).read_bytes()[:-1]),
    "the header alone": lambda p: idx_path(p).write_bytes(idx_path(p).read_bytes()[:20]),
    "longer than it says": lambda p: idx_path(p).write_bytes(idx_path(p).read_bytes() + b"x"),
    "multimodal": lambda p: idx_path(p).write_bytes(idx_path(p).read_bytes() + b"xx"),
    "bin is truncated": lambda p: bin_path(p).write_bytes(bin_path(p).read_bytes()[:-2]),
    "longer than its index": lambda p: bin_path(p).write_bytes(bin_path(p).read_bytes() + b"x"),
    "not a Megatron index": lambda p: patch(idx_path(p), 0, b"TNTIDX"),
    "index version 2": lambda p: patch(idx_path(p), 9, b"\x02"),
    "dtype code 9": lambda p: patch(idx_path(p), 17, b"\x09"),
    "out of order": lambda p: patch(idx_path(p), HEADER.size + 2 * 12, b"\x07"),
    "points outside": lambda p: patch(idx_path(p), HEADER.size + 2 * 4, b"\x7f"),
}


@pytest.mark.parametrize("message", BREAK)
def test_every_bad_file_has_its_error(tmp_path: Path, message: str) -> None:
    prefix = write(tmp_path / "x", [[1, 2, 3], [4]])
    BREAK[message](prefix)
    with pytest.raises(ValueError, match=message):
        IndexedDataset(prefix)


def test_vocabulary_and_dtype(tmp_path: Path) -> None:
    with refused("70000", "uint16"):
        write(tmp_path / "x", [[70000]])
    assert not list(tmp_path.iterdir())  # neither file, nor a temporary one
    data = IndexedDataset(write(tmp_path / "x", [[65000]]))
    data.check_vocabulary(65536)
    with refused("65537"):
        data.check_vocabulary(65537)
    with pytest.raises(ValueError, match="not tokens"):
        IndexedDataset(write(tmp_path / "f", [[1]], "f4")).check_vocabulary(10)


def test_failed_rewrite_leaves_the_old_files(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", [[1, 2]])
    with pytest.raises(ValueError), IndexedWriter(prefix, dtype="u2") as writer:
        writer.add_document([5])
        writer.add_document([-1])
    assert IndexedDataset(prefix).get(0).tolist() == [1, 2]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.bin", "x.idx"]
