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
ROOM = 0.04  # of a plot's height, above and below what is drawn
UNITS = {1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k"}

Point = tuple[float, float]


class Series(NamedTuple):
    """Numbers over ascending numbers. What is not finite is a gap.

    kind: "line", "dashed" or "dotted"; "dots" on a thin line; or "band": a chart stacks its bands, which have the
    same x. Of more points than a screen tells apart, a line is their mean, before their range.
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


@dataclass(frozen=True)
class Scale:
    """Places numbers on 0 .. SIZE. low < high, both above 0 if ``log``. whole: its ticks are whole numbers."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    @classmethod
    def over(cls, values: Iterable[float], log: bool = False, zero: bool = False) -> Scale:
        """Return the scale of what is finite and, if ``log``, above 0. zero: it begins at 0."""
        seen = [v for v in values if math.isfinite(v) and (v > 0 or not log)] or [1.0]
        low, high = (0.0 if zero else min(seen)), max(seen)
        if low >= high:
            low, high = (low / 2, high * 2) if log else (low - 1, low + 1)
        return cls(low, high, log, all(float(v).is_integer() for v in seen))

    def wider(self, keep_low: bool) -> Scale:
        """Return the scale with some room above and, unless ``keep_low``, below."""
        if self.log:
            part = (self.high / self.low) ** ROOM
            return Scale(self.low / part, self.high * part, True)
        part = (self.high - self.low) * ROOM
        return Scale(self.low - part * (not keep_low), self.high + part)

    def holds(self, value: float) -> bool:
        return math.isfinite(value) and (value > 0 or not self.log)

    def place(self, value: float) -> int:
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return round((at - low) / (high - low) * SIZE)

    def ticks(self) -> list[float]:
        """Return about five round numbers, on a long logarithmic axis of each power of ten."""
        if self.log and self.high > 8 * self.low:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            parts = (1, 2, 5) if len(powers) < 4 else (1,)
            found = [part * 10.0**power for power in powers[:: 1 + len(powers) // 9] for part in parts]
        else:
            rough = (self.high - self.low) / 5
            power = 10.0 ** math.floor(math.log10(rough))
            step = next(power * part for part in (1, 2, 2.5, 5, 10) if power * part >= rough * 0.999)
            found = [step * k for k in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [t for t in found if self.low <= t <= self.high and (not self.whole or float(t).is_integer())]


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
    log: bool = False,
    zero: bool = False,
) -> str:
    """Return a figure. x, y: what the axes show, with units. log: of the y axis, which begins at 0 if ``zero``."""
    columns = min(COLUMNS, POINTS // (2 * max(1, len(series))))
    across = Scale.over(v for xs in (*(each.x for each in series), [mark.x for mark in marks]) for v in xs)
    outlines = [*stacked([each for each in series if each.kind == "band"], across, columns // 2)]
    seen = [v for each in series if each.kind != "band" for v in each.y]
    zero = zero or bool(outlines)
    up = Scale.over(seen + [v for outline in outlines for _, v in outline], log, zero).wider(keep_low=zero)
    drawn, key, bands = list[str](), list[str](), iter(outlines)
    for each in series:
        pieces = [next(bands)] if each.kind == "band" else [*thinned(each, across, up, columns)]
        if each.kind == "line" and len(each.x) > 2 * columns:
            drawn.append(_path(each._replace(kind="range", name=""), pieces, across, up))
            pieces = [*thinned(averaged(each, across, columns // 4), across, up, columns)]
        drawn.append(_path(each, pieces, across, up))
        key.append(f'<span class="entry {each.kind}" style="{_colour(each.colour)}">{text(each.name)}</span>')
    axes = json.dumps([[x, across.low, across.high, False], ["", up.low, up.high, up.log]])
    grid, words = _ticks(across, up)
    return (
        f'<figure class="chart"><figcaption>{text(title)}<small>{text(y)}</small></figcaption>'
        f'<div class="plot" data-axes="{text(axes)}"><svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none">'
        f'{grid}{"".join(drawn)}</svg>{words}{"".join(_marks(marks, across))}<div class="tip" hidden></div></div>'
        f'<small class="x">{text(x)}</small><div class="key">{"".join(key)}</div></figure>'
    )


def _colour(number: int) -> str:
    return f"--c:var(--c{number % COLOURS})"


def thinned(series: Series, across: Scale, up: Scale, columns: int) -> Iterator[list[Point]]:
    """Yield the pieces of a line between its gaps. Of a column's points the lowest and the highest are left."""
    piece = list[Point]()
    for group in columned(series.x, across, columns):
        seen = [i for i in group if up.holds(series.y[i])]
        if seen:
            ends = {min(seen, key=series.y.__getitem__), max(seen, key=series.y.__getitem__)}
            piece += [(series.x[i], series.y[i]) for i in sorted(ends)]
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def columned(x: Sequence[float], across: Scale, columns: int) -> Iterator[list[int]]:
    """Yield the indices of the numbers in each column of a plot that has some."""
    for _, group in groupby(range(len(x)), lambda i: across.place(x[i]) * columns // SIZE):
        yield [*group]


def averaged(series: Series, across: Scale, columns: int) -> Series:
    """Return the means over columns of what is finite."""
    x, y = list[float](), list[float]()
    for group in columned(series.x, across, columns):
        seen = [i for i in group if math.isfinite(series.y[i])]
        x.append(sum(series.x[i] for i in group) / len(group))
        y.append(sum(series.y[i] for i in seen) / len(seen) if seen else math.nan)
    return series._replace(x=x, y=y)


def stacked(bands: Sequence[Series], across: Scale, columns: int) -> Iterator[list[Point]]:
    """Yield each band's outline: means over columns, on top of the bands before it, there and back."""
    low: Sequence[float] = ()
    for band in bands:
        means = averaged(band, across, columns)
        low = low or [0.0] * len(means.x)
        top = [a + (b if math.isfinite(b) else 0.0) for a, b in zip(low, means.y, strict=True)]
        yield [*zip(means.x, top, strict=True), *[*zip(means.x, low, strict=True)][::-1]]
        low = top


def _path(series: Series, points: Iterable[Iterable[Point]], across: Scale, up: Scale) -> str:
    pieces = [[(across.place(x), SIZE - up.place(y)) for x, y in piece] for piece in points]

    def path(kind: str, d: str, name: str = "") -> str:
        named = f' data-name="{text(name)}"' if name else ""
        return f'<path class="{kind}" style="{_colour(series.colour)}"{named} d="{d}"/>'

    line = "".join("M" + " ".join(f"{a},{b}" for a, b in piece) for piece in pieces)
    if series.kind != "dots":
        return path(series.kind, line + "z" * (series.kind == "band"), series.name)
    dots = "".join(f"M{a},{b}z" for piece in pieces for a, b in piece)
    return path("thin", line) + path("dots", dots, series.name)


def _ticks(across: Scale, up: Scale) -> tuple[str, str]:
    """Return the lines of the grid, and what they mean."""
    rows = [(f"M0,{SIZE - up.place(tick)}h{SIZE}", "y", "bottom", up, tick) for tick in up.ticks()]
    rows += [(f"M{across.place(tick)},0v{SIZE}", "x", "left", across, tick) for tick in across.ticks()]
    words = (
        f'<span class="{name}" style="{side}:{scale.place(tick) / SIZE:.2%}">{short(tick)}</span>'
        for _, name, side, scale, tick in rows
    )
    return f'<path class="grid" d="{"".join(row[0] for row in rows)}"/>', "".join(words)


def _marks(marks: Sequence[Mark], across: Scale) -> Iterator[str]:
    """Yield marks by kind and place: those of one place are one."""

    def spot(mark: Mark) -> tuple[str, int]:
        return mark.kind, across.place(mark.x) // 200

    for (kind, _), group in groupby(sorted(marks, key=spot), spot):
        first, *others = group
        words = first.words + (f", and {len(others)} more" if others else "")
        left = across.place(first.x) / SIZE
        yield f'<i class="mark {text(kind)}" style="left:{left:.2%}" title="{text(words)}"></i>'


# -- what is no chart ------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table. Numbers are shortened; words of a few characters stay in one line."""

    def cell(value: object) -> str:
        words = short(value) if isinstance(value, int | float) else f"{value}"
        return f"<td{' class=brief' * (len(words) <= 12)}>{text(words)}</td>"

    lines = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    heads = "".join(f"<th>{text(each)}</th>" for each in head)
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>'


def boxes(groups: Mapping[str, Sequence[tuple[str, int]]]) -> str:
    """Return a box for each group with a small one for each of its parts, which have words and a colour."""
    out = []
    for name, parts in groups.items():
        cells = "".join(f'<span style="{_colour(c)}">{text(words)}</span>' for words, c in parts)
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
