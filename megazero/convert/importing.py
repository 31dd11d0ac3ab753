"""Imports a Hugging Face folder: as a checkpoint, or into the slices of a run that starts from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint import store
from megazero.checkpoint.boxes import boxes, gaps
from megazero.checkpoint.placement import Placement
from megazero.checkpoint.planners import box_view
from megazero.checkpoint.records import SliceRecord
from megazero.config.model.architecture import from_hf_config
from megazero.config.model.published import find_tokenizer
from megazero.config.model.section import ModelConfig
from megazero.config.options.sections import DataConfig
from megazero.config.run import to_store
from megazero.config.secrets import redact
from megazero.convert.folder import Folder
from megazero.data.tokenizer_files import load_run_tokenizer, read_tokenizer_files, tokenizer_options
from megazero.models.hf_weights import match_names, tied_head

PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(frozen=True)
class Published:
    """A folder whose config.json is understood and whose weights are those of its model.

    accept: fields of config.json that are set aside although the decoder does not know them.
    """

    folder: Folder
    accept: tuple[str, ...] = ()

    @classmethod
    def open(cls, path: Path, accept: Collection[str] = ()) -> Published:
        """Open a folder and check it. Raises ValueError if a field or a tensor is not understood, or is missing."""
        published = cls(Folder.open(path), tuple(accept))
        head = tied_head(published.model)
        shapes = published.folder.shapes
        if head and head[0] in shapes:  # some hold it twice; a head of its own would be another model
            ours = published.names[head[1]]
            if not torch.equal(published.folder.tensor(head[0]), published.folder.tensor(ours)):
                raise ValueError(
                    f"'{path}': config.json ties '{head[0]}' to the embedding, and the files hold another one: "
                    "tie_word_embeddings has to be false"
                )
        return published

    @cached_property
    def model(self) -> ModelConfig:
        """The model section, as long as its positions go."""
        return from_hf_config(self.folder.config, self.accept)

    @cached_property
    def names(self) -> dict[str, str]:
        """Map each tensor of the model to its name in the folder, in the order of the model."""
        return match_names(self.model, self.folder.shapes)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of the model as a view of the mapped file."""
        return self.folder.tensor(self.names[name])

    @cached_property
    def data(self) -> DataConfig:
        """The data section: which tokenizer the folder has, if it has one that is read here."""
        found: dict[str, Any] = find_tokenizer(self.folder.path)
        return DataConfig(**found)


def fill(published: Published, records: Sequence[SliceRecord], kinds: Collection[str]) -> None:
    """Fill the records' tensors of ``kinds`` with their part of the folder's weights. Padding becomes zero.

    A rank reads its own slices. The dtype is converted to the records'.
    """
    for record in records:
        there = published.tensor(record.placement.name)
        for kind in [kind for kind in record.tensors if kind in kinds]:
            for low, high in gaps(record.placement, record.start, record.stop):
                record.tensors[kind][low - record.start : high - record.start].zero_()
            for box in boxes(record.placement, record.start, record.stop):
                view = there
                for dim, (first, size) in enumerate(zip(box.stored_offsets, box.stored_sizes, strict=True)):
                    view = view.narrow(dim, first, size)
                box_view(record, kind, box).copy_(view)


def write_checkpoint(published: Published, root: Path) -> Path:
    """Write ROOT/iter_0000000 with the folder's weights, bit for bit, and its tokenizer. Returns its path.

    Raises CheckpointError if ROOT has that already, or cannot be written; then it is as before. Raises ValueError if
    the tokenizer has more ids than the model.
    """
    dtype = {"params_dtype": PRECISIONS[published.folder.dtype]}
    values = {**dataclasses.asdict(published.model), **dataclasses.asdict(published.data), **dtype}
    tokenizer = load_run_tokenizer(values, {}, {})
    if tokenizer.info.vocab_size > published.model.vocabulary:
        raise ValueError(
            f"the tokenizer in '{published.folder.path}' has {tokenizer.info.vocab_size} ids, and the embedding "
            f"{published.model.vocabulary} rows: a text with the last of them has no embedding; remove the tokens "
            "that were added since, or resize the model"
        )
    state = {
        "iteration": 0,
        "consumed_samples": 0,
        "run_id": "",
        "tokenizer": tokenizer.info.fingerprint,
        "imported": True,
    }
    snapshot = store.Snapshot(
        step=0,
        records=list(_whole(published)),
        state=state,
        configuration=redact(to_store(values)),
        files=read_tokenizer_files(values["tokenizer_type"], tokenizer_options(values)),
    )
    return store.save(root, snapshot)


def _whole(published: Published) -> Iterator[SliceRecord]:
    for name in published.names:
        tensor = published.tensor(name)
        placement = Placement.plain(name, tuple(tensor.shape))
        yield SliceRecord(placement, 0, prod(tensor.shape), {"weights": tensor.view(-1)})
