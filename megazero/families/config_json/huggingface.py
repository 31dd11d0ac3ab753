"""Reads and writes Hugging Face's config.json as options, by a family's tables.

A field that no table knows is an error: silently ignoring it would give another model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from megazero.families.config_json.known_fields import CURES, INERT, MORE_TOKENS, ONLY, refusal
from megazero.families.layer_kinds import MOST_LAYERS

Config = Mapping[str, Any]

# Fields that every family has, and what an absent one means.
FIELDS = {"vocab_size": "vocab_size", "init_method_std": "initializer_range"}
ABSENT = {"init_method_std": 0.02}
TIED = "tie_word_embeddings"
# Options whose field may be null, whatever its absence means: as many as heads, no latent, and of no meaning to a
# trained model.
_NULL = ("num_query_groups", "q_lora_rank", "init_method_std")


def _nothing(_: object) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class FieldGroup:
    """Fields that have a meaning together, which no table says.

    ``read`` takes config.json to options, and raises ValueError for what the decoder does not have. ``write`` takes
    an object with the options as attributes to fields, with the keys that transformers 4 and 5 both read. A group
    without ``read`` sets its fields aside; one without ``write`` writes none.
    """

    names: Collection[str]
    read: Callable[[Config], dict[str, Any]] = _nothing
    write: Callable[[Any], dict[str, Any]] = _nothing


@dataclass(frozen=True)
class HuggingFace:
    """A family's config.json, whose fields are those of transformers' configuration class.

    ``model_type`` and ``architecture`` name the family there, and its model with a head. ``other_types`` are those of
    models with the same fields and tensors, which are read, and written as this one.
    ``fields`` maps an option to its field. ``absent`` maps an option to what an absent field means; a field without
    a value there is required. A value of None leaves the option to its default, which other options may decide.
    ``tied`` is what an absent tie_word_embeddings means.
    ``aliases`` maps another spelling to its field. ``only`` maps a field to the values that the decoder computes; the
    first is written. ``groups`` read and write what no table says.
    """

    model_type: str
    architecture: str
    fields: Mapping[str, str]
    absent: Mapping[str, Any]
    tied: bool
    aliases: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    groups: tuple[FieldGroup, ...] = ()
    other_types: tuple[str, ...] = ()

    @property
    def read_types(self) -> tuple[str, ...]:
        return (self.model_type, *self.other_types)

    @property
    def plain_fields(self) -> Mapping[str, str]:
        """Return the field of each option whose value is the field's."""
        return {**FIELDS, **self.fields}

    @property
    def read_fields(self) -> frozenset[str]:
        """Return the fields that decide an option."""
        grouped = (name for group in self.groups for name in group.names)
        return frozenset((*FIELDS.values(), *self.fields.values(), *self.aliases, *grouped, TIED))

    def knows(self, name: str) -> bool:
        """Tell whether a field of config.json is read, has one legal value, or changes nothing."""
        known = name in self.read_fields or name in self.only or name in ONLY
        return known or any(fnmatchcase(name, pattern) for pattern in INERT)

    def options(self, config: Config, accept: Collection[str] = ()) -> dict[str, Any]:
        """Return the options that a config.json of this model_type states.

        accept: fields that are set aside although the decoder does not know them, or not with their value.
        Raises ValueError, which names every field that is absent, unknown or not supported here, and why.
        """
        errors = list(self._misplaced(config, accept))
        config = {name: value for name, value in config.items() if name not in accept}
        unknown = list(self._unknown(config))
        if unknown:
            unknown[-1] += " (--accept-field NAME sets a field aside that you know to change nothing)"
        errors += unknown
        errors += [
            f"{name} = {config[name]!r} and {there} = {config[there]!r} differ"
            for name, there in self.aliases.items()
            if name in config and config.get(there, config[name]) != config[name]
        ]
        given = {there: config[name] for name, there in self.aliases.items() if name in config} | config
        absent = {**ABSENT, **self.absent}
        options = {name: given.get(there, absent.get(name)) for name, there in self.plain_fields.items()}
        errors += [
            f"{self.fields.get(name, name)} is missing"
            for name, value in options.items()
            if value is None and name not in absent
        ]
        errors += [
            f"{there} = null has no meaning"
            for name, there in self.plain_fields.items()
            if there in given and given[there] is None and absent.get(name) is not None and name not in _NULL
        ]
        layers = options["num_layers"]
        if isinstance(layers, int) and layers > MOST_LAYERS:  # the groups count them out
            raise ValueError(f"{self.model_type} config: {layers} layers; at most {MOST_LAYERS} can be meant")
        options["untie_embeddings_and_output_weights"] = not given.get(TIED, self.tied)
        for group in self.groups:
            try:
                options |= group.read(given)
            except ValueError as error:
                errors.append(str(error))
            except (TypeError, AttributeError, ArithmeticError) as error:
                said = ", ".join(f"{name} = {given[name]!r}" for name in group.names if name in given)
                number = isinstance(error, ArithmeticError)
                why = "a number out of its range" if number else "of another kind than the field takes"
                errors.append(f"{said or 'a field'} is {why}")
        if errors:
            raise ValueError(f"{self.model_type} config: " + "; ".join(errors))
        return options

    def config(self, options: object) -> dict[str, Any]:
        """Return config.json for ``options``, an object with the options as attributes.

        The keys are those of transformers 4, which 5 reads, too; what 5 writes, 4 reads in part. It has no dtype and
        nothing about the tokenizer. Whether it says all that the options say is not checked here.
        """
        written: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        written |= {there: getattr(options, name) for name, there in self.plain_fields.items()}
        written |= {name: values[0] for name, values in self.only.items()}
        written[TIED] = not options.untie_embeddings_and_output_weights  # type: ignore[attr-defined]
        for group in self.groups:
            written |= group.write(options)
        return written

    def _misplaced(self, config: Config, accept: Collection[str]) -> Iterator[str]:
        """Report what cannot be accepted: a field that is not there, or one that the options are read from."""
        for name in accept:
            if name not in config and name != MORE_TOKENS:  # tensors may tell of such layers alone
                yield f"there is no field {name} to accept"
            elif name in self.read_fields and name != MORE_TOKENS:
                yield f"{name} is read, so it cannot be set aside"

    def _unknown(self, config: Config) -> Iterator[str]:
        for name, value in config.items():
            allowed = self.only.get(name) or ONLY.get(name)
            if allowed is not None and value not in allowed:
                cure = f": {CURES[name]}" if name in CURES else ""
                yield f"{name} = {value!r} is not supported (only {', '.join(map(repr, allowed))}){cure}"
            elif not self.knows(name):
                yield f"{name} = {value!r} {refusal(name)}"
