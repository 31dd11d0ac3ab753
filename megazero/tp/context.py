"""The tensor-parallel context that layers receive."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.distributed import ProcessGroup

from megazero.comm.traffic import Traffic
from megazero.comm.waits import Waits
from megazero.mesh.grid import INTRA
from megazero.tp.deferred import DeferredGradients


@dataclass(frozen=True)
class TensorParallel:
    """The tp axis as one rank sees it: its group, its index in it, and the group's size.

    With ``size`` 1 nothing communicates and ``group`` is not looked at. With ``group`` None and a larger size the
    context serves for shapes, placements and initialisation only. Communication needs the group by name, since
    torch.distributed reads None as the whole world.

    sequence_parallel: Between the parallel linears, activations are cut along the sequence (dim 0) over the axis
        (Korthikanti et al. 2022, section 4.2.2).
    traffic: if given, counts the bytes this rank sends. The axis never leaves a node.
    waits: times the waits for the other ranks of the axis.
    deferred: if given, backwards defer weight gradients. It works for every size, 1 included.
    """

    group: ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    sequence_parallel: bool = False
    traffic: Traffic | None = field(default=None, compare=False, repr=False)
    waits: Waits = field(default_factory=Waits, compare=False, repr=False)
    deferred: DeferredGradients | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"tensor-parallel rank {self.rank} is not in [0, {self.size})")

    @property
    def sharded_sequence(self) -> bool:
        """Return whether activations between the parallel linears hold only this rank's part of the sequence."""
        return self.sequence_parallel and self.size > 1

    def count(self, sent: int) -> None:
        """Add bytes that this rank sends over the axis."""
        if self.traffic is not None:
            self.traffic.add("tp", INTRA, sent)

    def share(self, total: int, what: str) -> int:
        """Return ``total / size``. Raises ValueError naming ``what`` when it does not divide."""
        if total % self.size:
            raise ValueError(
                f"{what} = {total} does not divide over tensor parallel size {self.size}; "
                f"the nearest multiple is {max(1, round(total / self.size)) * self.size}"
            )
        return total // self.size
