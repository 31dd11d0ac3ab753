"""The first sections of loss.md, in the order in which a sceptic asks: what is published, what a trained model's
gradients show, what our own small runs show and cannot show, what is not known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks import harness
from benchmarks.harness import Store, filled
from benchmarks.loss import published
from benchmarks.loss.intervals import effects
from benchmarks.loss.ladder import EXPERTS, parameters
from benchmarks.loss.ladder_report import LOSS_PAGE, LadderReport, label, size_name
from benchmarks.loss.plan import Results
from benchmarks.loss.report import PAGE_TITLE, STUDY, coding_name
from benchmarks.loss.rounding.formats import EXACT
from benchmarks.loss.rounding.report import PAGE, SETTLED, Found, Row, by_format, cell
from benchmarks.loss.rounding.table import ALL
from benchmarks.loss.run import BALANCE, RANKS
from benchmarks.loss.variants import BASELINE
from megazero.comm.codec import codec_of
from megazero.config.layout.wire import asked_for
from megazero.config.options.sections import ZeroConfig

TRAINED = "rounding.jsonl"  # rows of the study of a trained model
# What its table of gradients has of all matrices, by key of a row.
MEASURED = {"bytes": "bytes an element", "error": "error", "zero": "zero", "dead": "dead", "gain": "gain"}


def with_summary(page: str, ladder: LadderReport, data: Path) -> str:
    """Return loss.md with these sections, in place of older ones, before the study of 1.3M parameters."""
    _, heading, rest = page.partition(f"\n## {STUDY}\n")
    assert heading, f"loss.md has no section {STUDY!r}"
    rows = Store(data / TRAINED).records()
    parts = [PAGE_TITLE, introduction(), public(), trained(rows), ours(ladder), unknown(ladder)]
    return "\n\n".join(part for part in parts if part) + "\n" + heading + rest


def introduction() -> str:
    """Name the default, and what it has to gain."""
    default = asked_for(ZeroConfig(zero_preset="zeropp"))
    gradients, weights = (coding_name(codec_of(c)) for c in (default.gradients_inter, default.weights))
    return filled(f"""
        Preset zeropp sends gradients as {gradients}, and weights as {weights} of differences. Where such messages
        cost loss, exact ones reach it with fewer tokens, so a step gains only if it is faster by more than that
        factor. A run measures what its own gradients lose, and warns (`quantization_error_gradients`,
        [metrics](../reference/metrics.md)). `--zero-gradient-bits 8` takes 1.9 times the bytes and loses a fifth or
        less of what INT4 does.""")


def public() -> str:
    return f"""## What is published

{filled(published.sentences())}

{published.table()}

{filled(published.SETTINGS)}"""


def trained(rows: Sequence[Row]) -> str:
    """Return the section of the trained model's gradients; nothing while it has no rows."""
    found = Found(rows)
    names = dict.fromkeys(row["format"] for row in found.of("gradients", kind=ALL, tokens=found.tokens))
    if not names:
        return ""
    cells = []
    for name in names:
        step = found.value("gain", "step", format=name, tokens=found.tokens)
        cells.append([name, *(cell(found.gradient(key, name)) for key in MEASURED), cell(step)])
    said = f"""
        SmolLM2-135M-Instruct, a trained model with a vocabulary of 49,152, messages of {found.tokens:,} tokens, on
        {found.device}; all matrices, the mean over tensors. *error*: ||sent - exact|| / ||exact||. *zero*: digits
        that are 0. *dead*: elements with a gradient that are 0 in every message. *gain*: share of the exact step's
        gain in held-out loss, to first order; *in loss*: the same as measured after the step.
        [{PAGE.name}]({PAGE.name}) has kinds of tensors, and what was predicted and refuted."""
    table = harness.table(["gradients", *MEASURED.values(), "in loss"], cells)
    parts = ["## What real gradients show", filled(said), table]
    if steps := _over_steps(found):
        parts.append(
            filled(f"""
            What a single step loses did not add up over the steps that we could afford. {steps} So a trained model
            says which format loses less of a gradient, at the same bytes; that the loss of a whole training follows
            is what the published runs say, not ours.""")
        )
    return "\n\n".join(parts)


