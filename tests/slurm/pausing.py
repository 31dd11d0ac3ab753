"""In the place of python: pretrain_gpt.py as it is, but that it waits at one moment until something has happened.

    MOMENT=save RUN=FOLDER python tests/slurm/pausing.py pretrain/pretrain_gpt.py FLAGS

Every rank makes FOLDER/at-RANK when it is there, and goes on when there is FOLDER/go or it has received a signal.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megazero.checkpoint import directory
from megazero.mesh.launch import read_launch
from megazero.ops.exit_conditions import StopSignals
from megazero.train import setup
from megazero.train.trainer import Trainer

# The iteration after or in which each of them waits; jobs.py has a run that saves and evaluates there.
STEP, SAVE, EVALUATION = 45, 40, 30
MOMENTS = ("start-up", "step", "save", "evaluation")


def main() -> None:
    pause = _Pause(Path(os.environ["RUN"]))
    moment = os.environ.get("MOMENT")
    if moment == "start-up":
        _before(setup, "find_origin", lambda *_: pause())
    elif moment == "save":  # all is written, nothing is renamed
        _before(
            directory, "commit", lambda _, final, *__: pause() if final.name.endswith(f"{SAVE}") else None
        )
    elif moment == "step":
        at = STEP - 1
        _before(
            Trainer, "_forward_backward", lambda run, *_: pause() if run.progress.iteration == at else None
        )
    elif moment == "evaluation":
        at = EVALUATION
        _before(Trainer, "asked_to_stop", lambda run: pause() if run.progress.iteration == at else None)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


class _Pause:
    """Waits when it is called, once in the life of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.signalled = folder, False
        note = StopSignals._note

        def noted(signals: StopSignals, *rest: Any) -> None:
            self.signalled = True
            note(signals, *rest)

        StopSignals._note = noted  # type: ignore[method-assign]

    def __call__(self) -> None:
        if not (self.folder / "go").exists():
            (self.folder / f"at-{read_launch().rank}").touch()
        while not (self.signalled or (self.folder / "go").exists()):
            time.sleep(0.05)


def _before(owner: Any, name: str, first: Callable[..., object]) -> None:
    """Have a function or method do ``first``, with its arguments, before all else."""
    function = getattr(owner, name)

    def both(*arguments: Any, **options: Any) -> Any:
        first(*arguments)
        return function(*arguments, **options)

    setattr(owner, name, both)


if __name__ == "__main__":
    main()
