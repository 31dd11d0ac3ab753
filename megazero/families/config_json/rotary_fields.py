"""Fields of config.json for rotary positions and their scalings, in the spellings of transformers 4 and 5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megazero.families.config_json.huggingface import Config, FieldGroup

_FACTOR = {"rotary_scaling_factor": "factor"}
_ORIGINAL = {"rotary_original_max_position": "original_max_position_embeddings"}
# By type: an option and its field of the scaling.
_SCALINGS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "linear": _FACTOR,
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
_MSCALES = ("mscale", "mscale_all_dim")
_ABSENT |= dict(zip(_MSCALES, (1.0, 0.0), strict=True))
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


def _scaling(kind: str, config: Config, rope: Config) -> dict[str, Any]:
    """Return the options of a scaling of this type. ``rope`` has its fields.

    Raises ValueError, which names fields that are missing or not known.
    """
    there = _SCALINGS[kind]
    said = {field: rope.get(field) for field in there.values()} | _by_lengths(kind, config, rope)
    if said.get("attention_factor") or not (said.get("mscale") and said.get("mscale_all_dim")):
        said |= dict.fromkeys(_MSCALES)  # transformers does not use them then
    values = {n: _ABSENT.get(field) if said[field] is None else said[field] for n, field in there.items()}
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *there.values()}
    errors = [f"{name} = {rope[name]!r} is not known" for name in rope.keys() - known if rope[name]]
    errors += [f"{f} is missing" for n, f in there.items() if values[n] is None and f not in _ABSENT]
    if errors:
        raise ValueError(f"rotary positions of type {kind}: {', '.join(errors)}")
    return {n: tuple(map(float, value)) if isinstance(value, list) else value for n, value in values.items()}


def _by_lengths(kind: str, config: Config, rope: Config) -> dict[str, Any]:
    """Return the original length of a scaling that has one, and its factor where that follows from the lengths."""
    if _ORIGINAL.items() - _SCALINGS[kind].items():
        return {}
    spellings = {f"{_ORIGINAL_LENGTH} of the rotary positions": rope.get(_ORIGINAL_LENGTH)}
    spellings[_ORIGINAL_LENGTH] = config.get(_ORIGINAL_LENGTH)
    longest = None if kind == "llama3" else config.get(_LENGTH)
    original = agreed(spellings, longest)
    implied = kind == "longrope" or "factor" in rope
    if implied and rope.get("factor") is None and original and longest:
        return {_ORIGINAL_LENGTH: original, "factor": longest / original}
    return {_ORIGINAL_LENGTH: original}


def _written_scaling(options: Any) -> dict[str, Any]:
    """Return rope_scaling, and the lengths that transformers takes from outside of it."""
    kind, original = options.rotary_scaling, options.rotary_original_max_position
    values = {field: getattr(options, name) for name, field in _SCALINGS[kind].items()}
    unused = () if values.get("mscale") and values.get("mscale_all_dim") else _MSCALES
    values = {field: value for field, value in values.items() if value is not None and field not in unused}
    values = {field: list(v) if isinstance(v, tuple) else v for field, v in values.items()}
    fields = {"rope_scaling": {"rope_type": kind, **values}}
    if kind == "longrope":  # transformers 4 computes the factor from these
        fields |= {_ORIGINAL_LENGTH: original, _LENGTH: round(options.rotary_scaling_factor * original)}
    return fields


def rotary(
    base: str = "rope_theta",
    share: str | None = None,
    absent_share: float = 1.0,
    absent_base: float | None = 10000.0,
    says_none: bool = False,
) -> FieldGroup:
    """Return the fields of rotary positions, in the spelling of transformers 4 or 5.

    ``base`` and ``share`` are the family's own names of rope_theta and partial_rotary_factor in transformers 4.
    ``absent_share`` is what an absent share means. Without a name of it, 1 is the only value. ``absent_base`` is what
    an absent base means; None if releases of transformers disagree: then it is an error.
    ``says_none``: without a scaling, files say so; what its absence means, releases disagree on, too.
    """

    def value(name: str, own: str | None, config: Config, rope: Config, absent: Any) -> Any:
        spellings = {name: config.get(name), f"{name} of the rotary positions": rope.get(name)}
        return agreed(spellings | ({own: config.get(own)} if own else {}), absent)

    def read(config: Config) -> dict[str, Any]:
        """Raise ValueError, which names a kind, a field or a share that the decoder does not have."""
        rope = agreed({name: config.get(name) for name in ("rope_scaling", "rope_parameters")}, {})
        if says_none and not rope:
            raise ValueError("rope_scaling is missing")
        # Where both stand there, transformers 4 takes type, and 5 takes rope_type.
        kind = agreed({name: rope.get(name) for name in ("rope_type", "type")}, "default")
        if kind not in _SCALINGS:
            raise ValueError(f"rope_type = {kind!r} is none of {', '.join(_SCALINGS)}")
        percent = value("partial_rotary_factor", share, config, rope, absent_share)
        if share is None and percent != 1:
            raise ValueError(f"partial_rotary_factor = {percent!r} is not supported (only 1)")
        theta = value("rope_theta", base, config, rope, absent_base)
        if theta is None:
            raise ValueError("rope_theta is missing")
        return {
            "position_embedding_type": "rope",
            "rotary_base": theta,
            "rotary_percent": percent,
            "rotary_scaling": "none" if kind == "default" else kind,
            **_scaling(kind, config, rope),
        }

    def write(options: Any) -> dict[str, Any]:
        fields: dict[str, Any] = {
            base: options.rotary_base,
            "rope_scaling": {"rope_type": "default"} if says_none else None,
        }
        if share:
            fields[share] = options.rotary_percent
        return fields | (_written_scaling(options) if options.rotary_scaling != "none" else {})

    names = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", _ORIGINAL_LENGTH, base}
    return FieldGroup(names | ({share} if share else set()), read, write)


ROTARY = rotary()
