"""This module reads Hugging Face's config.json as options, by a family's tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Config = Mapping[str, Any]

# Fields that every family has, and what an absent one means.
FIELDS = {"vocab_size": "vocab_size", "init_method_std": "initializer_range"}
ABSENT = {"init_method_std": 0.02}


def nothing(_: Config) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class HuggingFace:
    """This describes a family's config.json, whose fields are those of transformers' configuration class.

    ``fields`` maps an option to its field. ``absent`` maps an option to what an absent field means; a field without
    a value there is required. A value of None leaves the option to its default, which other options may decide.
    ``tied`` is what an absent tie_word_embeddings means.
    ``aliases`` maps another spelling to its field. ``only`` maps a field to the values that the decoder computes.
    ``further`` reads what no table says, from config.json to options. It raises ValueError for what the decoder
    does not have.
    """

    model_type: str
    fields: Mapping[str, str]
    absent: Mapping[str, Any]
    tied: bool
    aliases: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    further: Callable[[Config], dict[str, Any]] = nothing

    def options(self, config: Config) -> dict[str, Any]:
        """Return the options that a config.json of this model_type states.

        Raises ValueError, which names what is absent or not supported here.
        """
        given = {there: config[name] for name, there in self.aliases.items() if name in config} | dict(config)
        absent = {**ABSENT, **self.absent}
        options = {
            name: given.get(there, absent.get(name)) for name, there in {**FIELDS, **self.fields}.items()
        }
        errors = [
            f"{name} = {given[name]!r} is not supported (only {', '.join(map(repr, values))})"
            for name, values in self.only.items()
            if name in given and given[name] not in values
        ]
        errors += [
            f"{self.fields.get(name, name)} is missing"
            for name, value in options.items()
            if value is None and name not in absent
        ]
        if errors:
            raise ValueError(f"{self.model_type} config: " + "; ".join(errors))
        options["untie_embeddings_and_output_weights"] = not given.get("tie_word_embeddings", self.tied)
        return {**options, **self.further(given)}


def rotary_options(config: Config) -> dict[str, Any]:
    """Return base and scaling of rotary positions, in the spelling of transformers 4 or 5."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    options = {"rotary_base": rope.get("rope_theta", config.get("rope_theta", 10000.0))}
    fields = {
        "default": {},
        "linear": {"rotary_scaling_factor": "factor"},
        "llama3": {
            "rotary_scaling_factor": "factor",
            "rotary_low_freq_factor": "low_freq_factor",
            "rotary_high_freq_factor": "high_freq_factor",
            "rotary_original_max_position": "original_max_position_embeddings",
        },
    }
    if kind not in fields:
        raise ValueError(f"rope_type = {kind!r} is none of {', '.join(fields)}")
    if kind != "default":
        options["rotary_scaling"] = kind
    return options | {name: rope[there] for name, there in fields[kind].items()}
