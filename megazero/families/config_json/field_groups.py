"""Fields of config.json that have a meaning together, for the families that share them."""

from __future__ import annotations

from typing import Any

from megazero.families.config_json.huggingface import Config, FieldGroup


def biases(mlp: bool) -> FieldGroup:
    """Return attention_bias, which is that of q, k, v and o, and mlp_bias where the family has it."""
    fields = {"add_attention_bias": "attention_bias"} | ({"add_bias_linear": "mlp_bias"} if mlp else {})
    return FieldGroup(
        tuple(fields.values()),
        lambda config: {name: config.get(there, False) for name, there in fields.items()},
        lambda options: {there: getattr(options, name) for name, there in fields.items()},
    )


def single(field: str, option: str, absent: Any, written: str | None = None) -> FieldGroup:
    """Return a field whose value is the option's. ``absent`` is what an absent field means.

    ``written`` is the property of the options that has the field's value, if it is not the option.
    """
    return FieldGroup(
        (field,),
        lambda config: {option: config.get(field, absent)},
        lambda options: {field: getattr(options, written or option)},
    )


def chosen(field: str, option: str, values: tuple[Any, Any], absent: bool) -> FieldGroup:
    """Return a switch between two ``values`` of an option: of off, and of on. ``absent`` is an absent field's."""
    return FieldGroup(
        (field,),
        lambda config: {option: values[bool(config.get(field, absent))]},
        lambda options: {field: getattr(options, option) == values[True]},
    )


def unread(**values: Any) -> FieldGroup:
    """Return fields of published files that transformers' class does not have, each with its only value here."""

    def read(config: Config) -> dict[str, Any]:
        others = [n for n, value in values.items() if config.get(n, value) != value]
        if others:
            said = ", ".join(f"{n} = {config[n]!r} (only {values[n]!r})" for n in others)
            raise ValueError(f"{said} is not supported")
        return {}

    return FieldGroup(tuple(values), read)


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
WHOLE_HEADS = FieldGroup((), _whole_heads)
