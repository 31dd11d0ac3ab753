"""Names the unit on which ranks disagree: one rank uses it in a step and another does not, or uses it later.

Such ranks issue different collectives, which hang, mix up values, or fail with a message of the backend. Steady steps
pay nothing. A rank that has waited 10 s, has failed, or finds differing hashes at the step's end puts its issued
collectives into the store and reads those of the others. In a hang all ranks wait, so all of them do this.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import torch.distributed as dist

from megazero.comm.lane import Differ
from megazero.mesh.mesh import Mesh
from megazero.zero.program import IssueHash
from megazero.zero.unit import Unit

ANSWER_S = 5.0  # for which the others are waited for once something has failed
KINDS = {"g": "gathers", "r": "reduces", "t": "sums the tied parameters of"}


class Agreement:
    """Compares what data-parallel ranks have issued in the open step."""

    def __init__(self, mesh: Mesh, units: Sequence[Unit], issued: IssueHash) -> None:
        self.rank, self.units, self.issued = mesh.rank, units, issued
        ranks = [mesh.grid.rank_of(mesh.pp.index, i, mesh.tp.index) for i in range(mesh.dp_size)]
        self.peers = [rank for rank in ranks if rank != mesh.rank]
        self.engine = 0  # its number, the same on every rank: to make one is collective
        if self.peers and dist.is_initialized():
            self.engine = self._store().add(f"megazero/engines/{mesh.rank}", 1)

    def check(self, failed: bool = False) -> None:
        """Raise Differ, with the names of units, if a peer is known to have issued something else.

        failed: peers will soon look too; wait for them.
        """
        if not self.peers:
            return
        try:
            theirs = self._exchange(time.monotonic() + (ANSWER_S if failed else 0.0))
        except (dist.DistError, ValueError):  # the store has gone with its rank: what failed says so
            return
        for peer, issued in theirs.items():
            for own, other in zip(self.issued.history, issued, strict=False):
                if own != other:
                    raise Differ(
                        f"ranks issued different collectives in this step: rank {self.rank} {self._named(own)} where "
                        f"rank {peer} {self._named(other)}; every rank must call the same modules in the same order "
                        "(with an input of no consequence where it has none)"
                    )

    def _exchange(self, until: float) -> dict[int, list[str]]:
        """Publish what was issued here; return what the peers published of the same step."""
        store, key = self._store(), f"megazero/issued/{self.engine}"
        store.set(f"{key}/{self.rank}", json.dumps([self.issued.step, self.issued.history]))
        found: dict[int, list[str]] = {}
        while True:
            for peer in self.peers:
                if store.check([f"{key}/{peer}"]):
                    step, history = json.loads(store.get(f"{key}/{peer}"))
                    if step == self.issued.step:
                        found[peer] = history
            if len(found) == len(self.peers) or time.monotonic() > until:
                return found
            time.sleep(0.1)

    def _store(self) -> dist.Store:
        return dist.distributed_c10d._get_default_store()

    def _named(self, issued: str) -> str:
        return f"{KINDS[issued[0]]} unit {self.units[int(issued[1:].split()[0])].name!r}"
