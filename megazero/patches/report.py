"""The words of a patch's start line: the format of every hop, and why it is exact."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megazero.comm.codec import Blockwise, Codec
from megazero.comm.wire import Codecs
from megazero.mesh.levels import INTER, INTRA
from megazero.models.dtypes import PRECISIONS
from megazero.patches.two_hops import TwoHops


def gradient_words(dtypes: Iterable[torch.dtype], hops: TwoHops, codecs: Codecs[Codec]) -> str:
    """Describe the hops of gradients, which have these dtypes where they are exact."""
    raw = " and ".join(map(short, dtypes))
    told = []
    if hops.intra.size > 1:
        told.append(f"{_gradient_format(codecs.gradients.get(INTRA), raw)} inside a node")
    if hops.inter.size > 1:
        told.append(
            f"{_gradient_format(codecs.gradients.get(INTER), 'fp32' if told else raw)} across nodes, sums in fp32"
        )
    elif INTER in codecs.gradients:
        what = (
            "nothing across nodes" if INTRA in codecs.gradients else "not quantised as no hop crosses nodes"
        )
        told.append(what)
    return ", ".join(told)


def _gradient_format(codec: Codec | None, raw: str) -> str:
    """Describe a format of gradients, with what is done before they are encoded."""
    words = format_words(codec, raw)
    if not isinstance(codec, Blockwise):
        return words
    mixed = f"Hadamard transform of {codec.hadamard}" if codec.hadamard else "no transform"
    return f"{words.removesuffix(')')}, {mixed})"


def weight_words(dtype: torch.dtype, codecs: Codecs[Codec]) -> str:
    """Describe how weights of this dtype are sent quantised."""
    return f"{'differences of ' if codecs.delta else ''}{short(dtype)} as {format_words(codecs.weights, '')}"


def format_words(codec: Codec | None, raw: str) -> str:
    return (
        f"int{codec.bits} (blocks of {codec.form.block})" if isinstance(codec, Blockwise) else f"exact {raw}"
    )


def short(dtype: torch.dtype) -> str:
    return "fp8" if dtype == torch.uint8 else PRECISIONS.get(dtype, str(dtype).removeprefix("torch."))
