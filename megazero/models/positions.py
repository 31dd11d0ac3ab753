"""Tables of rotary positions and ALiBi biases (Press et al. 2022), computed on first use."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megazero.config.model.section import ModelConfig
from megazero.families.layer_kinds import LayerKind
from megazero.models.rotary import Rotate, rotary_tables
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


class Documents:
    """The documents packed in one micro-batch's samples. Layers share what they compute from them.

    position_ids: int64 [b, s], the position of each token within its document. None means within the sample.
    starts: int64 [b, s], where in the sample each token's document begins, and attention with it. None means
    that attention crosses documents.
    """

    def __init__(self, position_ids: Tensor | None = None, starts: Tensor | None = None) -> None:
        self.position_ids, self.starts = position_ids, starts
        self._made: dict[Hashable, Any] = {}

    def shared(self, kind: Hashable, x: Tensor, compute: Callable[[], Any]) -> Any:
        """Return ``compute``'s result, computed for the first layer that asks, for the device and dtype of ``x``."""
        key = (kind, x.device, x.dtype)
        if key not in self._made:
            with torch.no_grad():
                self._made[key] = compute()
        return self._made[key]


class Positions:
    """Position tables and masks of one decoder, for samples of one length at a time. Layers share them.

    They are a cache, neither parameters nor state.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        self.config, self.tp = config, tp
        self._length = 0
        self._cache: dict[Hashable, Any] = {}

    def _cached(self, kind: Hashable, x: Tensor, compute: Callable[[int], Any]) -> Any:
        if (
            self._length != x.shape[0]
        ):  # masks grow with its square, and generation and ramps have many lengths
            self._length, self._cache = x.shape[0], {}
        key = (kind, x.device, x.dtype)
        if key not in self._cache:
            with torch.inference_mode(False), torch.no_grad():  # an inference tensor could not be saved
                self._cache[key] = compute(x.shape[0])
        return self._cache[key]

    def rotate(self, x: Tensor, kind: LayerKind, documents: Documents | None = None) -> Tensor:
        """Apply rotary positions to x [s, b, heads, d]. They are 0 .. s-1 unless ``documents`` says others. The
        tables are computed in fp64. A scaling that depends on the length depends on s, not on documents. Layers with
        the same base and scaling share them.
        """
        name = ("rope", kind.rotary_base, kind.rotary_scaling)

        def tables(length: int) -> list[Tensor]:
            own = replace(self.config, rotary_base=kind.rotary_base, rotary_scaling=kind.rotary_scaling)
            return [table[:, None, None].to(x) for table in rotary_tables(own, length)]

        own = self._cached(name, x, tables)
        if documents is not None and documents.position_ids is not None:
            every, ids = own, documents.position_ids.t()
            own = documents.shared(name, x, lambda: [table[:, 0, 0][ids].unsqueeze(2) for table in every])
        return Rotate.apply(x, *own, self.config.rotary_interleaved)

    def mask(self, x: Tensor, kind: LayerKind, documents: Documents | None = None) -> Tensor | None:
        """Return the additive attention mask for x [s, b, heads, d], or None if the causal mask of torch suffices.

        The mask of ALiBi is [1, heads of this rank, s, s]: slope * (key - query), and -inf above the diagonal. With
        scaled_alibi, slope * key is rounded to bf16 and scaled as scores are. With a window that is shorter than s,
        or scores that are capped before the mask, it is [1, 1 or heads, s, s]; where attention stays within
        documents, [b, 1 or heads, s, s]. It is -inf outside of window and documents. Layers with the same window
        share it; with documents, those of one micro-batch.
        """
        length = x.shape[0]
        bias = self._alibi(x) if self.config.position_embedding_type == "alibi" else None
        window = kind.window if kind.window is not None and kind.window < length else None
        starts = None if documents is None else documents.starts
        if starts is None and window is None and (bias is not None or not self.config.attn_logit_softcapping):
            return bias

        def within(length: int = length) -> Tensor:
            around = x.new_zeros(()) if bias is None else bias
            hidden = outside(length, window, starts, x.device)
            return torch.where(hidden, -torch.inf, around).to(x.dtype)

        if starts is None or documents is None:
            return self._cached(("mask", window), x, within)
        return documents.shared(("mask", window), x, within)

    def _alibi(self, x: Tensor) -> Tensor:
        def bias(length: int) -> Tensor:
            """Return the additive bias of scores, [1, heads of this rank, length, length], with -inf for later
            keys."""
            heads = self.tp.share(self.config.num_attention_heads, "num_attention_heads")
            slopes = alibi_slopes(self.config.num_attention_heads)[
                self.tp.rank * heads : (self.tp.rank + 1) * heads
            ]
            at = torch.arange(length, device=x.device)
            wide = torch.promote_types(x.dtype, torch.float32)
            if self.config.scaled_alibi:
                # Falcon's slopes and products are bf16; the difference to the query's own changes no softmax.
                rounded = (slopes.to(at.device, torch.bfloat16)[:, None] * at).to(wide)
                rounded *= self.config.attention_scale
                biases = rounded[:, None, :] - rounded[:, :, None]
            else:
                distance = (at[None, :] - at[:, None]).to(wide)
                biases = slopes.to(distance)[:, None, None] * distance
            later = at[None, :] > at[:, None]
            return biases.masked_fill_(later, -torch.inf)[None].to(x.dtype)

        return self._cached("alibi", x, bias)
