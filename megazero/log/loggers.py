"""TensorBoard and Weights & Biases behind one small interface. metrics.jsonl stays the authority.

If a requested logger cannot run, starting it raises ValueError with the cure. Once training runs, a logger that fails
is dropped with one warning: a full disk or a broken network never stops a run.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from megazero.checkpoint.errors import error_number
from megazero.log.line_file import NO_ROOM


class Logger(Protocol):
    """Takes the values of an iteration. Nested mappings become names that are joined by '/'."""

    def log(self, iteration: int, values: Mapping[str, Any]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class TensorBoardLogger:
    """Writes scalars as TensorBoard events.

    On a resume, events after `iteration` are purged. TensorBoard's fast reader, its default, ignores the mark of
    that: it drops points only when another of their iteration or an earlier one comes.
    """

    def __init__(self, directory: str | os.PathLike[str], *, iteration: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                f"--tensorboard-dir {directory} needs TensorBoard ({error}): pip install tensorboard"
            ) from error
        # A start from the beginning takes the place of one that never saved, evaluations before training included.
        self._writer = SummaryWriter(str(directory), purge_step=iteration + 1 if iteration else 0)

    def log(self, iteration: int, values: Mapping[str, Any]) -> None:
        for name, value in scalars(values):
            self._writer.add_scalar(name, value, iteration)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """Writes one wandb run, which is continued across restarts by its id (new_run_id, kept in the trainer's state).

    entity: the user or team that the project belongs to; without one, wandb's own.
    directory: the folder of its local files (--wandb-save-dir); without one, wandb chooses. Mode and account are
    wandb's own business and variables: WANDB_MODE=offline needs no account. The x axis is `iteration`, so a resume
    from an earlier checkpoint may log again what wandb's own step counter would refuse.
    """

    def __init__(
        self,
        project: str,
        *,
        run_id: str,
        entity: str | None = None,
        name: str | None = None,
        directory: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError(f"--wandb-project {project} needs wandb ({error}): pip install wandb") from error
        try:
            self._run = wandb.init(
                project=project,
                entity=entity,
                name=name,
                id=run_id,
                dir=directory,
                resume="allow",
                config=dict(config or {}),
            )
        except Exception as error:
            raise ValueError(
                f"--wandb-project {project}: wandb does not start ({error}). Run `wandb login`, or set "
                "WANDB_MODE=offline to need neither account nor network"
            ) from error
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def log(self, iteration: int, values: Mapping[str, Any]) -> None:
        self._run.log(dict(scalars(values)) | {"iteration": iteration})

    def flush(self) -> None:
        """Do nothing: wandb's own process has what was logged, and outlives this one."""

    def close(self) -> None:
        self._run.finish()


def opened(makers: Iterable[Callable[[], Logger]]) -> list[Logger]:
    """Open the loggers. One whose disk is full is left out with a warning: a resume must not fail because of it."""
    made = []
    for make in makers:
        try:
            made.append(make())
        except (OSError, ValueError) as error:
            if error_number(error) not in NO_ROOM:
                raise
            warnings.warn(f"a logger does not start, training goes on without it: {error}", stacklevel=2)
    return made


class Loggers:
    """Uses several loggers as one. A member that fails is dropped with a warning."""

    def __init__(self, members: Sequence[Logger] = ()) -> None:
        self._members = list(members)

    def log(self, iteration: int, values: Mapping[str, Any]) -> None:
        self._each(lambda member: member.log(iteration, values))

    def flush(self) -> None:
        """Write what members have buffered, so that it survives a kill."""
        self._each(lambda member: member.flush())

    def close(self) -> None:
        self._each(lambda member: member.close())
        self._members.clear()

    def _each(self, call: Callable[[Logger], None]) -> None:
        for member in tuple(self._members):
            try:
                call(member)
            except Exception as error:  # noqa: BLE001 - whatever it is, training is worth more
                self._members.remove(member)
                warnings.warn(
                    f"{type(member).__name__} failed and is switched off ({type(error).__name__}: {error}); "
                    "training goes on, metrics.jsonl has every line",
                    stacklevel=3,
                )


def scalars(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers in nested mappings as ("time_bill/compute", 0.1). Text and None are left out."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif hasattr(value, "item"):
            yield f"{prefix}{name}", float(value.item())
        elif isinstance(value, (bool, int, float)):
            yield f"{prefix}{name}", float(value)
