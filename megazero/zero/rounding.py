"""What rounding on the wire needs (noise, the divisor) and what it leaves (sampled errors).

There is one Rounding per engine; the chains of gather.py and reduce.py are given it. Noise is a function of
(seed, updates, unit, hop, sender, element). So it is the same after a resume, and replicas that round the
same slice draw the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

import torch

from megazero.comm.codec import Codec, Identity
from megazero.kernels.noise import Noise
from megazero.zero.unit import Unit

WEIGHTS, GRADIENTS = "weights", "gradients"
KINDS = (WEIGHTS, GRADIENTS)

# (unit, codec, kind, exact, sent): what messages were made of and what they decode to. Weights: the compact OS slice;
# gradients: rows [k, n] of the coded region.
Observer = Callable[[Unit, Codec, str, torch.Tensor, torch.Tensor], None]


class Rounding:
    """Gives noise to the codecs of one engine and sums up the errors they made.

    names: the names of the units of all pipeline stages. updates: how many updates the master weights have
        had.
    divisor: the open step's divisor of gradients. sums: what was measured since the last step's end, by kind.
    observer: it sees every unit's messages, not only the sample's.
    """

    def __init__(self, seed: int, rank: int, device: torch.device, names: Sequence[str] = ()) -> None:
        self.seed, self.rank, self.device, self.names = seed, rank, device, names
        self.updates = 0
        self.divisor = 1.0
        self.sums: dict[str, torch.Tensor] = {}
        self.observer: Observer | None = None

    @property
    def sampled(self) -> str | None:
        """Name of the unit whose messages are measured.

        It changes with the master weights, not when a step begins: an evaluation or a save between steps
        sends the refresh that belongs to the next one.
        """
        return self.names[self.updates % len(self.names)] if self.names else None

    def noise(self, unit: Unit, hop: str, start: int = 0) -> Noise:
        """Return the noise of a slice whose first element is ``start`` of the unit.

        hop: a text that tells hops, and senders, apart.
        """
        stream = int.from_bytes(blake2b(f"{unit.name}/{hop}".encode(), digest_size=8).digest(), "little")
        return Noise(self.seed, self.updates, stream, start)

    def measures(self, unit: Unit, codec: Codec) -> bool:
        """Whether ``measure`` wants to know what these messages lost."""
        watched = self.observer is not None or unit.name == self.sampled
        return watched and not isinstance(codec, Identity)

    def measure(
        self, unit: Unit, codec: Codec, kind: str, exact: torch.Tensor, sent: Callable[[], torch.Tensor]
    ) -> None:
        """Add ||sent - exact||^2 and ||exact||^2 of one message to the step's sums, if the unit is the
        sample.

        exact: what was encoded, any shape and float dtype. sent: returns what it decodes to, in the same
            shape; it is called only if that is looked at.
        """
        if not self.measures(unit, codec):
            return
        decoded = sent()
        if self.observer is not None:
            self.observer(unit, codec, kind, exact, decoded)
        if unit.name != self.sampled:
            return
        squares = torch.stack([(decoded - exact).double().square().sum(), exact.double().square().sum()])
        if kind in self.sums:
            # In place: on CUDA a unit's chains take turns on streams, and memory freed here would be the first one's.
            self.sums[kind].add_(squares)
        else:
            self.sums[kind] = squares

    def take(self) -> torch.Tensor:
        """Return this rank's sums since the last take, fp64 [2 x KINDS]; they are zeros where nothing was sampled."""
        none = torch.zeros(2, dtype=torch.float64, device=self.device)
        out = torch.cat([self.sums.get(kind, none) for kind in KINDS])
        self.sums.clear()
        return out

    def abort(self) -> None:
        """Forget what was measured of the open step's gradients. What was measured of the weights stays
        and counts.
        """
        self.sums.pop(GRADIENTS, None)


def relative_errors(sums: torch.Tensor) -> dict[str, float]:
    """Turn the sums of all ranks, fp64 [2 x KINDS], into ||sent - exact|| / ||exact|| per kind.

    Kinds without sums are left out.
    """
    out = {}
    for kind, (error, norm) in zip(KINDS, sums.view(-1, 2).tolist(), strict=True):
        if norm != 0:
            out[kind] = (error / norm) ** 0.5
    return out
