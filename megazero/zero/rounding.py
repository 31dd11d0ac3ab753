"""Rounding: every step measures what the messages of one unit lost, in turn.

There is one Rounding per engine; the chains of gather.py and reduce.py are given it. It also has the noise of small
moments, a function of (seed, updates, unit, element), so it is the same after a resume and on every replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from megazero.comm.codec import Codec, Identity, at_least_fp32, decoded
from megazero.comm.rows import RowRun
from megazero.comm.watch import Watch, write_squares
from megazero.kernels.arena import Frame
from megazero.kernels.noise import Noise
from megazero.mesh.mesh import Mesh
from megazero.mesh.objects import gather_objects
from megazero.zero.policy import Policy
from megazero.zero.scalars import Rows, StepPart, Sums
from megazero.zero.unit import Unit

WEIGHTS, GRADIENTS = "weights", "gradients"
KINDS = (WEIGHTS, GRADIENTS)
MEASURED = 2 * len(KINDS) + 2  # numbers: two squares of each kind, two counts of the gradients

# (unit, codec, kind, exact, sent): what messages were made of and what they decode to. Weights: the compact OS slice;
# gradients: rows [k, n] of the coded region.
Observer = Callable[[Unit, Codec, str, torch.Tensor, torch.Tensor], None]


class Rounding(StepPart):
    """Sums up the errors of the sample's messages. Where nothing is rounded it has no columns.

    names: the names of the units of all pipeline stages. updates: how many updates the master weights have had.
    measured: fp64 [MEASURED], what the sample's messages lost since the last step's end; always the same buffer,
    because a unit's chains alternate between streams on CUDA. Its views are sums [KINDS, 2], ||sent - exact||^2 and
    ||exact||^2, and zeroed [2], how many elements of gradients were not 0 and arrived as 0, and how many were not 0.
    observer: it sees every unit's messages, not only the sample's. It keeps none of the tensors.
    """

    def __init__(self, policy: Policy, mesh: Mesh, names: Sequence[str] = ()) -> None:
        self.seed, self.names = policy.seed, names
        self.columns = self.summed = 0 if policy.codecs.exact else MEASURED
        self.updates = 0
        self.measured = torch.zeros(MEASURED, dtype=torch.float64, device=mesh.device)
        self.sums, self.zeroed = self.measured[:-2].view(len(KINDS), 2), self.measured[-2:]
        self.observer: Observer | None = None

    @property
    def sampled(self) -> str | None:
        """Name of the unit whose messages are measured.

        It changes with the master weights, not when a step begins: an evaluation or a save between steps
        sends the refresh that belongs to the next one.
        """
        return self.names[self.updates % len(self.names)] if self.names else None

    def noise(self, unit: Unit, what: str, start: int = 0) -> Noise:
        """Return the noise of a slice whose first element is ``start`` of the unit. what: a text that names it."""
        return Noise.named(self.seed, self.updates, f"{unit.name}/{what}", start)

    @contextmanager
    def unmeasured(self) -> Iterator[None]:
        """Measure nothing inside."""
        names, self.names = self.names, ()
        try:
            yield
        finally:
            self.names = names

    def measures(self, unit: Unit, codec: Codec) -> bool:
        """Whether ``note`` needs the rounding error of these messages."""
        return not isinstance(codec, Identity) and bool(self.watches(unit, GRADIENTS))

    def watches(self, unit: Unit, kind: str) -> tuple[Watch, ...]:
        """Return what measures the unit's messages: nothing unless it is the sample, or all are observed."""
        watched = self.observer is not None or unit.name == self.sampled
        return (partial(self._sample, unit, kind),) if watched else ()

    def _sample(
        self, unit: Unit, kind: str, codec: Codec, run: RowRun, messages: torch.Tensor, frame: Frame
    ) -> None:
        rows = run.rows[0]
        arrived = decoded(codec, messages, run.rows, frame.take, at_least_fp32(rows.dtype))
        self.note(unit, codec, kind, rows, arrived[0], frame)

    def note(
        self, unit: Unit, codec: Codec, kind: str, exact: torch.Tensor, sent: torch.Tensor, frame: Frame
    ) -> None:
        """Add what one message lost to the step's measurements, if the unit is the sample.

        exact: what was encoded, any shape and float dtype. sent: what it decodes to, in the same shape and at least
        exact's precision.
        """
        if self.observer is not None:
            self.observer(unit, codec, kind, exact, sent)
        if unit.name != self.sampled:
            return
        found = frame.take(4, torch.float64)
        squares, zeroed = found[:2], found[2:] if kind == GRADIENTS else None
        write_squares(sent, exact, squares, frame, zeroed)
        self.sums[KINDS.index(kind)].add_(squares)
        if zeroed is not None:
            self.zeroed.add_(zeroed)

    def forget(self) -> None:
        """Begin anew."""
        self.measured.zero_()

    def write(self, row: torch.Tensor) -> None:
        if self.columns:
            row.copy_(self.measured)
            self.forget()

    def read(self, rows: Rows, sums: Sums) -> Mapping[str, Any]:
        if not self.columns:
            return {"sampled": self.sampled}
        return {"sampled": self.sampled, "errors": relative_errors(sums), "zeroed": zeroed_share(sums)}

    def updated(self, made: bool) -> None:
        self.updates += int(made)

    def state(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.updates = int(state["updates"])

    def aborted(self) -> None:
        """Forget the measurements of the open step's gradients. Those of the weights stay and count."""
        self.sums[KINDS.index(GRADIENTS)].zero_()
        self.zeroed.zero_()


def relative_errors(measured: Sequence[float]) -> dict[str, float]:
    """Turn the sums [MEASURED] over all ranks into ||sent - exact|| / ||exact|| per kind.

    Kinds without sums are left out.
    """
    squares = zip(KINDS, measured[:-2:2], measured[1:-2:2], strict=True)
    return {kind: (error / norm) ** 0.5 for kind, error, norm in squares if norm != 0}


def zeroed_share(measured: Sequence[float]) -> float | None:
    """Turn the sums [MEASURED] over all ranks into the share of elements that arrived as 0; None without any."""
    gone, given = measured[-2:]
    return gone / given if given else None


def unit_names(mesh: Mesh, units: Sequence[Unit]) -> list[str]:
    """Return the names of the units of all pipeline stages, each once, the same on all ranks. Collective over pp."""
    names: list[list[str]] = [[u.name for u in units]]
    if mesh.pp.size > 1:
        names = gather_objects([u.name for u in units], group=mesh.pp.gather_group)
    return list(dict.fromkeys(name for stage in names for name in stage))
