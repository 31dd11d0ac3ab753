"""The comparison's claims, tables and chart. Pure functions of comparison.json."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.links.contestants import CONTESTANTS, INTERVAL

Result = Mapping[str, Any]  # of one rate, number of micro-batches and heat
BASELINE = "FSDP2"
ZEROPP = ("megazero zeropp INT8", "megazero zeropp")
REPLICAS = ("megazero 1,1,d INT8", "megazero 1,1,d delta")
MOST_BYTES = dict(zip((*ZEROPP, *REPLICAS), (0.40, 0.28, 0.40, 0.28), strict=True))  # x 2N per step and node
COUNTERS = 0.05  # by which counters and interface may differ
NOT_MET = "**not met**"
CHARTED = ("sharded", "replicated")


@dataclass(frozen=True)
class Claim:
    """Claims that in ``heat`` megazero's ``forms`` are at least ``least`` times as fast as the fastest of ``rivals``.

    least: by (rate, micro-batches); at the same rates other micro-batches are reported without one. reason: told
    where it is not met.
    """

    heat: str
    forms: tuple[str, ...]
    against: str
    rivals: Callable[[str], bool]
    least: Mapping[tuple[str, int], float | None]
    reason: str = ""


def _slow(one: float, four: float) -> dict[tuple[str, int], float | None]:
    return {("200mbit", 1): one, ("200mbit", 4): four}


def _fast(gigabit: float | None, unshaped: float | None) -> dict[tuple[str, int], float | None]:
    rates = {"1gbit": gigabit, "none": unshaped}
    return {(rate, count): least for rate, least in rates.items() for count in (1, 4, 8)}


def _unshaped(least: float) -> dict[tuple[str, int], float | None]:
    return {("none", count): least for count in (1, 4)}


def _is(rival: str) -> Callable[[str], bool]:
    return lambda name: name == rival


def joined(name: str) -> tuple[str, str]:
    """Return a preset's contestants: with four layers in a unit (--zero-unit-layers 4), and with one."""
    return (f"megazero {name} joined", f"megazero {name}")


def _plain(name: str) -> bool:
    return CONTESTANTS[name].plain


def _shards(name: str) -> bool:
    return CONTESTANTS[name].shards


CORES = (
    "Where a claim at 200 Mb/s is not met: quantised steps take what two cores need to compute for four ranks, as "
    "the same rows without a rate show; FSDP2 waits for the link. So the slower the cores, the lower the ratio."
)
FP32_SUMS = (
    "Where it is not met: megazero adds up micro-batches in fp32, DDP in bf16, which is less memory traffic. A DDP "
    "that adds up in fp32 took 1.06 of DDP's seconds in a run in which megazero took 1.10 (4 micro-batches)."
)
FP32_CROSSES = (
    "Where it is not met: sums cross in fp32, DDP's in bf16, which is half the bytes. That is on purpose."
)
CODING = (
    "Where it is not met: on a link without a rate nothing that quantisation saves is waited for, and encoding and "
    "decoding take the cores that compute."
)
CLAIMS = (
    Claim("sharded", ZEROPP, "FSDP2", _is("FSDP2"), _slow(4.5, 6), CORES),
    Claim("sharded", ZEROPP, "the fastest peer that shards, in any form", _shards, _slow(1.8, 1.3), CORES),
    Claim("sharded", ZEROPP, "the fastest of its memory class", _plain, _fast(1.0, 1.2), CODING),
    Claim("replicated", REPLICAS, "FSDP2", _is("FSDP2"), _slow(5, 9), CORES),
    Claim("replicated", REPLICAS, "the fastest peer", lambda name: CONTESTANTS[name].peer, _slow(2.2, 2), CORES),
    Claim("replicated", REPLICAS, "the fastest form of DDP", lambda n: n.startswith("DDP"), _fast(None, None)),
    Claim("replicated", joined("zero1"), "DDP once", _is("DDP once"), _unshaped(0.97), FP32_SUMS),
    Claim("replicated", joined("ddp"), "DDP", _is("DDP"), _unshaped(1 / 1.02), FP32_CROSSES),
    Claim("patched", ("HSDP patched INT4",), "FSDP2", _is("FSDP2"), _slow(3, 5), CORES),
    Claim("patched", ("HSDP patched INT4",), "HSDP once", _is("HSDP once"), _slow(1.3, 1.3), CORES),
    Claim("patched", ("HSDP patched INT4",), "HSDP", _is("HSDP"), _unshaped(1 / 1.1), CODING),
    Claim("patched", ("FSDP2 patched INT8", "FSDP2 patched delta"), "FSDP2", _is("FSDP2"), _slow(2.5, 3.5), CORES),
)  # fmt: skip


