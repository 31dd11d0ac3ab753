"""A Megatron checkpoint as weights of the decoder, a tensor at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint.errors import CheckpointError
from megazero.checkpoint.placement import Placement
from megazero.config.errors import ConfigError
from megazero.config.model.rules import check_model
from megazero.config.model.section import ModelConfig, complete
from megazero.config.options.data_inputs import TOKENIZERS
from megazero.config.options.fields import section_of
from megazero.config.options.sections import DataConfig
from megazero.convert.megatron.arguments import Arguments, read_arguments
from megazero.convert.megatron.names import EMBEDDING, HEAD, NAMES, behind, names_of
from megazero.convert.megatron.saved import arguments, find_iteration
from megazero.convert.megatron.torch_dist import TorchDist, is_other_dcp, is_torch_dist
from megazero.data.tokenizer import load_tokenizer
from megazero.data.tokenizer_files import tokenizer_options
from megazero.models.dtypes import PRECISIONS
from megazero.models.placements import bias_placements, decoder_placements, stored_tensors
from megazero.tp import TensorParallel

_SHOWN = 5


@dataclass(frozen=True)
class MegatronWeights:
    """A checkpoint whose arguments are understood, and whose tensors are those of their model."""

    stored: TorchDist
    arguments: Arguments
    model: ModelConfig
    data: DataConfig
    notes: tuple[str, ...]

    @classmethod
    def open(
        cls, path: Path, step: int | None = None, words: Collection[str] = (), accept: Collection[str] = ()
    ) -> MegatronWeights:
        """Open a folder of Megatron's --save, or one of its iter_* folders.

        words: flags that replace arguments of the checkpoint. accept: unknown arguments that are set aside.
        Raises ValueError if it is damaged, or its model is not the decoder's; the text has every cause.
        """
        stored = _open(find_iteration(path, step))
        told = read_arguments(arguments(stored.saved), words, accept)
        _refuse_dtypes(stored)
        data, found, notes = _tokenizer(told.options)
        model, more = _model(stored, told.options, found)
        weights = cls(stored, told, model, data, (*told.notes, *notes, *more))
        weights._check_tensors()
        return weights

    @property
    def origin(self) -> str:
        """What a checkpoint that is made of it says of its weights."""
        return f"Megatron's checkpoint of iteration {self.stored.saved.get('iteration', 'unknown')}"

    @property
    def base(self) -> str:
        """What model cards say of its weights: Megatron's checkpoints have no name."""
        return self.origin

    @property
    def license(self) -> Mapping[str, str]:
        return {}

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Map the decoder's stored tensors to their shapes, in the order of the model."""
        return stored_tensors(self.model)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the embedding, which the matrices share."""
        return self.stored.dtypes[EMBEDDING]

    def dtype_of(self, name: str) -> torch.dtype:
        """Return a stored tensor's dtype, which is Megatron's."""
        return self.stored.dtypes[self._parts[name][0][1].name]

    def tensor(self, name: str) -> torch.Tensor:
        """Make a stored tensor. Parameters go through their places there and here: cut, fused, transposed or not."""
        out = torch.empty(self.shapes[name], dtype=self.dtype_of(name))
        read: dict[str, torch.Tensor] = {}  # a fused tensor there is often one here
        for here, there in self._parts[name]:
            if there.name not in read:
                read = {there.name: self.stored.tensor(there.name)}
            parameter = torch.empty(here.local_shape, dtype=out.dtype)
            for ours, theirs in there.boxes(parameter, read[there.name]):
                ours.copy_(theirs)
            for ours, mine in here.boxes(parameter, out):
                mine.copy_(ours)
        return out

    @cached_property
    def _parts(self) -> dict[str, list[tuple[Placement, Placement]]]:
        """Map each stored tensor to the places of its parameters, here and in Megatron's tensors."""
        whole, parts = TensorParallel(), dict[str, list[tuple[Placement, Placement]]]()
        layers, names = self.model.num_layers, names_of(self.model.gated_mlp)
        there = decoder_placements(self.model, whole, names)
        for role, places in decoder_placements(self.model, whole).items():
            for here, other in zip(places.parts, there[role].parts, strict=True):
                spelt = dataclasses.replace(other, name=behind(other.name, layers))
                parts.setdefault(here.name, []).append((here, spelt))
        for role, here in bias_placements(self.model).items():
            name = behind(names.stored(role)[0], layers)
            parts[here.name] = [(here, dataclasses.replace(here, name=name))]
        return parts

    def _check_tensors(self) -> None:
        """Raise CheckpointError with every tensor that is missing, of another shape, or none of the decoder's."""
        wanted = {there.name: there.shape for parts in self._parts.values() for _, there in parts}
        shapes = dict(self.stored.shapes)
        if HEAD in shapes and HEAD not in wanted:  # the copy of the embedding that the last stage held
            if not torch.equal(*(self.stored.tensor(name) for name in (HEAD, EMBEDDING))):
                raise CheckpointError(
                    f"'{self.stored.path}' has an {HEAD} of its own: add --untie-embeddings-and-output-weights"
                )
            del shapes[HEAD]
        for name in (EMBEDDING, HEAD):  # padding is left out
            if name in shapes and name in wanted:
                shapes[name] = (min(shapes[name][0], wanted[name][0]), *shapes[name][1:])
        lines = [
            f"{name} is {shapes.get(name, 'missing')}, and {wanted[name]} by the arguments"
            for name in wanted
            if shapes.get(name) != wanted[name]
        ]
        lines += [
            f"{name} {shapes[name]} belongs to no decoder here" for name in shapes.keys() - wanted.keys()
        ]
        if lines:
            more = [f"... {len(lines)} such tensors"] if len(lines) > _SHOWN else []
            raise CheckpointError(
                f"'{self.stored.path}' does not hold the model of its arguments:\n  "
                + "\n  ".join([*sorted(lines)[:_SHOWN], *more])
            )


