"""loss_at_size.md and loss_at_size.png: what the runs of ladder.py say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import harness
from benchmarks.harness import filled
from benchmarks.loss.intervals import Difference, effects, estimate
from benchmarks.loss.ladder import LADDER, MORE, Rung, halve, parameters, plan
from benchmarks.loss.plan import Runs
from benchmarks.loss.report import coding_name, describe
from benchmarks.loss.rounding_noise import ALL, CODECS
from benchmarks.loss.run import Settings
from benchmarks.loss.variants import BASELINE, VARIANTS
from megazero.plan import rounding

# Variants here, and what SDP4Bit published of the like.
BESIDE = {
    "qgz": rounding.INT4,
    "int4-hadamard": rounding.HADAMARD,
    "zeropp-hadamard": rounding.DELTA,
}
Row = dict[str, Any]
LOSS_PAGE = Settings()
HALF = "exact, half the batch"
PAGE = """\
# Loss with quantised communication, over sizes

Written by `{command}`;
each run is a line of [loss_at_size.jsonl](../../benchmarks/results/loss_at_size.jsonl).

[loss.md](loss.md) says what is published, what a trained model's gradients show, and what this study cannot show: its
models are small, from scratch, with a vocabulary of 1,024.

![loss over sizes](loss_at_size.png)

## The gap by size

{setting}

{gaps}

{explanation}

## What the gap is made of

{noise}

## Peak learning rates

One exact run per peak, of seed 1. Where *steps* is below that of the plan, the rate was tried with fewer tokens.

{peaks}

## The plan

{plan}

Hours are CPU time of one core: measured where there are runs, else estimated from their operations. `--ladder RUNG`
runs a rung that does not fit into the eight hours. 125M is for one GPU: its hours are that GPU's, and unmeasured:

{more}

## The text

No run sees a token twice. 5% of the files are held out.