# -- figures -------------------------------------------------------------------------------------------


def ratios(result: Result, name: str, rival: str) -> list[float]:
    """Return how many times as fast as the rival it is, round by round."""
    return harness.ratios(result["seconds"][rival], result["seconds"][name])


def fastest(result: Result, among: Callable[[str], bool]) -> str | None:
    """Return the contestant with the least median, or None if nobody took part."""
    names = [name for name in result["seconds"] if among(name)]
    return min(names, key=lambda name: statistics.median(result["seconds"][name]), default=None)


def sent(result: Result, name: str) -> float:
    """Return the bytes per step of the node that sent most, averaged over rounds."""
    return statistics.mean(max(turn) for turn in result["sent"][name])


def share(result: Result, name: str) -> float:
    """Return ``sent`` over 2N, the model in bf16."""
    return sent(result, name) / (2 * result["elements"])


def of_counters(result: Result, name: str) -> float | None:
    """Return what the interfaces counted over what the engine counted, on all nodes; None for peers, which do not
    count."""
    counted = sum(map(sum, result["counted"][name]))
    return sum(map(sum, result["sent"][name])) / counted if counted else None


# -- text ----------------------------------------------------------------------------------------------


def verdict(met: bool) -> str:
    return "met" if met else NOT_MET


def speed_rows(claim: Claim, results: Sequence[Result]) -> list[list[str]]:
    """Return rows of rate, micro-batches, rival, claim, and each form's ratio."""
    lines = []
    for result in results:
        rival = fastest(result, claim.rivals)
        if result["heat"] != claim.heat or not any(form in result["seconds"] for form in claim.forms):
            continue
        if rival is None or result["rate"] not in {rate for rate, _ in claim.least}:
            continue
        least = claim.least.get((result["rate"], result["micro_batches"]))
        line = [result["rate"], str(result["micro_batches"]), rival, f"{least:.2g}" if least else "-"]
        for form in claim.forms:
            speeds = ratios(result, form, rival) if form in result["seconds"] else []
            judged = f", {verdict(statistics.median(speeds) >= least)}" if speeds and least else ""
            line.append(harness.spread(speeds, 2) + judged if speeds else "-")
        lines.append(line)
    return lines


def byte_rows(results: Sequence[Result]) -> list[list[str]]:
    """Return for each quantised form its bytes over all results, and their limit."""
    lines = []
    for name, limit in MOST_BYTES.items():
        shares = [share(r, name) for r in results if name in r["seconds"]]
        if shares:
            found = f"{min(shares):.3f} to {max(shares):.3f}"
            lines.append([name, f"{limit:.2f}", found, verdict(max(shares) <= limit)])
    return lines


def counter_line(results: Sequence[Result]) -> str:
    every = [of_counters(r, name) for r in results for name in r["seconds"]]
    found = [x for x in every if x is not None]
    if not found:
        return "No engine that counts took part."
    met = all(abs(x - 1) <= COUNTERS for x in found)
    return (
        f"The interfaces counted {min(found):.3f} to {max(found):.3f} times the bytes of the engine's own counters, "
        f"over all megazero results; claimed: within {COUNTERS:.0%}, {verdict(met)}."
    )


def summary(results: Sequence[Result]) -> str:
    text = ["### Bytes sent by a node per step, over 2N, all results", ""]
    text += [harness.table(["", "at most", "found", ""], byte_rows(results)), "", counter_line(results)]
    for claim in CLAIMS:
        lines = speed_rows(claim, results)
        if lines:
            head = ["rate", "micro-batches", "that is", "at least", *claim.forms]
            text += ["", f"### {claim.forms[0]} against {claim.against}", "", harness.table(head, lines)]
            if any(NOT_MET in cell for line in lines for cell in line):
                text += ["", claim.reason]
    return "\n".join(text)


