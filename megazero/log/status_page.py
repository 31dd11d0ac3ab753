"""Runs as one page of HTML: facts, curves, time bill and bytes. It has its own drawings and needs no network."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from megazero.log.status import Line, Run, facts, restarts
from megazero.log.time_bill import ITEMS

POINTS = 400  # of a curve: more are drawn as means of their neighbours
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 220, 64, 24, 10  # of a drawing, in pixels; the last three are margins
COLOURS = ("#3366cc", "#dc3912", "#ff9900", "#109618", "#990099", "#0099c6", "#dd4477", "#66aa00", "#b82e2e",
           "#316395", "#994499", "#22aa99", "#aaaa11", "#6633cc", "#e67300")  # fmt: skip
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
svg{background:#fafafa;border:1px solid #ddd}svg text{font:11px system-ui,sans-serif;fill:#444}
.key span{white-space:nowrap;margin-right:.9em;font-size:.85em}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}svg{background:#222;border-color:#444}
svg text{fill:#bbb}h2{border-color:#444}}
"""

Points = Sequence[tuple[float, float]]


def page(runs: Sequence[Run]) -> str:
    """Return the page of these runs. Text from their files is escaped."""
    parts = [_run(run) for run in runs]
    title = html.escape(", ".join(str(run.folder) for run in runs))
    at = f"{max(run.now for run in runs).astimezone():%F %T %Z}"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>"
        f"<h1>Runs, as of {at}</h1>{''.join(parts)}</html>\n"
    )


def _run(run: Run) -> str:
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


def _loss(run: Run) -> str:
    curves = {"training": of(run.iterations, "lm_loss")}
    for line in run.evaluations:
        name = f"evaluation {line.get('eval_data', '')}".strip()
        if name not in curves:
            same = [e for e in run.evaluations if e.get("eval_data") == line.get("eval_data")]
            curves[name] = of(same, "eval_lm_loss")
    return lines("loss, nats per token", curves, _marks(run))


def _rank_times(run: Run) -> str:
    rows = [{"iteration": m["iteration"], **m["rank_times"]} for m in run.iterations if "rank_times" in m]
    if not rows:
        return ""
    curves = {"the slowest": of(rows, "most_s"), "the fastest": of(rows, "least_s")}
    return lines("seconds that a rank works in an iteration", curves, _marks(run))


def _bill(run: Run) -> str:
    bills = [m["time_bill"] for m in run.iterations if "time_bill" in m]
    return bars("time bill: seconds of a mean iteration", _means(bills, ITEMS), "s")


def _bytes(run: Run) -> str:
    sent = [m["bytes"] for m in run.iterations if "bytes" in m]
    names = sorted({name for row in sent for name in row})
    return bars("bytes that one rank sends in a mean iteration", _means(sent, names), "B")


def _means(rows: Sequence[Mapping[str, float]], names: Sequence[str]) -> dict[str, float]:
    means = {name: sum(row.get(name, 0.0) for row in rows) / len(rows) for name in names} if rows else {}
    return {name: mean for name, mean in means.items() if mean > 0}


def of(rows: Sequence[Line], key: str) -> Points:
    """Return (iteration, value) of the lines that have a finite one."""
    return [(r["iteration"], float(r[key])) for r in rows if key in r and math.isfinite(float(r[key]))]


def _marks(run: Run) -> list[float]:
    return [float(start["iteration"]) for start in run.starts[1:]]


# -- drawings --------------------------------------------------------------------------------------------------------


def lines(title: str, curves: Mapping[str, Points], marks: Sequence[float] = ()) -> str:
    """Draw curves by name over one pair of axes. marks: the iterations of restarts, as dashed lines."""
    thin = {name: _thinned(points) for name, points in curves.items() if points}
    if not thin:
        return ""
    every = [point for points in thin.values() for point in points]
    (x0, x1), (y0, y1) = (_span([point[axis] for point in every]) for axis in (0, 1))

    def place(x: float, y: float) -> str:
        across = LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - 8)
        return f"{across:.1f},{TOP + (y1 - y) / (y1 - y0) * (HEIGHT - TOP - BOTTOM):.1f}"

    drawn = [_axes(x0, x1, y0, y1)]
    for mark in marks:
        if x0 <= mark <= x1:
            ends = f"M{place(mark, y1)}L{place(mark, y0)}"
            drawn.append(f'<path d="{ends}" stroke="#999" stroke-dasharray="4 3"/>')
    for number, (name, points) in enumerate(thin.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(place(x, y) for x, y in points)
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.4"/>')
        if name.startswith("evaluation") or len(points) == 1:
            dots = (place(x, y).split(",") for x, y in points)
            drawn += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in dots]
    return _figure(title, "".join(drawn), [name for name in thin if name])


def bars(title: str, parts: Mapping[str, float], unit: str) -> str:
    """Draw parts of a sum, each with its value and share, as horizontal bars."""
    if not parts:
        return ""
    total, most = sum(parts.values()), max(parts.values())
    rows = [f"<tr><th>{_scaled(total)}{unit}<td><td>in all"]
    for name, value in sorted(parts.items(), key=lambda item: -item[1]):
        size = f'width="{300 * value / most:.1f}" height="12" fill="{COLOURS[0]}"'
        bar = f'<svg width="300" height="12"><rect {size}/></svg>'
        words = html.escape(name.replace("_", " "))
        rows.append(f"<tr><td>{_scaled(value)}{unit}<td>{bar}<td>{words}, {value / total:.1%}")
    return f"<figure><figcaption>{html.escape(title)}</figcaption><table>{''.join(rows)}</table></figure>"


def _axes(x0: float, x1: float, y0: float, y1: float) -> str:
    bottom = HEIGHT - BOTTOM
    texts = [
        (LEFT - 6, TOP + 8, "end", f"{y1:.4g}"),
        (LEFT - 6, bottom, "end", f"{y0:.4g}"),
        (LEFT, HEIGHT - 8, "start", f"{x0:,.0f}"),
        (WIDTH - 8, HEIGHT - 8, "end", f"{x1:,.0f}"),
    ]
    written = (f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>' for x, y, anchor, text in texts)
    return f'<path d="M{LEFT},{TOP}V{bottom}H{WIDTH - 8}" fill="none" stroke="#888"/>{"".join(written)}'


def _figure(title: str, drawing: str, names: Sequence[str]) -> str:
    keys = (
        f'<span><svg width="12" height="8"><rect width="12" height="8" fill="{COLOURS[i % len(COLOURS)]}"/></svg> '
        f"{html.escape(name)}</span>"
        for i, name in enumerate(names)
    )
    key = f'<div class="key">{"".join(keys)}</div>' if len(names) > 1 else ""
    return (
        f"<figure><figcaption>{html.escape(title)}</figcaption>"
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">{drawing}</svg>{key}</figure>'
    )


def _thinned(points: Points) -> Points:
    size = max(1, len(points) // POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low, low + (abs(low) or 1.0))


def _scaled(value: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, "")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1000:.3g} m" if value else "0 "


def write_page(runs: Sequence[Run], path: Path) -> None:
    """Write the page beside ``path`` and rename it, so that a reader never sees half of it."""
    beside = path.with_name(f"{path.name}.partial")
    beside.write_text(page(runs), encoding="utf-8")
    beside.replace(path)
