"""Hugging Face state dicts are read and written here, through the placements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megazero.checkpoint.placement import Placement
from megazero.models.decoder import Decoder

# Buffers of older releases that hold no weights.
_BUFFERS = (
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    "rotary_emb.inv_freq",
)


def _boxes(placement: Placement, local: Tensor, stored: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of equal-shaped views: a box of the local tensor, and where it lies in the stored one."""
    stored = stored.t() if placement.transposed else stored
    for segment in placement.segments:
        rows = stored[segment.stored : segment.stored + segment.length]
        if local.ndim > 1:
            rows = rows[:, placement.offset1 : placement.offset1 + local.shape[1]]
        yield local[segment.local : segment.local + segment.length], rows


@torch.no_grad()
def load_hf_state_dict(decoder: Decoder, state_dict: Mapping[str, Tensor]) -> None:
    """Copy a family's Hugging Face tensors into this rank's parameters. Padding rows become zero.

    ``state_dict`` has the names of the family's ForCausalLM model, or of its bare model (without the leading
    "model.", "transformer." or "gpt_neox."), as GPT-2 and BLOOM are published.
    Raises ValueError listing every missing, unexpected or misshapen tensor. Nothing is written then.
    """
    placements = decoder.placements()
    names = decoder.config.tensor_names
    files = {names.aliases.get(name, name): value for name, value in state_dict.items()}
    available = _with_prefix(files, placements)
    wanted = {p.name: p.shape for p in placements.values()}
    errors = [f"{name} is missing" for name in sorted(wanted.keys() - available.keys())]
    tied = {f"{names.model['head']}.weight"} if decoder.tied else set()
    unexpected = available.keys() - wanted.keys() - tied
    errors += [f"{n} belongs to no parameter" for n in sorted(unexpected) if not n.endswith(_BUFFERS)]
    errors += [
        f"{name} has shape {tuple(available[name].shape)}, not {shape}"
        for name, shape in sorted(wanted.items())
        if name in available and tuple(available[name].shape) != shape
    ]
    if errors:
        raise ValueError(
            f"these weights are not of this model (family {decoder.config.model_family}):\n  "
            + "\n  ".join(errors)
        )
    for name, parameter in decoder.named_parameters():
        placement = placements[name]
        parameter.zero_()
        for ours, theirs in _boxes(placement, parameter, available[placement.name]):
            ours.copy_(theirs)


def _with_prefix(state_dict: Mapping[str, Tensor], placements: Mapping[str, Placement]) -> dict[str, Tensor]:
    names = {p.name for p in placements.values()}
    prefix = next(iter(placements.values())).name.split(".", 1)[0] + "."
    return {
        name if name in names or not any(n.startswith(prefix + name) for n in names) else prefix + name: value
        for name, value in state_dict.items()
    }


@torch.no_grad()
def to_hf_state_dict(decoder: Decoder, into: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the family's Hugging Face tensors, in the parameters' dtype, on the CPU.

    This rank's slices are written over ``into`` (missing tensors start as zeros). So it is filled by passing the same
    dict with the decoder of each tp rank in turn. On one rank the result is complete. Tied weights appear once, under
    the embedding's name.
    """
    tensors = {} if into is None else into
    placements = decoder.placements()
    for name, parameter in decoder.named_parameters():
        placement = placements[name]
        if placement.name not in tensors:
            tensors[placement.name] = torch.zeros(placement.shape, dtype=parameter.dtype, device="cpu")
        for ours, theirs in _boxes(placement, parameter.detach(), tensors[placement.name]):
            theirs.copy_(ours)
    return tensors