def _over_steps(found: Found) -> str:
    """Tell the gaps of loss after training on, and from scratch."""
    told = []
    if runs := found.runs("continued"):
        gaps = _gaps(by_format(runs, SETTLED))
        told.append(f"Training on for {runs[0]['steps']} steps of {runs[0]['tokens']:,} tokens: {gaps}.")
    for vocabulary in sorted({row["vocabulary"] for row in found.rows if row["what"] == "scratch"}):
        runs = found.runs("scratch", vocabulary=vocabulary)
        size, steps = size_name(runs[0]["parameters"]), runs[0]["steps"]
        gaps = _gaps(by_format(runs, 1))
        told.append(f"{size} parameters from scratch, vocabulary {vocabulary:,}, {steps} steps: {gaps}.")
    return " ".join(told)


def _gaps(losses: Mapping[str, Mapping[int, Sequence[float]]]) -> str:
    gaps = effects(losses, EXACT)
    return ", ".join(f"{name} {gap.percent:+.2f}% ({gap.bounds})" for name, gap in gaps.items())


def ours(ladder: LadderReport) -> str:
    parts = []
    for rung, found in ladder.gaps.items():
        if (gap := found.get("qgz")) and math.isfinite(gap.upper):
            tokens = "1 token" if rung.share == 1 else f"{rung.share:g} tokens"
            parts.append(f"{rung.size} parameters at {tokens} each {gap.lower:+.2f} to {gap.upper:+.2f}%")
    return (
        "## What our runs show, and cannot show\n\n"
        + filled(f"""
        zeropp with plain INT4 gradients (`--zero-gradient-transform none`) at {size_name(parameters(LOSS_PAGE))}
        parameters is [below](#the-study). Over sizes ([loss_at_size.md](loss_at_size.md)), plain INT4 gradients
        across nodes against exact ones, 95% bounds: {"; ".join(parts) or "no run yet"}. Such runs cannot show the
        published gap if it comes from columns of different size, where plain INT4 loses more than with a transform:
        models are small, from scratch, with a vocabulary of 1,024, and lose {_errors(ladder, "qgz")} of their
        gradients by rounding, and {_errors(ladder, "int4-hadamard")} with a transform. Nor did a vocabulary of 16,384
        or 49,152 show it in some hundred steps ([from scratch]({PAGE.name}#from-scratch)).""")
        + _experts(ladder)
    )


def _experts(ladder: LadderReport) -> str:
    """Tell what rounding costs mixtures of experts, and how their experts are balanced; nothing without runs."""
    parts = []
    for rung in (rung for rung in ladder.gaps if rung in EXPERTS):
        settings, results = ladder.settings[rung], ladder.results[rung]
        gaps = [
            f"{label(name)} {gap.percent:+.2f}% ({gap.bounds}, {len(results.of(name))} runs)"
            for name, gap in ladder.gaps[rung].items()
        ]
        loads = [
            f"{_loads(results, name)} with {'exact messages' if name == BASELINE else label(name)}"
            for name in (BASELINE, *ladder.gaps[rung])
        ]
        exact = results.of(BASELINE)
        loss = fmean(record["loss"] for record in exact)
        parts.append(f"""
            Mixtures of experts: {size_name(parameters(settings))} parameters, {settings.layers} layers of
            {settings.experts} experts, 2 of them for a token, a vocabulary of {settings.vocabulary:,},
            {settings.steps} steps of {settings.tokens:,} tokens on {RANKS} nodes of one rank, {settings.dtype},
            balanced by seq_aux_loss x {BALANCE:g}. Against {len(exact)} exact runs, whose loss is {loss:.4f}:
            {"; ".join(gaps)}. At the end the fullest expert of any layer had so many times the mean of tokens:
            {"; ".join(loads)}. Runs this short show a fault of experts' gradients or of their rows, and bound what
            rounding costs at the beginning. They cannot show what it costs a trained mixture, whose experts differ
            more.""")
    return "".join("\n\n" + filled(part) for part in parts)


def _loads(results: Results, name: str) -> str:
    last = [record["loads"][-1][1] for record in results.of(name)]
    return f"{fmean(last):.2f} ({min(last):.2f} to {max(last):.2f})"


def _errors(ladder: LadderReport, name: str) -> str:
    runs = [run for results in ladder.results.values() for run in results.of(name)]
    errors = [run["errors"]["gradients"] for run in runs]
    return f"{min(errors):.3f} to {max(errors):.3f}" if errors else "what is not measured"


def unknown(ladder: LadderReport) -> str:
    largest = max(parameters(each) for each in (LOSS_PAGE, *ladder.settings.values()))
    return "## What is not known\n\n" + filled(f"""
        The loss of a whole training with any of these formats, here, above {size_name(largest)} parameters: that
        zeropp's default holds at size rests on what is published, for models of up to 1.3B parameters and 42B tokens.
        Whether columns differ more in larger models, as the published gap at 1.3B suggests.""")
