"""The order of use: recorded once per kind of segment, then checked, and hashed so that ranks can compare it.

A step is a program: a sequence of segments. Each is the forward (F), the backward (B, or I for the input's
gradient alone) or the weights' gradients (W) of one part of the module for one micro-batch. The program says
which segments come; the record of a segment's kind says in which order it uses units. Together they predict
every gather of a step, whatever the number of micro-batches. ``Agreement`` names the unit where ranks differ.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist

from megazero.bounded import load_json
from megazero.comm.lane import Differ
from megazero.mesh.mesh import Mesh
from megazero.zero.unit import Unit

FORWARD, BACKWARD, INPUT, WEIGHT, EVALUATION = "F", "B", "I", "W", "E"


class Segment(NamedTuple):
    """kind: F, B, I or W, or E, which stands for all forwards of an evaluation. part: the part of the module."""

    kind: str
    part: int = 0


Use = tuple[int, ...]  # indices of the units that one module needs


class UseOrder:
    """Records what modules need, in order of use, within one kind of segment."""

    def __init__(self) -> None:
        self.sequence: list[Use] = []
        self.position = 0

    def begin(self) -> None:
        """Start over. If the last pass was shorter than the record, its tail is forgotten."""
        if self.position:
            del self.sequence[self.position :]
            self.position = 0

    def use(self, needs: Use) -> None:
        """Note a use. Where it differs from the record, recording restarts from here."""
        at = self.position
        if at < len(self.sequence) and self.sequence[at] != needs:
            del self.sequence[at:]
        if at == len(self.sequence):
            self.sequence.append(needs)
        self.position += 1


class Program:
    """Holds the open step's segments, the place in them, and the recorded orders."""

    def __init__(self) -> None:
        self.orders: defaultdict[Segment, UseOrder] = defaultdict(UseOrder)
        self.segments: Sequence[Segment] = ()
        self.at = 0  # the current segment, or the next one
        self.current: Segment | None = None

    def open(self, segments: Sequence[Segment]) -> None:
        self.segments, self.at, self.current = segments, 0, None

    def enter(self, segment: Segment) -> None:
        """Go to the next such segment, or past the end where the program has none (for one more forward, say)."""
        self.leave()
        rest = range(self.at, len(self.segments))
        self.at = next((i for i in rest if self.segments[i] == segment), len(self.segments))
        self.current = segment
        self.orders[segment].begin()

    def leave(self) -> None:
        if self.current is not None:
            self.current = None
            self.at += 1

    def use(self, needs: Use) -> None:
        assert self.current is not None
        self.orders[self.current].use(needs)

    def upcoming(self) -> Iterator[Use]:
        """Return what the modules of the rest of the program will need, in their order, as far as it is recorded."""
        rest: Sequence[Use] = ()
        if self.current is not None:
            order = self.orders[self.current]
            rest = order.sequence[order.position :]
        return chain(
            rest, chain.from_iterable(self.orders[self.segments[i]].sequence for i in self._following())
        )

    def returns_to(self, part: int) -> bool:
        """Whether a later segment needs the part's parameters."""
        return any(
            self.segments[i].part == part and self.segments[i].kind != WEIGHT for i in self._following()
        )

    def _following(self) -> range:
        return range(self.at + int(self.current is not None), len(self.segments))


class IssueHash:
    """A hash of everything issued in a step. It has 32 bits, so it is exact in a float64 that ranks exchange.

    history: the issued collectives, for ranks that differ (``Agreement``), kept until the next step issues something.
    """

    def __init__(self) -> None:
        self.value = self.taken = 0
        self.history: list[str] = []
        self.step = 0  # that history is of

    def add(self, text: str) -> None:
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


ANSWER_S = 5.0  # for which the others are waited for once something has failed
KINDS = {
    "g": "gathers",
    "r": "reduces",
    "t": "sums the tied parameters of",
    "o": "takes the outer step of",
}

_ENTRY = re.compile(f"[{''.join(KINDS)}](\\d{{1,9}})\\b")  # of a history


class Agreement:
    """Compares what data-parallel ranks have issued in the open step, and names the unit that they disagree about.

    Ranks that use different units in a step, or in another order, issue different collectives, which hang, mix up
    values, or fail in the backend's words. Steady steps pay nothing: only a rank that has waited long, has failed, or
    sees at the step's end that the hashes differ puts what it has issued into the store and reads what the others put
    there. In a hang, all of them wait. An evaluation, which no step ends, ends with an exchange of its own.
    """

    def __init__(self, mesh: Mesh, units: Sequence[Unit], issued: IssueHash) -> None:
        self.rank, self.units, self.issued = mesh.rank, units, issued
        at = (mesh.pp.index, mesh.tp.index, mesh.replica)
        ranks = [mesh.grid.rank_of(at[0], i, at[1], at[2]) for i in range(mesh.dp_size)]
        self.peers = [rank for rank in ranks if rank != mesh.rank]
        self.evaluations = 0  # that have ended here
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
        except (
            dist.DistError,
            ValueError,
            TypeError,
        ):  # the store has gone with its rank, or holds other words
            return
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

    def end_evaluation(self, mesh: Mesh) -> None:
        """Wait until all ranks have ended their evaluation. Raises RuntimeError where peers used other units in it.

        This rank leaves word before it waits: a peer that waits for it in a gather finds that it has ended.
        """
        if not self.engine:
            return
        self.evaluations += 1
        told = json.dumps([self.evaluations, len(self.issued.of_step())])
        self._store().set(f"megazero/evaluated/{self.engine}/{self.rank}", told)
        try:
            hashes = mesh.gather_rows(
                torch.tensor([self.issued.value], dtype=torch.float64, device=mesh.device)
            )
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} has ended its evaluation(), and another rank has failed in its own ({error}): its "
                "log says why"
            ) from error
        if any(float(hashes[peer]) != self.issued.value for peer in self.peers):
            self.check(failed=True)
            raise RuntimeError("ranks used other units in evaluation(), or in another order")

    def _ended(self) -> dict[int, int]:
        """Return the peers that have ended the evaluation that is open here: what they had issued by then."""
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
