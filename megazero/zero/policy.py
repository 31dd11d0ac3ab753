"""What the engine may choose; the shard factors themselves are the mesh's cuts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megazero.comm.codec import Blockwise, Codec
from megazero.mesh.grid import INTRA
from megazero.mesh.mesh import Mesh

LIFETIMES = ("use", "step", "resident")


@dataclass(frozen=True)
class Codecs:
    """Wire formats; None is exact: identity, in the parameters' dtype or, for sums of gradients, at least fp32.

    weights: of the refresh; the gathers inside P send what was received. gradients_intra, gradients_inter: of
    reductions inside a node and across nodes. Blocks must divide the policy's block.
    """

    weights: Codec | None = None
    gradients_intra: Codec | None = None
    gradients_inter: Codec | None = None

    def gradients(self, link: str) -> Codec | None:
        return self.gradients_intra if link == INTRA else self.gradients_inter


@dataclass(frozen=True)
class Policy:
    """How one unit's copies live and how far communication runs ahead.

    lifetime: of the P copy. 'use': the P copy is the optimizer's own slice, so it needs P = OS; 'step':
        gathered at the step's first use, dropped after its last backward (hpZ); 'resident': kept across steps.
        None: 'use' where P = OS, 'resident' where P = 1, else 'step'.
    keep_gathered: full parameters live from their first use in a step to its end (one gather a step).
    prefetch_bytes: how much may be gathered ahead of use. pending_reductions: how many units' gradients may
        be on their way before a backward waits for the oldest.
    block: elements; parameters start on block boundaries and slices are whole blocks.
    exact_numel: parameters with at most this many elements go to the unit's exact region.
    dtype: the parameters' dtype in forward and backward; None: as the module has them.
    codecs: wire formats of the hops.
    """

    lifetime: str | None = None
    keep_gathered: bool = False
    prefetch_bytes: int = 256 << 20
    pending_reductions: int = 2
    block: int = 64
    exact_numel: int = 0
    dtype: torch.dtype | None = None
    codecs: Codecs = Codecs()

    def __post_init__(self) -> None:
        problems = []
        if self.lifetime is not None and self.lifetime not in LIFETIMES:
            problems.append(f"lifetime {self.lifetime!r} is not one of {', '.join(LIFETIMES)}")
        for name, least in (
            ("prefetch_bytes", 0),
            ("pending_reductions", 0),
            ("block", 1),
            ("exact_numel", 0),
        ):
            if getattr(self, name) < least:
                problems.append(f"{name}={getattr(self, name)} must be at least {least}")
        for codec in (self.codecs.weights, self.codecs.gradients_intra, self.codecs.gradients_inter):
            inner = codec.form.block if isinstance(codec, Blockwise) else 1
            if self.block % inner:
                problems.append(
                    f"block={self.block} is not a multiple of the codec's block {inner}, so a slice could cut one; "
                    f"nearest: {-(-self.block // inner) * inner}"
                )
        if problems:
            raise ValueError("; ".join(problems))


@dataclass(frozen=True)
class Levels:
    """How many data-parallel sub-axes, innermost first, cut the parameters, gradients, optimizer states."""

    p: int
    g: int
    os: int
    all: int

    @staticmethod
    def of(mesh: Mesh) -> Levels:
        roles = [a.spec.role for a in mesh.data_axes]
        p = roles.count("p")
        g = p + roles.count("g")
        return Levels(p, g, g + roles.count("os"), len(roles))

    def lifetime(self, wanted: str | None) -> str:
        """The P copy's lifetime; raises ValueError for one that P and OS do not allow."""
        if self.p == self.os:  # the P copy is the optimizer's own slice, whatever is asked
            return "use"
        if wanted is None:
            return "resident" if self.p == 0 else "step"
        if wanted == "use":
            raise ValueError(
                "lifetime 'use' drops the P copy after each use, which is legal only where P = OS; nearest: 'step'"
            )
        return wanted
