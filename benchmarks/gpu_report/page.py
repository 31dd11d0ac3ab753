"""The page of a report: its rows as tables. A pure function of the JSON that tools/gpu_report.py keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from benchmarks import harness
from benchmarks.gpu_report.pieces import PIECES, Piece
from benchmarks.gpu_report.record import REASON

SHARES = ("of a copy", "MFU")  # columns that are told in percent
REHEARSAL = """\
> **This is a rehearsal, not a measurement.** It ran on a CPU with tiny sizes, to show that every piece runs. No
> figure on this page says anything about a GPU.
"""


def page(stored: Mapping[str, Any]) -> str:
    """Return the page. stored: the machine, whether it is a rehearsal, and by name the pieces' results."""
    text = ["# On a GPU\n", *([REHEARSAL] if stored["rehearsal"] else [])]
    text += [f"- {key}: {value}" for key, value in stored["machine"].items()]
    for piece in PIECES:
        text += ["", *section(piece, stored["pieces"].get(piece.name), stored["machine"])]
    return "\n".join(text) + "\n"


def section(piece: Piece, result: Mapping[str, Any] | None, machine: Mapping[str, str]) -> list[str]:
    what = import_module(f"benchmarks.gpu_report.{piece.module}").__doc__ or ""
    text = [f"## {piece.title}", "", f"`--pieces {piece.name}`. {what.strip()}", ""]
    if result is None:
        return [*text, "Not run."]
    if apart := [f"{key} {result[key]}" for key in ("device", "commit") if result[key] != machine[key]]:
        text += [f"Measured on {', '.join(apart)}.", ""]
    if result["rows"]:
        text += [table(result["rows"]), ""]
    text += [f"- {note}" for note in result["notes"]]
    return text + [f"- **The piece did not end well**: {result[REASON]}"] * bool(result[REASON])


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a markdown table, its columns in the rows' order, the reason last."""
    columns = list(dict.fromkeys(name for row in rows for name in row if name != REASON))
    columns += [REASON] if any(REASON in row for row in rows) else []
    return harness.table(columns, [[cell(row.get(name), name) for name in columns] for row in rows])


def cell(value: Any, column: str = "") -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        if column in SHARES:
            return f"{value:.1%}"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
