"""Runs as one page of HTML: facts, curves, time bill and bytes. It needs matplotlib and no network."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megazero.charts import new_figure, png, stacked_bars
from megazero.log.time_bill import ITEMS
from megazero.ops.status import facts, restarts
from megazero.ops.vitals import Line, Vitals

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS = 400  # of a curve: more are drawn as means of their neighbours
CURVES = {  # key of a line -> title
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
    "tokens_per_s": "tokens per second",
    "iteration_time_s": "seconds of an iteration",
    "memory_bytes": "bytes of memory, peak of the first rank",
    "loss_scale": "loss scale",
}
STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:1360px;padding:0 1em;color:#222;background:#fff}
h1{font-size:1.4em}h2{font-size:1.15em;margin-top:2em;border-bottom:1px solid #ccc}
table{border-collapse:collapse}td,th{padding:.15em .9em .15em 0;text-align:left;vertical-align:top}
figure{display:inline-block;margin:0 1em 1em 0}figcaption{font-weight:600}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}h2{border-color:#444}}
"""

Points = Sequence[tuple[float, float]]


def page(runs: Sequence[Vitals]) -> str:
    """Return the page of these runs. Text from their files is escaped. Raises ValueError without matplotlib."""
    parts = [_run(run) for run in runs]
    title = html.escape(", ".join(str(run.folder) for run in runs))
    at = f"{max(run.now for run in runs).astimezone():%F %T %Z}"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>"
        f"<h1>Runs, as of {at}</h1>{''.join(parts)}</html>\n"
    )


def _run(run: Vitals) -> str:
    rows = "".join(
        f"<tr><th>{html.escape(name)}<td>{html.escape(words)}" for name, words in facts(run).items()
    )
    again = "".join(f"<li>{html.escape(line)}" for line in restarts(run))
    drawings = [_loss(run)] + [
        lines(title, {"": of(run.iterations, key)}, _marks(run))
        for key, title in CURVES.items()
        if any(key in line for line in run.iterations)
    ]
    drawings += [_rank_times(run), _bill(run), _bytes(run)]
    return (
        f"<h2>{html.escape(run.folder.name)}</h2><table>{rows}</table>"
        f"{f'<p>Restarts:<ol>{again}</ol>' if again else ''}{''.join(drawings)}"
    )


def _loss(run: Vitals) -> str:
    curves = {"training": of(run.iterations, "lm_loss")}
    for line in run.evaluations:
        name = f"evaluation {line.get('eval_data', '')}".strip()
        if name not in curves:
            same = [e for e in run.evaluations if e.get("eval_data") == line.get("eval_data")]
            curves[name] = of(same, "eval_lm_loss")
    return lines("loss, nats per token", curves, _marks(run))


def _rank_times(run: Vitals) -> str:
    rows = [{"iteration": m["iteration"], **m["rank_times"]} for m in run.iterations if "rank_times" in m]
    if not rows:
        return ""
    curves = {"the slowest": of(rows, "most_s"), "the fastest": of(rows, "least_s")}
    return lines("seconds that a rank works in an iteration", curves, _marks(run))


def _bill(run: Vitals) -> str:
    bills = [m["time_bill"] for m in run.iterations if "time_bill" in m]
    return bars("time bill: seconds of a mean iteration", _means(bills, ITEMS), "s")


def _bytes(run: Vitals) -> str:
    sent = [m["bytes"] for m in run.iterations if "bytes" in m]
    names = sorted({name for row in sent for name in row})
    return bars("bytes that one rank sends in a mean iteration", _means(sent, names), "B")


def _means(rows: Sequence[Mapping[str, float]], names: Sequence[str]) -> dict[str, float]:
    means = {name: sum(row.get(name, 0.0) for row in rows) / len(rows) for name in names} if rows else {}
    return {name: mean for name, mean in means.items() if mean > 0}


def of(rows: Sequence[Line], key: str) -> Points:
    """Return (iteration, value) of the lines that have a finite one."""
    return [(r["iteration"], float(r[key])) for r in rows if key in r and math.isfinite(float(r[key]))]


def _marks(run: Vitals) -> list[float]:
    return [float(start["iteration"]) for start in run.starts[1:]]


def lines(title: str, curves: Mapping[str, Points], marks: Sequence[float] = ()) -> str:
    """Draw curves by name over one pair of axes. marks: the iterations of restarts, as dashed lines."""
    thin = {name: _thinned(points) for name, points in curves.items() if points}
    if not thin:
        return ""
    figure = new_figure(6.4, 2.2, dpi=100)
    axes = figure.add_subplot(xlabel="iteration", ylabel=title.partition(",")[0])
    axes.locator_params(axis="x", integer=True)
    for name, points in thin.items():
        dots = "." if name.startswith("evaluation") or len(points) == 1 else None
        axes.plot(*zip(*points, strict=True), label=name, marker=dots, linewidth=1.2)
    for mark in marks:
        axes.axvline(mark, color="#999", linestyle="--", linewidth=1)
    if len(thin) > 1:
        axes.legend(fontsize=7)
    return _figure(title, figure)


def bars(title: str, parts: Mapping[str, float], unit: str) -> str:
    """Draw parts of a sum, each with its value and share, as horizontal bars."""
    if not parts:
        return ""
    total, by_size = sum(parts.values()), sorted(parts.items(), key=lambda item: item[1])
    names = [
        f"{name.replace('_', ' ')}: {_scaled(value)}{unit}, {value / total:.1%}" for name, value in by_size
    ]
    figure = new_figure(6.4, 0.4 + 0.25 * len(names), dpi=100)
    stacked_bars(figure.add_subplot(xlabel=unit), names, {"": [value for _, value in by_size]})
    return _figure(f"{title}, {_scaled(total)}{unit} in all", figure)


def _figure(title: str, figure: Figure) -> str:
    image = base64.b64encode(png(figure)).decode()
    caption = html.escape(title)
    source = f"data:image/png;base64,{image}"
    return f'<figure><figcaption>{caption}</figcaption><img alt="{caption}" src="{source}"></figure>'


def _thinned(points: Points) -> Points:
    size = max(1, len(points) // POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]


def _scaled(value: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, "")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1000:.3g} m" if value else "0 "
