"""Measure on one card, in at most 8 minutes and piece by piece, everything about megazero that needs a GPU.

    python -m benchmarks.gpu_report [--pieces kernels,race] [--minutes 8] [--fresh] [--out DIR]

A piece runs in a process of its own with a time limit. Its result is kept in OUT; a failure is a row with its reason.
Run again, it does only what is missing or failed. OUT has all results as gpu.md and gpu.json. Without a card, or with
--rehearsal, the same pieces run with tiny sizes on the CPU, and the page says so. It needs torch and numpy; what else
a piece needs and does not find is a reason on the page.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu_report import page
from benchmarks.gpu_report.pieces import BY_NAME, PIECES, Piece
from benchmarks.gpu_report.record import REASON
from megazero.files import write_text

ROOT = Path(__file__).resolve().parents[2]
LEAST = 5.0  # seconds that a piece is started with
PATIENCE = 4  # times a piece's time in a rehearsal: machines without a card are slow, and shared


def main(argv: list[str] | None = None) -> int:
    """Return the exit status. It is 0 if every piece that was asked for ended well."""
    options = _options(argv)
    began = time.monotonic()
    import torch

    from benchmarks.gpu_report.setting import machine

    rehearsal = options.rehearsal or not torch.cuda.is_available()
    out = options.out or ROOT / "runs" / ("gpu-rehearsal" if rehearsal else "gpu-report")
    facts = machine(rehearsal)
    results: dict[str, Any] = {}
    for piece in PIECES:
        file = out / f"{piece.name}.result.json"
        if file.exists():
            results[piece.name] = json.loads(file.read_text())
    stored = {"rehearsal": rehearsal, "machine": facts, "pieces": results}
    for piece in options.pieces:
        if options.fresh or not still_good(results.get(piece.name), facts):
            left = 60 * options.minutes - (time.monotonic() - began)
            kept = results[piece.name] = run(piece, out, rehearsal, left, facts)
            write_text(out / f"{piece.name}.result.json", json.dumps(kept, indent=1))
            print(f"{piece.name:12} {kept['seconds']:5.0f} s  {kept[REASON] or 'done'}", flush=True)
            write(stored, out)
            keep(out, os.environ.get("OUT"))
    return int(any(piece.name not in results or results[piece.name][REASON] for piece in options.pieces))


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pieces", type=_pieces, default=list(PIECES), help=f"of {','.join(BY_NAME)}; default: all"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="for all that is run now (default: 8)")
    parser.add_argument("--fresh", action="store_true", help="run what is there already, too")
    parser.add_argument("--rehearsal", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--out", type=Path, help="results and logs (default: runs/gpu-report, gpu-rehearsal)")
    options = parser.parse_args(argv)
    if not options.minutes > 0:
        parser.error(f"--minutes {options.minutes:g} must be above 0; the default is 8")
    return options


def _pieces(text: str) -> list[Piece]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if wrong := [name for name in names if name not in BY_NAME]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is no piece; there are {', '.join(BY_NAME)}")
    return [BY_NAME[name] for name in names]


def still_good(kept: Mapping[str, Any] | None, facts: Mapping[str, str]) -> bool:
    """Return whether a stored result stands.

    It must be complete, and come from this machine and torch. (The page tells its commit.)
    """
    return (
        kept is not None and not kept[REASON] and all(kept[key] == facts[key] for key in ("device", "torch"))
    )


def run(piece: Piece, out: Path, rehearsal: bool, left: float, facts: Mapping[str, str]) -> dict[str, Any]:
    """Run one piece in a process of its own, and return its rows, whatever became of it.

    left: the seconds for all that is to come.
    """
    result = {"rows": [], "notes": [], "seconds": 0.0, REASON: ""}
    result |= {key: facts[key] for key in ("device", "torch", "commit")}
    seconds = min(float(piece.seconds) * (PATIENCE if rehearsal else 1), left)
    if seconds < LEAST:
        return {**result, REASON: "not run: the time of the report was over (--minutes)"}
    rows, log = out / f"{piece.name}.rows.json", out / f"{piece.name}.log"
    out.mkdir(parents=True, exist_ok=True)
    rows.unlink(missing_ok=True)
    began = time.monotonic()
    status = _process(piece, rows, log, rehearsal, seconds)
    result["seconds"] = time.monotonic() - began
    if rows.exists():
        result |= json.loads(rows.read_text())
    if status is None:
        result[REASON] = f"stopped after {seconds:.0f} s, its time; the rows are what it had"
    elif status != 0:
        result[REASON] = f"ended with status {status}: {last_words(log)}"
    return result


def _process(piece: Piece, rows: Path, log: Path, rehearsal: bool, seconds: float) -> int | None:
    """Run the piece and return its exit status, or None if it had to be stopped.

    Its processes are stopped with it.
    """
    command = [sys.executable, "-m", "benchmarks.gpu_report.pieces", piece.name, str(rows.resolve())]
    command += [str(0.9 * seconds), *(["--rehearsal"] if rehearsal else [])]
    environment = {**os.environ, **(piece.environment if rehearsal else {})}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with open(log, "w") as text:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=text, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(
                ProcessLookupError
            ):  # those that it started, too, which may outlive it: one session
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def keep(out: Path, folder: str | None) -> None:
    """Pack the results so far into ``folder``, where it is named, for a machine of which nothing else stays."""
    if folder:
        with tarfile.open(Path(folder) / "gpu-report.tgz", "w:gz") as packed:
            packed.add(out, "gpu-report")


def last_words(log: Path) -> str:
    """Return the last line that a piece printed. Of a traceback this is the exception."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300].replace("|", "/") if lines else "it printed nothing"


def write(stored: Mapping[str, Any], folder: Path) -> None:
    """Write gpu.md and gpu.json."""
    write_text(folder / "gpu.json", json.dumps(stored, indent=1) + "\n")
    write_text(folder / "gpu.md", page.page(stored))


if __name__ == "__main__":
    sys.exit(main())
