"""Idle time of every pipeline schedule against theory, with stages of equal cost that sleep.

    python -m benchmarks.pipeline.bubble [--pp 4 2] [--micro-batches 8] [--rounds 7] [--trace FILE]

The real executor, with its messages between gloo processes. The schedules take turns within a round. Writes the
table into docs/results/pipeline.md and the measured timelines into docs/results/pipeline.png (--out: another folder).
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from benchmarks import harness
from benchmarks.pipeline.sleeping import Case, Run, take_turns
from benchmarks.pipeline.timelines import Timeline, chrome_trace, draw
from benchmarks.results import PAGES
from megazero.pp.schedules import SCHEDULES, make_schedule, peak_activations
from megazero.pp.timeline import Times, ideal_bubble, simulate
from tests.dist.pool import run_ranks

TITLE = "Bubble against theory"
VIRTUAL = 2  # stages per rank of the interleaved schedule
HEADER = [
    *("schedule", "ranks", "stages per rank", "theory", "simulated with the measured times"),
    *("measured", "measured / theory", "activations, theory", "activations, measured"),
]
TEXT = """    python -m benchmarks.pipeline.bubble

Stages sleep instead of computing, {times} ms for one micro-batch ({micro_batches} micro-batches), and run through
the real executor and its messages. F is a forward, I and W are the halves of a backward: gradients of the stage's
input and of its weights. *Theory*: idle share with equal stages and free messages
(`pp/timeline.py: ideal_bubble`). *Simulated*: the schedule with the measured time of every action and free messages
(`pp/timeline.py: simulate`); the rest of the measured bubble is messages and the executor. *Activations*: the most
forwards a rank held at once, rank 0 first, measured by counting what autograd and the deferred gradients keep
alive. {rounds} rounds, the schedules in turn; {setting}.

{table}

![Measured timelines](pipeline.png)
"""


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


def typical(case: Case, runs: list[Run]) -> Timeline:
    """Return the timeline of the run with the median bubble."""
    timelines = sorted((Timeline(case.pp, run.spans) for run in runs), key=lambda timeline: timeline.bubble)
    return timelines[len(timelines) // 2]


def main() -> None:
    parser = harness.parser(
        __doc__, pp=([4, 2], "ranks; the first is drawn"), micro_batches=8, rounds=7, out=PAGES
    )
    parser.add_argument(
        "--times", type=float, nargs=3, default=[40, 40, 40], metavar=("F", "I", "W"), help="milliseconds"
    )
    parser.add_argument("--trace", type=Path, help="the drawn timelines for chrome://tracing, one file each")
    options = parser.parse_args()
    times = Times(*(ms / 1e3 for ms in options.times))
    rows, drawn = [], {}
    for pp in options.pp:
        cases = [
            Case(name, pp, VIRTUAL if name == "interleaved" else 1, options.micro_batches, times)
            for name in SCHEDULES
        ]
        runs = run_ranks(pp, take_turns, cases, options.rounds, timeout=600)[0]
        rows += [row(case, of_case) for case, of_case in zip(cases, runs, strict=True)]
        drawn = drawn or {
            case.schedule: typical(case, of_case) for case, of_case in zip(cases, runs, strict=True)
        }
    text = TEXT.format(
        times=", ".join(f"{kind} {ms:g}" for kind, ms in zip("FIW", options.times, strict=True)),
        micro_batches=options.micro_batches,
        rounds=options.rounds,
        setting=harness.setting(),
        table=harness.table(HEADER, rows),
    )
    print(text)
    harness.write_section(options.out / "pipeline.md", TITLE, text)
    draw(drawn, options.out / "pipeline.png")
    if options.trace:
        for name, timeline in drawn.items():
            file = options.trace.with_stem(f"{options.trace.stem}-{name}")
            file.write_text(json.dumps(chrome_trace(timeline)))


if __name__ == "__main__":
    harness.start(main)