{text}
"""

NOISE = """\
*noise* is the variance of one node's gradient over its batches, divided by the mean gradient's square. *error* is
`quantization_error_gradients` of those messages. *noise +%* is what rounding adds to the noise: 10% acts like a batch
that is a tenth smaller. *bias* is the part of the error that batches share, divided by the gradient's norm; averaging
does not remove it."""


class LadderReport:
    """rungs: all that may have runs. text: of data.contents. noise: rows of rounding_noise.py."""

    def __init__(self, rungs: Sequence[Rung], store: Runs, text: Sequence[Row], noise: Sequence[Row]) -> None:
        self.rungs, self.store, self.text, self.noise = rungs, store, text, noise
        self.settings = {r: s for r in rungs if (s := r.tuned_settings(store)) and store.results(s).runs}
        self.results = {rung: store.results(settings) for rung, settings in self.settings.items()}
        self.gaps = {rung: self._gaps_of(rung) for rung in self.settings}

    def markdown(self, command: str) -> str:
        return PAGE.format(
            command=command,
            setting=self._setting(),
            gaps=self._gaps(),
            explanation=self._explanation(),
            noise=noise_section(self.noise),
            peaks=self._peaks(),
            plan=plan(LADDER, self.store),
            more=plan(MORE, self.store),
            text=harness.table(
                ["package", "version", "files", "bytes"],
                [[t["name"], t["version"], f"{t['files']:,}", f"{t['bytes']:,}"] for t in self.text],
            ),
        )

    def _gaps_of(self, rung: Rung) -> dict[str, Difference]:
        results = self.results[rung]
        losses = {name: results.losses(name) for name in VARIANTS if results.of(name)}
        if halved := self.store.results(halve(self.settings[rung])).losses(BASELINE):
            losses[HALF] = halved
        return effects(losses, BASELINE) if BASELINE in losses else {}

    def _setting(self) -> str:
        return filled("""
            A Llama learns Python sources, tokenized to a vocabulary of 1,024, in sequences of 128: 4 ranks as 4 nodes
            of 1, bf16 parameters, fp32 master, AdamW (0.9, 0.95), weight decay 0.1, clipping at 1, a tenth of the
            steps of warm-up to the peak, then linearly to 0. "1.3M x 4" are 4 training tokens a parameter. Layers
            with experts have 8, of which a token goes to 2; there the vocabulary is 16,384, parameters are in fp32,
            and the text is Python's standard library alone.""")

    def _gaps(self) -> str:
        rows = []
        for rung, results in self.results.items():
            base = estimate(results.losses(BASELINE))
            spread = "-" if base.deviation is None else f"{100 * base.deviation / base.mean:.2f}%"
            shared = [rung.name, f"{self.settings[rung].peak:g}", f"{base.mean:.4f} ({base.runs})", spread]
            for name, found in self.gaps[rung].items():
                runs = results.of(name)
                errors = [run["errors"]["gradients"] for run in runs if "gradients" in run["errors"]]
                count = str(len(runs)) if runs else "-"
                error = f"{fmean(errors):.3f}" if errors else "-"
                rows.append([*shared, label(name), count, f"{found.percent:+.2f}", found.bounds, error])
                shared = [""] * len(shared)
        head = ["rung", "peak", "exact loss (runs)", "noise floor", "gradients; weights", "runs"]
        return harness.table([*head, "gap %", "95% bounds %", "gradients' rounding error"], rows)

    def _explanation(self) -> str:
        return filled("""
            The noise floor is the deviation of exact runs of one seed that differ in one weight, which starts 0.001
            higher. Gaps and bounds are least squares over variants and seeds with one deviation, which is judged from
            all runs of the rung; each bound holds with 95%. The rounding error is quantization_error_gradients, the
            mean over a run.""")

    def _peaks(self) -> str:
        rows = []
        for rung in self.rungs:
            for settings in rung.trials():
                for run, record in self.store.results(settings).runs.items():
                    if (run.variant, run.seed, run.nudge) == (BASELINE, 1, 0):
                        rows.append(
                            [rung.name, str(settings.steps), f"{settings.peak:g}", f"{record['loss']:.4f}"]
                        )
        return harness.table(["rung", "steps", "peak", "loss"], rows)

    def chart(self, file: Path) -> None:
        """Draw the gap over parameters, with bounds, beside the published points."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 6), layout="constrained")
        panel = figure.subplots()
        names = list(dict.fromkeys(name for found in self.gaps.values() for name in found if name != HALF))
        for i, name in enumerate(names):
            found = [(rung, gaps[name]) for rung, gaps in self.gaps.items() if name in gaps]
            # Beside each other where they would cover each other; more tokens a parameter lie further right.
            places = [parameters(self.settings[rung]) * 1.06**i * rung.share**0.25 for rung, _ in found]
            panel.plot(places, [gap.percent for _, gap in found], "o", ms=4, color=f"C{i}", label=label(name))
            for x, (_, gap) in zip(places, found, strict=True):
                if math.isfinite(gap.upper):
                    panel.plot([x, x], [gap.lower, gap.upper], color=f"C{i}", lw=1)
            if name in BESIDE:
                what, series = BESIDE[name], rounding.SDP4BIT
                panel.plot(
                    [each.parameters for each in series], [each.gap(what) for each in series], "s--", lw=0.8,
                    color=f"C{i}", label=f"SDP4Bit: {what}",
                )  # fmt: skip
        panel.axhline(0, color="black", lw=0.8)
        panel.set(xscale="log", xlabel="parameters", ylabel="% above exact loss (bars: 95% bounds)")
        panel.set_yscale("symlog", linthresh=0.5)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
        figure.savefig(file, dpi=100)


def noise_section(rows: Sequence[Row]) -> str:
    """Return rounding_noise.py's two tables: over size, phase and batch, and over the kinds of layers."""
    if not rows:
        return "Not measured yet: `python -m benchmarks.loss.rounding_noise`."
    head = ["noise", *(f"{codec}: {what}" for codec in CODECS for what in ("error", "noise +%", "bias"))]
    least = {rung: min(r["tokens"] for r in rows if r["rung"] == rung) for rung in {r["rung"] for r in rows}}
    whole = [
        [r["rung"], f"{r['peak']:g}", f"{r['step']} of {r['steps']}", f"{r['tokens']:,}", *_noise_cells(r)]
        for r in rows
        if r["kind"] == ALL
    ]
    layers = [
        [r["rung"], f"{r['peak']:g}", r["kind"], *_noise_cells(r)]
        for r in rows
        if r["step"] == r["steps"] and r["tokens"] == least[r["rung"]]
    ]
    tables = [
        harness.table(["rung", "peak", "step", "tokens of a node", *head], whole),
        harness.table(["rung", "peak", "layer", *head], layers),
    ]
    return "\n\n".join([NOISE, tables[0], "By layer, at the last step and the smallest batch:", tables[1]])


def _noise_cells(row: Row) -> list[str]:
    cells = ["-" if row["noise"] is None else f"{row['noise']:.1f}"]
    for codec in CODECS:
        found = row[codec]
        bias = "-" if math.isnan(found["bias"]) else f"{found['bias']:.3f}"
        cells += [f"{found['error']:.3f}", f"{100 * found['added']:+.1f}", bias]
    return cells


def size_name(numel: float) -> str:
    return (
        f"{numel / 1e9:.1f}B"
        if numel >= 1e9
        else f"{numel / 1e6:.0f}M"
        if numel >= 1e7
        else f"{numel / 1e6:.1f}M"
    )


def label(name: str) -> str:
    if name == HALF:
        return HALF
    variant = VARIANTS[name]
    if variant.dispatch and not variant.quantised:
        return f"rows to experts {coding_name(variant.dispatch)}"
    return "; ".join(reversed(describe(variant)))
