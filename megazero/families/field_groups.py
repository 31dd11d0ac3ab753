"""Fields of config.json that have a meaning together, for the families that share them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megazero.families.huggingface import Config, FieldGroup

_SCALINGS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "linear": {"rotary_scaling_factor": "factor"},
    "llama3": {
        "rotary_scaling_factor": "factor",
        "rotary_low_freq_factor": "low_freq_factor",
        "rotary_high_freq_factor": "high_freq_factor",
        "rotary_original_max_position": "original_max_position_embeddings",
    },
}


def agreed(spellings: Mapping[str, Any], absent: Any) -> Any:
    """Return the value that is given under several names, or ``absent`` where none is given.

    Raises ValueError where they differ.
    """
    said = {name: value for name, value in spellings.items() if value is not None}
    values = list(said.values())
    if any(value != values[0] for value in values):
        raise ValueError(" and ".join(f"{name} = {value!r}" for name, value in said.items()) + " differ")
    return values[0] if values else absent


@dataclass(frozen=True)
class _Rotary:
    """``base`` and ``share`` are the family's names of rope_theta and partial_rotary_factor in transformers 4.

    ``absent_share`` is what an absent share means. Without a name of it, 1 is the only value. ``absent_base`` is what
    an absent base means; None if releases of transformers disagree.
    """

    base: str = "rope_theta"
    share: str | None = None
    absent_share: float = 1.0
    absent_base: float | None = 10000.0

    def read(self, config: Config) -> dict[str, Any]:
        """Return the options of rotary positions that config.json states, in the spelling of transformers 4 or 5.

        Raises ValueError, which names a kind, a field or a share that the decoder does not have.
        """
        rope = agreed({name: config.get(name) for name in ("rope_scaling", "rope_parameters")}, {})
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in _SCALINGS:
            raise ValueError(f"rope_type = {kind!r} is none of {', '.join(_SCALINGS)}")
        scaling = _SCALINGS[kind]
        known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *scaling.values()}
        errors = [f"{name} = {rope[name]!r} is not known" for name in rope.keys() - known if rope[name]]
        errors += [f"{name} is missing" for name in scaling.values() if name not in rope]
        if errors:
            raise ValueError(f"rotary positions of type {kind}: {', '.join(errors)}")
        share = self._value("partial_rotary_factor", self.share, config, rope, self.absent_share)
        if self.share is None and share != 1:
            raise ValueError(f"partial_rotary_factor = {share!r} is not supported (only 1)")
        theta = self._value("rope_theta", self.base, config, rope, self.absent_base)
        if theta is None:
            raise ValueError("rope_theta is missing")
        return {
            "position_embedding_type": "rope",
            "rotary_base": theta,
            "rotary_percent": share,
            "rotary_scaling": "none" if kind == "default" else kind,
            **{name: rope[there] for name, there in scaling.items()},
        }

    def _value(self, name: str, own: str | None, config: Config, rope: Config, absent: Any) -> Any:
        spellings = {name: config.get(name), f"{name} of the rotary positions": rope.get(name)}
        return agreed(spellings | ({own: config.get(own)} if own else {}), absent)

    def write(self, options: Any) -> dict[str, Any]:
        fields: dict[str, Any] = {self.base: options.rotary_base, "rope_scaling": None}
        if self.share:
            fields[self.share] = options.rotary_percent
        kind = options.rotary_scaling
        if kind != "none":
            values = {there: getattr(options, name) for name, there in _SCALINGS[kind].items()}
            fields["rope_scaling"] = {"rope_type": kind, **values}
        return fields


def rotary(
    base: str = "rope_theta",
    share: str | None = None,
    absent_share: float = 1.0,
    absent_base: float | None = 10000.0,
) -> FieldGroup:
    """Return the fields of rotary positions, in the spelling of transformers 4 or 5.

    ``base`` and ``share`` are the family's own names of rope_theta and partial_rotary_factor in transformers 4. An
    ``absent_base`` of None is an error.
    """
    names = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", base}
    group = _Rotary(base, share, absent_share, absent_base)
    return FieldGroup(names | ({share} if share else set()), group.read, group.write)


ROTARY = rotary()


def biases(mlp: bool) -> FieldGroup:
    """Return attention_bias, which is that of q, k, v and o, and mlp_bias where the family has it."""
    fields = {"add_attention_bias": "attention_bias"} | ({"add_bias_linear": "mlp_bias"} if mlp else {})
    return FieldGroup(
        tuple(fields.values()),
        lambda config: {name: config.get(there, False) for name, there in fields.items()},
        lambda options: {there: getattr(options, name) for name, there in fields.items()},
    )


# transformers' names of GELU: by the error function, and by tanh.
_EXACT, _TANH = ("gelu", "gelu_python"), ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_accurate")


def gelu(name: str, absent: str) -> FieldGroup:
    """Return the field ``name``, which says which GELU the MLP has. ``absent`` is what its absence means."""

    def read(config: Config) -> dict[str, Any]:
        kind = config.get(name) or absent
        if kind not in (*_EXACT, *_TANH):
            raise ValueError(f"{name} = {kind!r} is not supported (only {', '.join((*_EXACT, *_TANH))})")
        return {"openai_gelu": kind in _TANH}

    tanh = absent if absent in _TANH else "gelu_new"
    return FieldGroup((name,), read, lambda options: {name: tanh if options.openai_gelu else "gelu"})


def soft_caps(**absent: float | None) -> FieldGroup:
    """Return the caps of attention's scores and of logits. ``absent`` is what an absent field means, by its name."""
    return FieldGroup(
        tuple(absent),
        lambda config: {name: config.get(name, value) or 0.0 for name, value in absent.items()},
        lambda options: {name: getattr(options, name) or None for name in absent},
    )


def _whole_heads(config: Config) -> dict[str, Any]:
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if hidden and heads and hidden % heads:
        raise ValueError(f"hidden_size = {hidden} does not divide by num_attention_heads = {heads}")
    return {}


# A rule of transformers' class, even where head_dim says the width of a head.
WHOLE_HEADS = FieldGroup((), _whole_heads, lambda _: {})
