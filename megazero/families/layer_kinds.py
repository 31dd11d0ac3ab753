"""What a layer chooses by its number: what mixes its tokens, the window of its attention, its rotary positions, and
whether it has experts.

Layers that choose the same are of one kind: they share masks and tables. Three options say which layers skip what
most have: ``window_attn_skip_freq``, ``linear_attention_freq`` and ``no_rope_freq``, as Megatron's. One number N
means every N-th layer, in brackets, too. Several numbers are one for each layer: 1 for a layer that has a window,
that has linear attention, or that has no rotary positions. ``moe_layer_freq`` says which layers have experts, by 1.
There one number N means the first of every N layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Frequency = tuple[int, ...] | None
# Mixers of tokens (config/model/mixers).
SOFTMAX, LATENT, GATED_DELTA_NET = "softmax", "latent", "gated_delta_net"
MOST_LAYERS = 10_000  # of a model: a number beyond is a mistake, whose layers would be counted out for hours


class Marked(NamedTuple):
    """How an option lists layers. mark: the number of a listed one. last: of every N it is the last, or the first."""

    mark: int
    last: bool = True


# Layers without a window, without linear attention, without rotary positions, with experts.
MARKS = {
    "window_attn_skip_freq": Marked(0),
    "linear_attention_freq": Marked(0),
    "no_rope_freq": Marked(1),
    "moe_layer_freq": Marked(1, last=False),
}


@dataclass(frozen=True)
class LayerKind:
    """The choices of a layer that its number decides.

    window: tokens that its attention looks back through, its own included; None for all of them.
    rotary: whether rotary positions turn its queries and keys. Their frequencies have the base ``rotary_base`` and
    the scaling ``rotary_scaling``.
    experts: whether its MLP is a mixture of experts.
    mixer: the name of what mixes its tokens (config/model/mixers).
    """

    window: int | None
    rotary: bool
    rotary_base: float
    rotary_scaling: str
    experts: bool = False
    mixer: str = SOFTMAX


def layer_kind(options: Any, index: int) -> LayerKind:
    """Return the kind of layer ``index`` (from 0). Those behind the last layer are of its kind.

    ``options`` has the options of a model as attributes.
    """
    index = min(index, options.num_layers - 1)
    softmax, other = _softmax(options), options.experimental_attention_variant
    mixer = softmax if other is None or _chosen(options, "linear_attention_freq", index) else other
    windowed = options.sliding_window is not None and not _chosen(options, "window_attn_skip_freq", index)
    windowed = windowed and mixer == softmax
    unturned = _chosen(options, "no_rope_freq", index) or mixer != softmax
    local = options.rotary_window_base if windowed else None
    return LayerKind(
        options.sliding_window if windowed else None,
        options.position_embedding_type == "rope" and not unturned,
        options.rotary_base if local is None else local,
        options.rotary_scaling if local is None else "none",
        options.num_experts is not None and _chosen(options, "moe_layer_freq", index),
        mixer,
    )


def mixers(options: Any) -> tuple[str, ...]:
    """Return the names of the mixers of tokens that layers have. It asks no list of layers, which may be illegal."""
    softmax, other = _softmax(options), options.experimental_attention_variant
    if other is None:
        return (softmax,)
    return (other,) if options.linear_attention_freq is None else (softmax, other)


def _softmax(options: Any) -> str:
    return LATENT if options.multi_latent_attention else SOFTMAX


def layer_kinds(options: Any, layers: Sequence[int] | None = None) -> list[LayerKind]:
    """Return the kinds of the layers with these numbers, or of all layers."""
    return [layer_kind(options, i) for i in (range(options.num_layers) if layers is None else layers)]


def some_layers(options: Any, layers: Sequence[int]) -> dict[str, Any]:
    """Return the options by name of a model whose layers choose what these do."""
    chosen: dict[str, Any] = {
        name: frequency_of([_chosen(options, name, i) for i in layers], name) for name in MARKS
    }
    if chosen["moe_layer_freq"] is None:  # no layer here has experts
        chosen |= {"moe_layer_freq": (1,), "num_experts": None}
    return {"num_layers": len(layers), **chosen}


def _chosen(options: Any, name: str, index: int) -> bool:
    """Tell whether a layer is one of every N, or is listed."""
    frequency = getattr(options, name)
    return frequency is not None and _among(frequency, MARKS[name], index)


def _among(frequency: Sequence[int], marked: Marked, index: int) -> bool:
    if len(frequency) == 1:
        return (index + marked.last) % frequency[0] == 0
    return frequency[index] == marked.mark


def frequency_of(chosen: Sequence[bool], name: str) -> Frequency:
    """Return the value of the option ``name`` that chooses these layers: None for none, one number if it is one of
    every N, else a list."""
    if not any(chosen):
        return None
    marked = MARKS[name]
    every = (list(chosen) if marked.last else [*chosen[1:], True]).index(True) + 1
    if all(_among((every,), marked, i) == choice for i, choice in enumerate(chosen)):
        return (every,)
    return tuple(marked.mark if choice else 1 - marked.mark for choice in chosen)
