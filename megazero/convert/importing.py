"""Imports a Hugging Face folder: as a checkpoint, or into the slices of a run that starts from it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch

from megazero.bounded import load_yaml, read_bytes
from megazero.checkpoint import store
from megazero.checkpoint.boxes import boxes
from megazero.checkpoint.placement import Placement
from megazero.checkpoint.records import SliceRecord
from megazero.config.model.architecture import from_hf_config
from megazero.config.model.published import find_tokenizer
from megazero.config.model.section import ModelConfig
from megazero.config.options.sections import DataConfig
from megazero.config.run import to_store
from megazero.convert.folder import Folder
from megazero.data.tokenizer_files import load_run_tokenizer, read_tokenizer_files, tokenizer_options
from megazero.data.tokenizer_settings import OF_MODEL
from megazero.families.config_json.known_fields import MORE_TOKENS
from megazero.models.dtypes import PRECISIONS
from megazero.models.hf_weights import constants, copies, layers_behind, match_names, tied_head
from megazero.models.placements import stored_tensors

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_CACHED = "models--"  # of the Hub's cache: a folder models--ORG--NAME has the revisions of ORG/NAME


class ImportedWeights(Protocol):
    """Weights that become a checkpoint: the decoder's stored tensors, which are read or made one at a time.

    model, data: the sections of their model and of its tokenizer. origin: where they come from, in words. base: the
    name of the model. license: as model cards have it, by field. shapes: of every tensor, in the order of the model.
    dtype: that of most of them.
    """

    @property
    def model(self) -> ModelConfig: ...

    @property
    def data(self) -> DataConfig: ...

    @property
    def origin(self) -> str: ...

    @property
    def base(self) -> str: ...

    @property
    def license(self) -> Mapping[str, str]: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """Return a contiguous tensor on the CPU."""
        ...


@dataclass(frozen=True)
class Published:
    """A folder whose config.json is understood and whose weights are those of its model.

    accept: fields of config.json that are set aside although the decoder does not know them.
    """

    folder: Folder
    accept: tuple[str, ...] = ()
    origin = "a Hugging Face folder"

    @classmethod
    def open(cls, path: Path, accept: Collection[str] = ()) -> Published:
        """Open a folder and check it. Raises ValueError if a field or a tensor is not understood, or is missing."""
        published = cls(Folder.open(path), tuple(accept))
        names = published.names
        head, embedding = tied_head(published.model) or (None, "")
        tensor, aliases = published.folder.tensor, published.model.tensor_names.aliases
        again = copies(published.model)
        # Some folders hold the head, too. One of its own would be another model.
        for there in published.folder.shapes:
            name = aliases.get(there, there)
            own = embedding if name == head else again.get(name)
            if own is None or torch.equal(tensor(there), tensor(names[own])):
                continue
            if name == head:
                raise ValueError(
                    f"'{path}': config.json ties '{there}' to the embedding, and the files hold another one: "
                    "tie_word_embeddings has to be false"
                )
            raise ValueError(f"'{path}': '{there}' is not '{own}', which further predictions share")
        for name, value in constants(published.model).items():
            if not torch.equal(held := tensor(names[name]), torch.tensor(value, dtype=held.dtype)):
                raise ValueError(f"'{path}': '{name}' is {held.item():g} (only {value:g})")
        return published

    @cached_property
    def model(self) -> ModelConfig:
        """The model section, as long as its positions go."""
        return from_hf_config(self.folder.config, self.accept)

    @property
    def base(self) -> str:
        """The model's name on a hub, if the cache's folder or config.json has one, else the folder's name."""
        path = self.folder.path.resolve()
        cached = (part.removeprefix(_CACHED) for part in path.parts if part.startswith(_CACHED))
        named = (f"{self.folder.config.get(field)}" for field in ("_name_or_path", "_model_name_or_path"))
        names = (*(part.replace("--", "/", 1) for part in cached), *named)
        return next(filter(HUB_NAME.fullmatch, names), path.name)

    @cached_property
    def license(self) -> dict[str, str]:
        """What the folder's model card says of the model's license, by field. A card that is damaged says nothing."""
        with suppress(ValueError, OSError):
            front = read_bytes(self.folder.path / "README.md").decode().split("---\n")
            told = load_yaml(front[1])[0] if len(front) > 2 and not front[0] else None
            if isinstance(told, dict):
                fields = ("license", "license_name", "license_link")
                return {name: told[name] for name in fields if isinstance(told.get(name), str)}
        return {}

    @property
    def of_model(self) -> dict[str, bytes]:
        """The files of ``OF_MODEL`` by name, which a checkpoint keeps."""
        there = {name: self.folder.path / name for name in OF_MODEL}
        return {name: file.read_bytes() for name, file in there.items() if file.is_file()}

    @cached_property
    def names(self) -> dict[str, str]:
        """Map each of ``folder_tensors`` to its name in the folder, in the order of the model."""
        shapes, further = self.folder.shapes, self.folder.config.get(MORE_TOKENS) or 0
        if not isinstance(further, int):
            raise ValueError(f"{MORE_TOKENS} takes a whole number, got {further!r}")
        behind = layers_behind(self.model, shapes, further)
        if behind and MORE_TOKENS not in self.accept:
            raise ValueError(
                f"'{self.folder.path}' has layers that predict further tokens, which are not built (such as "
                f"'{behind[0]}'): --accept-field {MORE_TOKENS} leaves them out"
            )
        first = f"{self.model.tensor_names.layer_prefix}{self.model.num_layers}.enorm.weight"
        if self.model.mtp_num_layers and first not in shapes:
            raise ValueError(
                f"'{self.folder.path}': {MORE_TOKENS} = {further} in config.json, and the files have no '{first}': "
                f"--accept-field {MORE_TOKENS} leaves layers that predict further tokens out"
            )
        own = {name: shape for name, shape in shapes.items() if name not in behind}
        return match_names(self.model, own)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return stored_tensors(self.model)

    @property
    def dtype(self) -> torch.dtype:
        return self.folder.dtype

    def dtype_of(self, name: str) -> torch.dtype:
        return self.tensor(name).dtype

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of the model: a view of the mapped file, or a copy where others lie in between."""
        there = self.names
        return self.model.tensor_names.taken(name, lambda n: self.folder.tensor(there[n])).contiguous()

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
            record.zero_padding(kind)
            for box in boxes(record.placement, record.start, record.stop):
                view = there
                for dim, (first, size) in enumerate(zip(box.stored_offsets, box.stored_sizes, strict=True)):
                    view = view.narrow(dim, first, size)
                record.view(kind, box).copy_(view)


def write_checkpoint(weights: ImportedWeights, root: Path, files: Mapping[str, bytes] | None = None) -> Path:
    """Write ROOT/iter_0000000 with the weights, bit for bit, and their tokenizer. Returns its path.

    files: small files that go with them, by name.
    Raises CheckpointError if ROOT has that already, or cannot be written; then it is as before. Raises ValueError if
    the tokenizer has more ids than the model.
    """
    dtype = {"params_dtype": PRECISIONS[weights.dtype]}
    values = {**dataclasses.asdict(weights.model), **dataclasses.asdict(weights.data), **dtype}
    tokenizer = load_run_tokenizer(values, {}, {})
    if tokenizer.info.vocab_size > weights.model.vocabulary:
        raise ValueError(
            f"the tokenizer of {weights.origin} has {tokenizer.info.vocab_size} ids, and the embedding "
            f"{weights.model.vocabulary} rows: a text with the last of them has no embedding; remove the tokens "
            "that were added since, or resize the model"
        )
    state = {
        "iteration": 0,
        "consumed_samples": 0,
        "run_id": "",
        "tokenizer": tokenizer.info.fingerprint,
        "imported": weights.origin,
        "base": weights.base,
        "license": weights.license,
    }
    held = read_tokenizer_files(values["tokenizer_type"], tokenizer_options(values))
    snapshot = store.Snapshot(
        step=0,
        records=[_whole(weights, name) for name in weights.shapes],
        state=state,
        configuration=to_store(values),
        files={**held, **(files or {})},
    )
    return store.save(root, snapshot)


def _whole(weights: ImportedWeights, name: str) -> SliceRecord:
    """Return the record of a whole tensor, which is read or made when it is written."""
    shape = weights.shapes[name]
    flat = torch.empty(prod(shape), dtype=weights.dtype_of(name), device="meta")
    place = Placement.plain(name, shape)
    return SliceRecord(
        place, 0, len(flat), {"weights": flat}, make=lambda kind: weights.tensor(name).view(-1)
    )
