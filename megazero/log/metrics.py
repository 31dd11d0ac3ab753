"""metrics.jsonl has one JSON object per line, and one line per iteration or evaluation.

Iteration lines hold the fields of IterationMetrics and any extra keys; evaluation lines hold iteration,
consumed_samples, eval_lm_loss and eval_ppl, and those of the test data eval_data ("test"). Results of other
evaluations have a line with iteration and consumed_samples. Every line has the time at which it was written. The file
is the authority on a run: it survives a kill at any moment, and after a resume it still has one line per iteration.

Numbers that JSON cannot hold are the strings "NaN", "Infinity" and "-Infinity" (null would hide whether it was a NaN
or an overflow); read_metrics turns them back into floats.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megazero.bounded import DEEP, load_json
from megazero.files import decoded, encodable, replacing
from megazero.log.line_file import LineFile

METRICS_FILE = "metrics.jsonl"
SUPERSEDED_FILE = "metrics.superseded.jsonl"


@dataclass(frozen=True, kw_only=True)
class IterationMetrics:
    """What one iteration did. sent: the bytes that one rank sent in the iteration by link: 'intra_node_bytes', ...

    lm_loss is the mean over the valid tokens of the global batch, in nats. tokens_per_s counts the global batch, and
    tflops_per_rank counts the model's FLOPs without recompute. memory_bytes is the peak. time_bill has the items of
    time_bill.items_over in seconds, which add up to iteration_time_s.

    The trainer puts these into extra: batch_size (in samples); decoupled_learning_rate (under --decoupled-lr); bytes
    (by hop and link class); skipped (1 if there was no update); outer (after a meeting of replicas:
    docs/reference/metrics.md); loss_scale (under fp16, that of the next iteration); mfu
    (tflops_per_rank over the device's peak, where that is known).
    Where messages are quantised it also puts quantization_unit (the unit
    measured in this iteration), quantization_error_weights and quantization_error_gradients (||sent - exact|| /
    ||exact||), and quantization_zeroed_gradients (the share of elements that are not 0 and arrive as 0).
    """

    iteration: int
    consumed_samples: int
    lm_loss: float
    grad_norm: float
    learning_rate: float
    iteration_time_s: float
    tokens_per_s: float
    tflops_per_rank: float
    sent: Mapping[str, int]
    memory_bytes: int
    time_bill: Mapping[str, float]
    extra: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields in order, then the extra keys beside them (they may not have the name of a field)."""
        fields = dict[str, Any]()
        for name in (f.name for f in dataclasses.fields(self) if f.name != "extra"):
            fields |= self.sent if name == "sent" else {name: getattr(self, name)}
        shadowed = fields.keys() & self.extra.keys()
        assert not shadowed, f"extra metrics shadow fields: {sorted(shadowed)}"
        return fields | {"time_bill": dict(self.time_bill)} | dict(self.extra)


def average(lines: Sequence[IterationMetrics]) -> IterationMetrics:
    """Return a log interval as one line.

    The line has the last position, the means of losses, norms, times and bytes, and the peak of memory. Rates are
    totals over total time, so a slow iteration weighs as long as it took. Non-finite losses and norms (their steps
    were skipped) are left out unless all are non-finite. The extra key `skipped` is summed.
    """
    last, count = lines[-1], len(lines)
    norms = [m.grad_norm for m in lines if math.isfinite(m.grad_norm)] or [last.grad_norm]
    losses = [m.lm_loss for m in lines if math.isfinite(m.lm_loss)] or [last.lm_loss]
    skipped = sum(int(m.extra.get("skipped", 0)) for m in lines)
    seconds = sum(m.iteration_time_s for m in lines)

    # All lines have one peak: the share of it that a TFLOP/s is.
    share = last.extra["mfu"] / last.tflops_per_rank if last.extra.get("mfu") else 0.0

    def mean(values: Iterable[float]) -> float:
        return sum(values) / count

    def rate(name: str) -> float:
        return sum(getattr(m, name) * m.iteration_time_s for m in lines) / seconds if seconds > 0 else 0.0

    return dataclasses.replace(
        last,
        lm_loss=sum(losses) / len(losses),
        grad_norm=sum(norms) / len(norms),
        iteration_time_s=seconds / count,
        tokens_per_s=rate("tokens_per_s"),
        tflops_per_rank=rate("tflops_per_rank"),
        sent={name: round(mean(m.sent[name] for m in lines)) for name in last.sent},
        memory_bytes=max(m.memory_bytes for m in lines),
        time_bill={name: mean(m.time_bill[name] for m in lines) for name in last.time_bill},
        extra=dict(last.extra)
        | ({"skipped": skipped} if skipped else {})
        | ({"mfu": share * rate("tflops_per_rank")} if share else {}),
    )


class MetricsWriter:
    """Appends lines to LOG_DIR/metrics.jsonl. It is made on one rank only.

    iteration: training continues after this iteration (0: it starts from the beginning). On opening, lines of
    later iterations, which this run is about to write again, move to metrics.superseded.jsonl. A torn line (the
    process was killed while it wrote) moves there as {"torn": text}. The first iteration line has the extra keys
    of ``start`` and, after a resume, resumed_from. guard: as LineFile's.

    Each line is one unbuffered write. What a full disk does not take waits in memory (LineFile); training goes on.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        *,
        iteration: int,
        start: Mapping[str, Any] | None = None,
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = Path(log_dir) / METRICS_FILE
        self._file = LineFile(self.path, lambda: _supersede(self.path, iteration), guard=guard)
        self._first = {**({"resumed_from": iteration} if iteration else {}), **(start or {})}

    def iteration(self, metrics: IterationMetrics) -> None:
        self._write(metrics.as_dict() | self._first)
        self._first = {}

    def evaluation(self, iteration: int, consumed_samples: int, loss: float, **extra: Any) -> dict[str, Any]:
        """Write and return an evaluation line. The loss is in nats per valid token."""
        line = {
            "iteration": iteration,
            "consumed_samples": consumed_samples,
            "eval_lm_loss": loss,
            "eval_ppl": perplexity(loss),
        } | extra
        self._write(line)
        return line

    def results(self, iteration: int, consumed_samples: int, results: Mapping[str, float]) -> dict[str, Any]:
        """Write and return a line with the results of other evaluations by name."""
        line = {"iteration": iteration, "consumed_samples": consumed_samples, **results}
        self._write(line)
        return line

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.append(encode({**line, "time": now()}))

    def close(self) -> None:
        self._file.close()


def now() -> str:
    """Return the time as the lines have it: ISO 8601 in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity where a float cannot hold it."""
    return math.exp(loss) if not loss > 709.0 else math.inf


def encode(line: Mapping[str, Any]) -> bytes:
    """Return one line of strict JSON, with its newline."""
    return json.dumps(encodable(line), allow_nan=False).encode("ascii") + b"\n"


def decode(text: str | bytes) -> dict[str, Any]:
    """Return a line as a dict again. Raises ValueError if it is not a whole JSON object."""
    try:
        line = decoded(load_json(text))
    except RecursionError:
        raise ValueError(DEEP) from None
    if not isinstance(line, dict):
        raise ValueError(f"not a JSON object: {text!r:.80}")
    return line


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return every line of a metrics.jsonl (or of the one in a log directory), in order.

    Torn lines are left out with a warning. Raises FileNotFoundError if there is no file, and ValueError if it has
    torn lines only.
    """
    file = Path(path)
    if file.is_dir():
        file = file / METRICS_FILE
    good, torn = read_lines(file.read_bytes())
    if torn and not good:
        raise ValueError(f"{file} is not a metrics file: none of its {len(torn)} lines is a JSON object")
    if torn:
        warnings.warn(f"{file}: {len(torn)} torn line(s) left out", stacklevel=2)
    return [line for _, line in good]


def read_lines(data: bytes) -> tuple[list[tuple[bytes, dict[str, Any]]], list[bytes]]:
    """Return the whole lines (their bytes and contents) and the torn ones. Blank lines are neither."""
    good: list[tuple[bytes, dict[str, Any]]] = []
    torn: list[bytes] = []
    for raw in data.split(b"\n"):
        try:
            if raw.strip():
                good.append((raw, decode(raw)))
        except ValueError:  # includes json.JSONDecodeError and UnicodeDecodeError
            torn.append(raw)
    return good, torn


def _supersede(path: Path, iteration: int) -> None:
    """Leave in `path` the whole lines up to `iteration`, and move the rest beside it.

    This is safe to repeat: the moved lines are on disk before the file loses them, and after a kill in between they
    are not appended twice.
    """
    if not path.exists():
        return
    data = path.read_bytes()
    good, torn = read_lines(data)
    keep, move = list[bytes](), list[bytes]()
    for raw, line in good:
        (move if line.get("iteration", 0) > iteration else keep).append(raw + b"\n")
    move += [encode({"torn": raw.decode("utf-8", "replace")}) for raw in torn]
    kept = b"".join(keep)
    if kept == data:
        return
    if move:
        moved = b"".join(move)
        with open(path.with_name(SUPERSEDED_FILE), "a+b") as side:
            side.seek(max(0, side.tell() - len(moved)))
            if side.read() != moved:
                side.write(moved)
            side.flush()
            os.fsync(side.fileno())
    with replacing(path) as file:
        file.write(kept)
