"""The console output of a training run: a header, a progress bar, one line per log interval.

On a terminal, rich draws a progress bar with the time left below the lines. Anywhere else (CI, SLURM logs, a pipe)
the same lines are written plainly: no control characters, no colours, no bar, but a line for the first iteration and
one at least every LINE_S seconds. One rank prints; on the others a TrainConsole is silent.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megazero.config.options.skipping import due
from megazero.log.metrics import IterationMetrics, average, perplexity
from megazero.log.terminal import SafeConsole
from megazero.log.units import duration, human_bytes, human_count
from megazero.mesh.levels import INTER, INTRA, across

SAY_S = 30.0  # between lines of an evaluation
LINE_S = 60.0  # of iterations without a line, where there is no bar


class TrainConsole:
    """Prints on one rank (``enabled``) or not at all. Use it in a ``with``, so that the bar goes away on any exit.

    total: the run's last iteration. begin: the iteration that it continues after. log_interval: iterations between
    lines. stream: where lines go, the standard output by default. There is a bar only if it is a terminal.
    """

    def __init__(
        self,
        *,
        total: int,
        begin: int = 0,
        log_interval: int = 10,
        enabled: bool = True,
        stream: TextIO | None = None,
    ) -> None:
        self._total, self._begin, self._log_interval = total, begin, log_interval
        self._enabled = enabled
        self._stream = stream if stream is not None else sys.stdout
        self._pending: list[IterationMetrics] = []
        self._reached = begin  # the iteration of the last metrics
        self._said = 0.0  # when a line last said how far an evaluation is
        self._rich: Console | None = None
        self._progress: Progress | None = None
        console = SafeConsole(self._stream, highlight=False, force_terminal=self._stream.isatty())
        if enabled and console.is_terminal and not console.is_dumb_terminal:
            self._rich = console
            self._progress = _progress(console)

    def __enter__(self) -> TrainConsole:
        if self._progress is not None:
            self._task = self._progress.add_task(
                "training", total=self._total, completed=self._begin, loss="", left=""
            )
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._pending:
            self._interval()
        if self._progress is not None:
            self._progress.stop()

    def header(self, title: str, facts: Mapping[str, Any]) -> None:
        """The run in two lines: its title, and facts by name."""
        self._line(title, style="bold")
        self._line(f" {' | '.join(f'{name} {value}' for name, value in facts.items())}")

    def note(self, text: str) -> None:
        """A thing that happened: a checkpoint saved, a batch size changed, why training stops."""
        self._line(f" {text}", style="cyan")

    def warning(self, text: str) -> None:
        self._line(f" warning: {text}", style="yellow")

    def iteration(self, metrics: IterationMetrics) -> None:
        """Advance the bar; every log_interval iterations, print their mean as one line. Without a bar a line comes
        also for the first iteration, and when those without one have taken LINE_S seconds.
        """
        if not self._enabled:
            return
        self._pending.append(metrics)
        if self._progress is not None:
            left = duration(_seconds_left(average(self._pending), self._total))
            loss = f"loss {metrics.lm_loss:.4f}"
            self._progress.update(self._task, completed=metrics.iteration, loss=loss, left=left)
        since, self._reached = self._reached, metrics.iteration
        silent = sum(each.iteration_time_s for each in self._pending)
        early = self._progress is None and (since == self._begin or silent >= LINE_S)
        if early or due(self._log_interval, since, metrics.iteration) or metrics.iteration >= self._total:
            self._interval()

    def evaluation(self, iteration: int, loss: float, split: str = "validation") -> None:
        """The result of an evaluation; loss in nats per token."""
        self._line(
            f" evaluation at {iteration:,} on {split} | loss {loss:.4f} | perplexity {perplexity(loss):.4g}",
            style="green",
        )

    def evaluating(self, split: str, done: int, steps: int) -> None:
        """Say how far an evaluation is: on the bar, or in a line every SAY_S seconds."""
        if self._progress is not None:
            self._progress.update(self._task, loss=f"evaluating {split} {done}/{steps}")
        elif done in (0, steps):
            self._said = time.monotonic()
        elif time.monotonic() - self._said >= SAY_S:
            self._said = time.monotonic()
            self._line(f" evaluating on {split}: {done} of {steps} batches")

    def _interval(self) -> None:
        mean = average(self._pending)
        self._pending.clear()
        self._line(interval_line(mean, self._total, f"{datetime.now():%H:%M:%S}"))

    def _line(self, text: str, style: str | None = None) -> None:
        if not self._enabled:
            return
        if self._rich is not None:
            self._rich.print(escape(text), style=style, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)


def interval_line(mean: IterationMetrics, total: int, clock: str) -> str:
    """One log interval as text: position, time, loss, norm, rate, speed, bytes sent by a rank, memory, time left."""
    width = len(str(total))
    skipped = mean.extra.get("skipped", 0)
    parts = [
        f" iteration {mean.iteration:>{width}}/{total}",
        clock,
        f"samples {mean.consumed_samples:,}",
        f"loss {mean.lm_loss:.4f}",
        f"grad norm {mean.grad_norm:.3f}",
        f"lr {mean.learning_rate:.3e}{_decoupled(mean)}",
        f"{mean.iteration_time_s * 1000:.0f} ms/iter",
        f"{human_count(mean.tokens_per_s)} tokens/s",
        f"{mean.tflops_per_rank:.3g} TFLOP/s per rank{_utilisation(mean)}",
        f"sent {', '.join(_sent(mean))}",
        f"memory {human_bytes(mean.memory_bytes)}",
    ]
    parts += [f"loss scale {mean.extra['loss_scale']:g}"] if "loss_scale" in mean.extra else []
    parts += _experts(mean) + ([f"skipped {skipped}"] if skipped else [])
    left = _seconds_left(mean, total)
    return " | ".join(parts + ([f"left {duration(left)}"] if left else []))


def _seconds_left(mean: IterationMetrics, total: int) -> float:
    """Return the seconds to the last iteration, ``total``: by tokens, since batches and samples may have grown."""
    if (tokens := mean.extra.get("tokens_left")) is not None and mean.tokens_per_s:
        return float(tokens) / mean.tokens_per_s
    return (total - mean.iteration) * mean.iteration_time_s


def _sent(mean: IterationMetrics) -> Iterator[str]:
    """Yield the bytes over each link, that inside a node first."""
    words = {f"{INTRA}_bytes": "in node", f"{INTER}_bytes": "across"}
    for name, sent in mean.sent.items():
        yield f"{human_bytes(sent)} {words.get(name) or across(name.removesuffix('_bytes'))}"


def _utilisation(mean: IterationMetrics) -> str:
    return f" ({mean.extra['mfu']:.1%} MFU)" if "mfu" in mean.extra else ""


def _experts(mean: IterationMetrics) -> list[str]:
    """Return the balance of experts in the interval's last iteration, of a model that has some."""
    told = mean.extra.get("experts")
    if told is None:
        return []
    parts = [f"fullest expert {told['load']:.2f} x the mean (layer {told['fullest_layer']})"]
    names = {"load_balancing_loss": "balance loss", "z_loss": "router z loss"}
    return [*parts, *(f"{text} {told[name]:.4g}" for name, text in names.items() if name in told)]


def _decoupled(mean: IterationMetrics) -> str:
    rate = mean.extra.get("decoupled_learning_rate")
    return "" if rate is None else f" (embedding and head {rate:.3e})"


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        TextColumn("left {task.fields[left]}"),
        console=console,
        transient=True,
    )
