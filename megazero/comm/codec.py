"""Wire formats of the hops.

A codec turns slices of n elements into messages and back. A message is a 1-D tensor of ``wire_dtype`` with
``message_numel(n)`` elements: everything of the slice that crosses the link, and after it, if asked for, the
exact region: elements that are sent as they are (small sensitive parameters). Messages of nested slices
concatenate in layout order, so a gather over any axes needs no knowledge of the format; only the two ends encode
and decode. Reduction is all-to-all, decode, sum in at least fp32 by source index.

Shapes: k slices (rows), n elements each, e exact elements each, m = message_numel(n, e).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from megazero.kernels.bound import error_bound
from megazero.kernels.dequantize import dequantize
from megazero.kernels.dequantize_accumulate import dequantize_accumulate
from megazero.kernels.dequantize_sum_quantize import dequantize_sum_quantize
from megazero.kernels.format import DEFAULT_BLOCK, Format
from megazero.kernels.noise import Noise
from megazero.kernels.quantize import quantize

__all__ = ["Blockwise", "Codec", "Identity", "Noise", "decoded"]

ALIGN = 16  # bytes: messages and exact regions start at multiples of it


class Codec(Protocol):
    """One small interface for every wire format."""

    @property
    def wire_dtype(self) -> torch.dtype: ...

    def message_numel(self, n: int, exact: int = 0) -> int:
        """Elements of wire_dtype for a slice of n elements and as many exact ones as said."""
        ...

    def encode(
        self,
        x: torch.Tensor,
        exact: torch.Tensor | None = None,
        *,
        noise: Noise | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [k, n] and exact [k, e] -> messages [k, m], in ``out`` if given, else new or x itself.

        noise: where a stochastic codec draws; its start is the global index of x[0, 0], rows follow.
        """
        ...

    def decode(self, messages: torch.Tensor, out: torch.Tensor, exact: torch.Tensor | None = None) -> None:
        """messages [k, m] -> out [k, n] and exact [k, e], any float dtype."""
        ...

    def decode_sum(
        self,
        messages: torch.Tensor,
        out: torch.Tensor,
        accumulate: bool,
        exact: torch.Tensor | None = None,
    ) -> None:
        """out [n] (at least fp32) = (out if accumulate) + messages[0] + messages[1] + ... in this order;
        exact [e] likewise."""
        ...


