"""Tables of rotary positions and of attention, made before the layers that use them.

Layers receive them as arguments, so a layer is a function of its inputs: a recompute sees the same tensors, and
torch.compile traces no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megazero.config.model.attention import wants_of
from megazero.config.model.mixers import MIXERS
from megazero.config.model.section import ModelConfig
from megazero.cp import ContextParallel
from megazero.families.layer_kinds import LayerKind
from megazero.models.attention import choose, make_tables
from megazero.models.masking import AttentionTables, Masking
from megazero.models.rotary import channel_cosines, rotary_tables


@dataclass(frozen=True)
class Documents:
    """The documents packed in one micro-batch's samples.

    position_ids: int64 [b, s], the position of each token within its document; of a context-parallel rank's own
    tokens. None means within the sample.
    starts: int64 [b, s], where in the sample each token's document begins, and attention with it; of all tokens whose
    queries the rank has in attention (``ContextParallel.own_queries``). None means that attention crosses documents.
    It belongs on the host, where tables are made of it.
    """

    position_ids: Tensor | None = None
    starts: Tensor | None = None


class LayerTables(NamedTuple):
    """What the layers of one kind are given for one micro-batch, on the device and in the dtype of activations.

    rotary: cosines [s, b or 1, 1, channels of a head] and sines [s, b or 1, 1, half of those that turn], as Rotate
    takes them, of a context-parallel rank's own tokens. None without rotary positions.
    """

    rotary: tuple[Tensor, Tensor] | None
    attention: AttentionTables


class _Samples(NamedTuple):
    """The samples of one micro-batch, as given to ``Positions.tables``. packed: what was made of their documents."""

    length: int
    like: Tensor
    documents: Documents
    packed: dict[Hashable, Any]


class Positions:
    """Makes the tables of one decoder. Those that all micro-batches share are kept, for samples of one length, device
    and dtype at a time: generation has many lengths. backend: --attention-backend.
    """

    def __init__(
        self,
        config: ModelConfig,
        backend: str = "auto",
        cp: ContextParallel | None = None,
    ) -> None:
        self.config, self.backend, self.cp = config, backend, cp or ContextParallel()
        self._like: Hashable = None
        self._kept: dict[Hashable, Any] = {}

    def tables(
        self, kinds: Iterable[LayerKind], length: int, like: Tensor, documents: Documents | None = None
    ) -> dict[LayerKind, LayerTables]:
        """Return the tables of each kind of layer, for samples of ``length`` tokens, on the device and in the dtype
        of ``like``. Kinds share what is equal.
        """
        if self._like != (length, like.device, like.dtype):
            self._like, self._kept = (length, like.device, like.dtype), {}
        samples = _Samples(length, like, documents or Documents(), {})
        with torch.inference_mode(False), torch.no_grad():  # an inference tensor could not be saved
            return {
                kind: LayerTables(
                    self._rotary(kind, samples) if kind.rotary else None, self._attention(kind, samples)
                )
                for kind in dict.fromkeys(kinds)
            }

    def _rotary(self, kind: LayerKind, samples: _Samples) -> tuple[Tensor, Tensor]:
        """Positions are 0 .. s-1 unless documents have others. Tables are computed in fp64. A scaling that depends on
        the length depends on s, not on documents. Layers with the same width, base and scaling share them.
        """
        heads = MIXERS[kind.mixer](self.config).heads
        assert heads is not None
        width = heads.rotated
        # Of heads that are no wider than what positions turn.
        choices: dict[str, Any] = {"kv_channels": width}
        choices |= {"rotary_base": kind.rotary_base, "rotary_scaling": kind.rotary_scaling}
        name = ("rope", *choices.values())

        def of_samples() -> tuple[Tensor, Tensor]:
            own = replace(self.config, **choices)
            cos, sin = rotary_tables(own, samples.length)
            cos = channel_cosines(cos, width, own.rotary_interleaved)
            return cos[:, None, None].to(samples.like), sin[:, None, None].to(samples.like)

        cos, sin = _once(self._kept, name, of_samples)
        if samples.documents.position_ids is None:
            if self.cp.size == 1:
                return cos, sin
            return _once(self._kept, (*name, "own"), lambda: (self.cp.own(cos), self.cp.own(sin)))
        ids = samples.documents.position_ids.t()
        return _once(
            samples.packed, name, lambda: (cos[:, 0, 0][ids].unsqueeze(2), sin[:, 0, 0][ids].unsqueeze(2))
        )

    def _attention(self, kind: LayerKind, samples: _Samples) -> AttentionTables:
        """Layers with the same mixer and window share theirs; with documents, those of one micro-batch.

        A mixer without heads of attention is given where documents start, on the device.
        """
        config, (length, like, documents, packed) = self.config, samples
        heads = MIXERS[kind.mixer](config).heads
        if heads is None:
            starts = documents.starts
            return _once(
                packed,
                "starts",
                lambda: AttentionTables(
                    Masking(1.0), "", None if starts is None else starts.to(like.device, non_blocking=True)
                ),
            )
        window = kind.window if kind.window is not None and kind.window < length else None
        chunks = self.cp.queries(length) if self.cp.groups > 1 else None
        wants = wants_of(config, documents.starts is not None, window is not None, chunks is not None)
        backend = _once(
            self._kept,
            ("backend", wants),
            lambda: choose(self.backend, wants, like.dtype, length, like.device),
        )

        def made() -> AttentionTables:
            scale, cap = heads.scale, config.attn_logit_softcapping
            queries = None if chunks is None else tuple(chunks)
            sinks = config.softmax_type != "vanilla"
            masking = Masking(scale, cap, window, documents.starts, queries, sinks)
            return make_tables(masking, backend, length, like)

        return _once(
            self._kept if documents.starts is None else packed, ("attention", kind.mixer, window), made
        )


def _once(made: dict[Hashable, Any], name: Hashable, compute: Callable[[], Any]) -> Any:
    if name not in made:
        made[name] = compute()
    return made[name]
