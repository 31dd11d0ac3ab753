"""A checkpoint as a source for export: its model, and its weights in Hugging Face's form, a piece at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint.errors import CheckpointError
from megazero.checkpoint.manifest import Manifest, open_manifest
from megazero.checkpoint.reading import StoredTensors, pieces, read_state
from megazero.config.model.section import ModelConfig
from megazero.config.options.fields import section_of
from megazero.config.run import stored_values
from megazero.convert.shards import Plain
from megazero.families.family import ExpertPlace
from megazero.models.hf_weights import constants, copies, folder_tensors
from megazero.models.placements import bias_placements, stored_tensors


@dataclass(frozen=True)
class Source:
    """A checkpoint that is exported, or compared with a folder.

    weights: "trained", those that forwards used, or "master", those of the optimizer in at least fp32. dtype: what
    they are converted to, but routers' biases, which stay fp32; None leaves each tensor as it is stored.
    """

    path: Path
    weights: str = "trained"
    dtype: torch.dtype | None = None

    @cached_property
    def stored(self) -> StoredTensors:
        """The stored tensors. Raises CheckpointError if the checkpoint does not hold the weights asked for."""
        kinds = self.manifest.kinds
        if self.weights == "trained":
            return StoredTensors.open(self.path)
        if "master" in kinds:
            return StoredTensors.open(self.path, "master")
        if set(kinds.get("weights", ())) & {"bfloat16", "float16"}:
            raise CheckpointError(
                f"'{self.path}' holds no master weights, only {', '.join(kinds)}; leave out --weights master"
            )
        return StoredTensors.open(self.path)  # a run in fp32 needs none: its weights are the master weights

    @cached_property
    def manifest(self) -> Manifest:
        return open_manifest(self.path)

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """The options that the checkpoint was made with, by name."""
        return stored_values(self.manifest.configuration)

    @cached_property
    def model(self) -> ModelConfig:
        return section_of(ModelConfig, self.values)

    @cached_property
    def state(self) -> Mapping:
        return read_state(self.path)

    @cached_property
    def tensors(self) -> list[Plain]:
        """Every stored tensor, in the order of the model. Raises CheckpointError if they do not fit."""
        wanted, shapes = stored_tensors(self.model), self.stored.shapes
        different = [n for n in wanted.keys() | shapes.keys() if wanted.get(n) != shapes.get(n)]
        if different:
            name = min(different)
            raise CheckpointError(
                f"'{self.path}' does not hold the model of its configuration: '{name}' is "
                f"{shapes.get(name, 'absent')} there and {wanted.get(name, 'absent')} by the configuration "
                f"({len(different)} such tensors)"
            )
        biases = [place.name for place in bias_placements(self.model).values()]
        dtypes = {**dict.fromkeys(wanted, self.dtype), **dict.fromkeys(biases)}
        return [
            Plain(name, dtypes[name] or self.stored.dtypes[name], shape) for name, shape in wanted.items()
        ]

    @cached_property
    def in_folder(self) -> list[Plain]:
        """Every tensor that a folder has of them, in the same order."""
        dtypes = {tensor.name: tensor.dtype for tensor in self.tensors}
        dtypes |= dict.fromkeys(constants(self.model), self.tensors[0].dtype)
        dtypes |= {place.tensor: dtypes[name] for held in self._experts.values() for name, place in held}
        found = [Plain(name, dtypes[name], shape) for name, shape in folder_tensors(self.model).items()]
        shapes = {tensor.name: tensor for tensor in self.tensors}
        return found + [replace(shapes[own], name=name) for name, own in copies(self.model).items()]

    @cached_property
    def _experts(self) -> Mapping[tuple[str, int], list[tuple[str, ExpertPlace]]]:
        """The stored tensors that a folder's tensor holds of an expert, and their places."""
        found: defaultdict[tuple[str, int], list[tuple[str, ExpertPlace]]] = defaultdict(list)
        for tensor in self.tensors:
            if place := self.model.tensor_names.in_folders(tensor.name):
                found[place.tensor, place.expert].append((tensor.name, place._replace(expert=0)))
        return found

    def pieces(self, tensor: Plain) -> Iterator[torch.Tensor]:
        """Yield the pieces of one of ``in_folder`` in order: whole rows, in its dtype, on the CPU."""
        own = copies(self.model).get(tensor.name, tensor.name)
        if own in self.stored.shapes:
            for first, rows in pieces(tensor.shape):
                yield self.stored.read(own, first, rows).to(tensor.dtype)
            return
        if not tensor.shape:
            yield torch.tensor(constants(self.model)[tensor.name], dtype=tensor.dtype)
            return
        for expert in range(tensor.shape[0]):
            whole = torch.empty(1, *tensor.shape[1:], dtype=tensor.dtype)
            for name, place in self._experts[tensor.name, expert]:
                place.of(whole).copy_(self.stored.read(name))
            yield whole
