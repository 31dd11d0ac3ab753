"""The command ``megazero status``. It needs no torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megazero.charts import text_chart
from megazero.config import run_with_arguments
from megazero.config.options.fields import option
from megazero.config.run import all_options
from megazero.files import write_text
from megazero.ops.status import Judgement, compared, facts, judge, restarts
from megazero.ops.vitals import Vitals, read_run

USAGE = """usage: megazero status [LOG_DIR ...] [flags below]
       megazero status runs/*/logs --html runs.html
       */5 * * * * megazero status /shared/runs/a/logs --quiet --alert 'mail -s "run a" me@example.org'   # cron

Reports the state of runs, their progress, pace and end, and why they were restarted (states: docs/guide/slurm.md).
Several runs are compared in a table at the end.
Exit status 0: all runs are well (they train, wait or have ended as they should); 1: a run needs a person; 2: a folder
is not a run's, or something cannot be written.
"""


@dataclass(frozen=True)
class StatusOptions:
    """The words of the command."""

    log_dir: tuple[str, ...] = option(
        (all_options()["log_dir"].default,), "folders that --log-dir named in training", place="LOG_DIR"
    )
    html: str | None = option(
        None, "also write a page there with curves, time breakdown and bytes (needs matplotlib)"
    )
    job: str | None = option(
        None, "the run's job (default: the job that its files or its folder's name give)"
    )
    alert: str | None = option(
        None,
        "shell command to run when a run is not well, once for each state of a start. It reads the sentence on "
        "standard input, and MEGAZERO_RUN, MEGAZERO_STATE and MEGAZERO_WHY in its environment",
    )
    quiet: bool = option(False, "print only one line for each run that is not well")
    chart: bool = option(True, "draw the curve of the loss")


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0, 1 if a run is not well, or 2 if a folder or an output cannot be used."""
    return run_with_arguments("status", argv, USAGE, StatusOptions, _status)


def report(run: Vitals, chart: bool, width: int, braille: bool) -> list[str]:
    """Return what is printed of a run."""
    said = facts(run)
    lines = [f"{name:<12}  {words}" for name, words in said.items()]
    lines += [f"{'':<12}  {line}" for line in restarts(run)[-10:]]
    losses = [(line["iteration"], line["lm_loss"]) for line in run.iterations]
    return lines + (
        ["", *text_chart(losses, "iteration", "loss, nats per token", width, 12, braille)]
        if chart and losses
        else []
    )


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


def _status(options: StatusOptions) -> int:
    width = shutil.get_terminal_size((100, 24)).columns
    braille = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    runs, texts, status = [], [], 0
    for folder in map(Path, options.log_dir):
        try:
            run = read_run(folder, options.job or "")
            runs.append(run)
            found = judge(run)
            status = max(status, int(found.state.alarming))
            if not options.quiet:
                texts.append("\n".join(report(run, options.chart, width, braille)) + "\n")
            elif found.state.alarming:
                texts.append(f"{run.folder}: {found.words}")
            if options.alert is not None:
                alert(options.alert, run, found)
        except (ValueError, OSError) as error:  # the other runs are reported all the same
            print(f"error: {error}", file=sys.stderr)
            status = 2
    if len(runs) > 1 and not options.quiet:
        texts.append("\n".join(compared(runs)) + "\n")
    print("\n".join(texts), end="" if not texts or not options.quiet else "\n")
    if options.html and runs:
        from megazero.ops.status_page import page  # matplotlib, which is optional

        write_text(Path(options.html), page(runs))
    return status
