"""Training anew: small Llamas with a large vocabulary, all formats of a seed at once, by batched products.

Each format is a run of its own, with its own weights and AdamW; they start alike and read the same samples. A model
of one run is S senders' copies of bf16 weights, so that each sender has a gradient of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.loss.rounding.formats import BLOCK, EXACT, ROUNDINGS, Hop
from benchmarks.loss.rounding.text import Samples
from benchmarks.loss.rounding.training import BETAS, CLIP, DECAY
from megazero.zero.layout import UnitLayout, make_layout

FORMATS = (EXACT, "INT4 64", "INT4 64 + H64", "INT4 2048", "INT8 128")
ROTARY = 1e4
Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """senders: nodes, of ``batch`` sequences of ``length`` tokens a step. share: of the steps in which the rate rises
    to ``rate``; then it falls to 0. exact, held: as continued.Sizes."""

    vocabularies: tuple[int, ...] = (16384, 49152)
    seeds: tuple[int, ...] = (1, 2, 3)
    senders: int = 4
    batch: int = 4
    length: int = 256
    layers: int = 4
    hidden: int = 256
    ffn: int = 688
    heads: int = 4
    rate: float = 2e-3
    share: float = 0.1
    exact: int = 16384
    held: int = 128
    every: int = 50
    least: int = 100
    most: int = 2000

    @property
    def tokens(self) -> int:
        return self.senders * self.batch * self.length


def shapes(vocabulary: int, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    d, f = sizes.hidden, sizes.ffn
    found: dict[str, tuple[int, ...]] = {"embedding": (vocabulary, d)}
    for i in range(sizes.layers):
        found |= {f"{i}.norm": (d,), f"{i}.qkv": (3 * d, d), f"{i}.o": (d, d), f"{i}.mlp_norm": (d,)}
        found |= {f"{i}.in": (2 * f, d), f"{i}.out": (d, f)}
    return found | {"norm": (d,)}


class Ensemble:
    """Runs of one seed, R of them. master: fp32 [R, n]. weights, gradient: bf16 [R S, n], laid out as a unit."""

    def __init__(self, vocabulary: int, sizes: Sizes, seed: int, runs: int, device: torch.device) -> None:
        self.sizes, self.runs = sizes, runs
        all_shapes = shapes(vocabulary, sizes)
        exact = frozenset(name for name, shape in all_shapes.items() if math.prod(shape) <= sizes.exact)
        self.layout: UnitLayout = make_layout(
            all_shapes, block=BLOCK, sizes=(sizes.senders,), indices=(0,), exact=exact
        )
        first = torch.zeros(self.layout.numel)
        generator = torch.Generator().manual_seed(seed)
        for slot in self.layout.slots:
            part = first[slot.start : slot.start + slot.numel]
            if len(slot.shape) == 1:
                part.fill_(1.0)
                continue
            deep = slot.name.endswith((".o", ".out"))  # their sums over layers keep one size
            deviation = 0.02 / (math.sqrt(2 * sizes.layers) if deep else 1)
            part.normal_(std=deviation, generator=generator)
        self.master = first.to(device).repeat(runs, 1).requires_grad_()
        copies = runs * sizes.senders
        self.weights, self.gradient = (
            torch.zeros(copies, self.layout.numel, dtype=torch.bfloat16, device=device) for _ in range(2)
        )
        decay = torch.zeros(self.layout.numel, device=device)
        decay[: self.layout.regions[0][1]] = DECAY
        self.decay = decay
        self.optimizer = torch.optim.AdamW([self.master], betas=BETAS, weight_decay=0.0, fused=True)
        self.refresh()
        angles = torch.arange(sizes.length)[:, None] * ROTARY ** -torch.linspace(
            0, 1, sizes.hidden // sizes.heads // 2
        )
        turns = torch.cat([angles, angles], 1).to(device)
        self.cos, self.sin = turns.cos().bfloat16(), turns.sin().bfloat16()

    @torch.no_grad()
    def refresh(self) -> None:
        self.weights.unflatten(0, (self.runs, -1)).copy_(self.master[:, None])

    def parameters(self, weights: Tensor, gradient: Tensor | None) -> dict[str, Tensor]:
        """Return views [copies, *shape] of weights [copies, n] by name, their gradients in views of ``gradient``."""
        found = {}
        for slot in self.layout.slots:
            part = slice(slot.start, slot.start + slot.numel)
            p = weights[:, part].unflatten(1, slot.shape)
            if gradient is not None:
                p.requires_grad_()
                p.grad = gradient[:, part].unflatten(1, slot.shape)
            found[slot.name] = p
        return found

    def losses(self, p: dict[str, Tensor], tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss [copies] of each copy on its tokens, int64 [copies, b, s]."""
        copies, b, s = tokens.shape
        which = torch.arange(copies, device=tokens.device)[:, None]
        x = p["embedding"][which, tokens.flatten(1)]  # [copies, b s, d]
        for i in range(self.sizes.layers):
            x = x + self._attended(_norm(x, p[f"{i}.norm"]), p[f"{i}.qkv"], b) @ p[f"{i}.o"].mT
            gate, up = (_norm(x, p[f"{i}.mlp_norm"]) @ p[f"{i}.in"].mT).chunk(2, -1)
            x = x + (F.silu(gate) * up) @ p[f"{i}.out"].mT
        logits = _norm(x, p["norm"]) @ p["embedding"].mT
        lost = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
        return lost.view(copies, -1).mean(1)

    def _attended(self, x: Tensor, qkv: Tensor, b: int) -> Tensor:
        copies, heads = len(x), self.sizes.heads
        q, k, v = (x @ qkv.mT).view(copies * b, -1, 3, heads, x.shape[-1] // heads).permute(2, 0, 3, 1, 4)
        q, k = (each * self.cos + _turned(each) * self.sin for each in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(x.shape)

    def step(self, hops: list[Hop], tokens: Tensor, labels: Tensor, rate: float) -> None:
        """Make one step on tokens of all senders, int64 [S, b, s]."""
        self.gradient.zero_()
        p = self.parameters(self.weights, self.gradient)
        every = (x.repeat(self.runs, 1, 1) for x in (tokens, labels))
        self.losses(p, *every).sum().backward()
        grouped = self.gradient.unflatten(0, (self.runs, -1))
        means = torch.stack([hop.mean(g.float()) for hop, g in zip(hops, grouped, strict=True)])
        means *= CLIP / means.norm(dim=1, keepdim=True).clamp(min=CLIP)
        with torch.no_grad():
            self.master.mul_(1 - rate * self.decay)
        self.master.grad = means
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.refresh()

    @torch.no_grad()
    def evaluated(self, tokens: Tensor, labels: Tensor) -> list[float]:
        """Return each run's mean loss on tokens [count, s]."""
        p = self.parameters(self.weights[:: self.sizes.senders], None)
        total = torch.zeros(self.runs, device=tokens.device)
        size = self.sizes.batch * self.sizes.senders
        for batch in zip(tokens.split(size), labels.split(size), strict=True):
            total += len(batch[0]) * self.losses(p, *(x.expand(self.runs, -1, -1) for x in batch))
        return (total / len(tokens)).tolist()


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:]) * weight[:, None]


