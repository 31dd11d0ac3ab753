"""What keys and values in few bits cost that cross nodes: errors of attention's output by layer and the loss of the
trained model, and small models trained anew.

Nodes are parts of one process: each has two chunks of a sequence, as groups of context-parallel ranks do, attends to
its own keys and values as they are, and to those of the others as they are decoded. Gradients are exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.loss.rounding.formats import EXACT
from benchmarks.loss.rounding.text import Samples
from benchmarks.loss.rounding.training import Training
from megazero.comm.codec import Blockwise, Codec, Identity
from megazero.mesh.grid import own_spans
from megazero.models import Decoder, layer, make_model
from megazero.models.attention import attend

RUN = "INT8 128 + H128"  # what --cp-gather-bits 8 sends
CODECS: dict[str, Codec] = {
    RUN: Blockwise(8, 128, 128),
    "INT8 128": Blockwise(8, 128),
    "bf16": Identity(torch.bfloat16),
    "INT4 64 + H64": Blockwise(4, 64, 64),
    "INT4 64": Blockwise(4, 64),
}
TRAINED = (EXACT, RUN, "INT4 64 + H64")
Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """nodes: that share a sequence. length, held: sequences that are evaluated on; the first ``layers`` of them for
    the errors by layer."""

    nodes: int = 2
    length: int = 1024
    held: int = 16
    layers: int = 2


@dataclass(frozen=True)
class ScratchSizes:
    """As scratch.Sizes, of Llamas in fp32."""

    nodes: int = 2
    vocabulary: int = 2048
    seeds: tuple[int, ...] = (1, 2, 3)
    batch: int = 8
    length: int = 256
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    groups: int = 2
    rate: float = 2e-3
    share: float = 0.1
    held: int = 64
    every: int = 50
    least: int = 50
    most: int = 1000


def decoded(x: Tensor, codec: Codec) -> Tensor:
    """Return what keys or values [s, b, heads, d] decode to, filled up to whole blocks on their way."""
    rows = x.detach().reshape(1, -1)
    rows = F.pad(rows, (0, -rows.shape[1] % getattr(codec, "block", 1)))
    out = torch.empty_like(rows)
    codec.decode(codec.encode(rows), out)
    return out[:, : x.numel()].view(x.shape)


def attended(q: Tensor, k: Tensor, v: Tensor, rest: tuple[Any, ...], codec: Codec, nodes: int) -> Tensor:
    """Return attention over nodes that exchange keys and values in a format. Rounding has the gradient 1."""
    rounded = [x + (decoded(x, codec) - x).detach() for x in (k, v)]
    total: Tensor | None = None
    for node in range(nodes):
        own = torch.zeros(len(k), 1, 1, 1, dtype=torch.bool, device=k.device)
        for span in own_spans(len(k), node, 1, nodes):
            own[span.start : span.stop] = True
        out = attend(q, *(torch.where(own, x, sent) for x, sent in zip((k, v), rounded, strict=True)), *rest)
        total = out if total is None else torch.where(own, out, total)
    assert total is not None
    return total


def sent(name: str, nodes: int) -> AbstractContextManager[Any]:
    """In the block, every layer's keys and values cross nodes in the format of that name."""
    if name == EXACT:
        return patch.object(layer, "attend", attend)
    return patch.object(layer, "attend", lambda q, k, v, *rest: attended(q, k, v, rest, CODECS[name], nodes))


