"""The model that a Hugging Face config.json describes, and which architecture there computes a given model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from megazero.config.errors import ConfigError
from megazero.config.model.mixers import mixers_of
from megazero.config.model.rules import check_model
from megazero.config.model.section import ModelConfig, make_model
from megazero.config.options.fields import Option, convert, section_options, show
from megazero.config.options.needs import lacks
from megazero.families import FAMILIES, Family
from megazero.families.config_json.missing import missing
from megazero.families.layer_kinds import layer_kinds, mixers, some_layers

# Options of the model that decide neither which parameters there are nor what is computed of them.
_FREE = (
    "seq_length",
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    *(
        "use_mup",
        "mup_base_hidden_size",
        "mup_base_head_dim",
        "mup_attn_scale_power",
    ),  # told by what they scale
    "make_vocab_size_divisible_by",
    "pad_vocab_size_to",
)


def is_architecture(name: str, positions: str | None) -> bool:
    """Tell whether an option decides which parameters a model has, or what it computes of them.

    ``positions`` is its position_embedding_type: learned ones are parameters, others go as far as they are asked to.
    """
    return name not in _FREE and (name != "max_position_embeddings" or positions == "learned_absolute")


def otherwise(model: Mapping[str, Any], said: Mapping[str, Any]) -> list[str]:
    """Return the options that ``said`` gives another value than ``model`` has, by which it is another model.

    Both are by option name. Some choices can be said in two ways, which is no difference if both models are legal.
    """
    names = [name for name, value in model.items() if said.get(name) not in (None, value)]
    with suppress(ConfigError):
        before, now = (
            make_model(**{"seq_length": 1, **model, **changes})
            for changes in ({}, {n: said[n] for n in names})
        )
        check_model(before)
        check_model(now)
        known = {option.name: option for option in section_options("model", ModelConfig)}
        return [n for n in names if _value(before, known[n]) != _value(now, known[n])]
    return names


def from_hf_config(config: Mapping[str, Any], accept: Collection[str] = (), **options: Any) -> ModelConfig:
    """Return the model section that a Hugging Face config.json describes.

    ``accept`` has the fields that are set aside although the decoder does not know them.
    ``options`` are given by name and replace what is read. Dropout is 0 and sequences are as long as the model can
    take unless it is given here.
    Raises ValueError, which names a model type, or every field that the decoder does not have, or every rule that its
    values break.
    """
    known = {kind: family for family in FAMILIES.values() for kind in family.hugging_face.read_types}
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in known:
        parts, inner = missing(config), config.get("text_config")
        lacks = f"it has {', '.join(parts)}" if parts else "its fields and tensor names have no reader"
        why = f"is not built here: {lacks}; built are"
        text = inner.get("model_type") if isinstance(inner, Mapping) else None
        more = f" (its text_config is of {text}, so a folder of that alone is read)" if text in known else ""
        raise ValueError(f"model_type = {kind!r} {why} {', '.join(known)}{more}")
    model = _read(known[kind], config, accept, options)
    try:
        check_model(model)
    except ConfigError as error:
        raise ValueError(f"{kind} config: {'; '.join(error.errors)}") from None
    return model


def _read(
    family: Family, config: Mapping[str, Any], accept: Collection[str], options: Mapping[str, Any]
) -> ModelConfig:
    if faults := list(_other_kinds(family, config)):
        raise ValueError(f"{family.hugging_face.model_type} config: {'; '.join(faults)}")
    read = family.hugging_face.options(config, accept)
    faults = list(_other_kinds_of_options(read))
    if read.get("num_experts") == 1:  # Megatron's word for none
        there = family.hugging_face.fields["num_experts"]
        faults.append(
            f"{there} = 1: a mixture of one expert is not built; nearest: a dense model of that MLP"
        )
    if faults:
        raise ValueError(f"{family.hugging_face.model_type} config: {'; '.join(faults)}")
    without = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    return make_model(**{"model_family": family.name, **without, **read, **options})


def _other_kinds(family: Family, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fields that hold another kind of value than their option: "2" is text, where a number is needed."""
    options = {option.name: option for option in section_options("model", ModelConfig)}
    plain = family.hugging_face.plain_fields
    spelt = {there: name for name, there in plain.items() if name in options}
    spelt |= {alias: spelt[there] for alias, there in family.hugging_face.aliases.items() if there in spelt}
    for field, name in spelt.items():
        if why := _other_kind(options[name], config.get(field)):
            yield f"{field} {why}"


