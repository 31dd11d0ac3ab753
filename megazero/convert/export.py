"""Exports a checkpoint to a Hugging Face folder: the weights, then their description, config.json last.

Everything is written in FOLDER.partial, which is renamed when it is complete. After an interruption the same call
continues and keeps finished files whose checksums match.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint.directory import fsync_directory
from megazero.checkpoint.errors import CheckpointError, agree_local
from megazero.checkpoint.manifest import FileEntry, checksum
from megazero.checkpoint.reading import check_files
from megazero.config.model.architecture import architecture_of
from megazero.config.model.published import CONFIG_FILE
from megazero.config.read.files import read_json
from megazero.convert.card import card
from megazero.convert.folder import INDEX_FILE
from megazero.convert.shards import (
    PARTIAL,
    Shard,
    index_of,
    plan_shards,
    remove_notes,
    write_json,
    write_shard,
)
from megazero.convert.source import Source
from megazero.convert.tokenizer import (
    RunTokenizer,
    generation_config,
    hub_tokenizer,
    of_checkpoint,
    token_ids,
)
from megazero.data.tokenizer_settings import GENERATION, json_object
from megazero.families.config_json.known_fields import of_training
from megazero.files import replacing

CONVERSION_FILE, CARD_FILE = "conversion.json", "README.md"
SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class ExportProgress:
    """Callbacks that receive a description of the current work, the bytes written of it, and notes for the user."""

    say: Callable[[str, int], None] = lambda what, total: None
    advance: Callable[[int], None] = lambda count: None
    note: Callable[[str], None] = lambda text: None


def refuse_existing(folder: Path) -> None:
    """Raise CheckpointError if the folder of an export is there: it is never touched."""
    if folder.exists():
        raise CheckpointError("that exists already and was kept; name another folder, or move it away")


def write_folder(
    source: Source,
    folder: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    tokenizer: Path | None = None,
    progress: ExportProgress = ExportProgress(),
) -> Path:
    """Write FOLDER.partial, whole, and return it; ``finish`` gives it its name.

    shard_bytes: the most bytes of tensors in a file. tokenizer: as ``of_checkpoint`` takes it. Raises CheckpointError
    where the checkpoint is damaged, has no architecture in Hugging Face, or is not to be written there; finished
    files stay for the next call.
    """
    partial = folder.with_name(folder.name + PARTIAL)
    doing = f"'{folder}' not written"

    def prepare() -> tuple[list[Shard], RunTokenizer]:
        refuse_existing(folder)
        architecture_of(source.model)
        shards = plan_shards(source.in_folder, shard_bytes)
        run = of_checkpoint(source.path, source.values, tokenizer)
        partial.mkdir(parents=True, exist_ok=True)
        _check_space(partial, shards)
        progress.say("checking the checkpoint", 0)
        check_files(source.path, source.manifest)
        return shards, run

    shards, run = agree_local(None, doing, prepare)
    progress.say("writing", sum(shard.nbytes for shard in shards))
    name = _source_name(source)

    def write() -> None:
        files = {s.file: write_shard(partial, s, source.pieces, name, progress.advance) for s in shards}
        _describe(source, partial, shards, run, files, progress)

    agree_local(None, f"{doing}, and finished files stay: the same command goes on in '{partial}'", write)
    return partial


def finish(partial: Path) -> Path:
    """Give FOLDER.partial the name FOLDER and return that."""
    folder = partial.with_name(partial.name.removesuffix(PARTIAL))

    def rename() -> None:
        refuse_existing(folder)
        os.rename(partial, folder)
        fsync_directory(folder.parent)

    agree_local(None, f"'{folder}' not written", rename)
    return folder


def converted_weights(folder: Path) -> str:
    """Return which weights of its checkpoint a folder holds: as ``write_folder`` noted, else "trained"."""
    noted = folder / CONVERSION_FILE
    told = read_json(noted, "it says where the folder is from") if noted.is_file() else {}
    return str(told.get("weights", "trained"))


def hub_config(source: Source, run: RunTokenizer) -> dict[str, Any]:
    """Return config.json of a checkpoint's model, with the ids of its special tokens and the dtype of its weights.

    Fields of training alone are those of the folder that was imported, if it is of the same architecture.
    Raises ValueError if no architecture in Hugging Face has its mixture of choices.
    """
    counts = Counter[torch.dtype]()
    for tensor in source.tensors:
        counts[tensor.dtype] += tensor.nbytes
    dtype = counts.most_common(1)[0][0]
    config = architecture_of(source.model).hugging_face.config(source.model)
    told = json_object(CONFIG_FILE, run.files.get(CONFIG_FILE, b"{}"))
    same = told.get("model_type") == config["model_type"]
    kept = {name: value for name, value in told.items() if same and of_training(name)}
    return {**kept, **config, **token_ids(run), "torch_dtype": str(dtype).removeprefix("torch.")}


def _describe(
    source: Source,
    partial: Path,
    shards: list[Shard],
    run: RunTokenizer,
    files: dict[str, FileEntry],
    progress: ExportProgress,
) -> None:
    """Write all but the weights into ``partial``: config.json last."""
    hub = hub_tokenizer(run)
    if hub.note:
        progress.note(hub.note)
    small = {**hub.files, GENERATION: generation_config(run)}
    for name, data in small.items():
        with replacing(partial / name) as handle:
            handle.write(data)
    if len(shards) > 1:
        write_json(partial / INDEX_FILE, index_of(shards))
    remove_notes(partial, shards)
    described = {**files, **{name: checksum(partial / name) for name in small}}
    with replacing(partial / CARD_FILE) as handle:
        handle.write(card(source, described, hub.note).encode())
    write_json(
        partial / CONVERSION_FILE,
        {
            "format": "megazero-conversion",
            "version": 1,
            "step": source.manifest.step,
            "weights": source.weights,
            "dtype": None if source.dtype is None else str(source.dtype).removeprefix("torch."),
            "source": {name: asdict(entry) for name, entry in sorted(source.manifest.files.items())},
            "files": {name: asdict(entry) for name, entry in sorted(described.items())},
        },
    )
    write_json(partial / CONFIG_FILE, hub_config(source, run))
    _remove_others(partial, set(files))
    fsync_directory(partial)


def _remove_others(partial: Path, ours: set[str]) -> None:
    """Remove weights that an earlier call began to write with other options."""
    for path in (*partial.glob("*.safetensors*"), *partial.glob(".*.safetensors.json")):
        if path.name not in ours | {INDEX_FILE}:
            path.unlink()
    if len(ours) == 1:
        (partial / INDEX_FILE).unlink(missing_ok=True)


def _source_name(source: Source) -> str:
    """Return the identity of the weights' source: a file from another source is written again."""
    entries = sorted((name, e.size, e.crc32) for name, e in source.manifest.files.items())
    return f"{entries} {source.weights}"


def _check_space(partial: Path, shards: list[Shard]) -> None:
    there = {path.name: path.stat().st_size for path in partial.iterdir()}
    needed = sum(shard.nbytes for shard in shards if shard.file not in there)
    free = shutil.disk_usage(partial).free
    if needed > free:
        raise CheckpointError(
            f"{needed / 1e9:.2f} GB are to be written and '{partial.parent}' has {free / 1e9:.2f} GB free"
        )
