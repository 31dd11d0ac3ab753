"""Checkpoint files made by an attacker are refused, and nothing in them runs."""

import io
import json
import os
import pickle

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from megazero.checkpoint import manifest, store
from megazero.checkpoint.errors import CheckpointError
from tests.unit.checkpoint.test_store import model, no_fsync, saved

__all__ = ["no_fsync"]


class Malice:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def reseal(path, name):
    """What an attacker does: put the right checksums on a changed file."""
    body = json.loads((path / "manifest.json").read_bytes())
    for key in ("format", "version", "crc32"):
        body.pop(key)
    entry = manifest.checksum(path / name)
    body["files"][name] = {"size": entry.size, "crc32": entry.crc32}
    (path / "manifest.json").unlink()
    manifest.write_manifest(path, manifest._parse(body))


@pytest.mark.parametrize("function", [os.mkdir, eval, torch.load, getattr, pickle.loads])
def test_malicious_metadata_is_refused_without_running(tmp_path, function):
    path = saved(tmp_path)
    target = tmp_path / "owned"
    argument = f"__import__('os').mkdir('{target}')" if function is eval else str(target)
    (path / ".metadata").write_bytes(pickle.dumps(Malice(function, argument)))
    reseal(path, ".metadata")
    with pytest.raises(CheckpointError, match="damaged or malicious"):
        store.load(path, records=model())
    assert not target.exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "other.distcp"])
def test_metadata_cannot_point_outside(tmp_path, name):
    path = saved(tmp_path)
    metadata = FileSystemReader(path).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = name
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(path, ".metadata")
    with pytest.raises(CheckpointError, match="no description of tensors|manifest does not list"):
        store.load(path, records=model())


def test_malicious_tensor_file_is_refused(tmp_path):
    path = saved(tmp_path)
    target = tmp_path / "owned"
    buffer = io.BytesIO()
    torch.save(Malice(os.mkdir, str(target)), buffer)
    data = (path / "__0_0.distcp").read_bytes()
    metadata = FileSystemReader(path).read_metadata()
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, len(buffer.getvalue())
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    (path / "__0_0.distcp").write_bytes(buffer.getvalue() + data)
    for name in (".metadata", "__0_0.distcp"):
        reseal(path, name)
    with pytest.raises(CheckpointError, match="[Ww]eights.only"):
        store.load(path, records=model())
    assert not target.exists()
