"""Wire formats of the hops.

A codec turns slices of n elements into messages and back. A message is a 1-D tensor of ``wire_dtype`` with
``message_numel(n)`` elements. It holds everything of the slice that crosses the link. If asked for, it also holds the
exact region behind that: elements that are sent as they are (small sensitive parameters). Messages of nested slices
concatenate in layout order, so a gather over any axes needs no knowledge of the format: only the two ends encode and
decode. A reduction is an all-to-all, then a decode, then a sum in at least fp32 by source index.

Shapes: k is the number of slices (rows), n the elements of each, e the exact elements of each, and m is
message_numel(n, e).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor

from megazero.comm.made_once import made_once
from megazero.comm.topk import TopK
from megazero.comm.wire import ALIGN, Codecs, Coding, MessageFormat, Sparse, filled
from megazero.kernels.add_to import add_to
from megazero.kernels.arena import SCRATCH, Take, view_of
from megazero.kernels.dequantize import dequantize
from megazero.kernels.dequantize_accumulate import dequantize_accumulate
from megazero.kernels.dequantize_sum_quantize import dequantize_sum_quantize
from megazero.kernels.format import Format
from megazero.kernels.hadamard import Hadamard, mixed
from megazero.kernels.quantize import error_bound, quantize
from megazero.kernels.sum_rows import sum_rows

__all__ = ["Blockwise", "Codec", "Hadamard", "Identity", "decoded", "encoded"]


class Codec(MessageFormat, Protocol):
    """The interface of every wire format."""

    @property
    def wire_dtype(self) -> torch.dtype: ...

    def message_numel(self, n: int, exact: int = 0) -> int:
        """Return how many elements of wire_dtype a slice of n elements and ``exact`` exact elements takes."""
        ...

    def encode(self, x: Tensor, exact: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """Encode x [k, n] and exact [k, e], of any float dtype, into messages [k, m] of wire_dtype.

        The messages are written to ``out`` if it is given; else they are a new tensor, or x itself.
        """
        ...

    def decode(self, messages: Tensor, out: Tensor, exact: Tensor | None = None) -> None:
        """Decode messages [k, m] of wire_dtype into out [k, n] and exact [k, e], of any float dtype."""
        ...

    def decode_sum(
        self,
        messages: Tensor,
        out: Tensor,
        accumulate: bool,
        exact: Tensor | None = None,
        *,
        own: Sequence[Tensor] = (),
    ) -> None:
        """Add up the decoded messages [k, m] in the order messages[0], messages[1], ...

        The sum goes to out [n] (at least fp32) and exact [e]. With ``accumulate`` it starts from what they
        hold. own: [n] and [e] of any float dtype, which are added before the messages.
        """
        ...


@dataclass(frozen=True)
class Identity:
    """Sends elements as they are, in ``wire_dtype``: exact if the source has no more precision than that."""

    wire_dtype: torch.dtype

    def message_numel(self, n: int, exact: int = 0) -> int:
        return n + exact

    def message_bytes(self, n: int, exact: int = 0) -> int:
        return n * self.wire_dtype.itemsize + exact

    def encode(self, x: Tensor, exact: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """Encode as the protocol says.

        Returns x itself if neither exact nor out is given and x already has the wire's dtype. ``out`` may be x.
        Without exact, x [k, ...] may have more dimensions and lie in pieces.
        """
        if exact is None and out is None:
            return x.to(self.wire_dtype)
        if exact is None and out is not None and x.dim() > 2:
            out.view(x.shape).copy_(x)
            return out
        regions = [x] if exact is None else [x, exact]
        numels = tuple(region.shape[1] for region in regions)
        if out is None:
            out = torch.empty(len(x), sum(numels), dtype=self.wire_dtype, device=x.device)
        for part, region in zip(view_of(out, Tensor.split, numels, 1), regions, strict=True):
            if part.data_ptr() != region.data_ptr():
                part.copy_(region)
        return out

    def decode(self, messages: Tensor, out: Tensor, exact: Tensor | None = None) -> None:
        regions = [out] if exact is None else [out, exact]
        parts = view_of(messages, Tensor.split, tuple(region.shape[1] for region in regions), 1)
        for part, region in zip(parts, regions, strict=True):
            if part.data_ptr() != region.data_ptr():
                region.copy_(part)

    def decode_sum(
        self,
        messages: Tensor,
        out: Tensor,
        accumulate: bool,
        exact: Tensor | None = None,
        *,
        own: Sequence[Tensor] = (),
    ) -> None:
        """Add up as ``Codec.decode_sum`` says; messages have out's elements, then exact's."""
        regions = (out,) if exact is None else (out, exact)
        parts = view_of(messages, Tensor.split, tuple(x.numel() for x in regions), 1)
        for part, total, first in zip_longest(parts, regions, own):
            sum_rows(part, total, accumulate, first)


@dataclass(frozen=True)
class Blockwise(Coding):
    """Sends INT8, INT4 or 2 bits, symmetric, with one bf16 scale per block (kernels/format.py), as uint8 messages.

    Slices must be whole blocks. If it transforms (kernels/hadamard.py), blocks that are partly padding decode to
    values there, too, which the caller clears.

    exact_dtype: the dtype of the exact region. seed: that of the transform's signs.

    Bytes: the codes and scales take n * bits / 8 + 2 n / block bytes. They and the exact region are each
    filled up to a multiple of 16. With the default blocks one element takes 1.016 bytes at 8 bits, 0.531 at
    4, 0.281 at 2. A block with NaN or Inf decodes to NaN. fp64 values are rounded to fp32 first.
    """

    exact_dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.form

    @cached_property
    def transform(self) -> Hadamard | None:
        return Hadamard(self.hadamard, self.seed) if self.hadamard else None

    @cached_property
    def form(self) -> Format:
        return Format(self.bits, self.block, self.transform)

    @property
    def wire_dtype(self) -> torch.dtype:
        return torch.uint8

    @made_once
    def message_numel(self, n: int, exact: int = 0) -> int:
        return self.message_bytes(n, exact * self.exact_dtype.itemsize)

    def error_bound(self, x: Tensor) -> Tensor:
        """Return fp32 [k, n / block]: the most by which elements of x [k, n] and their decoded fp32 values differ."""
        return error_bound(x, self.form)

    def mixed(self, x: Tensor) -> Tensor:
        """Return x [k, n], fp32 or fp64, as it is rounded: transformed where the codec transforms, else x itself.

        There an error is within ``error_bound`` / T, for a transform of T elements.
        """
        return x if self.transform is None else mixed(x, self.transform)

    def encode(self, x: Tensor, exact: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """Encode as the protocol says. ``out`` must be uint8 and contiguous."""
        return self._encode(x, exact, out, None)

    def encode_difference(
        self, x: Tensor, base: Tensor, exact: Tensor | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Encode what x [k, n], rounded to base's dtype, differs by from base [k, n]; exact [k, e] as it is.

        The difference is taken in x's dtype, in fp32 at least.
        """
        return self._encode(x, exact, out, base.contiguous())

    def _encode(self, x: Tensor, exact: Tensor | None, out: Tensor | None, base: Tensor | None) -> Tensor:
        e = 0 if exact is None else exact.shape[1]
        out = self._message(x.shape[0], x.shape[1], e, x.device, out)
        quantize(x.contiguous(), out, self.form, base)
        if exact is not None:
            self.exact(out, x.shape[1], e).copy_(exact)
        return out

    def decode(self, messages: Tensor, out: Tensor, exact: Tensor | None = None) -> None:
        self._decode(messages, out, exact, add=False)

    def decode_add(self, messages: Tensor, out: Tensor, exact: Tensor | None = None) -> None:
        """Add the differences that messages [k, m] hold to out [k, n], which has any float dtype.

        The sum is taken in fp32 (in fp64 for an fp64 out) and rounded once to out's dtype. exact [k, e] is
        replaced, not added to. out may be columns of a wider tensor.
        """
        self._decode(messages, out, exact, add=True)

    def _decode(self, messages: Tensor, out: Tensor, exact: Tensor | None, add: bool) -> None:
        self._check(messages, out.shape[1], exact)
        dequantize(messages, out, self.form, add)
        if exact is not None:
            exact.copy_(self.exact(messages, out.shape[1], exact.shape[1]))

    def decode_sum(
        self,
        messages: Tensor,
        out: Tensor,
        accumulate: bool,
        exact: Tensor | None = None,
        *,
        own: Sequence[Tensor] = (),
    ) -> None:
        """Add up as ``Codec.decode_sum`` says; exact regions are not coded."""
        self._check(messages, out.numel(), exact)
        for total, first in zip((out,) if exact is None else (out, exact), own, strict=False):
            add_to(total, first) if accumulate else total.copy_(first)
        accumulate = accumulate or bool(own)
        dequantize_accumulate(messages, out, self.form, accumulate)
        if exact is not None:
            sum_rows(self.exact(messages, out.numel(), exact.numel()), exact, accumulate)

    def decode_sum_encode(
        self,
        messages: Tensor,
        n: int,
        next_codec: Blockwise,
        rows: int = 1,
        *,
        exact: int = 0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Between two hops, sum messages by source and encode the sum for the next hop.

        messages [k, m] (uint8) hold n coded and ``exact`` exact elements. The sum is encoded with next_codec
        as ``rows`` slices of n / rows elements (and exact / rows). Returns uint8 [rows, next m], ``out`` if it is
        given. Raises ValueError if n or exact does not cut into equal rows.
        Where both codecs have one transform, the sum is encoded as it comes, without a transform.
        """
        if n % rows or exact % rows:
            raise ValueError(f"{n} coded and {exact} exact elements do not cut into {rows} equal slices")
        out = next_codec._message(rows, n // rows, exact // rows, messages.device, out)
        dequantize_sum_quantize(messages, n, self.form, out, next_codec.form)
        if exact:
            with SCRATCH.frame(messages.device) as frame:
                sums = frame.take(exact, at_least_fp32(self.exact_dtype))
                sum_rows(self.exact(messages, n, exact), sums, accumulate=False)
                next_codec.exact(out, n // rows, exact // rows).copy_(sums.view(rows, -1))
        return out

    def exact(self, messages: Tensor, n: int, e: int) -> Tensor:
        """Return the exact region of messages [k, m] as a view [k, e] of exact_dtype."""
        if not e:  # an empty message's strides do not allow a view
            return messages.new_empty(len(messages), 0, dtype=self.exact_dtype)
        start = self._exact_start(n)
        stop = start + e * self.exact_dtype.itemsize
        region: Tensor = view_of(messages, _columns, start, stop, self.exact_dtype)
        return region

    @made_once
    def _exact_start(self, n: int) -> int:
        return filled(self.form.coded_bytes(n), ALIGN)

    def _check(self, messages: Tensor, n: int, exact: Tensor | None) -> None:
        need = self.message_numel(n, 0 if exact is None else exact.shape[-1])
        assert messages.shape[1] == need, (messages.shape, n, need)

    def _message(self, k: int, n: int, e: int, device: torch.device, out: Tensor | None) -> Tensor:
        """Return ``out`` or a new buffer [k, m], its filling bytes zero, so that equal slices give equal messages."""
        m = self.message_numel(n, e)
        if out is None:
            out = torch.empty(k, m, dtype=torch.uint8, device=device)
        assert out.shape == (k, m) and out.dtype == torch.uint8 and out.is_contiguous(), (out.shape, k, m)
        start = self._exact_start(n)
        for low, high in ((self.form.coded_bytes(n), start), (start + e * self.exact_dtype.itemsize, m)):
            if low < high:  # often there are none
                out[:, low:high].zero_()
        return out


def _columns(messages: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    return messages[:, start:stop].view(dtype)


def codec_of(
    coding: Coding | Sparse | Codec | None, exact: torch.dtype = torch.float32, seed: int = 0
) -> Codec | None:
    """Return the codec of a format. exact: the dtype of its exact region. seed: that of its transform's signs.

    A codec stays what it is, but for the dtype of its exact region.
    """
    if isinstance(coding, Blockwise):
        return replace(coding, exact_dtype=exact)
    if isinstance(coding, Sparse):
        return TopK(exact)
    if isinstance(coding, Coding):
        return Blockwise(coding.bits, coding.block, coding.hadamard, exact, seed)
    return coding


def codecs_of(
    codecs: Codecs[Any],
    weights: torch.dtype = torch.float32,
    gradients: torch.dtype = torch.float32,
    seed: int = 0,
) -> Codecs[Codec]:
    """Return the codecs of formats. weights, gradients: the dtypes of their exact regions."""
    return replace(
        codecs,
        weights=codec_of(codecs.weights, weights, seed),
        gradients={link: codec_of(coding, gradients, seed) for link, coding in codecs.gradients.items()},
    )


def encoded(codec: Codec, regions: Sequence[Tensor], take: Take) -> Tensor:
    """Encode rows [k, n], one tensor per region, into messages [k, m] in a buffer that ``take`` gives.

    Rows [k, ...] of one region that are sent as they are and lie in one piece are their own messages: nothing is
    copied.
    """
    as_they_are = isinstance(codec, Identity) and len(regions) == 1 and regions[0].dtype == codec.wire_dtype
    if as_they_are and regions[0].is_contiguous():
        return regions[0].flatten(1)
    rows, m = len(regions[0]), codec.message_numel(*row_numels(regions))
    return codec.encode(*regions, out=view_of(take(rows * m, codec.wire_dtype), Tensor.view, rows, -1))


def row_numels(regions: Sequence[Tensor]) -> list[int]:
    """Return the elements of a row of each region [k, ...]."""
    return [region.numel() // len(region) for region in regions]


def decoded(
    codec: Codec, messages: Tensor, like: Sequence[Tensor], take: Take, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Decode messages [k, m] into buffers that ``take`` gives, one [k, n] per region.

    They have the shapes of ``like``, and its dtype unless ``dtype`` is given.
    """
    out = [take(x.numel(), dtype or x.dtype).view(x.shape) for x in like]
    codec.decode(messages, *out)
    return out


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums of values of a float dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32
