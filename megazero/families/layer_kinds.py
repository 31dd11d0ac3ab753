"""What a layer chooses by its number: the window of its attention and its rotary positions.

Layers that choose the same are of one kind: they share masks and tables. Two options say which layers skip what most
have: ``window_attn_skip_freq`` and ``no_rope_freq``, as Megatron's. One number N means every N-th layer, in brackets,
too. Several numbers are one for each layer: 1 for a layer that has a window, or that has no rotary positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Frequency = tuple[int, ...] | None
MOST_LAYERS = 10_000  # of a model: a number beyond is a mistake, whose layers would be counted out for hours
# The numbers that list a layer: one without a window, and one without rotary positions.
MARKS = {"window_attn_skip_freq": 0, "no_rope_freq": 1}


@dataclass(frozen=True)
class LayerKind:
    """The choices of a layer that its number decides.

    window: tokens that its attention looks back through, its own included; None for all of them.
    rotary: whether rotary positions turn its queries and keys. Their frequencies have the base ``rotary_base`` and
    the scaling ``rotary_scaling``.
    """

    window: int | None
    rotary: bool
    rotary_base: float
    rotary_scaling: str


def layer_kind(options: Any, index: int) -> LayerKind:
    """Return the kind of layer ``index`` (from 0). ``options`` has the options of a model as attributes."""
    windowed = options.sliding_window is not None and not _chosen(options.window_attn_skip_freq, index, 0)
    unturned = _chosen(options.no_rope_freq, index, 1)
    local = options.rotary_window_base if windowed else None
    return LayerKind(
        options.sliding_window if windowed else None,
        options.position_embedding_type == "rope" and not unturned,
        options.rotary_base if local is None else local,
        options.rotary_scaling if local is None else "none",
    )


def layer_kinds(options: Any, layers: Sequence[int] | None = None) -> list[LayerKind]:
    """Return the kinds of the layers with these numbers, or of all layers."""
    return [layer_kind(options, i) for i in (range(options.num_layers) if layers is None else layers)]


def some_layers(options: Any, layers: Sequence[int]) -> dict[str, Any]:
    """Return the options by name of a model whose layers choose what these do."""
    frequencies = {
        name: frequency_of([_chosen(getattr(options, name), i, mark) for i in layers], mark)
        for name, mark in MARKS.items()
    }
    return {"num_layers": len(layers), **frequencies}


def _chosen(frequency: Frequency, index: int, mark: int) -> bool:
    """Tell whether a layer is an N-th one, or is listed with ``mark``."""
    if frequency is None:
        return False
    if len(frequency) == 1:
        return (index + 1) % frequency[0] == 0
    return frequency[index] == mark


def frequency_of(chosen: Sequence[bool], mark: int) -> Frequency:
    """Return the option that chooses these layers: None for none, one number if it is every N-th, else a list."""
    if not any(chosen):
        return None
    every = chosen.index(True) + 1
    if all(_chosen((every,), i, mark) == choice for i, choice in enumerate(chosen)):
        return (every,)
    return tuple(mark if choice else 1 - mark for choice in chosen)