def table(result: Result) -> str:
    """Return a result's table, the fastest first."""
    header = ["", "bytes / 2N", "of formula", "of counters", "s per step", f"times {BASELINE}", "loss"]
    most = result.get("most")  # there is none in results from before outer steps
    header += ["most bytes / 2N", "of formula"] if most else []
    lines = []
    seconds = result["seconds"]
    for name in sorted(seconds, key=lambda name: statistics.median(seconds[name])):
        counters = of_counters(result, name)
        lines.append(
            [
                name,
                f"{share(result, name):.3f}",
                f"{sent(result, name) / result['formula'][name]:.3f}",
                f"{counters:.3f}" if counters else "-",
                harness.spread(seconds[name]),
                harness.spread(ratios(result, name, BASELINE), 2) if BASELINE in seconds else "-",
                f"{result['loss'][name]:.4f}",
                *(most_cells(result, name) if most else []),
            ]
        )
    return harness.table(header, lines)


def most_cells(result: Result, name: str) -> list[str]:
    """Return the most bytes of a step, over 2N and over the formula of a meeting."""
    if name not in result["most"]:
        return ["-", "-"]
    most = result["most"][name]
    return [f"{most / (2 * result['elements']):.3f}", f"{most / result['most_formula'][name]:.3f}"]


INTRODUCTION = """\
# Comparison with FSDP2, HSDP, DDP and DeepSpeed

    python -m benchmarks.links.comparison --micro-batches {micro_batches} --out docs/results

writes this page, comparison.json and the chart. {nodes} nodes of {ranks_per_node} ranks run on one machine ({cores}
cores, gloo, torch {torch}, DeepSpeed {deepspeed}). Each node is a network namespace, joined to the others by links
of the given rate (`tests/netlab`). Every contestant trains the same decoder (8 layers, hidden 256, ffn 688,
vocabulary 4096, 8.4M parameters) on the same tokens, sequence 128, micro-batch 1, in bf16 with an fp32 master and
AdamW. The contestants of a heat take turns in the same processes. Ratios are taken round by round within a heat:
median (least to most).

Bytes are the kernel's count at a node's interface around the steps, everything included, for the node that sent
most, relative to 2N, the model in bf16. *of formula*: relative to benchmarks/links/volume.py. *of counters*: relative
to the engine's own counters. What is above both are headers (0.25%), acknowledgements and gloo's own messages (10 to
25 kB a step and node, whatever the format). *loss*: of the same step for all.

Peers run as most people write the loop, with communication in every micro-batch, and in two further forms. *once*:
across nodes once per step as far as their switches allow. *kept*: gathered parameters stay for the step.
DeepSpeed's ZeRO-1 always communicates once; its ZeRO-3 cannot. `1,1,d` shards only the optimizer. zeropp's memory
class is the peers that hold neither parameters nor gradients whole: FSDP2, HSDP, DeepSpeed ZeRO-3. *joined*:
`--zero-unit-layers 4`, as DDP joins gradients into buckets of 25 MB; a layer has 1.6 MB here. *patched*: FSDP2 with
fsdp2_patch. *zeropp* and *patched* send gradients with `--zero-gradient-transform none`; *Hadamard* is the preset's
default.

On gloo, FSDP2's reduce-scatter costs the bytes of an all-reduce. NCCL would send half of that: 2.1 instead of 2.8 x
2N per micro-batch. {sharing:g} ranks share a core here, so compute weighs more than on a cluster. The cores' own
speed varied by a fifth while this was measured: compare within a heat. Speed is of steps, not of losses: with INT4
gradients, *zeropp* and *patched* may take 1.07 to 1.37 times the tokens for the same loss, *Hadamard* 1.02 to 1.04
times ([loss.md](loss.md#what-is-published)).
"""


def title(result: Result) -> str:
    return f"{result['rate']}, {result['micro_batches']} micro-batch(es), {result['heat']}"


MEETINGS = f"""\
Outer steps and DiLoCo: a node is a replica, and replicas meet every {INTERVAL} steps. Bytes and seconds are means
over whole intervals, *most bytes* are those of one step. DiLoCo is DDP inside the node and an all-reduce by the first
rank of each, in fp32 or bf16. *late*: three steps on its way. Their *loss* is that of
replicas on their own tokens.
"""


def page(stored: Mapping[str, Any]) -> str:
    results = stored["results"]
    sharing = stored["nodes"] * stored["ranks_per_node"] / stored["cores"]
    counts = " ".join(map(str, sorted({result["micro_batches"] for result in results})))
    text = [INTRODUCTION.format(**stored, sharing=sharing, micro_batches=counts)]
    text += [MEETINGS] if any(result.get("most") for result in results) else []
    text += [
        "![Seconds and bytes per step](comparison.png)",
        "",
        "## Claims",
        "",
        summary(results),
        "",
        "## Results",
    ]
    for result in results:
        text += ["", f"### {title(result)}", "", table(result)]
    return "\n".join(text) + "\n"


