"""``.metadata`` is read as data: what torch writes loads, and no program in it reaches anything that outlives it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as of_torch

from megazero.checkpoint.errors import CheckpointError
from megazero.checkpoint.metadata import BytesPlace, Description, StoredChunk, StoredTensor, read_metadata

DCP = "torch.distributed.checkpoint.metadata"
CLASSES = (of_torch.Metadata, of_torch.StorageMeta, of_torch.TensorProperties, of_torch.MetadataIndex)
MEMBER = of_torch._MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that torch wrote by itself: nested names, a path in its description."""
    path = tmp_path_factory.mktemp("dcp")
    state = {
        "a": {"w": torch.zeros(3, 2), "half": torch.zeros(4, dtype=torch.bfloat16)},
        "l": [torch.ones(())],
    }
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


@pytest.fixture
def metadata(written: Path) -> of_torch.Metadata:
    return pickle.loads((written / ".metadata").read_bytes())


def read(path: Path, data: bytes) -> Description:
    (path / ".metadata").write_bytes(data)
    return read_metadata(path)


def expected(metadata: of_torch.Metadata) -> Description:
    """What read_metadata says of torch's own object."""
    places = {
        (index.fqn, index.offset): BytesPlace(info.relative_path, info.offset, info.length)
        for index, info in metadata.storage_data.items()
    }
    tensors = {
        name: StoredTensor(
            tuple(each.size),
            each.properties.dtype,
            tuple(
                StoredChunk(tuple(c.offsets), tuple(c.sizes), places[name, c.offsets]) for c in each.chunks
            ),
        )
        for name, each in metadata.state_dict_metadata.items()
    }
    return Description(tensors, {})


def test_what_torch_writes_is_read(written: Path, metadata: of_torch.Metadata) -> None:
    found = read_metadata(written)
    assert found == expected(metadata) and found.tensors.keys() == {"a.w", "a.half", "l.0"}
    assert found.tensors["a.half"].dtype == torch.bfloat16 and found.tensors["a.w"].shape == (3, 2)


@pytest.mark.parametrize("protocol", [2, 5])
def test_every_protocol_and_early_python_311(
    protocol: int, tmp_path: Path, metadata: of_torch.Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    if protocol > 2:  # 3.11.2 and older write a member of an enumeration as an attribute of its class
        reduce = lambda member, _: (getattr, (type(member), member.name))  # noqa: E731
        monkeypatch.setattr(of_torch._MEM_FORMAT_ENCODING, "__reduce_ex__", reduce)
    assert read(tmp_path, pickle.dumps(metadata, protocol)) == expected(metadata)


def test_fields_that_older_releases_lack_are_not_needed(tmp_path: Path, metadata: of_torch.Metadata) -> None:
    del metadata.version, metadata.storage_meta.modules
    assert read(tmp_path, pickle.dumps(metadata)) == expected(metadata)


def described_by(fields: int, monkeypatch: pytest.MonkeyPatch, extra: Any = None) -> None:
    """Have torch write a tensor's properties as a release with so many fields does, ``extra`` in new ones."""
    state = of_torch.TensorProperties.__getstate__
    monkeypatch.setattr(
        of_torch.TensorProperties, "__getstate__", lambda own: (*state(own), extra, extra)[:fields]
    )


@pytest.mark.parametrize("fields", [5, 7])
def test_every_release_reads_what_another_wrote(
    fields: int, tmp_path: Path, metadata: of_torch.Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    first(metadata).properties = of_torch.TensorProperties(
        torch.half, requires_grad=True, memory_format=torch.channels_last, pin_memory=True
    )
    described_by(fields, monkeypatch, extra=(2, 1))
    vars(metadata).update(__eq__="x", later={"a": 1.5})
    found = read(tmp_path, pickle.dumps(metadata))
    assert found == expected(metadata) and first(metadata).properties.dtype == torch.half


# Pieces of pickle programs.


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def name(module: str, qualified: str) -> bytes:
    return text(module) + text(qualified) + b"\x93"  # STACK_GLOBAL


def fields(**values: bytes) -> bytes:
    return b"}" + b"".join(text(key) + value + b"s" for key, value in values.items())


ONE = b"K\x01"
METADATA, META = name(DCP, "Metadata"), name(DCP, "StorageMeta")
PROGRAMS = {
    "attribute of a class": META + b"N" + fields(poison=ONE) + b"\x86b",  # BUILD with (None, slots)
    "fields of a class": METADATA + fields(poison=ONE) + b"b",
    "attribute of a function": name("torch.serialization", "_get_layout") + fields(cache=ONE) + b"b",
    "attribute of a member": name(DCP, "_MEM_FORMAT_ENCODING") + ONE + b"\x85R" + fields(poison=ONE) + b"b",
    "attribute of a dtype": name("torch", "half") + fields(poison=ONE) + b"b",
    "attribute of a size": name("torch", "Size") + fields(poison=ONE) + b"b",
    "call": name("builtins", "exec") + text("raise SystemExit") + b"\x85R",
    "GLOBAL": b"cos\nabort\n)R",
    "INST": b"(ios\nabort\n",
    "OBJ": b"(" + name("os", "abort") + b"o",
    "persistent id": b"P1\n",
    "extension": b"\x82\x01",
    "buffer from outside": b"\x97",
}  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_change_nothing(program: str, tmp_path: Path, metadata: of_torch.Metadata) -> None:
    """The program runs before a description that is otherwise right, and what it leaves is dropped."""
    body = pickle.dumps(metadata, 4)
    body = body[11:] if body[2:3] == b"\x95" else body[2:]  # without PROTO and FRAME
    before = {kind: dict(vars(kind)) for kind in (*CLASSES, of_torch._MEM_FORMAT_ENCODING)}
    layout = torch.serialization._get_layout
    seen = (dict(vars(MEMBER)), set(vars(layout)), layout("torch.strided"))
    try:
        assert read(tmp_path, b"\x80\x04" + PROGRAMS[program] + b"0" + body) == expected(metadata)
    except CheckpointError as error:
        assert "damaged or malicious" in f"{error}"
    assert {kind: dict(vars(kind)) for kind in before} == before
    assert (dict(vars(MEMBER)), set(vars(layout)), layout("torch.strided")) == seen


def first(metadata: of_torch.Metadata) -> Any:
    return next(iter(metadata.state_dict_metadata.values()))


UNEXPECTED = {
    "chunk": lambda m: vars(first(m).chunks[0]).update(poison=1),
    "coding of a file": lambda m: vars(next(iter(m.storage_data.values()))).update(coding="zstd"),
    "key that is no text": lambda m: m.state_dict_metadata.update({1: first(m)}),
    "missing field": lambda m: vars(first(m)).pop("size"),
    "wrong type of a field": lambda m: vars(first(m)).update(size=(3, -2)),
    "wrong type of a number": lambda m: vars(next(iter(m.storage_data.values()))).update(offset=True),
    "extensions": lambda m: vars(next(iter(m.storage_data.values()))).update(transform_descriptors=["zstd"]),
    "list in itself": lambda m: first(m).chunks.append(first(m).chunks),
    "no storage": lambda m: vars(m).update(storage_data=None),
}


@pytest.mark.parametrize("what", UNEXPECTED)
def test_unexpected_fields_are_refused(what: str, tmp_path: Path, metadata: of_torch.Metadata) -> None:
    UNEXPECTED[what](metadata)
    with pytest.raises(CheckpointError, match="damaged or malicious"):
        read(tmp_path, pickle.dumps(metadata))
