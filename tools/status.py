#!/usr/bin/env python
"""Say how runs are: their state, how far, how fast, when they will be done, and why they were restarted.

    python tools/status.py runs/a/logs
    python tools/status.py runs/*/logs --html runs.html
    */5 * * * * python tools/status.py /shared/runs/a/logs --quiet --alert 'mail -s "run a" me@example.org'   # cron

The exit status is 0 if all runs are well (they train, wait or have ended as they should), 1 if one needs a person,
and 2 if a folder is not a run's or something cannot be written. docs/slurm.md has the states.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megazero.charts import text_chart
from megazero.files import write_text
from megazero.log.safe_stream import guard_streams
from megazero.ops.status import Judgement, facts, judge, restarts
from megazero.ops.vitals import Vitals, read_run


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
    add("--job", default="", help="the run's job; by default the one that its files or its folder's name say")
    add(
        "--alert",
        metavar="COMMAND",
        help="when a run is not well, give this shell command the sentence that says so on its standard input, and "
        "MEGAZERO_RUN, MEGAZERO_STATE and MEGAZERO_WHY in its environment; once for each state of a start",
    )
    add("--quiet", action="store_true", help="print one line for each run that is not well, and nothing else")
    add("--no-chart", action="store_true", help="leave the curve of the loss out")
    return parser.parse_args(arguments)


def report(run: Vitals, chart: bool, width: int, braille: bool) -> list[str]:
    """Return what is printed of a run."""
    said = facts(run)
    lines = [f"{name:<12}  {words}" for name, words in said.items()]
    lines += [f"{'':<12}  {line}" for line in restarts(run)[-10:]]
    losses = [(line["iteration"], line["lm_loss"]) for line in run.iterations]
    return lines + (["", *text_chart(losses, width, 12, braille)] if chart and losses else [])


def alert(command: str, run: Vitals, found: Judgement) -> None:
    """Run the command if this is new. LOG_DIR/.alerted says what it was told last; a run that is well removes it.

    Raises OSError if that cannot be written, and ValueError if the command fails: the next call tries it again.
    """
    memory = run.folder / ".alerted"
    if not found.state.alarming:
        memory.unlink(missing_ok=True)
        return
    start = run.lease.owner if run.lease else f"{len(run.starts)}"
    what = f"{found.state.name} {start}\n"
    if memory.exists() and memory.read_text() == what:
        return
    sentence = f"{run.folder}: {found.words}"
    said = {"MEGAZERO_RUN": f"{run.folder}", "MEGAZERO_STATE": found.state.words, "MEGAZERO_WHY": found.why}
    done = subprocess.run(command, shell=True, env={**os.environ, **said}, input=f"{sentence}\n", text=True)
    if done.returncode:
        raise ValueError(f"--alert {command} ended with {done.returncode}, so it is tried again: {sentence}")
    write_text(memory, what)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, 1 if a run is not well, or 2 if a folder or an output cannot be used."""
    options = parse(arguments)
    width = shutil.get_terminal_size((100, 24)).columns
    braille = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    runs, texts, status = [], [], 0
    for folder in options.log_dir:
        try:
            run = read_run(folder, options.job)
            runs.append(run)
            found = judge(run)
            status = max(status, int(found.state.alarming))
            if not options.quiet:
                texts.append("\n".join(report(run, not options.no_chart, width, braille)) + "\n")
            elif found.state.alarming:
                texts.append(f"{run.folder}: {found.words}")
            if options.alert is not None:
                alert(options.alert, run, found)
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            status = 2
    print("\n".join(texts), end="" if not texts or not options.quiet else "\n")
    if options.html and runs:
        from megazero.ops.status_page import page

        try:
            write_text(options.html, page(runs))
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return status


if __name__ == "__main__":
    guard_streams()
    sys.exit(main())
