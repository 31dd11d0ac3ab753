"""Writes the tables of docs/results/loss.md from the runs in benchmarks/results. The words are the page's own.

    python -m benchmarks.loss.page

A table stands below a line ``<!-- its name -->``. TABLES has the names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks import harness
from benchmarks.harness import table
from benchmarks.loss import outer_rules, study
from benchmarks.loss.intervals import CONFIDENCE, effects, t_quantile
from benchmarks.loss.rounding.__main__ import FILE
from benchmarks.loss.rounding.formats import DIFFERENCES, EXACT, GRADIENTS
from benchmarks.loss.rounding.gradients import ALL
from benchmarks.loss.rounding.keys import CODECS
from benchmarks.results import PAGES, RESULTS
from megazero.plan.rounding import SDP4BIT, ZEROPP

PAGE = PAGES / "loss.md"
SETTLED = 3  # evaluations at a branch's end whose mean is its loss: at a constant rate one alone is noisy
Row = Mapping[str, Any]


def published() -> str:
    """Return every published loss as a row."""
    rows = [
        [p.paper, p.model, f"{p.tokens / 1e9:.0f}B", name, f"{loss:.4f}", f"{p.exact:.4f}",
         f"{p.gap(name):+.2f}%", f"{p.least_speed(name):.2f}"]
        for p in (ZEROPP, *SDP4BIT)
        for name, loss in p.losses.items()
    ]  # fmt: skip
    return table(["", "model", "tokens", "rounded", "loss", "exact", "gap", "steps gain if faster by"], rows)


def trained(what: str, **wanted: Any) -> list[Row]:
    """Return the rows of the trained model, the newest of each kind, format and seed."""
    wanted |= {"what": what}
    found: dict[tuple[Any, ...], Row] = {}
    for row in harness.Store(RESULTS / FILE).records():
        if all(row.get(key) == value for key, value in wanted.items()):
            found[row.get("kind"), row.get("format"), row.get("seed"), row.get("layer")] = row
    return list(found.values())


def gradients() -> str:
    after = {row["format"]: row["gain"] for row in trained("step")}
    keys = ("bytes", "error", "zero", "dead")
    rows = {row["format"]: row for row in trained("gradients", kind=ALL)}
    lines = [[n, *(f"{rows[n][key]:.3f}" for key in keys), f"{after[n]:.3f}"] for n in GRADIENTS if n in rows]
    return table(["gradients", "bytes an element", *keys[1:], "share of the gain"], lines)


def weights() -> str:
    whats = ("weights", "difference of 1 step", "difference of 32 steps")
    errors = {what: {row["format"]: row["error"] for row in trained(what, kind=ALL)} for what in whats}
    lines = [
        [name, *(f"{errors[what][name]:.3f}" if name in errors[what] else "-" for what in whats)]
        for name in DIFFERENCES
    ]
    return table(["", *whats], lines)


def settled(curve: Sequence[Sequence[float]]) -> float:
    return fmean(loss for _, loss in curve[-SETTLED:])


def by_format(runs: Sequence[Row]) -> dict[str, dict[int, list[float]]]:
    """Return the losses at the end of runs by format and seed."""
    losses: dict[str, dict[int, list[float]]] = {}
    for row in runs:
        losses.setdefault(row["format"], {})[row["seed"]] = [settled(row["curve"])]
    return losses


def continued() -> str:
    losses, lines = by_format(trained("continued")), list[list[str]]()
    found = effects(losses, EXACT)
    for name, by_seed in losses.items():
        loss = fmean(each for values in by_seed.values() for each in values)
        gap = found.get(name)
        cells = [f"{gap.percent:+.2f}", gap.bounds] if gap else ["-", "-"]
        lines.append([name, str(len(by_seed)), f"{loss:.4f}", *cells])
    return table(["", "seeds", "loss", "gap %", "95% bounds %"], lines)


def keys() -> str:
    lost = {row["format"]: row for row in trained("keys loss")}
    lines = []
    for name in CODECS:
        own, end = trained("keys", format=name), lost[name]
        means = [f"{fmean(row[what] for row in own):.4f}" for what in ("keys", "values", "output")]
        half = t_quantile(CONFIDENCE, end["sequences"] - 1) * end["deviation"]
        bounds = f"{end['gap'] - half:+.4f} to {end['gap'] + half:+.4f}"
        lines.append([name, *means, f"{max(row['output'] for row in own):.4f}", f"{end['gap']:+.4f}", bounds])
    return table(["", "keys", "values", "output", "worst layer", "gap in nats", "95% bounds"], lines)


def outer_branches() -> Mapping[outer_rules.Branch, float]:
    return outer_rules.found(harness.Store(RESULTS / outer_rules.FILE))


TABLES: dict[str, Callable[[], str]] = {
    "published": published,
    "gradients": gradients,
    "weights": weights,
    "continued": continued,
    "keys": keys,
    "sizes": lambda: study.table(study.sizes(), study.Store(RESULTS / "loss_at_size.jsonl")),
    "outer": lambda: study.table(study.outer(), study.Store(RESULTS / "loss_outer.jsonl")),
    "outer rules": lambda: outer_rules.table(outer_branches()),
    "outer forms": lambda: outer_rules.forms_table(outer_branches()),
}


def written(page: str) -> str:
    """Return the page with its tables made anew. Raises ValueError unless it has each once."""
    for name, made in TABLES.items():
        page, count = re.subn(rf"(?<=<!-- {name} -->\n)(\|.*\n)*", made() + "\n", page)
        if count != 1:
            raise ValueError(f"the page has {count} lines <!-- {name} -->")
    return page


def main() -> None:
    harness.parser(__doc__).parse_args()
    PAGE.write_text(written(PAGE.read_text()))


if __name__ == "__main__":
    harness.start(main)
