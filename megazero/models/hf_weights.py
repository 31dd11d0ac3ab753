"""Reads Hugging Face state dicts through the placements."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from megazero.config.model.section import ModelConfig
from megazero.families.layer_kinds import layer_kinds
from megazero.models.decoder import Decoder
from megazero.models.placements import stored_tensors

# Buffers of older releases that hold no weights.
_BUFFERS = (
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    "rotary_emb.inv_freq",
)


Shapes = Mapping[str, tuple[int, ...]]


def load_hf_state_dict(decoder: Decoder, state_dict: Mapping[str, Tensor]) -> None:
    """Copy a family's Hugging Face tensors into this rank's parameters and biases. Padding rows become zero.

    ``state_dict`` has the names of the family's ForCausalLM model, or of its bare model (``match_names``).
    Raises ValueError listing every missing, unexpected or misshapen tensor. Nothing is written then.
    """
    config = decoder.config
    there = match_names(config, _shapes(state_dict))
    _load(decoder, lambda name: config.tensor_names.taken(name, lambda whole: state_dict[there[whole]]))


def load_stored(decoder: Decoder, tensors: Mapping[str, Tensor]) -> None:
    """Copy a checkpoint's tensors, as ``load_hf_state_dict``."""
    there = match_names(decoder.config, _shapes(tensors), stored_tensors)
    _load(decoder, lambda name: tensors[there[name]])


def _shapes(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(value.shape) for name, value in tensors.items()}


@torch.no_grad()
def _load(decoder: Decoder, stored: Callable[[str], Tensor]) -> None:
    placements = decoder.placements()
    for name, tensor in decoder.stored():
        tensor.zero_()
        for placement, local in placements[name].held(tensor):
            for ours, theirs in placement.boxes(local, stored(placement.name)):
                ours.copy_(theirs)


def folder_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Map the names of a folder's tensors to their shapes: ``stored_tensors``, but where folders have experts of one
    layer together."""
    found, names, count = dict[str, tuple[int, ...]](), config.tensor_names, config.num_experts or 0
    for name, shape in stored_tensors(config).items():
        own = names.in_folders(name)
        if own is None:
            found[name] = shape
        else:
            found[own.tensor] = (count, *shape[:0:-1], shape[0] * (own.columns.step or 1))
    return found | dict.fromkeys(constants(config), ())


def constants(config: ModelConfig) -> dict[str, float]:
    """Map the names of a folder's tensors that hold one number, the same in every model, to that."""
    names = config.tensor_names
    each = [(f"{names.layer_prefix}{i}.", names.constants) for i in range(config.num_layers)]
    return {layer + name: value for layer, held in each for name, value in held.items()}


def tied_head(config: ModelConfig) -> tuple[str, str] | None:
    """Return the names of the head, as some folders hold it twice, and of the embedding it is; None if untied."""
    if config.untie_embeddings_and_output_weights:
        return None
    names = config.tensor_names.model
    return f"{names['head']}.weight", f"{names['embedding.tokens']}.weight"


def copies(config: ModelConfig) -> dict[str, str]:
    """Map what folders hold again in layers that predict further tokens, the embedding and the head, to the names of
    the model's."""
    names, tied = config.tensor_names, not config.untie_embeddings_and_output_weights
    embedding, head = (f"{names.model[own]}.weight" for own in ("embedding.tokens", "head"))
    layers = (f"{names.layer_prefix}{i}." for i in config.all_layers[config.num_layers :])
    again = {"embed_tokens.weight": embedding, "shared_head.head.weight": embedding if tied else head}
    return {layer + name: own for layer in layers for name, own in again.items()}


def layers_behind(config: ModelConfig, names: Iterable[str], count: int) -> list[str]:
    """Return which tensors predict further tokens and are none of the model's: those of ``count`` layers behind its
    last one, and Qwen3-Next's, which have a name of their own."""
    behind = range(len(config.all_layers), config.num_layers + count)
    of_layer = re.compile(re.escape(config.tensor_names.layer_prefix) + r"(\d{1,9})\.")
    found = ((name, of_layer.match(name)) for name in names)
    return sorted(n for n, layer in found if n.startswith("mtp.") or layer and int(layer[1]) in behind)


def _experts_apart(config: ModelConfig) -> int:
    """Return how many experts of all layers have tensors of their own."""
    layers = [i for i, kind in enumerate(layer_kinds(config)) if kind.experts]
    apart = layers and "{}" in config.tensor_names.stored(f"layers.{layers[0]}.mlp.experts.up_proj.weight")[0]
    return len(layers) * (config.num_experts or 0) if apart else 0


def match_names(
    config: ModelConfig, shapes: Shapes, tensors: Callable[[ModelConfig], Shapes] = folder_tensors
) -> dict[str, str]:
    """Map the names of a model's ``tensors`` to those in ``shapes``.

    Names may lack the leading "model.", "transformer." or "gpt_neox.", as in published GPT-2. A tied head and
    ``copies`` may be present too.
    Raises ValueError listing every missing, unexpected or misshapen tensor, and every one under two names.
    """
    held = sum(shape[0] if len(shape) == 3 else 1 for shape in shapes.values())
    if (experts := _experts_apart(config)) > held:  # whose names are not to be counted out
        raise ValueError(f"config.json has {experts} experts in all layers, and the files {held} tensors")
    wanted, tied = tensors(config), tied_head(config)
    prefix = next(iter(wanted)).split(".", 1)[0] + "."
    ours, errors = dict[str, str](), list[str]()
    for there in shapes:
        name = config.tensor_names.aliases.get(there, there)
        name = prefix + name if name not in wanted and prefix + name in wanted else name
        if name in ours:
            errors.append(f"{ours[name]} and {there} are one tensor of the model")
        ours[name] = there
    for name in (*copies(config), *([tied[0]] if tied is not None and tied[0] not in wanted else [])):
        ours.pop(name, None)
    errors += [f"{name} is missing" for name in sorted(wanted.keys() - ours.keys())]
    unexpected = sorted(name for name in ours.keys() - wanted.keys() if not name.endswith(_BUFFERS))
    errors += [f"{name} belongs to no parameter" for name in unexpected]
    errors += [
        f"{name} has shape {shapes[ours[name]]}, not {shape}"
        for name, shape in sorted(wanted.items())
        if name in ours and shapes[ours[name]] != shape
    ]
    if errors:
        raise ValueError(
            f"these weights are not of this model (family {config.model_family}):\n  " + "\n  ".join(errors)
        )
    return {name: ours[name] for name in wanted}
