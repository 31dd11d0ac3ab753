"""Fields of config.json that choose layers: with a window, with other rotary positions or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megazero.families.config_json.field_groups import single
from megazero.families.config_json.huggingface import Config, FieldGroup
from megazero.families.config_json.rotary_fields import ROTARY, agreed
from megazero.families.layer_kinds import GATED_DELTA_NET, frequency_of, layer_kinds

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
ROPE = "rope_parameters"


def window(absent: int | None) -> FieldGroup:
    """Return the window of a family whose layers all have it. ``absent`` is what an absent field means."""
    return single("sliding_window", "sliding_window", absent)


def _size(config: Config, absent: int | None = 4096) -> int | None:
    """Return the size of windows that are switched on, or None."""
    return config.get("sliding_window", absent) if config.get("use_sliding_window") else None


def _read_switched_window(config: Config) -> dict[str, Any]:
    if config.get("use_sliding_window") and _size(config) is None:
        raise ValueError("use_sliding_window needs sliding_window")
    return {"sliding_window": _size(config)}


def _write_switched_window(options: Any) -> dict[str, Any]:
    return {
        "use_sliding_window": options.sliding_window is not None,
        "sliding_window": options.sliding_window,
    }


# Of Qwen3's mixtures: all layers have the window, whatever max_window_layers in published files says.
SWITCHED_WINDOW = FieldGroup(
    ("use_sliding_window", "sliding_window", "max_window_layers"),
    _read_switched_window,
    _write_switched_window,
)


def _windows(config: Config, size: int | None, usual: Callable[[int], bool], needs: str) -> dict[str, Any]:
    """Return the options of windows of ``size`` in the layers that layer_types says, or else ``usual`` by number.

    Raises ValueError for other types, another number of layers, and windows without a size, which ``needs`` gives.
    """
    layers, types = config.get("num_hidden_layers") or 0, config.get("layer_types")
    if types is None:
        types = [SLIDING if usual(i) else FULL for i in range(layers)]
    if others := sorted(set(types) - {FULL, SLIDING}):
        raise ValueError(f"layer_types with {', '.join(others)} is not supported (only {FULL}, {SLIDING})")
    if len(types) != layers:
        raise ValueError(f"layer_types has {len(types)} layers, and num_hidden_layers = {layers}")
    if SLIDING not in types:
        return {"sliding_window": None, "window_attn_skip_freq": None}
    if size is None:
        raise ValueError(f"layer_types with {SLIDING} needs {needs}")
    return {
        "sliding_window": size,
        "window_attn_skip_freq": frequency_of([t == FULL for t in types], "window_attn_skip_freq"),
    }


def _types(options: Any) -> list[str]:
    return [FULL if kind.window is None else SLIDING for kind in layer_kinds(options)]


def every_nth_full(pattern: int, name: str | None = None, width: int = 4096) -> FieldGroup:
    """Return windows, by default of ``width``, in all but every ``pattern``-th layer. ``name`` is a field of that."""

    def read(config: Config) -> dict[str, Any]:
        every = (name and config.get(name)) or pattern
        return _windows(
            config, config.get("sliding_window", width), lambda i: (i + 1) % every != 0, "sliding_window"
        )

    def write(options: Any) -> dict[str, Any]:
        # A size where no layer has a window, too: transformers makes its mask of a size.
        size = options.sliding_window or options.max_position_embeddings
        return {"sliding_window": size, "layer_types": _types(options)}

    own = (name, f"_{name}") if name else ()  # the second is what transformers 5 writes, and does not read
    return FieldGroup(("sliding_window", "layer_types", *own), read, write)


def _read_switched(config: Config, usual: Callable[[int, int], bool]) -> dict[str, Any]:
    size = _size(config)
    first = config.get("max_window_layers", 28)
    return _windows(config, size, lambda i: size is not None and usual(i, first), "use_sliding_window")


def _write_switched(options: Any) -> dict[str, Any]:
    types = _types(options)
    if SLIDING not in types:
        return {"use_sliding_window": False}
    first = types.index(SLIDING)
    fields = {"use_sliding_window": True, "sliding_window": options.sliding_window}
    return {**fields, "max_window_layers": first, "layer_types": types}


def switched_windows(usual: Callable[[int, int], bool]) -> FieldGroup:
    """Return Qwen's windows, whose width means nothing where they are not switched on.

    ``usual`` says which layers have one where layer_types does not, by a layer's number and max_window_layers.
    """
    return FieldGroup(
        ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
        lambda config: _read_switched(config, usual),
        _write_switched,
    )


SWITCHED_WINDOWS = switched_windows(lambda layer, first: layer >= first)


def _read_later(config: Config) -> dict[str, Any]:
    size, first = config.get("sliding_window", 4096), config.get("max_window_layers", 62)
    return _windows(config, size, lambda i: size is not None and i >= first, "sliding_window")


# Of dots.llm1: layers behind the first ones have windows.
LATER_WINDOWS = FieldGroup(
    ("sliding_window", "max_window_layers", "layer_types"),
    _read_later,
    lambda options: {"sliding_window": options.sliding_window, "layer_types": _types(options)},
)


def _read_unturned(config: Config) -> dict[str, Any]:
    """SmolLM3's layers without rotary positions. If windows are switched on, these layers have them."""
    layers, every = config.get("num_hidden_layers") or 0, config.get("no_rope_layer_interval") or 4
    turned = config.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(layers)]
    if len(turned) != layers:
        raise ValueError(f"no_rope_layers has {len(turned)} layers, and num_hidden_layers = {layers}")
    size = _size(config, None)
    needs = "use_sliding_window and sliding_window"
    windows = _windows(config, size, lambda i: size is not None and not turned[i], needs)
    return {**windows, "no_rope_freq": frequency_of([not turn for turn in turned], "no_rope_freq")}


