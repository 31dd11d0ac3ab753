"""A run that continues a checkpoint has the checkpoint's architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megazero.checkpoint.directory import newest_manifest
from megazero.config.fields import typed
from megazero.config.model import as_trained, complete
from megazero.config.run import all_options

# Options of the model that decide neither which parameters there are nor what is computed of them. All others are
# its architecture. Learned positions are parameters, others go as far as they are asked to.
FREE = (
    "seq_length",
    "max_position_embeddings",
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "make_vocab_size_divisible_by",
    "pad_vocab_size_to",
)
# Parameters have the same shapes whatever these say: a new run from the weights (--finetune) may change them.
SHAPELESS = ("rotary_", "norm_epsilon")


def take_architecture(said: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the options by name with those of the architecture from the checkpoint under --load, if there is one.

    Also return a note on what was not said and would have been another value, and an error line for each option that
    was said and is another. The data's tokenizer decides the vocabulary if one is named.
    """
    values, load = dict(said), said.get("load")
    manifest = newest_manifest(load) if load else None
    if manifest is None:
        return values, [], []
    notes, errors = list[str](), list[str]()
    saved = _architecture(as_trained(manifest.configuration.get("model", {})))
    if said.get("tokenizer_type") is not None:
        saved.pop("vocab_size", None)
    for name, value in saved.items():
        if said.get(name) in (None, value):
            values[name] = value
            continue
        wanted, has = (typed(all_options()[name], each) for each in (said[name], value))
        if said.get("finetune") and name.startswith(SHAPELESS):
            notes.append(f"{wanted} replaces {has} of the checkpoint in {load}")
            continue
        errors.append(
            f"{wanted} is not the model of the checkpoint in {load}, which has {has}; leave it out to continue that "
            "model, or name another folder"
        )
        values[name] = value
    options = all_options()
    would_be = {name: options[name].default for name in saved} | complete(said)
    taken = [typed(options[n], v) for n, v in saved.items() if said.get(n) is None and would_be[n] != v]
    if taken:
        notes.append(f"from the checkpoint in {load}: {' '.join(taken)}")
    return values, notes, errors


def _architecture(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a saved model section is architecture and known here."""
    learned = model.get("position_embedding_type") == "learned_absolute"
    return {
        name: value
        for name, value in model.items()
        if value is not None
        and name in all_options()
        and (name not in FREE or (learned and name == "max_position_embeddings"))
    }
