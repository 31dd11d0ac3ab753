"""Idle time of every pipeline schedule against theory, with stages of equal cost that sleep.

    python -m benchmarks.pipeline.bubble [--pp 4 2] [--micro-batches 8] [--rounds 7]

The real executor, with its messages between gloo processes. The schedules take turns within a round. Prints the table
of docs/results/pipeline.md.
"""

from __future__ import annotations

import statistics

from benchmarks import harness
from benchmarks.pipeline.sleeping import Case, Run, take_turns
from benchmarks.pipeline.timelines import Timeline
from megazero.pp.schedules import SCHEDULES, make_schedule, peak_activations
from megazero.pp.timeline import Times, ideal_bubble, simulate
from tests.dist.pool import run_ranks

VIRTUAL = 2  # stages per rank of the interleaved schedule
HEADER = [
    *("schedule", "ranks", "stages per rank", "theory", "simulated with the measured times"),
    *("measured", "measured / theory", "activations, theory", "activations, measured"),
]


def replayed(case: Case, run: Run) -> Timeline:
    """Return the schedule, simulated with each action's measured time."""
    took = {span.action: span.stop - span.start for span in run.spans}
    schedule = make_schedule(case.schedule, case.pp, case.virtual, case.micro_batches)
    return Timeline(case.pp, simulate(schedule, case.pp, time_of=took.__getitem__))


def percent(values: list[float]) -> str:
    return f"{statistics.median(values):.1%} ({min(values):.1%} to {max(values):.1%})"


def row(case: Case, runs: list[Run]) -> list[str]:
    theory = ideal_bubble(case.schedule, case.pp, case.virtual, case.micro_batches, case.of_stage)
    measured = [Timeline(case.pp, run.spans).bubble for run in runs]
    free = statistics.median(replayed(case, run).bubble for run in runs)
    peaks = peak_activations(case.schedule, case.pp, case.virtual, case.micro_batches)
    held = [max(of_rank) for of_rank in zip(*(run.held for run in runs), strict=True)]
    return [
        *(case.schedule, str(case.pp), str(case.virtual), f"{theory:.1%}", f"{free:.1%}", percent(measured)),
        f"{statistics.median(measured) / theory:.3f}",
        *(", ".join(map(str, counts)) for counts in (peaks, held)),
    ]


def main() -> None:
    parser = harness.parser(__doc__, pp=[4, 2], micro_batches=8, rounds=7)
    parser.add_argument(
        "--times", type=float, nargs=3, default=[40, 40, 40], metavar=("F", "I", "W"), help="milliseconds"
    )
    options = parser.parse_args()
    times = Times(*(ms / 1e3 for ms in options.times))
    rows = []
    for pp in options.pp:
        cases = [
            Case(name, pp, VIRTUAL if name == "interleaved" else 1, options.micro_batches, times)
            for name in SCHEDULES
        ]
        found = run_ranks(pp, take_turns, cases, options.rounds, timeout=600)[0]
        rows += [row(case, runs) for case, runs in zip(cases, found, strict=True)]
    print(f"{harness.setting()}\n\n{harness.table(HEADER, rows)}")


if __name__ == "__main__":
    harness.start(main)
