"""Charts and the pages that hold them: HTML and SVG, one file for a page, without libraries, server and network.

A plot is an SVG that stretches with the page while its strokes keep their width. Its texts are HTML around it, so
they are as large on a telephone. Texts of callers are escaped here. A page runs the one script that it was made
with, whatever its texts hold (Content-Security-Policy), and is light or dark as the reader's system is.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

SIZE = 10_000  # units of a plot's width and height
COLOURS = 8  # --c0 .. --c7
POINTS = 8000  # of a chart: 0.1 MB
COLUMNS = 1000  # that a screen tells apart
UNITS = {1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k"}

Point = tuple[float, float]


class Series(NamedTuple):
    """Numbers over ascending numbers. What is not finite is a gap.

    kind: "line"; "dots" on a thin line; "dashed"; or "band": a chart stacks its bands, which have the same x.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    kind: str = "line"


class Mark(NamedTuple):
    """Something that happened at ``x``. kind: "start", "save" or "alarm"."""

    x: float
    words: str
    kind: str


class Bar(NamedTuple):
    """A value, and the one that was expected."""

    name: str
    value: float
    expected: float | None
    words: str


@dataclass(frozen=True)
class Axis:
    """Places numbers on 0 .. SIZE. low < high, both above 0 if ``log``."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def over(cls, values: Iterable[float], log: bool = False, zero: bool = False) -> Axis:
        """Return the axis of what is finite and, if ``log``, above 0. zero: it begins at 0."""
        seen = [v for v in values if math.isfinite(v) and (v > 0 or not log)] or [1.0]
        low, high = (0.0 if zero else min(seen)), max(seen)
        if low >= high:
            low, high = (low / 2, high * 2) if log else (low - 1, low + 1)
        return cls(low, high, log)

    def holds(self, value: float) -> bool:
        return math.isfinite(value) and (value > 0 or not self.log)

    def place(self, value: float) -> int:
        low, high, at = (
            map(math.log, (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        return round((at - low) / (high - low) * SIZE)

    def ticks(self) -> list[float]:
        """Return about five round numbers, on a long logarithmic axis of each power of ten."""
        if self.log and self.high > 8 * self.low:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            parts = (1, 2, 5) if len(powers) < 4 else (1,)
            found = [part * 10.0**power for power in powers[:: 1 + len(powers) // 7] for part in parts]
        else:
            rough = (self.high - self.low) / 5
            power = 10.0 ** math.floor(math.log10(rough))
            step = next(power * part for part in (1, 2, 5, 10) if power * part >= rough * 0.999)
            found = [step * k for k in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [tick for tick in found if self.low <= tick <= self.high]


def text(value: object) -> str:
    """Return a value as text of HTML, for contents and for attributes in double quotes."""
    return html.escape(f"{value}")


def short(value: float) -> str:
    """Return a number in a few characters: 0.025, 12k, 1.5G."""
    size, unit = next(((s, u) for s, u in UNITS.items() if abs(value) >= s), (1.0, ""))
    return f"{value / size:.4g}{unit}"


# -- charts ----------------------------------------------------------------------------------------------------------


def chart(
    title: str,
    series: Sequence[Series],
    *,
    x: str = "iteration",
    y: str = "",
    marks: Sequence[Mark] = (),
    log_x: bool = False,
    log_y: bool = False,
    zero: bool = False,
) -> str:
    """Return a figure. x, y: what the axes show, with units. zero: the y axis begins at 0."""
    columns = min(COLUMNS, POINTS // (2 * max(1, len(series))))
    across = Axis.over((v for each in series for v in each.x), log_x)
    bands = [each for each in series if each.kind == "band"]
    outlines = dict(zip((each.name for each in bands), stacked(bands, across, columns // 2), strict=True))
    seen = [v for each in series if each.kind != "band" for v in each.y]
    seen += [v for outline in outlines.values() for _, v in outline]
    up = Axis.over(seen, log_y, zero or bool(bands))
    drawn = list[str]()
    for each in series:
        pieces = [outlines[each.name]] if each in bands else list(thinned(each, across, up, columns))
        places = [[(across.place(at), SIZE - up.place(v)) for at, v in piece] for piece in pieces]
        drawn.append(_path(each, places))
    key = "".join(
        f'<span class="entry {each.kind}" style="--c:var(--c{each.colour % COLOURS})">{text(each.name)}</span>'
        for each in series
        if each.name
    )
    axes = json.dumps([[x, across.low, across.high, across.log], ["", up.low, up.high, up.log]])
    return (
        f'<figure class="chart"><figcaption>{text(title)}<small>{text(y)}</small></figcaption>'
        f'<div class="plot" data-axes="{text(axes)}"><svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none">'
        f"{_grid(across, up)}{''.join(drawn)}</svg>{_ticks(across, up)}{''.join(_marks(marks, across))}"
        f'<div class="tip" hidden></div></div><small class="x">{text(x)}</small><div class="key">{key}</div></figure>'
    )


def thinned(series: Series, across: Axis, up: Axis, columns: int) -> Iterator[list[Point]]:
    """Yield the pieces of a line between its gaps. Of a column's points the lowest and the highest are left."""
    piece = list[Point]()
    for _, group in groupby(range(len(series.x)), lambda i: across.place(series.x[i]) * columns // SIZE):
        seen = [i for i in group if up.holds(series.y[i])]
        if seen:
            ends = {min(seen, key=series.y.__getitem__), max(seen, key=series.y.__getitem__)}
            piece += [(series.x[i], series.y[i]) for i in sorted(ends)]
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def stacked(bands: Sequence[Series], across: Axis, columns: int) -> Iterator[list[Point]]:
    """Yield each band's outline: means over columns, on top of the bands before it, there and back."""
    if not bands:
        return
    x = bands[0].x
    groups = [[*g] for _, g in groupby(range(len(x)), lambda i: across.place(x[i]) * columns // SIZE)]
    middles = [sum(x[i] for i in group) / len(group) for group in groups]
    low = [0.0] * len(groups)
    for band in bands:
        own = [sum(v for i in g if math.isfinite(v := band.y[i])) / len(g) for g in groups]
        top = [a + b for a, b in zip(low, own, strict=True)]
        yield [*zip(middles, top, strict=True), *[*zip(middles, low, strict=True)][::-1]]
        low = top


def _path(series: Series, pieces: Sequence[Sequence[tuple[int, int]]]) -> str:
    def path(kind: str, d: str, name: str = "") -> str:
        named = f' data-name="{text(name)}"' if name else ""
        return f'<path class="{kind}" style="--c:var(--c{series.colour % COLOURS})"{named} d="{d}"/>'

    line = "".join("M" + " ".join(f"{a},{b}" for a, b in piece) for piece in pieces)
    if series.kind != "dots":
        return path(series.kind, line + "z" * (series.kind == "band"), series.name)
    dots = "".join(f"M{a},{b}z" for piece in pieces for a, b in piece)
    return path("thin", line) + path("dots", dots, series.name)


def _grid(across: Axis, up: Axis) -> str:
    lines = [f"M0,{SIZE - up.place(tick)}h{SIZE}" for tick in up.ticks()]
    lines += [f"M{across.place(tick)},0v{SIZE}" for tick in across.ticks()]
    return f'<path class="grid" d="{"".join(lines)}"/>'


def _ticks(across: Axis, up: Axis) -> str:
    places = (("y", "bottom", up), ("x", "left", across))
    return "".join(
        f'<span class="{name}" style="{side}:{axis.place(tick) / SIZE:.2%}">{short(tick)}</span>'
        for name, side, axis in places
        for tick in axis.ticks()
    )


def _marks(marks: Sequence[Mark], across: Axis) -> Iterator[str]:
    """Yield marks by kind and place: those of one place are one."""
    inside = [mark for mark in marks if across.holds(mark.x) and across.low <= mark.x <= across.high]

    def spot(mark: Mark) -> tuple[str, int]:
        return mark.kind, across.place(mark.x) // 50

    for (kind, _), group in groupby(sorted(inside, key=spot), spot):
        first, *others = group
        words = first.words + (f", and {len(others)} more" if others else "")
        left = across.place(first.x) / SIZE
        yield f'<i class="mark {text(kind)}" style="left:{left:.2%}" title="{text(words)}"></i>'


# -- what is no chart ------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table. Numbers are shortened, and stand to the right."""

    def cell(value: object) -> str:
        number = isinstance(value, int | float)
        return f'<td class="n">{short(float(value))}</td>' if number else f"<td>{text(value)}</td>"

    lines = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    heads = "".join(f"<th>{text(each)}</th>" for each in head)
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>'


def bars(rows: Sequence[Bar]) -> str:
    """Return a bar for each value, with a tick where it was expected."""
    whole = max((max(row.value, row.expected or 0.0) for row in rows), default=0.0) or 1.0
    lines = []
    for row in rows:
        tick = "" if row.expected is None else f'<b style="left:{row.expected / whole:.2%}"></b>'
        bar = f'<div class="track"><i style="width:{row.value / whole:.2%}"></i>{tick}</div>'
        lines.append(f"<span>{text(row.name)}</span>{bar}<span>{text(row.words)}</span>")
    return f'<div class="bars">{"".join(lines)}</div>'


def boxes(groups: Mapping[str, Sequence[tuple[str, int]]]) -> str:
    """Return a box for each group with a small one for each of its parts, which have words and a colour."""
    out = []
    for name, parts in groups.items():
        cells = "".join(f'<span style="--c:var(--c{c % COLOURS})">{text(words)}</span>' for words, c in parts)
        out.append(f"<div><b>{text(name)}</b>{cells}</div>")
    return f'<div class="boxes">{"".join(out)}</div>'


def page(title: str, body: str, script: str = "", *, refresh: int = 0) -> str:
    """Return a whole document. body: HTML. script: runs after the charts' own. refresh: seconds, or 0."""
    script = HOVER + script
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    again = f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">{again}'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>'
        f"<body><main>{body}</main><script>{script}</script></body></html>\n"
    )


STYLE, HOVER = (Path(__file__).with_name(f"charts.{kind}").read_text("utf-8") for kind in ("css", "js"))