def _turned(x: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat([-high, low], -1)


def train(
    samples: Samples, vocabulary: int, sizes: Sizes, seed: int, steps: int, counted: int | None = None
) -> list[Row]:
    """Train all formats of one seed; return a row for each. counted: make so many of the steps, to time them."""
    device = samples.tokens.device
    runs = Ensemble(vocabulary, sizes, seed, len(FORMATS), device)
    hops = [Hop(ROUNDINGS[name], runs.layout) for name in FORMATS]
    order, held = samples.order(seed), samples.held(sizes.held)
    began, curves, count = time.monotonic(), [], sizes.senders * sizes.batch
    for step in range(counted or steps):
        rate = sizes.rate * min(
            (step + 1) / (sizes.share * steps), (steps - step) / ((1 - sizes.share) * steps)
        )
        numbers = [order[(step * count + i) % len(order)] for i in range(count)]
        batch = (x.unflatten(0, (sizes.senders, -1)) for x in samples.at(numbers))
        runs.step(hops, *batch, rate)  # type: ignore[call-arg]
        if (step + 1) % sizes.every == 0 or step + 1 == steps:
            curves.append([step + 1, *runs.evaluated(*held)])
    runs.evaluated(*(x[:1] for x in held))  # waits
    seconds = time.monotonic() - began
    return [
        {
            "what": "scratch", "format": name, "seed": seed, "bytes": ROUNDINGS[name].bytes, "steps": steps,
            "tokens": sizes.tokens, "rate": sizes.rate, "vocabulary": vocabulary, "hidden": sizes.hidden,
            "layers": sizes.layers, "parameters": sum(slot.numel for slot in runs.layout.slots),
            "curve": [[point[0], point[1 + i]] for point in curves], "seconds": seconds,
        }
        for i, name in enumerate(FORMATS)
    ]  # fmt: skip


def rows(texts: dict[int, Samples], sizes: Sizes, seconds: float) -> Iterator[Row]:
    """Yield the rows of each vocabulary and seed. texts: by vocabulary. Each vocabulary has its part of the time,
    twice as much for one twice as large."""
    began = time.monotonic()
    weights = {v: (v + 8192) / sum(each + 8192 for each in sizes.vocabularies) for v in sizes.vocabularies}
    plans = {}
    for vocabulary, samples in texts.items():
        train(samples, vocabulary, sizes, 0, 100, counted=2)
        (row, *_) = train(samples, vocabulary, sizes, 0, 100, counted=6)
        left = (0.9 * seconds - (time.monotonic() - began)) * weights[vocabulary] / len(sizes.seeds)
        steps = int(left / (row["seconds"] / 6) * 0.92)
        plans[vocabulary] = min(sizes.most, max(sizes.least, steps)) // sizes.every * sizes.every
        print(
            f"vocabulary {vocabulary}: {row['seconds'] / 6:.3f} s a step, {plans[vocabulary]} steps",
            flush=True,
        )
    for seed in sizes.seeds:
        for vocabulary, steps in plans.items():
            if time.monotonic() - began > seconds:
                return
            yield from train(texts[vocabulary], vocabulary, sizes, seed, steps)
