"""The mixers of tokens: a row for each, and their options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megazero.config.model.mixers.gated_delta_net import GatedDelta, GatedDeltaNetOptions
from megazero.config.model.mixers.latent import Latent, LatentOptions
from megazero.config.model.mixers.mamba import MambaOptions, StateSpace
from megazero.config.model.mixers.mixer import Mixer, Nothing
from megazero.config.model.mixers.softmax import Softmax
from megazero.families import layer_kinds

MIXERS: Mapping[str, type[Mixer]] = MappingProxyType(
    {
        layer_kinds.SOFTMAX: Softmax,
        layer_kinds.LATENT: Latent,
        layer_kinds.GATED_DELTA_NET: GatedDelta,
        layer_kinds.MAMBA: StateSpace,
        layer_kinds.NOTHING: Nothing,
    }
)


@dataclass(frozen=True, kw_only=True)
class MixerOptions(MambaOptions, GatedDeltaNetOptions, LatentOptions):
    """The options of all mixers."""


def mixers_of(c: Any) -> list[Mixer]:
    """Return the mixers that layers of the model ``c`` have: one with heads of attention first, if there is one."""
    return [MIXERS[name](c) for name in layer_kinds.mixers(c)]


__all__ = ["MIXERS", "Mixer", "MixerOptions", "mixers_of"]