@torch.no_grad()
def errors(model: Decoder, tokens: Tensor, labels: Tensor, nodes: int) -> Iterator[Row]:
    """Yield by layer and format, for the exact model's own activations, how far keys, values and attention's output
    are off, as ||sent - exact|| / ||exact||. largest: the largest channel's rms of the keys over the median one's.
    """
    found: list[Row] = []

    def measured(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        exact = attend(q, k, v, *rest)
        channels = k.square().mean((0, 1)).sqrt().flatten()
        for name, codec in CODECS.items():
            off = {"keys": (decoded(k, codec), k), "values": (decoded(v, codec), v)}
            off["output"] = attended(q, k, v, rest, codec, nodes), exact
            each = {what: float((a - b).norm() / b.norm()) for what, (a, b) in off.items()}
            more = {"layer": len(found) // len(CODECS), "largest": float(channels.max() / channels.median())}
            found.append(
                {"what": "keys", "format": name, "nodes": nodes, "tokens": tokens.numel()} | each | more
            )
        return exact

    with patch.object(layer, "attend", measured):
        model(tokens, labels)
    yield from found


@torch.no_grad()
def losses(model: Decoder, samples: Samples, sizes: Sizes, left: Callable[[], float]) -> Iterator[Row]:
    """Yield by format the loss of held sequences beside the exact one: as many as there is time for."""
    found: dict[str, list[float]] = {name: [] for name in (EXACT, *CODECS)}
    for tokens, labels in zip(*(x.split(1) for x in samples.held(sizes.held)), strict=True):
        if left() < 0:
            break
        for name, each in found.items():
            with sent(name, sizes.nodes):
                each.append(float(model(tokens, labels).mean()))
    exact = torch.tensor(found[EXACT], dtype=torch.float64)
    for name in CODECS if len(exact) > 1 else ():
        gaps = torch.tensor(found[name], dtype=torch.float64) - exact
        yield {
            "what": "keys loss", "format": name, "nodes": sizes.nodes, "length": sizes.length,
            "sequences": len(exact), "exact": float(exact.mean()), "gap": float(gaps.mean()),
            "deviation": float(gaps.std() / len(gaps) ** 0.5),
        }  # fmt: skip


def rows(model: Decoder, samples: Samples, sizes: Sizes, seconds: float) -> Iterator[Row]:
    """Yield the errors by layer, and then the losses, within the time."""
    began = time.monotonic()
    yield from errors(model, *samples.held(sizes.layers), sizes.nodes)
    yield from losses(model, samples, sizes, lambda: seconds - (time.monotonic() - began))


def small(sizes: ScratchSizes, seed: int) -> Decoder:
    config = make_model(
        model_family="llama", num_layers=sizes.layers, hidden_size=sizes.hidden, ffn_hidden_size=3 * sizes.hidden,
        num_attention_heads=sizes.heads, num_query_groups=sizes.groups, vocab_size=sizes.vocabulary,
        max_position_embeddings=sizes.length, untie_embeddings_and_output_weights=False,
    )  # fmt: skip
    model = Decoder(config, dtype=torch.float32)
    model.initialize(seed)
    return model


def train(samples: Samples, sizes: ScratchSizes, name: str, seed: int, steps: int) -> Row:
    """Train one model in a format; all formats of a seed start alike and read the same samples."""
    model = small(sizes, seed)
    training = Training(model, 1)
    held = [*zip(*(x.split(sizes.batch) for x in samples.held(sizes.held)), strict=True)]
    order, curve, began = samples.order(seed), list[list[float]](), time.monotonic()
    with sent(name, sizes.nodes):
        for step in range(steps):
            share = min((step + 1) / (sizes.share * steps), (steps - step) / ((1 - sizes.share) * steps))
            numbers = [order[(step * sizes.batch + i) % len(order)] for i in range(sizes.batch)]
            training.update(training.gradient_of([samples.at(numbers)]), sizes.rate * share)
            if (step + 1) % sizes.every == 0 or step + 1 == steps:
                curve.append([step + 1, training.loss(held)])
    return {
        "what": "keys trained", "format": name, "seed": seed, "steps": steps, "nodes": sizes.nodes,
        "tokens": sizes.batch * sizes.length, "length": sizes.length, "rate": sizes.rate,
        "parameters": training.layout.numel, "vocabulary": sizes.vocabulary, "curve": curve,
        "seconds": time.monotonic() - began,
    }  # fmt: skip


def scratch(samples: Samples, sizes: ScratchSizes, seconds: float) -> Iterator[Row]:
    """Yield the runs of each seed, of as many steps as fit into the time."""
    began = time.monotonic()
    train(samples, sizes, RUN, 0, 1)
    timed = train(samples, sizes, RUN, 0, 4)["seconds"] / 4
    runs = len(TRAINED) * len(sizes.seeds)
    steps = int(0.85 * (seconds - (time.monotonic() - began)) / runs / timed)
    steps = min(sizes.most, max(sizes.least, steps)) // sizes.every * sizes.every
    print(f"{timed:.3f} s a step and evaluation; {steps} steps of {', '.join(TRAINED)}", flush=True)
    for seed in sizes.seeds:
        for name in TRAINED:
            yield train(samples, sizes, name, seed, steps)