@dataclass(frozen=True)
class Identity:
    """Elements as they are, in ``wire_dtype``: exact if the source has no more precision than the wire."""

    wire_dtype: torch.dtype

    def message_numel(self, n: int, exact: int = 0) -> int:
        return n + exact

    def encode(
        self,
        x: torch.Tensor,
        exact: torch.Tensor | None = None,
        *,
        noise: Noise | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Nothing is rounded at random, so noise has no effect. Without exact and out, and x in the wire's
        dtype, x itself."""
        if exact is None and out is None:
            return x.to(self.wire_dtype)
        n = x.shape[1]
        if out is None:
            m = n + (0 if exact is None else exact.shape[1])
            out = torch.empty(len(x), m, dtype=self.wire_dtype, device=x.device)
        out[:, :n].copy_(x)
        if exact is not None:
            out[:, n:].copy_(exact)
        return out

    def decode(self, messages: torch.Tensor, out: torch.Tensor, exact: torch.Tensor | None = None) -> None:
        if messages.data_ptr() != out.data_ptr():
            out.copy_(messages[:, : out.shape[1]] if exact is not None else messages)
        if exact is not None:
            exact.copy_(messages[:, out.shape[1] :])

    def decode_sum(
        self,
        messages: torch.Tensor,
        out: torch.Tensor,
        accumulate: bool,
        exact: torch.Tensor | None = None,
    ) -> None:
        if exact is None:
            _sum_rows(messages, out, accumulate)
        else:
            _sum_rows(messages[:, : out.numel()], out, accumulate)
            _sum_rows(messages[:, out.numel() :], exact, accumulate)


@dataclass(frozen=True)
class Blockwise:
    """INT8, INT4 or 2 bits, symmetric, one bf16 scale per block (kernels/format.py); uint8 messages.

    block: elements that share a scale; None is the default for the bits. Slices are whole blocks.
    stochastic: round at random, without bias; encode then needs ``noise``.
    clip: scales tried per block (0: absmax decides); biased where it clips, so not with stochastic rounding.
    exact_dtype: of the exact region.

    Bytes: n * bits / 8 + 2 n / block, the exact region, each filled up to a multiple of 16. With the default
    blocks 1.016 per element at 8 bits, 0.531 at 4, 0.281 at 2. A block with NaN or Inf decodes to NaN.
    fp64 values are rounded to fp32 first.
    """

    bits: int
    block: int | None = None
    stochastic: bool = False
    clip: int = 0
    exact_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.stochastic and self.clip:
            raise ValueError(
                f"clip {self.clip} with stochastic rounding: clipping brings back the bias that stochastic "
                "rounding removes; give clip 0 or round to nearest"
            )
        _ = self.form

    @cached_property
    def form(self) -> Format:
        block = DEFAULT_BLOCK.get(self.bits, 64) if self.block is None else self.block
        return Format(self.bits, block, self.clip)

    @property
    def wire_dtype(self) -> torch.dtype:
        return torch.uint8

    def message_numel(self, n: int, exact: int = 0) -> int:
        return self._exact_start(n) + _aligned(exact * self.exact_dtype.itemsize)

    def error_bound(self, x: torch.Tensor) -> torch.Tensor:
        """fp32 [k, n / block]: most by which an element of x [k, n] and its decoded fp32 value differ."""
        return error_bound(x, self.form, self.stochastic)

    def encode(
        self,
        x: torch.Tensor,
        exact: torch.Tensor | None = None,
        *,
        noise: Noise | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As the protocol says; ``out`` uint8, contiguous. A stochastic codec needs ``noise`` (ValueError)."""
        e = 0 if exact is None else exact.shape[1]
        out = self._message(len(x), x.shape[1], e, x.device, out)
        quantize(x.contiguous(), out, self.form, self._drawn(noise))
        if exact is not None:
            self.exact(out, x.shape[1], e).copy_(exact)
        return out

    def decode(self, messages: torch.Tensor, out: torch.Tensor, exact: torch.Tensor | None = None) -> None:
        self._decode(messages, out, exact, add=False)

    def decode_add(
        self, messages: torch.Tensor, out: torch.Tensor, exact: torch.Tensor | None = None
    ) -> None:
        """For messages of differences: out [k, n], any float dtype, += their values, in fp32 (fp64 out: in fp64)
        and rounded once to out's dtype; exact [k, e] is replaced. out may be columns of a wider tensor."""
        self._decode(messages, out, exact, add=True)

    def _decode(
        self, messages: torch.Tensor, out: torch.Tensor, exact: torch.Tensor | None, add: bool
    ) -> None:
        self._check(messages, out.shape[1], exact)
        dequantize(messages, out, self.form, add)
        if exact is not None:
            exact.copy_(self.exact(messages, out.shape[1], exact.shape[1]))

    def decode_sum(
        self,
        messages: torch.Tensor,
        out: torch.Tensor,
        accumulate: bool,
        exact: torch.Tensor | None = None,
    ) -> None:
        self._check(messages, out.numel(), exact)
        dequantize_accumulate(messages, out, self.form, accumulate)
        if exact is not None:
            _sum_rows(self.exact(messages, out.numel(), exact.numel()), exact, accumulate)

    def decode_sum_encode(
        self,
        messages: torch.Tensor,
        n: int,
        next_codec: Blockwise,
        rows: int = 1,
        *,
        exact: int = 0,
        noise: Noise | None = None,
    ) -> torch.Tensor:
        """The middle of two hops: messages [k, m] of n elements and ``exact`` exact ones, summed by source and
        encoded with next_codec as ``rows`` slices of n / rows (and exact / rows). noise: next_codec's, its
        start the global index of the sum's first element."""
        if n % rows or exact % rows:
            raise ValueError(f"{n} coded and {exact} exact elements do not cut into {rows} equal slices")
        out = next_codec._message(rows, n // rows, exact // rows, messages.device, None)
        dequantize_sum_quantize(messages, n, self.form, out, next_codec.form, next_codec._drawn(noise))
        if exact:
            sums = torch.empty(exact, dtype=_sum_dtype(self.exact_dtype), device=messages.device)
            _sum_rows(self.exact(messages, n, exact), sums, accumulate=False)
            next_codec.exact(out, n // rows, exact // rows).copy_(sums.view(rows, -1))
        return out

    def exact(self, messages: torch.Tensor, n: int, e: int) -> torch.Tensor:
        """View [k, e], exact_dtype, of the exact region of messages [k, m]."""
        if not e:  # an empty message's strides do not allow a view
            return messages.new_empty(len(messages), 0, dtype=self.exact_dtype)
        start = self._exact_start(n)
        return messages[:, start : start + e * self.exact_dtype.itemsize].view(self.exact_dtype)

    def _exact_start(self, n: int) -> int:
        return _aligned(self.form.coded_bytes(n))

    def _drawn(self, noise: Noise | None) -> Noise | None:
        if not self.stochastic:
            return None
        if noise is None:
            raise ValueError("a stochastic codec needs noise=Noise(seed, step, stream, start) to round with")
        return noise

    def _check(self, messages: torch.Tensor, n: int, exact: torch.Tensor | None) -> None:
        need = self.message_numel(n, 0 if exact is None else exact.shape[-1])
        assert messages.shape[1] == need, (messages.shape, n, need)

    def _message(
        self, k: int, n: int, e: int, device: torch.device, out: torch.Tensor | None
    ) -> torch.Tensor:
        """out or a new buffer [k, m], filling bytes zero: equal slices give equal messages."""
        m = self.message_numel(n, e)
        if out is None:
            out = torch.empty(k, m, dtype=torch.uint8, device=device)
        assert out.shape == (k, m) and out.dtype == torch.uint8 and out.is_contiguous(), (out.shape, k, m)
        start = self._exact_start(n)
        out[:, self.form.coded_bytes(n) : start].zero_()
        out[:, start + e * self.exact_dtype.itemsize :].zero_()
        return out


def decoded(
    codec: Codec, messages: torch.Tensor, like: Sequence[torch.Tensor], dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """What messages [k, m] say, in new tensors of the shapes (and the dtype, unless one is given) of ``like``: [k, n]
    per region."""
    out = [torch.empty_like(x, dtype=dtype) for x in like]
    codec.decode(messages, *out)
    return out


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _sum_rows(messages: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
    """out [n] = (out if accumulate) + messages[0] + messages[1] + ... [k, n], in this order."""
    # Chain of adds: on a CPU as fast as torch.sum(dim=0) in fp32 and 1.6x faster in bf16
    # (5.0 ms against 8.0 ms for 4 x 1M), and the order of the sum is the source order by construction.
    sources = messages.unbind(0)
    if accumulate:
        out.add_(sources[0])
    elif len(sources) > 1 and messages.dtype == out.dtype:
        torch.add(sources[0], sources[1], out=out)
        sources = sources[1:]
    else:
        out.copy_(sources[0])
    for source in sources[1:]:
        out.add_(source)
