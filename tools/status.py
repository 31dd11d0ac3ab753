#!/usr/bin/env python
"""Say how far runs are, how fast, when they will be done, and why they were restarted.

python tools/status.py runs/a/logs
python tools/status.py runs/*/logs --html runs.html
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from megazero.charts import text_chart
from megazero.files import write_text
from megazero.log.status import RunStatus, facts, read_run, restarts


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "log_dir",
        type=Path,
        nargs="+",
        help="folder given to --log-dir in training; the run may be under way",
    )
    add(
        "--html",
        type=Path,
        metavar="PAGE",
        help="write a page with curves, time bill and bytes there, too (needs matplotlib)",
    )
    add("--no-chart", action="store_true", help="leave the curve of the loss out")
    return parser.parse_args(arguments)


def report(run: RunStatus, chart: bool, width: int, braille: bool) -> list[str]:
    """Return what is printed of a run."""
    said = facts(run)
    lines = [f"{name:<12}  {words}" for name, words in said.items()]
    lines += [f"{'':<12}  {line}" for line in restarts(run)[-10:]]
    losses = [(line["iteration"], line["lm_loss"]) for line in run.iterations]
    return lines + (["", *text_chart(losses, width, 12, braille)] if chart and losses else [])


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, or 2 if a folder is not a run's or the page cannot be written."""
    options = parse(arguments)
    width = shutil.get_terminal_size((100, 24)).columns
    braille = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    runs, status = [], 0
    for folder in options.log_dir:
        try:
            runs.append(read_run(folder))
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            status = 2
    print("\n\n".join("\n".join(report(run, not options.no_chart, width, braille)) for run in runs))
    if options.html and runs:
        from megazero.log.status_page import page

        try:
            write_text(options.html, page(runs))
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
