"""Whether ranks issue the same collectives.

A hash of those that were issued is compared in every step. Where hashes differ, the unit is named.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

from megazero.bounded import load_json
from megazero.comm.lane import Differ
from megazero.mesh.mesh import Mesh
from megazero.zero.axes import DataAxes
from megazero.zero.scalars import NOTHING, Rows, StepPart, Sums
from megazero.zero.unit import Unit


class IssueHash:
    """A hash of everything issued in a step. It has 32 bits, so it is exact in a float64 that ranks exchange.

    history: the issued collectives, for ranks that differ (``Agreement``), kept until what comes after the step, or
        after an evaluation, issues something.
    units: all of this rank, which the history names by their places.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units, self._places = units, {unit: place for place, unit in enumerate(units)}
        self.value = self.taken = 0
        self.history: list[str] = []
        self.step = 0  # the step that the history belongs to

    def add(self, deed: str, unit: Unit, how: str = "") -> None:
        """Note what is issued for a unit. deed: one of KINDS. how: what else ranks must agree on."""
        text = f"{deed}{self._places[unit]} {how}"
        if self.step != self.taken:
            self.step, self.history = self.taken, []
        self.history.append(text)
        self.value = crc32(text.encode(), self.value)

    def of_step(self) -> list[str]:
        """Return what has been issued in the open step."""
        return self.history if self.step == self.taken else []

    def take(self) -> int:
        value, self.value = self.value, 0
        self.taken += 1
        return value


def unlike(mesh: Mesh, axes: DataAxes, values: torch.Tensor) -> list[int]:
    """Return the places at which ranks along the axes have different values [n]. Collective over them."""
    rows = mesh.gather_along(axes.axes, values)
    return (rows != rows[0]).any(0).nonzero().flatten().tolist()


ANSWER_S = 5.0  # how long a rank waits for the others' histories once something has failed
KINDS = {
    "g": "gathers",
    "r": "reduces",
    "t": "sums the tied parameters of",
    "o": "takes the outer step of",
}

_ENTRY = re.compile(f"[{''.join(KINDS)}](\\d{{1,9}})\\b")  # an entry of a history


