"""A replica of `megazero train` that tells in lines of JSON when it sits in a meeting, and what it took up.

A rank of benchmarks.links.replicas. Takes the flags of a training.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from typing import Any

from megazero.comm.rooms.channel import Refused
from megazero.comm.rooms.member import Met
from megazero.data.sampler import Batches
from megazero.data.shares import cut
from megazero.mesh.objects import gather_objects
from megazero.train import command, setup
from megazero.train.replicas import Membership


class ToldMembership(Membership):
    """Says ``sits``, ``met`` with the samples that the meeting counted, and ``took`` what others met without it."""

    sat = 0.0

    def say_line(self, event: str, number: int, **words: Any) -> None:
        if self.steps.mesh.rank == 0:
            line = {"at": time.time(), "event": event, "number": number, **words}
            print(json.dumps(line), flush=True)

    def anchor_hash(self) -> str:
        """Return a hash of the whole anchor, whatever P, G and OS. Collective."""
        own = [(wire, self.steps.digest(place)) for place, wire in enumerate(self.wires)]
        digests = sorted(pair for rank in gather_objects(own) for pair in rank)
        return hashlib.sha256(f"{digests}".encode()).hexdigest()[:8]

    def _leave(self) -> None:
        self.sat = time.time()
        self.say_line("sits", self.member.standing.number)
        super()._leave()

    def _catch_up(self) -> bool:
        behind = super()._catch_up()
        if behind:
            self.say_line("took", self.member.standing.number, hash=self.anchor_hash())
        return behind

    def _take(self, met: Met) -> None:
        shares = self.stand.dealt.shares
        super()._take(met)
        used = {seat.name: json.loads(seat.header)["used"] for seat in met.seats}
        counted = [part for name, n in used.items() for part in cut(shares.get(name, ()), n)[0]]
        dealt = self.stand.dealt.state()
        names, seconds = [*used], time.time() - self.sat
        words = {"names": names, "seconds": seconds, "counted": counted, "dealt": dealt}
        if self.name in names:  # else it comes behind the others: ``took`` says where it is then
            self.say_line("met", met.number + 1, hash=self.anchor_hash(), **words)

    def join(self, batches: Batches) -> None:
        try:
            super().join(batches)
        except Refused as error:
            self.say_line("Refused", -1, why=f"{error}")
            raise


if __name__ == "__main__":
    setup.Membership = ToldMembership  # type: ignore[misc]
    sys.exit(command.main(sys.argv[1:]))
