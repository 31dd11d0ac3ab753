"""Checkpoints to Hugging Face folders and back: the same bits, bounded files, one clear error, nothing harmed."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megazero.checkpoint import store
from megazero.checkpoint.errors import CheckpointError
from megazero.checkpoint.placement import Placement
from megazero.checkpoint.records import SliceRecord
from megazero.config import parse
from megazero.convert import export, importing, shards
from megazero.convert.command import main
from megazero.convert.export import finish, write_folder
from megazero.convert.folder import Entry, Folder
from megazero.convert.importing import Published, fill, write_checkpoint
from megazero.convert.source import Source
from tests import ROOT
from tests.family_models import save
from tests.hugging_face import save_model, weights_digest
from tests.messages import refused

pytest.importorskip("transformers")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    """A power cut is not simulated, so the tests need not wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A published folder in bf16."""
    return save_model(tmp_path_factory.mktemp("made") / "hf", dtype=torch.bfloat16)


@pytest.fixture
def folder(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "hf"))


@pytest.fixture
def checkpoint(folder, tmp_path):
    return write_checkpoint(Published.open(folder), tmp_path / "ck")


def convert(*words) -> int:
    return main([str(word) for word in words])


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_import_then_export_is_bit_for_bit(kind, dtype, tmp_path, capsys):
    hf = save_model(tmp_path / "hf", kind, dtype)
    assert convert("from-hf", hf, tmp_path / "ck") == 0
    assert convert("to-hf", tmp_path / "ck", tmp_path / "out", "--shard-size", "9KB") == 0
    assert capsys.readouterr().out.count("holds") == 4
    before, after = Published.open(hf), Published.open(tmp_path / "out")
    assert before.model == after.model and list(before.names) == list(after.names)
    for name in before.names:
        assert before.tensor(name).dtype == after.tensor(name).dtype == dtype
        assert torch.equal(before.tensor(name).view(torch.int16), after.tensor(name).view(torch.int16)), name
    files = list((tmp_path / "out").glob("*.safetensors"))
    largest = max(after.tensor(name).nbytes for name in after.names)
    assert len(files) > 3 and all(file.stat().st_size < max(9_000, largest) + 4096 for file in files)
    noted = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert {file.name for file in files} <= noted["files"].keys() and noted["weights"] == "trained"


def test_safetensors_reads_what_is_written(checkpoint, folder, tmp_path):
    from safetensors.torch import load_file

    out = finish(write_folder(Source(checkpoint, dtype=torch.float32), tmp_path / "out"))
    tensors, published = load_file(out / "model.safetensors"), Published.open(folder)
    assert tensors.keys() == published.names.keys()
    assert all(torch.equal(tensors[name], published.tensor(name).float()) for name in tensors)
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float32"


def killed(renames, *words):
    """Run the command and kill it when it gives a finished file its name for the first time after ``renames``."""
    program = (
        "import os, signal, sys\n"
        "from megazero.convert.command import main\n"
        "left, rename = [int(sys.argv[1])], os.rename\n"
        "def renaming(*names):\n"
        "    left[0] -= 1\n"
        "    os.kill(os.getpid(), signal.SIGKILL) if left[0] < 0 else rename(*names)\n"
        "os.rename = renaming\n"
        "main(sys.argv[2:])\n"
    )
    command = [sys.executable, "-c", program, str(renames), *map(str, words)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120).returncode == -signal.SIGKILL


def test_padding_is_zero_after_an_import(folder):
    """Whatever the buffer held: an embedding's padded rows, in slices that begin and end anywhere."""
    published = Published.open(folder)
    name = next(name for name in published.names if published.names[name].endswith("embed_tokens.weight"))
    weights = published.tensor(name)
    rows, width = weights.shape
    whole = torch.cat([weights.float(), torch.zeros(5, width)]).view(-1)
    end = rows * width
    placement = Placement.plain(name, (rows, width), (rows + 5, width))
    for start, stop in ((0, len(whole)), (end - 3, end + 7), (end + 1, len(whole)), (5, end)):
        held = {kind: torch.full((stop - start,), torch.nan) for kind in ("master", "exp_avg")}
        fill(published, [SliceRecord(placement, start, stop, held)], ("master",))
        assert torch.equal(held["master"], whole[start:stop])
        assert held["exp_avg"].isnan().all(), "a kind that was not asked for"


