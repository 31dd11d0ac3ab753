"""A checkpoint as a source for export: its model, and its weights in Hugging Face's form, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
        """Every tensor under Hugging Face's name, in the order of the model. Raises ValueError if they do not fit."""
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

    def pieces(self, tensor: Plain) -> Iterator[torch.Tensor]:
        """Yield a tensor's pieces in order: whole rows, in its dtype, on the CPU."""
        for first, rows in pieces(tensor.shape):
            yield self.stored.read(tensor.name, first, rows).to(tensor.dtype)