UNTURNED_LAYERS = FieldGroup(
    # max_window_layers is in published files, and nothing reads it.
    ("no_rope_layers", "no_rope_layer_interval", *SWITCHED_WINDOWS.names),
    _read_unturned,
    lambda options: {
        "no_rope_layers": [int(kind.rotary) for kind in layer_kinds(options)],
        **_write_switched_window(options),
        "layer_types": _types(options),
    },
)


def _read_linear(config: Config) -> dict[str, Any]:
    layers, every = config.get("num_hidden_layers") or 0, config.get("full_attention_interval") or 4
    types = config.get("layer_types") or [LINEAR if (i + 1) % every else FULL for i in range(layers)]
    if others := sorted(set(types) - {FULL, LINEAR}):
        raise ValueError(f"layer_types with {', '.join(others)} is not supported (only {FULL}, {LINEAR})")
    if len(types) != layers:
        raise ValueError(f"layer_types has {len(types)} layers, and num_hidden_layers = {layers}")
    softmax = frequency_of([kind == FULL for kind in types], "linear_attention_freq")
    return {"experimental_attention_variant": GATED_DELTA_NET, "linear_attention_freq": softmax}


def _write_linear(options: Any) -> dict[str, Any]:
    kinds = layer_kinds(options)
    return {"layer_types": [LINEAR if kind.mixer == GATED_DELTA_NET else FULL for kind in kinds]}


# Of Qwen3-Next: most layers have linear attention.
LINEAR_LAYERS = FieldGroup(("layer_types", "full_attention_interval"), _read_linear, _write_linear)


def _of_full_layers(config: Config, others: FieldGroup) -> dict[str, Any]:
    """Return the options of layers without a window, which ``config`` says by the kind of layer.

    What is written here says their scaling twice, once for transformers 4. Raises ValueError where that differs, and
    for positions of other kinds of layers, or of all.
    """
    if further := sorted(config[ROPE].keys() - {FULL, SLIDING}):
        raise ValueError(f"{ROPE} has {', '.join(further)} beside {FULL} and {SLIDING}")
    options = others.read({**config, "rope_scaling": None, ROPE: config[ROPE].get(FULL)})
    flat = config.get("rope_scaling")
    if flat and others.read({**config, "rope_theta": options["rotary_base"], ROPE: None}) != options:
        raise ValueError(f"rope_scaling = {flat!r} and {FULL} of {ROPE} differ")
    return options


def two_rotaries(
    windows: FieldGroup, others: FieldGroup, base: float, local: str | None = None
) -> FieldGroup:
    """Return ``windows`` with rotary positions that are ``others`` in layers without one, and not scaled in theirs.

    ``base`` is what an absent base in layers with a window means. ``local`` is its name in transformers 4, where
    those of families without such a name have the base of the others.
    """

    def read(config: Config) -> dict[str, Any]:
        """Return the options that a config.json says. Raises ValueError for what they cannot."""
        chosen, rope = windows.read(config), config.get(ROPE) or {}
        nested = FULL in rope or SLIDING in rope
        options = _of_full_layers(config, others) if nested else others.read(config)
        inner = rope.get(SLIDING) or {} if nested else {}
        said = {"rope_theta of the windows": inner.get("rope_theta")}
        if local:
            said[local] = config.get(local)
        theta = agreed(said, base)
        if not nested and not local and options["rotary_base"] != base:
            raise ValueError(
                f"rope_theta = {options['rotary_base']:g}: transformers 4 and 5 differ on layers with a window; say "
                f"{ROPE}"
            )
        kind = ROTARY.read({ROPE: {**inner, "rope_theta": theta}})["rotary_scaling"]
        if kind != "none":
            raise ValueError(f"rope_type = {kind!r} of {SLIDING} is not supported (only default)")
        plain = theta == options["rotary_base"] and options["rotary_scaling"] == "none"
        idle = plain or chosen["sliding_window"] is None
        return {**chosen, **options, "rotary_window_base": None if idle else theta}

    def write(options: Any) -> dict[str, Any]:
        theta = options.rotary_window_base or options.rotary_base
        written = {**windows.write(options), **others.write(options)}
        if local:
            return {**written, local: theta}
        # transformers 5 does not read rope_theta of layers with a window (5.23); 4 reads no rope_parameters.
        scaling = written["rope_scaling"] or {"rope_type": "default"}
        full = {**scaling, "rope_theta": options.rotary_base}
        return {**written, ROPE: {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": theta}}}

    names = {*windows.names, *others.names, *((local,) if local else ())}
    return FieldGroup(names, read, write)
