"""The engine's options. The shard factors themselves are the mesh's cuts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megazero.comm.codec import Codec, codec_of
from megazero.comm.wire import Codecs, Coding, Sparse
from megazero.mesh.grid import copy_lifetime
from megazero.zero.axes import DataAxes

LIFETIMES = ("use", "step", "resident")


@dataclass(frozen=True)
class Outer:
    """How replicas' outer steps are taken (outer.py).

    momentum, nesterov: of the outer optimizer, which is SGD; its rate comes with each step. codec: the format of
    outer
        gradients; None sends them as they are. feedback: the share of what rounding lost that is added to the next
        outer gradient. wires: messages of each rank, above 1 where another replica has as many more data-parallel
        ranks.
    """

    momentum: float = 0.5
    nesterov: bool = True
    codec: Coding | Sparse | Codec | None = None
    feedback: float = 0.0
    wires: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1 or not 0 <= self.feedback <= 1 or self.wires < 1:
            raise ValueError(
                f"momentum={self.momentum} must be in [0, 1), feedback={self.feedback} in [0, 1] and "
                f"wires={self.wires} at least 1"
            )


@dataclass(frozen=True)
class Policy:
    """How one unit's copies live and how far communication runs ahead.

    lifetime: how long the P copy lives. With 'use' the P copy is the optimizer's own slice, so this needs P =
        OS. With 'step' it is gathered at the step's first use and dropped after its last backward (hpZ). With
        'resident' it is kept across steps. None chooses 'use' where P = OS, 'resident' where P = 1 or the
        refresh sends differences, else 'step'.
    keep_gathered: full parameters live from their first use in a step to its end (one gather a step).
    whole_gradients: gradients are accumulated whole, in at least fp32, and reduced once per step; else they are
        reduced to the G slice with every micro-batch. It takes effect where G > 1.
    prefetch_bytes: how many bytes may be gathered ahead of use, or kept for the next one, beyond what the next
        module needs.
    pending_reductions: how many units' reductions may be in flight before a backward waits for the oldest.
    chunk_numel: a unit with more elements is cut, at parameters, into several units. They are gathered for
        the same module but move one by one: the hop of one inside a node overlaps another's across nodes, and
        messages take less memory.
    block: a number of elements. Parameters start on block boundaries, and
        slices are whole blocks.
    exact_numel: parameters with at most this many elements go to the unit's exact region. If anything is
        quantised, those with ``Traits.exact`` go there, too.
    dtype: the parameters' dtype in forward and backward. None keeps the module's.
    loss_scaled: the caller multiplies the losses by a scale, includes it in ``begin_step``'s divisor, and lowers it
        when a step is skipped. Parameters in fp16 are trained only so: else their gradients would become zero.
    codecs: the wire formats of the hops. seed: that of transforms' signs, and of the rounding of small moments.
    outer: how outer steps are taken, where other replicas train apart. It does not take ``codecs.delta``.
    """

    lifetime: str | None = None
    keep_gathered: bool = False
    whole_gradients: bool = False
    prefetch_bytes: int = 256 << 20
    pending_reductions: int = 2
    chunk_numel: int = 1 << 27
    block: int = 128
    exact_numel: int = 0
    dtype: torch.dtype | None = None
    loss_scaled: bool = False
    codecs: Codecs[Any] = Codecs()
    seed: int = 0
    outer: Outer | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.lifetime is not None and self.lifetime not in LIFETIMES:
            problems.append(f"lifetime {self.lifetime!r} is not one of {', '.join(LIFETIMES)}")
        for name, least in (
            ("prefetch_bytes", 0),
            ("pending_reductions", 0),
            ("chunk_numel", 1),
            ("block", 1),
            ("exact_numel", 0),
        ):
            if getattr(self, name) < least:
                problems.append(f"{name}={getattr(self, name)} must be at least {least}")
        problems += self._codec_problems()
        if problems:
            raise ValueError("; ".join(problems))

    def _codec_problems(self) -> list[str]:
        codecs, problems = self.codecs, []
        outer = self.outer.codec if self.outer else None
        for codec in (*codecs.codings, outer):
            codec_of(codec)  # raises ValueError for an impossible format
            inner = getattr(codec, "block", 1)  # of the exact, and of one without blocks, an element
            if self.block % inner:
                problems.append(
                    f"block={self.block} is not a multiple of the codec's block {inner}, so a slice could cut one; "
                    f"nearest: {-(-self.block // inner) * inner}"
                )
        if codecs.delta and codecs.weights is None:
            problems.append("codecs.delta needs codecs.weights, what differences are encoded with")
        if codecs.delta and self.outer:
            problems.append(
                "codecs.delta does not go with outer: evaluations would see the anchor through the rounding of "
                "differences; nearest: delta=False"
            )
        return problems

    def lifetime_on(self, axes: DataAxes) -> str:
        """Return the P copy's lifetime on these axes. Raises ValueError for a lifetime that they do not allow."""
        p, _, os = axes.shards
        if self.codecs.delta and p != os and self.lifetime not in (None, "resident"):
            raise ValueError(
                f"lifetime {self.lifetime!r} drops what the delta refresh adds to; nearest: 'resident'"
            )
        return copy_lifetime(p, os, self.lifetime, self.codecs.delta)