# -- chart ---------------------------------------------------------------------------------------------


def chart(results: Sequence[Result], file: Path) -> None:
    """Draw bars of seconds per step with the bytes beside them; a row of panels per rate and heat, a column per
    micro-batches. Of the heats in CHARTED; if there is none, of all."""
    from matplotlib.figure import Figure

    results = [r for r in results if r["heat"] in CHARTED] or results
    rows = list(dict.fromkeys((r["rate"], r["heat"]) for r in results))
    counts = sorted({r["micro_batches"] for r in results})
    bars = max(len(r["seconds"]) for r in results)
    figure = Figure(figsize=(5.5 * len(counts), (1 + 0.23 * bars) * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), len(counts), squeeze=False)
    for panel in panels.flat:
        panel.set_axis_off()
    for result in results:
        panel = panels[rows.index((result["rate"], result["heat"]))][counts.index(result["micro_batches"])]
        _draw(panel, result)
    figure.savefig(file, dpi=100)


def _draw(panel: Any, result: Result) -> None:
    seconds = result["seconds"]
    names = sorted(seconds, key=lambda name: -statistics.median(seconds[name]))
    middle = [statistics.median(seconds[name]) for name in names]
    below = [m - min(seconds[name]) for m, name in zip(middle, names, strict=True)]
    above = [max(seconds[name]) - m for m, name in zip(middle, names, strict=True)]
    colors = [
        "tab:gray" if CONTESTANTS[name].peer else "tab:red" if name in MOST_BYTES else "tab:orange"
        for name in names
    ]
    panel.set_axis_on()
    panel.barh(names, middle, xerr=[below, above], color=colors, ecolor="black")
    for y, (name, m) in enumerate(zip(names, middle, strict=True)):
        text = f"{m:.2f} s, {share(result, name):.2f} x 2N"
        panel.annotate(text, (max(seconds[name]), y), (4, 0), textcoords="offset points", va="center", size=7)
    panel.tick_params(axis="y", labelsize=7)
    panel.margins(x=0.3, y=0.01)
    panel.set_title(title(result), size=10)
    panel.set_xlabel("s per step; bytes sent per step by a node", size=8)


OVER_RATES = {"megazero zeropp": "sharded", "FSDP2": "sharded", "HSDP once": "sharded", "DDP": "replicated"}


def chart_over_rates(results: Sequence[Result], file: Path) -> None:
    """Draw each of ``OVER_RATES`` (contestant to the heat that it is taken from) as seconds per step over the link's
    rate; a panel per number of micro-batches, a band from least to most. README shows this chart."""
    from matplotlib.figure import Figure

    counts = sorted({r["micro_batches"] for r in results})
    rates = list(dict.fromkeys(r["rate"] for r in results))
    figure = Figure(figsize=(4.2 * len(counts), 2.7), layout="constrained")
    for panel, count in zip(figure.subplots(1, len(counts), squeeze=False)[0], counts, strict=True):
        for name, heat in OVER_RATES.items():
            seconds = [
                r["seconds"][name]
                for r in results
                if (r["micro_batches"], r["heat"]) == (count, heat) and name in r["seconds"]
            ]
            if len(seconds) == len(rates):
                _line(panel, name, seconds)
        panel.set_xticks(range(len(rates)), [_RATE_WORDS.get(rate, rate) for rate in rates])
        panel.set_ylim(bottom=0)
        panel.set_title(f"{count} micro-batch{'es' if count > 1 else ''} a step", size=9)
        panel.set_xlabel("link between the nodes", size=8)
        panel.tick_params(labelsize=8)
    figure.axes[0].set_ylabel("seconds per step", size=8)
    figure.axes[0].legend(fontsize=7)
    figure.savefig(file, dpi=110)


_RATE_WORDS = {"200mbit": "200 Mb/s", "1gbit": "1 Gb/s", "none": "no limit"}


def _line(panel: Any, name: str, seconds: Sequence[Sequence[float]]) -> None:
    own = not CONTESTANTS[name].peer
    (line,) = panel.plot(
        [statistics.median(s) for s in seconds],
        marker="o",
        label=name,
        linewidth=2.5 if own else 1.2,
        **({"color": "tab:red"} if own else {}),
    )
    panel.fill_between(
        range(len(seconds)),
        [min(s) for s in seconds],
        [max(s) for s in seconds],
        alpha=0.15,
        color=line.get_color(),
    )
