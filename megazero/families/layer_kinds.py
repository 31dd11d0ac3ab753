"""What a layer chooses by its number: what mixes its tokens, the window of its attention, its rotary positions, and
its feed-forward.

Layers that choose the same are of one kind: they share masks and tables. Three options say which layers skip what
most have: ``window_attn_skip_freq``, ``linear_attention_freq`` and ``no_rope_freq``, as Megatron's. One number N
means every N-th layer, in brackets, too. Several numbers are one for each layer: 1 for a layer that has a window,
that has linear attention, or that has no rotary positions. ``moe_layer_freq`` says which layers have experts, by 1.
There one number N means the first of every N layers. ``hybrid_layer_pattern``, as Megatron's, has a letter for each
layer, which is a mixer or a feed-forward alone, and nothing in the other's place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Frequency = tuple[int, ...] | None
NOTHING = "nothing"  # in the place of a mixer or of a feed-forward
# Mixers of tokens (config/model/mixers), and feed-forwards (config/model/spec.py).
SOFTMAX, LATENT, GATED_DELTA_NET, MAMBA = "softmax", "latent", "gated_delta_net", "mamba"
DENSE, EXPERTS = "dense", "experts"
# The branches of a layer by its letter; attention is latent where all of the model's is.
LETTERS = {
    "M": (MAMBA, NOTHING),
    "G": (GATED_DELTA_NET, NOTHING),
    "*": (SOFTMAX, NOTHING),
    "-": (NOTHING, DENSE),
    "E": (NOTHING, EXPERTS),
}
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
    feed_forward: the name of what follows its mixer: an MLP, a mixture of experts, or nothing.
    mixer: the name of what mixes its tokens (config/model/mixers), or nothing.
    """

    window: int | None
    rotary: bool
    rotary_base: float
    rotary_scaling: str
    feed_forward: str = DENSE
    mixer: str = SOFTMAX

    @property
    def experts(self) -> bool:
        return self.feed_forward == EXPERTS


def layer_kind(options: Any, index: int) -> LayerKind:
    """Return the kind of layer ``index`` (from 0). Those behind the last layer are of its kind.

    ``options`` has the options of a model as attributes.
    """
    index = min(index, options.num_layers - 1)
    mixer, feed_forward = _branches(options, index)
    attends = mixer in (SOFTMAX, LATENT)
    skipped = _chosen(options, "window_attn_skip_freq", index)
    windowed = options.sliding_window is not None and not skipped and attends
    unturned = _chosen(options, "no_rope_freq", index) or not attends
    local = options.rotary_window_base if windowed else None
    return LayerKind(
        options.sliding_window if windowed else None,
        options.position_embedding_type == "rope" and not unturned,
        options.rotary_base if local is None else local,
        options.rotary_scaling if local is None else "none",
        feed_forward,
        mixer,
    )


def _branches(options: Any, index: int) -> tuple[str, str]:
    """Return the mixer and the feed-forward of layer ``index``."""
    attention, other = _attention(options), options.experimental_attention_variant
    if options.hybrid_layer_pattern is not None:
        mixer, feed_forward = LETTERS[options.hybrid_layer_pattern[index]]
        return attention if mixer == SOFTMAX else mixer, feed_forward
    mixer = attention if other is None or _chosen(options, "linear_attention_freq", index) else other
    experts = options.num_experts is not None and _chosen(options, "moe_layer_freq", index)
    return mixer, EXPERTS if experts else DENSE


def mixers(options: Any) -> tuple[str, ...]:
    """Return the names of the mixers of tokens that layers have, attention first. It asks no list of layers, which
    may be illegal."""
    attention, other = _attention(options), options.experimental_attention_variant
    if (pattern := options.hybrid_layer_pattern) is not None:
        named = {SOFTMAX: attention, GATED_DELTA_NET: GATED_DELTA_NET, MAMBA: MAMBA}
        found = {mixer for letter, (mixer, _) in LETTERS.items() if letter in pattern}
        return tuple(name for mixer, name in named.items() if mixer in found) or (attention,)
    if other is None:
        return (attention,)
    return (other,) if options.linear_attention_freq is None else (attention, other)


def feed_forwards(options: Any) -> set[str]:
    """Return the names of the feed-forwards that layers have, in the same way."""
    if (pattern := options.hybrid_layer_pattern) is not None:
        return {feed_forward for letter, (_, feed_forward) in LETTERS.items() if letter in pattern}
    if options.num_experts is None:
        return {DENSE}
    return {EXPERTS} if {*options.moe_layer_freq} == {1} else {DENSE, EXPERTS}


def _attention(options: Any) -> str:
    return LATENT if options.multi_latent_attention else SOFTMAX


def layer_kinds(options: Any, layers: Sequence[int] | None = None) -> list[LayerKind]:
    """Return the kinds of the layers with these numbers, or of all layers."""
    return [layer_kind(options, i) for i in (range(options.num_layers) if layers is None else layers)]


def some_layers(options: Any, layers: Sequence[int]) -> dict[str, Any]:
    """Return the options by name of a model whose layers choose what these do."""
    chosen: dict[str, Any] = {
        name: frequency_of([_chosen(options, name, i) for i in layers], name) for name in MARKS
    }
    if (pattern := options.hybrid_layer_pattern) is not None:
        chosen["hybrid_layer_pattern"] = own = "".join(pattern[i] for i in layers)
    if chosen["moe_layer_freq"] is None or (
        pattern is not None and "E" not in own
    ):  # no layer here has experts
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
