"""The words of a patch's start line: what is sent how on which hop, and why not otherwise."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megazero.comm.codec import Blockwise, Codec
from megazero.patches.two_hops import TwoHops
from megazero.zero.policy import Codecs


def gradient_words(dtypes: Iterable[torch.dtype], hops: TwoHops, codecs: Codecs) -> str:
    """Say how gradients, raw in these dtypes, take their hops."""
    raw = " and ".join(map(short, dtypes))
    told = []
    if hops.intra.size > 1:
        told.append(f"{format_words(codecs.gradients_intra, raw)} inside a node")
    if hops.inter.size > 1:
        told.append(
            f"{format_words(codecs.gradients_inter, 'fp32' if told else raw)} across nodes, sums in fp32"
        )
    elif codecs.gradients_inter:
        what = "nothing across nodes" if codecs.gradients_intra else "not quantised as no hop crosses nodes"
        told.append(what)
    return ", ".join(told)


def _weights(dtypes: Iterable[torch.dtype], hops: TwoHops, codecs: Codecs) -> str:
    if codecs.weights is None:
        return f"exact ({', '.join(map(short, dtypes))})"
    if hops.inter.size == 1:
        return "exact as no hop crosses nodes"
    told = []
    for dtype in dtypes:
        if dtype in (torch.bfloat16, torch.float16):
            what = "differences of " if codecs.delta else ""
            told.append(f"{what}{short(dtype)} as {format_words(codecs.weights, '')} on every hop")
        elif dtype == torch.uint8:
            told.append("fp8 as they are")
        else:
            told.append(f"{short(dtype)} exact as the optimizer's master weights are in that buffer")
    return ", ".join(told)


def format_words(codec: Codec | None, raw: str) -> str:
    return (
        f"int{codec.bits} (blocks of {codec.form.block})" if isinstance(codec, Blockwise) else f"exact {raw}"
    )


def short(dtype: torch.dtype) -> str:
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.uint8: "fp8"}
    return names.get(dtype, str(dtype).removeprefix("torch."))
