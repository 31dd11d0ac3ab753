"""The page and the charts of stored results. Pure functions of the JSON that tools/gpu_report.py keeps."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu_report.pieces import PIECES, Piece
from benchmarks.gpu_report.record import REASON

WIDTH = 118
OF_A_PIECE = {"device": "on", "commit": "at commit"}  # what a piece says where it is not the page's
Stored = Mapping[str, Any]  # machine, rehearsal, pieces: name -> result
REHEARSAL = """\
> **This is a rehearsal, not a measurement.** It ran on a CPU with tiny sizes, to show that every piece runs. No
> figure on this page says anything about a GPU.
"""
HEAD = """\
# On a GPU

    make gpu-report          # or, from a plain checkout with torch and numpy: python tools/gpu_report.py

With a GPU it writes this page, gpu.json and the charts in at most 8 minutes (`--minutes`). Without one it rehearses
on the CPU and writes only to `runs/gpu-rehearsal`. Each piece runs in its own process with a time limit; a failure
is a row with its reason. Started again, it runs only the missing and failed pieces (`--help` lists the flags).
"""


def page(stored: Stored, charts: Sequence[str] = ()) -> str:
    """Return the page. charts: files beside it."""
    text = [HEAD, REHEARSAL] if stored["rehearsal"] else [HEAD]
    text += [table([{"": key, "this run": value} for key, value in stored["machine"].items()]), ""]
    text += [table([_outcome(piece, stored["pieces"].get(piece.name)) for piece in PIECES]), ""]
    text += [f"![{Path(name).stem}]({name})\n" for name in charts]
    for piece in PIECES:
        text += section(piece, stored["pieces"].get(piece.name), stored["machine"])
    return "\n".join(text)


def section(piece: Piece, result: Mapping[str, Any] | None, machine: Mapping[str, str]) -> list[str]:
    what = import_module(f"benchmarks.gpu_report.{piece.module}").__doc__ or ""
    first, *rest = f"`--pieces {piece.name}`. {what.strip()}".split("\n\n")
    first = textwrap.fill(" ".join(first.split()), WIDTH, break_on_hyphens=False)
    text = [f"## {piece.title}", "", "\n\n".join([first, *rest]), ""]
    if result is None:
        return [*text, "Not run.", ""]
    if apart := [f"{word} {result[key]}" for key, word in OF_A_PIECE.items() if result[key] != machine[key]]:
        text += [f"Measured {' '.join(apart)}.", ""]
    if result["rows"]:
        text += [table(result["rows"]), ""]
    text += [f"- {note}" for note in result["notes"]]
    if result[REASON]:
        text += [f"- **The piece did not end well**: {result[REASON]}"]
    return [*text, ""] if text[-1] else text


def _outcome(piece: Piece, result: Mapping[str, Any] | None) -> dict[str, Any]:
    if result is None:
        return {"piece": piece.title, "rows": 0, "without figures": 0, "seconds": None, "": "not run"}
    empty = sum(REASON in row for row in result["rows"])
    return {
        "piece": piece.title,
        "rows": len(result["rows"]),
        "without figures": empty,
        "seconds": round(result["seconds"]),
        "": result[REASON] or "done",
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a markdown table, its columns in the rows' order, the reason last."""
    columns = [name for name in dict.fromkeys(n for row in rows for n in row) if name != REASON]
    columns += [REASON] if any(REASON in row for row in rows) else []
    lines = [columns, ["---"] * len(columns)]
    lines += [[cell(row.get(name), name) for name in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cell(value: Any, column: str = "") -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        if column in ("of a copy", "MFU", "share"):
            return f"{value:.1%}"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


# -- charts --------------------------------------------------------------------------------------------


def charts(stored: Stored, folder: Path) -> list[str]:
    """Draw what there is; return the files' names. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    drawn = []
    kernels = [row for row in _rows(stored, "kernels") if REASON not in row]
    training = [
        row
        for name in ("train-1b", "train-experts", "train-3b")
        for row in _rows(stored, name)
        if REASON not in row
    ]
    for name, bars, label in (
        ("gpu-kernels.png", _of_kernels(kernels), "share of a device copy"),
        ("gpu-training.png", _of_training(training), "tokens per second"),
    ):
        if not bars:
            continue
        figure = Figure(figsize=(9, 1.2 + 0.24 * len(bars)), layout="constrained")
        axes = figure.add_subplot(xlabel=label, title="REHEARSAL on a CPU" if stored["rehearsal"] else None)
        names = list(bars)[::-1]
        axes.barh(
            names,
            [bars[n] for n in names],
            color=["tab:red" if "megazero" in n else "tab:blue" for n in names],
        )
        axes.tick_params(axis="y", labelsize=7)
        axes.margins(y=0.01)
        figure.savefig(folder / name, dpi=110)
        drawn.append(name)
    return drawn


def _rows(stored: Stored, name: str) -> Sequence[Mapping[str, Any]]:
    return stored["pieces"].get(name, {}).get("rows", [])


def _of_kernels(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the bars of the largest size."""
    most = max((row["elements"] for row in rows), default=0)
    return {
        f"{row['operation']}, {row['bits']} bits, {row['rounding']}": row["of a copy"]
        for row in rows
        if row["elements"] == most
    }


def _of_training(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {
        f"{row['size']} ({row['layers']} layers), {row['contestant']}, recompute {row['recompute']}": row[
            "tokens/s"
        ]
        for row in rows
    }
