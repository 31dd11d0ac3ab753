"""The cost of heartbeats and timing: the time inside them over the time of the steps, counted directly.

    python -m benchmarks.features.heartbeat [--steps 60] [--hidden 256]

A training of a few seconds in which each rank counts, besides the seconds of its steps:

- timing: the main thread's seconds in the time bill's spans, in reading stalls, and in gathering and judging times
  of ranks, less what it takes to count a call of nothing;
- heartbeat: the seconds of the watchdog's threads, which hold the interpreter for no longer.

All are CPU seconds of a thread, which other programs do not change. Timing is divided by the main thread's CPU
seconds in its steps, which are at most the real ones; heartbeats, which come once a second, by real seconds. The
largest ratio of the ranks is printed.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from functools import wraps
from pathlib import Path
from typing import Any

from benchmarks import harness
from megazero.log.time_bill import _Span
from megazero.ops.stragglers import Stragglers
from megazero.train.trainer import Trainer
from tests.dist.runs import Processes

TIMING = (
    (_Span, "__init__"),
    (_Span, "__enter__"),
    (_Span, "__exit__"),
    (Stragglers, "take"),
    (Trainer, "_take_stalls"),
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero3": {"zero_preset": "zero3"},
    "zeropp, 2 nodes of 2": {"zero_preset": "zeropp", "ranks_per_node": 2},
    "TP 2, PP 2": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 2,
    },
}


def count(rank: int) -> None:
    """Count in this process, and write the figures beside its log when the training is over."""
    seconds, calls = [0.0], [0]

    def counted(call: Any) -> Any:
        @wraps(call)
        def run(*arguments: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*arguments, **options)
            finally:
                seconds[0] += time.thread_time() - began
                calls[0] += 1

        return run

    nothing, tries = counted(lambda: None), 20_000
    for _ in range(tries):
        nothing()
    counting, seconds[0], calls[0] = seconds[0] / tries, 0.0, 0
    for owner, name in TIMING:
        setattr(owner, name, counted(getattr(owner, name)))
    train, iterate = Trainer.run, Trainer._iterate
    steps: list[float] = []

    def iterated(self: Trainer, *arguments: Any) -> Any:
        began = time.thread_time()
        info = iterate(self, *arguments)
        steps.append(time.thread_time() - began)
        return info

    def run(self: Trainer) -> Any:
        began, beats = time.perf_counter(), cpu_seconds()
        status = train(self)
        figures = {
            "steps": len(steps),
            "step_s": sum(steps) / len(steps),
            "timing": (seconds[0] - counting * calls[0]) / sum(steps),
            "calls": calls[0] / len(steps),
            "heartbeat": (cpu_seconds() - beats) / (time.perf_counter() - began),
        }
        Path(self.config.logging.log_dir, f"cost{rank}.json").write_text(json.dumps(figures))
        return status

    Trainer._iterate, Trainer.run = iterated, run  # type: ignore[method-assign]


def cpu_seconds() -> float:
    """Return the CPU seconds of the watchdog's threads so far."""
    ours = [each for each in threading.enumerate() if "watch" in each.name]
    assert ours
    return sum(
        time.clock_gettime(time.pthread_getcpuclockid(each.ident)) for each in ours if each.ident is not None
    )


def main() -> None:
    parser = harness.parser(__doc__, steps=60, hidden=(256, "hidden size of the model of 4 layers"))
    options = parser.parse_args()
    values = {"hidden_size": options.hidden, "ffn_hidden_size": 3 * options.hidden, "num_layers": 4}
    values |= {"seq_length": 128, "vocab_size": 2048, "train_iters": options.steps, "global_batch_size": 8}
    rows = []
    for name, layout in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            ranks = Processes.start(4, {**values, **layout, "log_dir": folder}, Path(folder), prepare=count)
            assert ranks.statuses(600) == [0] * 4, ranks.texts()
            every = [json.loads(Path(folder, f"cost{rank}.json").read_text()) for rank in range(4)]
        worst = max(every, key=lambda each: each["timing"] + each["heartbeat"])
        shares = (worst["timing"], worst["heartbeat"], worst["timing"] + worst["heartbeat"])
        figures = [f"{worst['step_s'] * 1e3:.0f} ms", f"{worst['calls']:.0f}"]
        rows.append([name, *figures, *(f"{share:.3%}" for share in shares)])
    header = ["4 ranks", "CPU of a step", "calls a step", "timing / step", "heartbeat / time", "together"]
    print(harness.table(header, rows))


if __name__ == "__main__":
    harness.start(main)