def _other_kinds_of_options(read: Mapping[str, Any]) -> Iterator[str]:
    """Yield the same of what groups of fields were read as."""
    for option in section_options("model", ModelConfig):
        if why := _other_kind(option, read.get(option.name)):
            yield f"{option.flag} {why}"


def _other_kind(option: Option, value: Any) -> str:
    """Return why this is no value of an option, or '' if it is one."""
    if value is None:
        return ""
    try:
        convert(option, value)
    except (ValueError, TypeError) as error:
        return f"{error}"
    if isinstance(value, str) and option.kind in ("int", "float"):
        return f"takes a number, got the text {value!r}: leave its quotes out"
    return ""


def architecture_of(options: ModelConfig) -> Family:
    """Return the family whose architecture in Hugging Face computes what the model of ``options`` does.

    A checkpoint of the model has the names of that architecture. ``options.vocab_size`` may be unknown.
    Raises ValueError that names the choices which the nearest architecture does not have, or the family whose names
    the checkpoint would need.
    """
    own = FAMILIES[options.model_family]
    others = [family for family in FAMILIES.values() if family is not own]
    candidates = [family for family in (own, *others) if options.family_names in family.names]
    faults = {family.name: _inexpressible(options, family) for family in candidates}
    for family in candidates:
        if not faults[family.name].lost:
            return family
    for family in FAMILIES.values():
        named = any(names.can_express(options) for names in family.names)
        if named and not _inexpressible(options, family).lost:
            raise ValueError(
                f"--model-family {own.name} stores this mixture under other names than Hugging Face, which "
                f"has it as {family.hugging_face.model_type}; --model-family {family.name} stores it under those"
            )
    nearest = min(faults, key=lambda name: (not faults[name].readable, len(faults[name].lost)))
    raise ValueError(
        f"no architecture in Hugging Face has this mixture of choices; the nearest is {nearest}, without "
        f"{', '.join(faults[nearest].lost)}"
    )


class _Inexpressible(NamedTuple):
    """What a family's config.json does not say of a model, as flags, or why it cannot be read."""

    lost: list[str]
    readable: bool = True


def _inexpressible(options: ModelConfig, family: Family) -> _Inexpressible:
    """Write config.json of the family, read it again, and return what was lost on the way."""
    config = family.hugging_face.config(options)
    config["vocab_size"] = options.vocab_size or 1
    try:
        back = _read(family, config, (), {"seq_length": options.seq_length})
    except ValueError as error:
        return _Inexpressible([str(error)], readable=False)
    known = {**vars(options), "mixers": mixers(options)}
    said = [
        option
        for option in section_options("model", ModelConfig)
        if option.name not in ("model_family", "vocab_size")
        and not lacks(option, known)
        and is_architecture(option.name, options.position_embedding_type)
    ]
    pairs = [(option, _value(options, option), _value(back, option)) for option in said]
    return _Inexpressible([f"{option.flag} {show(value)}" for option, value, read in pairs if value != read])


def _value(options: ModelConfig, option: Option) -> Any:
    """Return the value of an option.

    Biases of q, k and v may be said twice, the default of a scale or a width and the base of a window, too, and a
    choice of layers in two ways.
    """
    heads = mixers_of(options)[0].heads
    meant: dict[str, Any] = {
        "add_qkv_bias": options.qkv_bias,
        "softmax_scale": heads.scale if heads else None,
    }
    meant["moe_ffn_hidden_size"] = options.expert_width
    meant["latent_norm_epsilon"] = options.latent_norm_epsilon or options.norm_epsilon
    meant["moe_router_topk_scaling_factor"] = options.moe_router_topk_scaling_factor or 1.0
    meant["moe_router_group_best"] = options.group_best
    kept = options.moe_router_group_topk
    if kept is not None and kept == options.moe_router_num_groups:  # all groups, as without them
        meant |= dict.fromkeys(("moe_router_num_groups", "moe_router_group_topk", "moe_router_group_best"))
    if all(kind.experts for kind in layer_kinds(options)):  # no layer has another width
        meant["ffn_hidden_size"] = options.expert_width
    if options.rotary_window_base == options.rotary_base and options.rotary_scaling == "none":
        meant["rotary_window_base"] = None
    meant |= some_layers(options, range(options.num_layers))
    return meant.get(option.name, getattr(options, option.name))