def test_a_folder_has_the_dtype_of_most_elements_not_of_most_tensors(tmp_path):
    many = {f"norm.{i}": Entry(tmp_path, "F32", (8,)) for i in range(9)}
    assert Folder(tmp_path, {}, {**many, "matrix": Entry(tmp_path, "BF16", (16, 16))}).dtype == torch.bfloat16


def test_bytes_behind_the_tensors_are_refused(folder):
    """Another file's end, or a header that lost a tensor: what is not described is not a part of the model."""
    file = next(folder.glob("*.safetensors"))
    with file.open("ab") as stream:
        stream.write(bytes(8))
    with refused(file.name, "no whole safetensors file", "get it again"):
        Folder.open(folder)


def test_files_of_the_trained_weights_do_not_stay_in_a_folder_of_the_masters(folder, tmp_path, monkeypatch):
    """An export that broke off after the weights left them finished; names, shapes and dtypes are the same."""
    whole = importing._whole

    def with_masters(published, name):
        record = whole(published, name)
        masters = {"master": record.tensors["weights"].float()}

        def make(kind):
            made = record.make("weights")
            return made if kind == "weights" else made.float() + 1

        return replace(record, tensors={**record.tensors, **masters}, make=make)

    monkeypatch.setattr(importing, "_whole", with_masters)
    checkpoint = write_checkpoint(Published.open(folder), tmp_path / "ck")
    trained, master = (Source(checkpoint, weights, torch.bfloat16) for weights in ("trained", "master"))
    with monkeypatch.context() as broken, pytest.raises(CheckpointError, match="no more space"):
        broken.setattr(export, "_describe", partial(raises, OSError("no more space")))
        write_folder(trained, tmp_path / "out", shard_bytes=9_000)
    made = Folder.open(write_folder(master, tmp_path / "out", shard_bytes=9_000))
    for name in made.entries:
        assert torch.equal(made.tensor(name), (trained.stored.read(name).float() + 1).bfloat16()), name


def raises(error, *_):
    raise error


@pytest.mark.long
def test_a_kill_half_way_is_resumed_and_finished_files_stay(checkpoint, tmp_path):
    """The process is killed in the third file; the next call writes only what is missing."""
    killed(2, "to-hf", checkpoint, tmp_path / "out", "--shard-size", "9KB", "--no-check")
    assert not (tmp_path / "out").exists()
    partial = tmp_path / "out.partial"
    kept = {file: file.stat().st_mtime_ns for file in partial.glob("*.safetensors")}
    assert len(kept) == 2 and not (partial / "config.json").exists()
    spoilt = sorted(kept)[0]
    spoilt.write_bytes(b"x" + spoilt.read_bytes()[1:])  # what is damaged meanwhile is written again
    stays = sorted(kept)[1]
    written = resumed(checkpoint, tmp_path)
    assert stays.name not in written and spoilt.name in written
    whole = finish(write_folder(Source(checkpoint), tmp_path / "other", shard_bytes=9_000))
    assert weights_digest(tmp_path / "out") == weights_digest(whole)
    assert not [
        path for path in (tmp_path / "out").iterdir() if path.name.startswith(".") or "partial" in path.name
    ]


def resumed(checkpoint, tmp_path) -> list[str]:
    """The files that a resumed export really writes."""
    written, original = [], shards._write

    def spy(*args):
        written.append(args[1].file)
        return original(*args)

    shards._write = spy
    try:
        assert convert("to-hf", checkpoint, tmp_path / "out", "--shard-size", "9KB", "--no-check") == 0
    finally:
        shards._write = original
    return written


