"""How much of the time replicas learn where they fail now and then: replicas that come and go, fixed ones, one job.

    python -m benchmarks.planning.goodput [--down 300] [--round 600] [--save 300] [--lost 2.3]

Simulated: each replica fails at random, as often as MTBF says, and is back DOWN seconds later. The share of the
replicas' seconds whose learning stays, by what happens meanwhile:

    elastic  The others lose LOST seconds and go on. Who failed loses what it learned since the last meeting, takes
             the anchor and trains for the next one.
    fixed    Who failed goes on from its last checkpoint, saved every SAVE seconds at no cost; the others wait for it
             at the next meeting.
    one job  A step is everyone's: all go back to the last checkpoint.

Prints the table of docs/guide/slow-links.md.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks import harness

REPLICAS, MTBF = (2, 4, 8, 16), (1, 4, 24)  # hours of a replica between failures
ROUNDS = 4000


@dataclass(frozen=True)
class Times:
    """Seconds: of a replica from failure to training, between meetings, between saves, and lost by the others."""

    down: float = 300.0
    round: float = 600.0
    save: float = 300.0
    lost: float = 2.3


def elastic(replicas: int, mtbf: float, times: Times, draw: random.Random) -> float:
    """Return the goodput of replicas that come and go; ``mtbf``: seconds of one between failures."""
    back, clock, learned = [0.0] * replicas, 0.0, 0.0
    for _ in range(ROUNDS):
        end, kills = clock + times.round, 0
        for i, since in enumerate(max(each, clock) for each in back):
            fails = since + draw.expovariate(1 / mtbf)
            if since < end <= fails:
                learned += end - since
            elif fails < end:
                back[i], kills = fails + times.down, kills + 1
        clock = end + kills * times.lost
    return learned / (replicas * clock)


def fixed(replicas: int, mtbf: float, times: Times, draw: random.Random) -> float:
    """Return the goodput of replicas that wait for each other."""
    spent = sum(max(_seconds(mtbf, times, draw) for _ in range(replicas)) for _ in range(ROUNDS))
    return ROUNDS * times.round / spent


def one_job(replicas: int, mtbf: float, times: Times, draw: random.Random) -> float:
    """Return the goodput of a job that fails where any replica's share of it does."""
    return ROUNDS * times.round / sum(_seconds(mtbf / replicas, times, draw) for _ in range(ROUNDS))


def _seconds(mtbf: float, times: Times, draw: random.Random) -> float:
    """Return how long it takes to learn for a round, from checkpoint to checkpoint."""
    spent, left = 0.0, times.round
    while left > 0:
        piece, fails = min(left, times.save), draw.expovariate(1 / mtbf)
        if fails < piece:
            spent += fails + times.down
        else:
            spent, left = spent + piece, left - piece
    return spent


FORMS: dict[str, Callable[[int, float, Times, random.Random], float]] = {
    "elastic": elastic, "fixed": fixed, "one job": one_job,
}  # fmt: skip


def table(times: Times) -> str:
    rows = []
    for replicas in REPLICAS:
        cells = [
            form(replicas, 3600 * hours, times, random.Random(0)) for hours in MTBF for form in FORMS.values()
        ]
        rows.append([str(replicas), *(f"{cell:.1%}" for cell in cells)])
    return harness.table(["replicas", *(f"{hours} h: {form}" for hours in MTBF for form in FORMS)], rows)


def main() -> None:
    options = harness.parser(__doc__, **vars(Times())).parse_args()
    print(table(Times(**vars(options))))


if __name__ == "__main__":
    harness.start(main)