def _open(path: Path) -> TorchDist:
    if is_torch_dist(path):
        return TorchDist(path)
    if any(path.glob("mp_rank_*")):
        why = (
            "Megatron itself turns mp_rank folders to torch_dist: start pretrain_gpt.py as the run did, with --load "
            "that folder --ckpt-convert-format torch_dist --ckpt-convert-save DIR, and name DIR/torch_dist"
        )
    elif is_other_dcp(path):
        why = "it is of --ckpt-format torch_dcp or fsdp_dtensor; save it once more with --ckpt-format torch_dist"
    elif any(path.glob("layer_*-model_*-model_states.pt")):
        why = "it is of DeepSpeed's pipelines, which are not read; convert it to Megatron's format first"
    else:
        why = "name a folder of Megatron's --save, or one of its iter_* folders"
    raise CheckpointError(f"'{path}' holds no torch_dist checkpoint: {why}")


def _refuse_dtypes(stored: TorchDist) -> None:
    strange = {name: dtype for name, dtype in stored.dtypes.items() if dtype not in PRECISIONS}
    if strange:
        name, dtype = next(iter(strange.items()))
        raise CheckpointError(
            f"'{stored.path}': '{name}' is stored as {dtype} ({len(strange)} such tensors); weights are read in "
            f"{', '.join(PRECISIONS.values())}: save them without --fp8-param-gather"
        )


def _tokenizer(options: Mapping[str, Any]) -> tuple[DataConfig, int | None, list[str]]:
    """Return the tokenizer's options where its files are here, the vocabulary, and a note where they are not."""
    kind, said = options.get("tokenizer_type"), options.get("vocab_size")
    if kind == "NullTokenizer" and said is not None:
        return DataConfig(), said + 1, []
    files = {name: options.get(name) for name in TOKENIZERS.get(kind or "", ()) if name != "vocab_size"}
    if all(path and Path(path).exists() for path in files.values()) and files:
        data = section_of(DataConfig, {"tokenizer_type": kind, **files})
        every: dict[str, Any] = {**tokenizer_options(vars(data))}
        size = load_tokenizer(str(kind), **every).info.vocab_size
        return data, max(size, said or 0), []
    named = " ".join(str(path) for path in files.values() if path) or "of no file"
    note = f"{kind} ({named}) is not here: the checkpoint holds no tokenizer"
    return DataConfig(), said, [note] if files else []


def _model(
    stored: TorchDist, options: Mapping[str, Any], vocabulary: int | None
) -> tuple[ModelConfig, list[str]]:
    """Return the model section, with the true vocabulary where it is known, else with all rows of the embedding."""
    if EMBEDDING not in stored.shapes:
        raise CheckpointError(
            f"'{stored.path}' has no {EMBEDDING}, which a GPT has; it holds {', '.join(list(stored.shapes)[:3])}, ..."
        )
    rows, notes = stored.shapes[EMBEDDING][0], list[str]()
    if vocabulary is None:
        notes.append(
            f"the vocabulary is all {rows} rows of the embedding, with padding: --vocab-size N cuts it"
        )
    elif vocabulary > rows:
        raise ConfigError(
            [f"--vocab-size {vocabulary} is above the embedding's {rows} rows; nearest: {rows}"]
        )
    decided = {"vocab_size": vocabulary or rows, "pad_vocab_size_to": None}
    given = {field.name for field in dataclasses.fields(ModelConfig)} & options.keys()
    try:
        model = section_of(ModelConfig, complete({name: options[name] for name in given} | decided))
    except ConfigError as error:
        hint = "the checkpoint holds no arguments: give its model's flags behind the folders"
        raise ConfigError([*error.errors, *([] if arguments(stored.saved) else [hint])]) from None
    check_model(model)
    if not NAMES.can_express(model):
        raise ConfigError([f"Megatron's GPT has not this mixture of choices: only {NAMES.needs} go with it"])
    return model, notes
