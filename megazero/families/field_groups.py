"""Fields of config.json that have a meaning together, for the families that share them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megazero.families.huggingface import Config, FieldGroup

_FACTOR = {"rotary_scaling_factor": "factor"}
_ORIGINAL = {"rotary_original_max_position": "original_max_position_embeddings"}
# By type: an option and its field of the scaling.
_SCALINGS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "linear": _FACTOR,
    "dynamic": _FACTOR,
    "llama3": {
        **_FACTOR,
        "rotary_low_freq_factor": "low_freq_factor",
        "rotary_high_freq_factor": "high_freq_factor",
        **_ORIGINAL,
    },
    "yarn": {
        **_FACTOR,
        **_ORIGINAL,
        "rotary_attention_factor": "attention_factor",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
        "yarn_mscale": "mscale",
        "yarn_mscale_all_dim": "mscale_all_dim",
        "yarn_correction_range_round_to_int": "truncate",
    },
    "longrope": {
        "rotary_short_factor": "short_factor",
        "rotary_long_factor": "long_factor",
        **_FACTOR,
        **_ORIGINAL,
        "rotary_attention_factor": "attention_factor",
    },
}
# Fields that may be absent or null, and what that means. Without both mscales the attention factor is as with these.
_ABSENT = {"attention_factor": None, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
_ABSENT |= {"mscale": 1.0, "mscale_all_dim": 0.0}
_LENGTH, _ORIGINAL_LENGTH = "max_position_embeddings", "original_max_position_embeddings"


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
            **_scaling(kind, config, rope),
        }

    def _value(self, name: str, own: str | None, config: Config, rope: Config, absent: Any) -> Any:
        spellings = {name: config.get(name), f"{name} of the rotary positions": rope.get(name)}
        return agreed(spellings | ({own: config.get(own)} if own else {}), absent)

    def write(self, options: Any) -> dict[str, Any]:
        fields: dict[str, Any] = {self.base: options.rotary_base, "rope_scaling": None}
        if self.share:
            fields[self.share] = options.rotary_percent
        if options.rotary_scaling != "none":
            fields |= _written_scaling(options)
        return fields


def _scaling(kind: str, config: Config, rope: Config) -> dict[str, Any]:
    """Return the options of a scaling of this type. ``rope`` has its fields.

    Raises ValueError, which names fields that are missing or not known.
    """
    there, scaled = _SCALINGS[kind], dict(rope)
    if _ORIGINAL.items() <= there.items():
        spellings = {"of the rotary positions": rope.get(_ORIGINAL_LENGTH), "": config.get(_ORIGINAL_LENGTH)}
        spellings = {f"{_ORIGINAL_LENGTH} {where}".strip(): value for where, value in spellings.items()}
        length = config.get(_LENGTH)
        scaled[_ORIGINAL_LENGTH] = original = agreed(spellings, None if kind == "llama3" else length)
        by_lengths = kind == "longrope" or (kind == "yarn" and "factor" in rope)
        if by_lengths and rope.get("factor") is None and length and original:
            scaled["factor"] = length / original
    if not (scaled.get("mscale") and scaled.get("mscale_all_dim")) or scaled.get("attention_factor"):
        scaled = {name: value for name, value in scaled.items() if "mscale" not in name}
    values = {name: scaled.get(field) for name, field in there.items()}
    values = {name: _ABSENT.get(there[name]) if value is None else value for name, value in values.items()}
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *there.values()}
    errors = [f"{name} = {rope[name]!r} is not known" for name in rope.keys() - known if rope[name]]
    errors += [f"{f} is missing" for name, f in there.items() if values[name] is None and f not in _ABSENT]
    if errors:
        raise ValueError(f"rotary positions of type {kind}: {', '.join(errors)}")
    if kind == "dynamic":
        if _LENGTH not in config:
            raise ValueError(f"{_LENGTH} is missing")
        # There it is the length from which on frequencies change, and no longest one.
        original, factor = config[_LENGTH], values["rotary_scaling_factor"]
        values |= {
            "rotary_original_max_position": original,
            "max_position_embeddings": int(factor * original),
        }
    return {n: tuple(map(float, value)) if isinstance(value, list) else value for n, value in values.items()}


def _written_scaling(options: Any) -> dict[str, Any]:
    """Return rope_scaling, and the lengths that transformers takes from outside of it."""
    kind, original = options.rotary_scaling, options.rotary_original_max_position
    values = {field: getattr(options, name) for name, field in _SCALINGS[kind].items()}
    values = {name: list(v) if isinstance(v, tuple) else v for name, v in values.items() if v is not None}
    if not (values.get("mscale") and values.get("mscale_all_dim")):
        values = {name: value for name, value in values.items() if "mscale" not in name}
    fields = {"rope_scaling": {"rope_type": kind, **values}}
    if kind == "dynamic":
        fields[_LENGTH] = original
    if kind == "longrope":  # transformers 4 computes the factor from these
        fields |= {_ORIGINAL_LENGTH: original, _LENGTH: round(options.rotary_scaling_factor * original)}
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
    names = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", _ORIGINAL_LENGTH, base}
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
