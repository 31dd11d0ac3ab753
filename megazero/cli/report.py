"""The command ``megazero report``. It needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megazero.config import run_with_arguments
from megazero.config.options.fields import option
from megazero.config.run import all_options
from megazero.files import write_text
from megazero.ops.report import write_page

PAGE_FILE = "report.html"
USAGE = """usage: megazero report [LOG_DIR ...] [flags below]
       megazero report runs/a/logs runs/b/logs --output both.html

Writes one HTML file of runs, whose curves lie over each other: losses, speed, where the time of an iteration goes,
bytes and memory beside the planner's, rounding errors, events, layout, flags. It opens in any browser, without a
network. Runs may be under way (--report of training keeps the page up to date) or broken off. Exit status 0; 2: a
folder is not a run's (the others are drawn).
"""


@dataclass(frozen=True)
class ReportOptions:
    """The words of the command."""

    log_dir: tuple[str, ...] = option(
        (all_options()["log_dir"].default,), "folders that --log-dir named in training", place="LOG_DIR"
    )
    output: str | None = option(None, f"file to write (default: {PAGE_FILE} in the first folder)")


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0, or 2 if a folder is not a run's."""
    return run_with_arguments("report", argv, USAGE, ReportOptions, _report)


def _report(options: ReportOptions) -> int:
    page, wrong = write_page(options.log_dir)
    path = Path(options.output or Path(options.log_dir[0]) / PAGE_FILE)
    write_text(path, page)
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    print(path)
    return 2 if wrong else 0