class Agreement(StepPart):
    """Compares what data-parallel ranks have issued in the open step, and names the unit that they disagree about.

    Ranks that use different units in a step, or in another order, issue different collectives, which hang, mix up
    values, or fail in the backend's words. Steady steps pay nothing: only a rank that has waited long, has failed, or
    sees at the step's end that the hashes differ puts what it has issued into the store and reads what the others put
    there. In a hang, all of them wait. An evaluation, which no step ends, ends with an exchange of its own.
    """

    columns = 1  # the hash of what this rank has issued in the step

    def __init__(self, mesh: Mesh, issued: IssueHash) -> None:
        self.mesh, self.rank, self.units, self.issued = mesh, mesh.rank, issued.units, issued
        ranks = [mesh.grid.rank_of(mesh.pp.index, i, mesh.tp.index) for i in range(mesh.dp_size)]
        self.peers = [rank for rank in ranks if rank != mesh.rank]
        self.evaluations = 0  # how many have ended on this rank
        self.engine = 0  # its number, the same on every rank: to make one is collective
        if self.peers and dist.is_initialized():
            self.engine = self._store().add(f"megazero/engines/{mesh.rank}", 1)

    def write(self, row: torch.Tensor) -> None:
        row.fill_(float(self.issued.take()))

    def read(self, rows: Rows, sums: Sums) -> Mapping[str, Any]:
        """Raise RuntimeError if ranks of one stage issued other collectives."""
        stage, hashes = self.mesh.grid.axis("pp").index, dict[int, set[float]]()
        for rank, (issued,) in enumerate(rows):
            hashes.setdefault(stage(rank), set()).add(issued)
        if any(len(issued) > 1 for issued in hashes.values()):
            self.check(failed=True)
            raise RuntimeError(
                f"ranks issued different collectives in this step (hashes {[row[0] for row in rows]}): the modules "
                "must be called in the same order on every rank"
            )
        return NOTHING

    def aborted(self) -> None:
        self.issued.take()  # ranks may have been broken off at different places

    def check(self, failed: bool = False) -> None:
        """Raise Differ, with the names of units, if a peer is known to have issued something else.

        failed: peers will soon look too; wait for them.
        """
        if not self.peers:
            return
        try:
            theirs = self._exchange(time.monotonic() + (ANSWER_S if failed else 0.0))
        except (dist.DistError, ValueError, TypeError):
            return  # the store has gone with its rank, or holds other words
        for peer, issued in theirs.items():
            for own, other in zip(self.issued.history, issued, strict=False):
                if own != other:
                    raise Differ(
                        f"ranks issued different collectives in this step: rank {self.rank} {self._named(own)} where "
                        f"rank {peer} {self._named(other)}; every rank must call the same modules in the same order "
                        "(with an input of no consequence where it has none)"
                    )
        for peer, count in self._ended().items():
            if further := self.issued.of_step()[count:]:
                raise Differ(
                    f"rank {self.rank} {self._named(further[0])} where rank {peer} has ended its evaluation(): every "
                    "rank must call the same modules as often (with an input of no consequence where it has none)"
                )

    def end_evaluation(self) -> None:
        """Wait until all ranks have ended their evaluation. Raises RuntimeError where peers used other units in it.

        This rank leaves word before it waits: a peer that waits for it in a gather finds that it has ended. What has
        been compared is not kept: a loop that only evaluates ends no step.
        """
        if self.engine:
            self._compare_evaluations()
        self.issued.take()

    def _compare_evaluations(self) -> None:
        self.evaluations += 1
        told = json.dumps([self.evaluations, len(self.issued.of_step())])
        self._store().set(f"megazero/evaluated/{self.engine}/{self.rank}", told)
        try:
            own = torch.tensor([self.issued.value], dtype=torch.float64, device=self.mesh.device)
            hashes = self.mesh.gather_rows(own)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} has ended its evaluation(), and another rank has failed in its own ({error}): its "
                "log says why"
            ) from error
        if any(float(hashes[peer]) != self.issued.value for peer in self.peers):
            self.check(failed=True)
            raise RuntimeError("ranks used other units in evaluation(), or in another order")

    def _ended(self) -> dict[int, int]:
        """Return how many collectives peers had issued when they ended the evaluation that is open here."""
        ended, store = dict[int, int](), self._store()
        for peer in self.peers:
            key = f"megazero/evaluated/{self.engine}/{peer}"
            with suppress(dist.DistError, ValueError, TypeError):
                number, count = load_json(store.get(key)) if store.check([key]) else (0, 0)
                if number == self.evaluations + 1:
                    ended[peer] = int(count)
        return ended

    def _exchange(self, until: float) -> dict[int, list[str]]:
        """Publish what was issued here; return what the peers published of the same step."""
        store, key = self._store(), f"megazero/issued/{self.engine}"
        store.set(f"{key}/{self.rank}", json.dumps([self.issued.step, self.issued.history]))
        found: dict[int, list[str]] = {}
        while True:
            for peer in self.peers:
                if store.check([f"{key}/{peer}"]):
                    step, history = load_json(store.get(f"{key}/{peer}"))
                    if step == self.issued.step and all(map(self._is_entry, history)):
                        found[peer] = history
            if len(found) == len(self.peers) or time.monotonic() > until:
                return found
            time.sleep(0.1)

    def _store(self) -> dist.Store:
        return dist.distributed_c10d._get_default_store()

    def _named(self, issued: str) -> str:
        return f"{KINDS[issued[0]]} unit {self.units[int(issued[1:].split()[0])].name!r}"

    def _is_entry(self, issued: object) -> bool:
        """Tell whether a peer's word is an entry of a history: the store takes words from anyone."""
        found = _ENTRY.match(issued) if isinstance(issued, str) else None
        return found is not None and int(found[1]) < len(self.units)
