"""What a run of megatron-core is (``Case``), and what it leaves behind on each rank (``Run``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Case:
    """A training of a small GPT under megatron-core's DistributedDataParallel and DistributedOptimizer.

    dp, tp, pp: ranks. ``vpp`` is the number of model chunks per pipeline rank (1: no virtual pipeline), ``ep``
    the ranks of dp that share a layer's experts (``experts``, 0: no MoE). ``micro_batches`` is per rank and
    step, of one sequence each. ``bucket_size`` is in elements and has effect where a bucket's sum overlaps the
    backward. ``ranks_per_node`` is what the patch takes for a node. ``nudge`` numbers the element of the embedding
    whose last bit is changed at the start (0: none). ``gated``: SwiGLU without biases and two query groups, as Llama.
    ``latent``: latent attention, with yarn. ``sinks``: gpt-oss's layers: sinks, windows by turns, clamped quick GEGLU
    with an offset, biases. ``further``: how many layers predict further tokens. ``device``: "cpu", or "cuda" for
    ranks on one card.
    """

    dp: int = 1
    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    experts: int = 0
    tied: bool = True
    gated: bool = False
    latent: bool = False
    sinks: bool = False
    further: int = 0
    recompute: bool = False
    per_token_loss: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    average_in_collective: bool = False
    micro_batches: int = 2
    bf16: bool = False
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    vocabulary: int = 128
    sequence: int = 16
    bucket_size: int = 40_000
    lr: float = 3e-3
    clip: float = 1.0
    seed: int = 1
    nudge: int = 0
    steps: int = 4
    ranks_per_node: int = 2
    device: str = "cpu"

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32


@dataclass(frozen=True)
class Run:
    """What one rank says of its run.

    ``losses``: for each step, the (sum of losses, number of tokens) of each of its micro-batches; empty but on
    a pipeline's last stage, and from one tensor-parallel rank alone. ``norms`` are the gradients' by step.
    ``digests`` are those of its parameters' bits at the end, by the name of what they are: ranks that hold the
    same tensor, or the same part of it, use the same name. ``sent`` are the patch's counters: bytes by (kind,
    link). ``buckets``: elements of each of this rank's buckets, the ranks that share it, and its parameters' places.
    """

    losses: list[list[tuple[float, int]]]
    norms: list[float]
    digests: dict[str, str]
    sent: dict[tuple[str, str], int] = field(default_factory=dict)
    buckets: list[tuple[int, tuple[int, ...], tuple[tuple[int, int], ...]]] = field(default_factory=list)


def step_losses(case: Case, runs: Sequence[Run]) -> list[float]:
    """Return the loss of every step over all ranks' samples, in float64: of the tokens, or of the micro-batches."""
    found = []
    for step in range(case.steps):
        parts = [part for run in runs if run.losses for part in run.losses[step]]
        if case.per_token_loss:
            found.append(sum(loss for loss, _ in parts) / sum(tokens for _, tokens in parts))
        else:
            found.append(sum(loss / tokens for loss, tokens in parts) / len(parts))
    return found


def replicas_differ(runs: Sequence[Run]) -> list[str]:
    """Return the names of the tensors whose bits are not the same on all ranks that hold them."""
    seen: dict[str, set[str]] = {}
    for run in runs:
        for name, digest in run.digests.items():
            seen.setdefault(name, set()).add(digest)
    return sorted(name for name, digests in seen.items() if len(digests) > 1)
