"""loss.md and loss.png: what the runs of study.py say."""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import harness
from benchmarks.harness import filled
from benchmarks.loss.intervals import Estimate, estimate
from benchmarks.loss.plan import Record, Results
from benchmarks.loss.run import NUDGE, RANKS, TRACE, Settings
from benchmarks.loss.variants import BASELINE, DEFAULT, VARIANTS, Variant
from megazero.comm.codec import Blockwise, Codec
from megazero.comm.wire import DEFAULT_BLOCK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Iterable[Sequence[str]]
PAGE_TITLE, STUDY = "# Loss with quantised communication", "The study"


class Report:
    """tuning: baseline runs at other peak rates. codecs: of weight_codecs. wall: of wall_time. until_decided: runs
    were added until the intervals decided."""

    def __init__(
        self,
        settings: Settings,
        results: Results,
        tuning: Sequence[Record] = (),
        codecs: Sequence[dict[str, Any]] = (),
        wall: dict[str, Any] | None = None,
        until_decided: bool = False,
    ) -> None:
        self.settings, self.results, self.tuning, self.codecs, self.wall = (
            settings,
            results,
            tuning,
            codecs,
            wall,
        )
        self.until_decided = until_decided
        self.names = [name for name in VARIANTS if results.of(name)]
        self.numel = sum(p.numel() for p in settings.decoder().parameters())

    # -- text ------------------------------------------------------------------------------------

    def markdown(self, command: str) -> str:
        parts = [self._introduction(command), self._variants(), self._noise()]
        if self.wall:
            parts.append(self._wall_time(self.wall))
        if self.codecs:
            parts.append(self._codecs())
        if len({r["settings"]["peak"] for r in self.tuning}) > 1:
            parts.append(self._tuning())
        return "\n\n".join(parts) + "\n"

    def _introduction(self, command: str) -> str:
        s = self.settings
        text = f"""
            A Llama of {self.numel:,} parameters ({s.layers} layers, hidden {s.hidden}, ffn {s.ffn}, vocabulary
            {s.vocabulary:,}, sequence {s.sequence}) learns the sources of Python {platform.python_version()}'s
            standard library: {s.steps} steps of {s.tokens:,} tokens on {RANKS} ranks as {RANKS // s.node} nodes of
            {s.node}; {s.dtype} parameters, fp32 master, AdamW (0.9, 0.95), weight decay 0.1, clipping at 1, peak
            learning rate {s.peak:g} after {s.warmup} steps of warm-up, then linear decay to 0. The loss is in nats
            per token over {s.evaluation * s.sequence:,} tokens of held-out files, the same for every run, with the
            decoded weights that the engine computes with."""
        written = filled(f"Written by `{command}`.")
        return f"{PAGE_TITLE}\n\n## {STUDY}\n\n{written}\n\n![loss](loss.png)\n\n{filled(text)}"

    def _variants(self) -> str:
        head = "variant|P,G,OS|weights across nodes|gradients across nodes|bytes per step / 2N|runs"
        head += "|loss|deviation of a run|from zero3 %|95% bounds %|target %|verdict"
        return _table(head, (self._row(name) for name in self.names)) + "\n\n" + self._explanation()

    def _row(self, name: str) -> list[str]:
        variant, records = VARIANTS[name], self.results.of(name)
        mine = estimate(self.results.losses(name))
        found = self.results.difference(name)
        sent = sum(r["sent"] for r in records) / len(records) / (2 * self.numel)
        weights, gradients = describe(variant)
        row = [name, ",".join(variant.shards), weights, gradients, f"{sent:.2f}", str(mine.runs)]
        row += [
            f"{mine.mean:.4f}",
            "-" if mine.deviation is None else f"{100 * mine.deviation / mine.mean:.2f}%",
        ]
        if name == BASELINE:
            return [*row, "-", "-", "-", "-"]
        if variant.target == 0:
            equal, pairs = self.results.equal(name)
            return [*row, "-", "-", "same bits", f"{equal} of {pairs} runs"]
        target = "-" if variant.target is None else f"{variant.target:g}"
        return [*row, f"{found.percent:+.2f}", found.bounds, target, self.results.verdict(name) or "-"]

    def _explanation(self) -> str:
        seeds = ", ".join(map(str, sorted(self.results.losses(BASELINE))))
        added = "Runs were added until the bounds decided, so verdicts err slightly more often."
        added = added if self.until_decided else ""
        return filled(f"""
            Seeds ({seeds}) differ in the order of the data and in the initial weights. Runs of one seed differ in one
            weight, which starts {NUDGE:g} higher. The deviation is that of a run within its seed. The bounds are
            Welch's with seeds as blocks, each one-sided at 95%: the verdict is "met" if the upper bound is at most
            the target, "missed" if the lower bound is above it, else "open". {added} "Same bits" counts runs whose
            final master weights equal zero3's of the same seed and nudge. INT codes are symmetric, in blocks, and
            rounded to nearest unless stated otherwise. Bytes: sent by one node.""")

    def _noise(self) -> str:
        runs = self.results.of(BASELINE)
        nudged = sum(r["nudge"] > 0 for r in runs)
        mine = estimate(self.results.losses(BASELINE))
        spread = "" if mine.deviation is None else f": {100 * mine.deviation / mine.mean:.2f}% of the loss"
        lines = [
            f"Noise floor: the deviation of {len(runs)} zero3 runs, {nudged} with a nudged weight{spread}."
        ]
        skipped = {n: sum(r["skipped"] for r in self.results.of(n)) for n in self.names}
        if any(skipped.values()):
            lines.append(f"Steps skipped for a non-finite norm: {skipped}.")
        errors = [
            f"{name} {kind} {statistics.fmean(r['errors'][kind] for r in self.results.of(name)):.3f}"
            for name in self.names
            for kind in self.results.of(name)[0]["errors"]
        ]
        if errors:
            lines.append(f"Mean relative rounding errors, sampled in training: {'; '.join(errors)}.")
        return "\n\n".join(map(filled, lines))

    def _wall_time(self, wall: dict[str, Any]) -> str:
        seconds = wall["seconds"]
        slow = seconds.get(BASELINE)
        rows = []
        for name, turns in seconds.items():
            speed = f"{statistics.median(slow) / statistics.median(turns):.2f}" if slow else "-"
            whole = f"{self.settings.steps * statistics.median(turns):.0f}"
            rows.append([name, harness.spread(turns), speed, whole])
        title = f"### Wall time at {wall['rate']} between the nodes"
        head = "variant|s per step (range of turns)|speed / zero3|s for all steps"
        return f"{title}\n\nThe chart's wall time is the number of steps times the median.\n\n{_table(head, rows)}"

    def _codecs(self) -> str:
        steps = sorted({row["step"] for row in self.codecs})
        cells = {(row["codec"], row["step"]): row for row in self.codecs}
        exact = {step: cells["bf16", step]["loss"] for step in steps}
        rows = []
        for codec in dict.fromkeys(row["codec"] for row in self.codecs):
            row = [codec]
            for step in steps:
                cell = cells[codec, step]
                percent = 100 * (cell["loss"] - exact[step]) / exact[step]
                row += [f"{cell['loss']:.4f}", f"{percent:+.3f}", f"{cell['error']:.2e}"]
            rows.append(row)
        head = "weights|" + "|".join(f"step {s}: loss|from bf16 %|relative error" for s in steps)
        text = f"""
            Without run noise: one zero3 run's master weights, halfway and at the end, refreshed through each codec.
            Delta codecs follow the master over the {TRACE} steps before, starting from its bf16 values."""
        return f"### One master under each weight codec\n\n{filled(text)}\n\n{_table(head, rows)}"

    def _tuning(self) -> str:
        rows = [
            [f"{r['settings']['peak']:g}", f"{r['loss']:.4f}"]
            for r in sorted(self.tuning, key=lambda r: r["settings"]["peak"])
        ]
        return f"### Peak learning rate\n\nOne zero3 run per peak.\n\n{_table('peak|loss', rows)}"

    # -- chart -----------------------------------------------------------------------------------

    def chart(self, file: Path) -> None:
        """Draw loss against step (mean and deviation of a run), the difference to the baseline's mean, final
        differences with their bounds, and loss against wall time where that was measured."""
        from matplotlib.figure import Figure

        shown = [name for name in self.names if name in DEFAULT] or self.names
        figure = Figure(figsize=(14, 9), layout="constrained")
        curves, differences, finals, time = figure.subplots(2, 2).flat
        self._curves(curves, shown)
        self._differences(differences, shown)
        self._finals(finals)
        if self.wall:
            self._against_time(time, self.wall)
        else:
            time.set_visible(False)
        for panel in figure.axes:
            panel.grid(alpha=0.3)
        figure.savefig(file, dpi=110)

    def _steps(self) -> list[int]:
        return [step for step, _ in self.results.of(BASELINE)[0]["curve"]]

    def _at(self, name: str, step: int) -> Estimate:
        return estimate(self.results.losses(name, step))

    def _curves(self, panel: Axes, names: Sequence[str]) -> None:
        steps = self._steps()[1:]
        for name in names:
            points = [self._at(name, step) for step in steps]
            means = [p.mean for p in points]
            band = [p.deviation or 0.0 for p in points]
            (line,) = panel.plot(steps, means, label=name, lw=1.2)
            low, high = ([m + sign * b for m, b in zip(means, band, strict=True)] for sign in (-1, 1))
            panel.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, lw=0)
        panel.set(
            xlabel="step", ylabel="evaluation loss (nats per token)", title="mean and deviation of a run"
        )
        panel.legend()

    def _differences(self, panel: Axes, names: Sequence[str]) -> None:
        steps = self._steps()[1:]
        base = [self._at(BASELINE, step) for step in steps]
        band = [100 * (b.deviation or 0.0) / b.mean for b in base]
        low = [-b for b in band]
        panel.fill_between(steps, low, band, color="gray", alpha=0.2, lw=0, label="deviation of a zero3 run")
        for name in self._differing(names):
            values = [self.results.difference(name, step).percent for step in steps]
            panel.plot(steps, values, label=name, lw=1.2)
        panel.axhline(0, color="black", lw=0.8)
        panel.set(xlabel="step", ylabel="% above zero3's mean", title="difference of the means")
        panel.legend()

    def _differing(self, names: Sequence[str]) -> list[str]:
        """Leave out the baseline and variants that equal it to the bit."""
        return [name for name in names if name != BASELINE and VARIANTS[name].target != 0]

    def _finals(self, panel: Axes) -> None:
        names = self._differing(self.names)
        for y, name in enumerate(names):
            found, target = self.results.difference(name), VARIANTS[name].target
            panel.plot(found.percent, y, "o", color="tab:blue")
            if math.isfinite(found.upper):
                panel.plot([found.lower, found.upper], [y, y], color="tab:blue")
            if target:
                panel.plot(target, y, "|", color="tab:red", ms=16, mew=2)
        panel.axvline(0, color="black", lw=0.8)
        panel.set_yticks(range(len(names)), names)
        panel.invert_yaxis()
        panel.set(xlabel="% above zero3's mean (bar: 95% bounds, red: target)", title="final loss")

    def _against_time(self, panel: Axes, wall: dict[str, Any]) -> None:
        steps = self._steps()[1:]
        for name, turns in wall["seconds"].items():
            if name in self.names:
                times = [step * statistics.median(turns) for step in steps]
                panel.plot(times, [self._at(name, step).mean for step in steps], label=name, lw=1.2)
        panel.set(xlabel="seconds", ylabel="evaluation loss", title=f"{wall['rate']} between the nodes")
        panel.legend()


def describe(variant: Variant) -> tuple[str, str]:
    """Return what crosses nodes, in words: weights, gradients."""
    codecs = variant.codecs
    weights = coding_name(codecs.weights, "bf16")
    gradients = variant.gone or coding_name(codecs.gradients_inter, "fp32")
    weights += " of differences" if codecs.delta else ""
    gradients += f"; {coding_name(codecs.gradients_intra)} inside nodes" if codecs.gradients_intra else ""
    gradients += f"; rows to experts {coding_name(variant.dispatch)}" if variant.dispatch else ""
    return weights, gradients


def coding_name(codec: Codec | None, exact: str = "") -> str:
    """Return a format's name; ``exact`` if it does not quantise."""
    if not isinstance(codec, Blockwise):
        return exact
    name = f"INT{codec.bits}" if codec.bits > 2 else f"{codec.bits} bits"
    name += f", blocks of {codec.form.block}" if codec.form.block != DEFAULT_BLOCK[codec.bits] else ""
    return name + (f", Hadamard of {codec.transform.size}" if codec.transform else "")


def _table(head: str, rows: Rows) -> str:
    return harness.table(head.split("|"), list(rows))
