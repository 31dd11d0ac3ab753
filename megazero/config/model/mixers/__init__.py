"""The mixers of tokens: a row for each, and their options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megazero.config.model.mixers.mixer import Mixer
from megazero.config.model.mixers.softmax import Softmax, SoftmaxOptions
from megazero.families import layer_kinds

MIXERS: Mapping[str, type[Mixer]] = MappingProxyType({layer_kinds.SOFTMAX: Softmax})


@dataclass(frozen=True, kw_only=True)
class MixerOptions(SoftmaxOptions):
    """The options of all mixers."""


def mixers_of(c: Any) -> Iterator[Mixer]:
    """Yield the mixers that layers of the model ``c`` have."""
    yield from (MIXERS[name](c) for name in layer_kinds.mixers(c))


def usual_names() -> dict[str, str | tuple[str, int]]:
    """Return what Hugging Face calls the modules of all mixers, where a family does not say otherwise."""
    return {module: there for mixer in MIXERS.values() for module, there in mixer.names.items()}


__all__ = ["MIXERS", "Mixer", "MixerOptions", "mixers_of", "usual_names"]
