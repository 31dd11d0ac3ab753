"""Tables of rotary positions, ALiBi biases (Press et al. 2022) and masks, made before the layers that use them.

Layers receive them as arguments, so a layer is a function of its inputs: a recompute sees the same tensors, and
torch.compile traces no cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megazero.config.model.section import ModelConfig
from megazero.families.layer_kinds import LayerKind
from megazero.models.rotary import channel_cosines, rotary_tables
from megazero.tp import TensorParallel


def alibi_slopes(num_heads: int) -> Tensor:
    """Return the slope of each head, fp64 [num_heads]. If that is no power of two, they are as in BLOOM."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(num_heads - power)]
    return torch.tensor(slopes, dtype=torch.float64)


def outside(length: int, window: int | None, starts: Tensor | None, device: torch.device) -> Tensor:
    """Return bool [b or 1, 1, length, length], True for keys that a query must not see.

    They are later ones, those before the window of ``window`` tokens that ends with the query, and those before where
    the query's document begins (``starts``, int64 [b, length]).
    """
    at = torch.arange(length, device=device)
    first = at.new_zeros(1, length) if starts is None else starts
    if window is not None:
        first = torch.maximum(first, at - (window - 1))
    return ((at > at[:, None]) | (at < first.unsqueeze(-1))).unsqueeze(1)


@dataclass(frozen=True)
class Documents:
    """The documents packed in one micro-batch's samples.

    position_ids: int64 [b, s], the position of each token within its document. None means within the sample.
    starts: int64 [b, s], where in the sample each token's document begins, and attention with it. None means
    that attention crosses documents.
    """

    position_ids: Tensor | None = None
    starts: Tensor | None = None


class AttentionMask(NamedTuple):
    """Which keys a query sees, beside that it sees no later ones, and what is added to its scores.

    window: tokens that it looks back through, its own included, if they are fewer than the sample's.
    starts: int64 [b, s], where in the sample each query's document begins, if attention stays within documents.
    bias: ALiBi's, [1, heads of this rank, s, s], with -inf for later keys.
    dense: all of it as one additive mask [b or 1, 1 or heads, s, s]. None if torch's causal mask suffices.
    """

    window: int | None = None
    starts: Tensor | None = None
    bias: Tensor | None = None
    dense: Tensor | None = None


class LayerTables(NamedTuple):
    """What the layers of one kind are given for one micro-batch, on the device and in the dtype of activations.

    rotary: cosines [s, b or 1, 1, kv_channels] and sines [s, b or 1, 1, rotary_channels / 2], as Rotate takes them.
    None without rotary positions.
    """

    rotary: tuple[Tensor, Tensor] | None
    mask: AttentionMask


class Positions:
    """Makes the tables of one decoder. Those that all micro-batches share are kept, for samples of one length, device
    and dtype at a time: masks grow with the length's square, and generation and ramps have many lengths.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        self.config, self.tp = config, tp
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
        packed: dict[Hashable, Any] = {}
        with torch.inference_mode(False), torch.no_grad():  # an inference tensor could not be saved
            return {
                kind: LayerTables(
                    self._rotary(kind, length, like, documents, packed) if kind.rotary else None,
                    self._mask(kind, length, like, documents, packed),
                )
                for kind in dict.fromkeys(kinds)
            }

    def _rotary(
        self,
        kind: LayerKind,
        length: int,
        like: Tensor,
        documents: Documents | None,
        packed: dict[Hashable, Any],
    ) -> tuple[Tensor, Tensor]:
        """Positions are 0 .. s-1 unless ``documents`` says others. Tables are computed in fp64. A scaling that
        depends on the length depends on s, not on documents. Layers with the same base and scaling share them.
        """
        name = ("rope", kind.rotary_base, kind.rotary_scaling)

        def of_samples() -> tuple[Tensor, Tensor]:
            own = replace(self.config, rotary_base=kind.rotary_base, rotary_scaling=kind.rotary_scaling)
            cos, sin = rotary_tables(own, length)
            cos = channel_cosines(cos, own.kv_channels, own.rotary_interleaved)
            return cos[:, None, None].to(like), sin[:, None, None].to(like)

        cos, sin = _once(self._kept, name, of_samples)
        if documents is None or documents.position_ids is None:
            return cos, sin
        ids = documents.position_ids.t()
        return _once(packed, name, lambda: (cos[:, 0, 0][ids].unsqueeze(2), sin[:, 0, 0][ids].unsqueeze(2)))

    def _mask(
        self,
        kind: LayerKind,
        length: int,
        like: Tensor,
        documents: Documents | None,
        packed: dict[Hashable, Any],
    ) -> AttentionMask:
        """With scaled_alibi, slope * key is rounded to bf16 and scaled as scores are. Scores that are capped before
        the mask need a dense one. Layers with the same window share it; with documents, those of one micro-batch.
        """
        alibi = self.config.position_embedding_type == "alibi"
        bias = _once(self._kept, "alibi", lambda: self._alibi(length, like)) if alibi else None
        window = kind.window if kind.window is not None and kind.window < length else None
        starts = None if documents is None else documents.starts
        if starts is None and window is None and (bias is not None or not self.config.attn_logit_softcapping):
            return AttentionMask(bias=bias, dense=bias)

        def dense() -> Tensor:
            around = like.new_zeros(()) if bias is None else bias
            hidden = outside(length, window, starts, like.device)
            return torch.where(hidden, -torch.inf, around).to(like.dtype)

        made = self._kept if starts is None else packed
        return AttentionMask(window, starts, bias, _once(made, ("mask", window), dense))

    def _alibi(self, length: int, like: Tensor) -> Tensor:
        """Return slope * (key - query), [1, heads of this rank, length, length], with -inf for later keys."""
        heads = self.tp.share(self.config.num_attention_heads, "num_attention_heads")
        slopes = alibi_slopes(self.config.num_attention_heads)[
            self.tp.rank * heads : (self.tp.rank + 1) * heads
        ]
        at = torch.arange(length, device=like.device)
        wide = torch.promote_types(like.dtype, torch.float32)
        if self.config.scaled_alibi:
            # Falcon's slopes and products are bf16; the difference to the query's own changes no softmax.
            rounded = (slopes.to(at.device, torch.bfloat16)[:, None] * at).to(wide)
            rounded *= self.config.attention_scale
            biases = rounded[:, None, :] - rounded[:, :, None]
        else:
            distance = (at[None, :] - at[:, None]).to(wide)
            biases = slopes.to(distance)[:, None, None] * distance
        later = at[None, :] > at[:, None]
        return biases.masked_fill_(later, -torch.inf)[None].to(like.dtype)


def _once(made: dict[Hashable, Any], name: Hashable, compute: Callable[[], Any]) -> Any:
    if name not in made:
        made[name] = compute()
    return made[name]
