"""What keys and values in few bits cost that cross nodes: errors of attention's output, and the trained model's loss.

Nodes are parts of one process: each has two chunks of a sequence, as groups of context-parallel ranks do, attends to
its own keys and values as they are, and to those of the others as they are decoded. Gradients are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.loss.rounding.formats import EXACT
from benchmarks.loss.rounding.text import Samples
from megazero.comm.codec import Blockwise, Codec, Identity
from megazero.mesh.grid import own_spans
from megazero.models import Decoder
from megazero.models.attention import attend
from megazero.models.mixers import softmax

RUN = "INT8 128 + H128"  # what --cp-gather-bits 8 sends
CODECS: dict[str, Codec] = {
    RUN: Blockwise(8, 128, 128),
    "INT8 128": Blockwise(8, 128),
    "bf16": Identity(torch.bfloat16),
    "INT4 64 + H64": Blockwise(4, 64, 64),
    "INT4 64": Blockwise(4, 64),
}


@dataclass(frozen=True)
class Sizes:
    """nodes: that share a sequence. length, held: sequences that are evaluated on; the first ``layers`` of them for
    the errors by layer."""

    nodes: int = 2
    length: int = 1024
    held: int = 10
    layers: int = 2


def decoded(x: Tensor, codec: Codec) -> Tensor:
    """Return what keys or values [s, b, heads, d] decode to, filled up to whole blocks on their way."""
    rows = x.reshape(1, -1)
    rows = F.pad(rows, (0, -rows.shape[1] % getattr(codec, "block", 1)))
    out = torch.empty_like(rows)
    codec.decode(codec.encode(rows), out)
    return out[:, : x.numel()].view(x.shape)


def attended(q: Tensor, k: Tensor, v: Tensor, rest: tuple[Any, ...], codec: Codec, nodes: int) -> Tensor:
    """Return attention over nodes that exchange keys and values in a format."""
    rounded = [decoded(x, codec) for x in (k, v)]
    parts = []
    for node in range(nodes):
        own = torch.zeros(len(k), 1, 1, 1, dtype=torch.bool, device=k.device)
        for span in own_spans(len(k), node, 1, nodes):
            own[span.start : span.stop] = True
        out = attend(q, *(torch.where(own, x, sent) for x, sent in zip((k, v), rounded, strict=True)), *rest)
        parts.append(torch.where(own, out, 0))
    return torch.stack(parts).sum(0)


@torch.no_grad()
def rows(model: Decoder, samples: Samples, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Yield by layer and format, for the exact model's own activations, how far keys, values and attention's output
    are off, as ||sent - exact|| / ||exact||; then by format the loss of held sequences beside the exact one."""
    found: list[dict[str, Any]] = []

    def measured(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        exact = attend(q, k, v, *rest)
        at = len(found) // len(CODECS)
        for name, codec in CODECS.items():
            off = {"keys": (decoded(k, codec), k), "values": (decoded(v, codec), v)}
            off["output"] = attended(q, k, v, rest, codec, sizes.nodes), exact
            row = {"what": "keys", "format": name, "layer": at, "tokens": q.shape[0] * q.shape[1]}
            found.append(row | {what: float((a - b).norm() / b.norm()) for what, (a, b) in off.items()})
        return exact

    with patch.object(softmax, "attend", measured):
        model(*samples.held(sizes.layers, sizes.layers)[0])
    yield from found
    exact = losses(model, samples, sizes, EXACT)
    for name in CODECS:
        gaps = losses(model, samples, sizes, name) - exact
        yield {
            "what": "keys loss", "format": name, "nodes": sizes.nodes, "length": sizes.length,
            "sequences": len(exact), "exact": float(exact.mean()), "gap": float(gaps.mean()),
            "deviation": float(gaps.std() / len(gaps) ** 0.5),
        }  # fmt: skip


def losses(model: Decoder, samples: Samples, sizes: Sizes, name: str) -> Tensor:
    """Return the loss of each held sequence, fp64, where all layers exchange keys and values in a format."""

    def sent(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        return attend(q, k, v, *rest) if name == EXACT else attended(q, k, v, rest, CODECS[name], sizes.nodes)

    with patch.object(softmax, "attend", sent):
        each = [float(model(*batch).mean()) for batch in samples.held(sizes.held, 1)]
    return torch.tensor(each, dtype=torch.float64)