def test_a_full_disk_harms_nothing_and_the_same_command_goes_on(checkpoint, tmp_path, capsys):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, before[1]))
    try:
        assert convert("to-hf", checkpoint, tmp_path / "out", "--shard-size", "6KB", "--no-check") == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    error = capsys.readouterr().err
    assert (
        "File too large" in error and "the same command goes on" in error and not (tmp_path / "out").exists()
    )
    assert convert("to-hf", checkpoint, tmp_path / "out", "--shard-size", "6KB") == 0


def grow(disk):
    subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)


def test_an_import_to_a_full_disk_harms_nothing(folder, disk, capsys):
    assert convert("from-hf", folder, disk / "ck") == 2
    assert "No space left on device" in capsys.readouterr().err and not list(disk.glob("ck*"))
    grow(disk)
    assert convert("from-hf", folder, disk / "ck") == 0


def first_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def truncate(folder):
    first_shard(folder).write_bytes(first_shard(folder).read_bytes()[:-7])


def header(folder):
    first_shard(folder).write_bytes(b"\xff" * 8 + first_shard(folder).read_bytes()[8:])


def remove_index(folder):
    (folder / "model.safetensors.index.json").unlink()


def reindex(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def remove_shard(folder):
    first_shard(folder).unlink()


def share_bytes(folder):
    """Let a norm lie where another one lies."""
    rewrite(
        folder, lambda told: told["model.norm.weight"] | {"data_offsets": first_norm(told)["data_offsets"]}
    )


def measure_in_floats(folder):
    rewrite(folder, lambda told: told["model.norm.weight"] | {"shape": [32.0]})


def rewrite(folder, norm):
    """Replace what a header says of the last norm."""
    for file in folder.glob("*.safetensors"):
        data = file.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        told = json.loads(data[8:end])
        if "model.norm.weight" in told:
            text = json.dumps({**told, "model.norm.weight": norm(told)}).encode()
            file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def first_norm(told):
    return next(each for name, each in told.items() if name.endswith("post_attention_layernorm.weight"))


def edit(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


MISTAKES = {
    "a shard truncated": (truncate, "no whole safetensors file.*get it again"),
    "a damaged header": (header, "is no whole safetensors file"),
    "a missing index": (remove_index, "model.safetensors.index.json' is missing: there are"),
    "an index that is a list": (lambda f: reindex(f, ["lm_head.weight"]), "index.json' is damaged"),
    "tensors that share bytes": (share_bytes, "is no whole safetensors file"),
    "a length that is no whole number": (measure_in_floats, "is no whole safetensors file"),
    "a missing shard": (remove_shard, "is missing, and .* names it"),
    "an unknown field": (lambda f: edit(f, brand_new=3), "brand_new = 3 is not known here.*--accept-field"),
    "another model type": (
        lambda f: edit(f, model_type="mamba"),
        "'mamba' is not built here: its fields and tensor names have no reader",
    ),
    "another size": (lambda f: edit(f, hidden_size=48, head_dim=6), "not of this model"),
    "a number in quotes": (
        lambda f: edit(f, num_nextn_predict_layers="1"),
        "num_nextn_predict_layers takes a whole number, got '1'",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json' is missing"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_folder_that_cannot_be_imported_is_one_clear_error(mistake, folder, tmp_path, capsys):
    spoil, message = MISTAKES[mistake]
    spoil(folder)
    assert convert("from-hf", folder, tmp_path / "ck") == 2
    (line, *_) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert re.search(message, line), line
    assert store.latest(tmp_path / "ck") is None


def test_an_accepted_field_is_set_aside(folder, tmp_path):
    edit(folder, brand_new=3)
    assert convert("from-hf", folder, tmp_path / "ck", "--accept-field", "brand_new", "--no-check") == 0


def test_a_flipped_byte_is_found_on_both_sides(checkpoint, folder, tmp_path, capsys):
    out = finish(write_folder(Source(checkpoint), tmp_path / "out"))
    file = out / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert convert("check", checkpoint, out) == 1
    printed = capsys.readouterr().out
    assert "1 of" in printed and "DOES NOT HOLD" in printed
    shard = next(checkpoint.glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert convert("to-hf", checkpoint, tmp_path / "again") == 2
    assert "has checksum" in capsys.readouterr().err and not (tmp_path / "again").exists()


def test_a_folder_that_exists_is_kept(checkpoint, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    assert convert("to-hf", checkpoint, tmp_path / "out") == 2
    assert "exists already and was kept" in capsys.readouterr().err and not list((tmp_path / "out").iterdir())


def test_a_tied_head_that_is_stored_twice_must_be_the_embedding(tmp_path):
    from safetensors.torch import load_file, save_file

    hf = save_model(tmp_path / "hf", "gpt2")
    file = first_shard(hf)
    tensors = load_file(file)
    embedding = Folder.open(hf).tensor("transformer.wte.weight").clone()
    index = json.loads((hf / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = file.name
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({**tensors, "lm_head.weight": embedding}, file)
    assert "lm_head.weight" not in Published.open(hf).names
    save_file({**tensors, "lm_head.weight": embedding + 1}, file)
    with refused("tie_word_embeddings"):
        Published.open(hf)


def test_a_tied_head_under_the_name_of_transformers_5_must_be_the_embedding(tmp_path):
    from safetensors.torch import load_file, save_file

    hf = save("gpt_neox", tmp_path / "hf", tie_word_embeddings=True)
    weights = load_file(hf / "model.safetensors")
    embedding = weights["gpt_neox.embed_in.weight"]
    save_file({**weights, "lm_head.weight": embedding.clone()}, hf / "model.safetensors")
    assert not [name for name in Published.open(hf).names.values() if name == "lm_head.weight"]
    save_file({**weights, "lm_head.weight": embedding + 1}, hf / "model.safetensors")
    with refused("lm_head.weight"):
        Published.open(hf)


def test_too_little_space_is_said_before_anything_is_written(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(export.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with refused("0.00 GB", by=store.CheckpointError):
        write_folder(Source(checkpoint), tmp_path / "out")


def test_the_flags_of_a_folder_are_its_model(folder, tmp_path, capsys):
    assert convert("flags", folder) == 0
    flags = capsys.readouterr().out.replace("\\\n", " ").split()
    run = ["--mock-data", "--micro-batch-size", "1", "--lr", "1", "--train-iters", "1"]
    assert parse([*flags, *run]).model == Published.open(folder).model
    assert convert("flags", folder, "--yaml") == 0
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out)
    assert parse(["--config", str(tmp_path / "run.yaml"), *run]).model == Published.open(folder).model


def test_shards_are_planned_by_size():
    tensors = [shards.Plain(str(i), torch.float32, (size,)) for i, size in enumerate((10, 10, 40, 1, 1))]
    planned = shards.plan_shards(tensors, 100)
    assert [[t.name for t in shard.tensors] for shard in planned] == [["0", "1"], ["2"], ["3", "4"]]
    assert shards.plan_shards(tensors, 10**6)[0].file == "model.safetensors"
    # To the byte; and a first tensor above the limit leaves no empty file before it.
    assert [len(shard.tensors) for shard in shards.plan_shards(tensors, 80)] == [2, 1, 2]
    assert [len(shard.tensors) for shard in shards.plan_shards(tensors, 79)] == [1, 1, 1, 2]
    assert [len(shard.tensors) for shard in shards.plan_shards(tensors, 39)] == [1, 1, 1, 2]


def test_torch_reads_our_checkpoints(checkpoint, folder, tmp_path):
    """torch.distributed.checkpoint.format_utils turns one into a file of torch.save."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(checkpoint, tmp_path / "weights.pt")
    tensors = torch.load(tmp_path / "weights.pt", weights_only=True)
    published = Published.open(folder)
    assert tensors.keys() == {f"weights/{name}" for name in published.names}
    assert all(torch.equal(tensors[f"weights/{name}"], published.tensor(name)) for name in published.names)
