"""All callbacks of a run as one: they are called in turn, and errors of a user's callback name it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
import torch.distributed as dist

from megazero.comm.lane import CommunicationError
from megazero.log.metrics import IterationMetrics, encode
from megazero.train.callbacks.callback import REDUCTIONS, Callback, Numbers, TrainedStep, WatchedRun
from megazero.train.state.progress import LeftOut, Progress

FIELDS = {"consumed_samples", "time", *(field.name for field in fields(IterationMetrics))}


class CallbackError(RuntimeError):
    """A user's callback failed."""


class Callbacks:
    """The trainer's own callbacks, then the user's, by the names that errors and checkpoints have for them."""

    def __init__(self, own: Sequence[Callback] = (), users: Mapping[str, Callback] | None = None) -> None:
        self.users = dict(users or {})
        self.members = [*own, *self.users.values()]
        self._names = {callback: name for name, callback in self.users.items()}

    def watch(self, run: WatchedRun) -> None:
        """Tell every callback which run it watches."""
        for callback in self.members:
            callback.run = run

    def start(self) -> None:
        self._tell("start")

    def before_step(self, iteration: int) -> None:
        self._tell("before_step", iteration)

    def numbers(self) -> dict[Callback, Numbers]:
        """Return what every callback exchanges in this step, on this rank."""
        found: dict[Callback, Numbers] = {}
        for callback, given in self._each("numbers"):
            with self._named(callback, "numbers"):
                if set(given) != set(callback.exchanged):
                    raise ValueError(
                        f"it returned {sorted(given)}, but exchanges {sorted(callback.exchanged)}"
                    )
            found[callback] = given
        return found

    def after_step(
        self, step: TrainedStep, numbers: Mapping[Callback, Mapping[str, Any]], metrics: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return ``metrics`` with those that callbacks add to the iteration's line."""
        metrics = dict(metrics)
        for callback in self.members:
            with self._named(callback, "after_step"):
                given = callback.after_step(replace(step, numbers=numbers[callback])) or {}
                self._check(callback, given, metrics)
            metrics |= given
        return metrics

    def logged(self, metrics: IterationMetrics) -> None:
        self._tell("logged", metrics)

    def evaluate(self) -> dict[str, float]:
        """Return the results of the user's evaluations by name."""
        results = dict[str, float]()
        for callback, given in self._each("evaluate"):
            with self._named(callback, "evaluate"):
                self._check(callback, given or {}, results)
            results |= given or {}
        return results

    def evaluated(self, at: Progress, name: str, loss: float) -> None:
        self._tell("evaluated", at, name, loss)

    def saved(self, iteration: int, path: Path, seconds: float) -> None:
        self._tell("saved", iteration, path, seconds)

    def undone(self, why: str, out: LeftOut) -> None:
        self._tell("undone", why, out)

    def closing(self) -> None:
        self._tell("closing")

    def state(self) -> dict[str, Any]:
        """Return the state of the user's callbacks by name, of those that have some."""
        found = {self._names[callback]: dict(state) for callback, state in self._each("state", users=True)}
        return {name: state for name, state in found.items() if state}

    def load_state(self, states: Mapping[str, Any]) -> None:
        for name, callback in self.users.items():
            if name in states:
                with self._named(callback, "load_state"):
                    callback.load_state(states[name])

    def _tell(self, moment: str, *arguments: Any) -> None:
        for _ in self._each(moment, *arguments):
            pass

    def _each(self, moment: str, *arguments: Any, users: bool = False) -> Iterator[tuple[Callback, Any]]:
        for callback in self.users.values() if users else self.members:
            with self._named(callback, moment):
                result = getattr(callback, moment)(*arguments)
            yield callback, result

    def _check(self, callback: Callback, given: Mapping[str, Any], others: Mapping[str, Any]) -> None:
        """Raise ValueError if metrics of a user's callback cannot stand in a line beside the others."""
        if callback not in self._names or not given:
            return
        if taken := FIELDS & given.keys() | others.keys() & given.keys():
            raise ValueError(f"a metric has this name already: {sorted(taken)}; choose another one")
        encode(given)  # raises for what JSON does not hold

    @contextmanager
    def _named(self, callback: Callback, moment: str) -> Iterator[None]:
        """Name a user's callback in its error. Errors of the trainer's own pass, and those of a lost rank."""
        try:
            yield
        except (dist.DistError, CommunicationError):
            raise
        except Exception as error:
            if callback not in self._names:
                raise
            raise CallbackError(
                f"--callbacks {self._names[callback]}: {moment}: {described(error)}"
            ) from error


def described(error: Exception) -> str:
    """Return an error of a user's code in one line, with the place in that code."""
    last = extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"


class Exchange:
    """The numbers that ranks send each other with the norm of a step: one fp64 row of each rank.

    own: names of the trainer's own numbers, of which every rank sees all ranks'.
    """

    def __init__(self, own: Sequence[str], callbacks: Sequence[Callback], device: torch.device) -> None:
        self.columns: list[tuple[Callback | None, str, str]] = [(None, name, "each") for name in own]
        self.columns += [(each, name, how) for each in callbacks for name, how in each.exchanged.items()]
        self.callbacks = callbacks
        self.row = torch.zeros(len(self.columns), dtype=torch.float64, device=device)

    def write(self, own: Numbers, numbers: Mapping[Callback, Numbers]) -> torch.Tensor:
        """Write this rank's row, without waiting for the device, and return it."""
        for slot, (callback, name, _) in zip(self.row, self.columns, strict=True):
            value = own[name] if callback is None else numbers[callback][name]
            slot.copy_(value) if isinstance(value, torch.Tensor) else slot.fill_(value)
        return self.row

    def read(
        self, rows: Sequence[Sequence[float]]
    ) -> tuple[dict[str, tuple[float, ...]], dict[Callback, dict[str, Any]]]:
        """Return the trainer's own numbers by name, and what each callback gets, from the rows of all ranks."""
        own, found = dict[str, tuple[float, ...]](), {each: dict[str, Any]() for each in self.callbacks}
        for (callback, name, how), column in zip(self.columns, zip(*rows, strict=True), strict=True):
            if callback is None:
                own[name] = column
            else:
                found[callback][name] = REDUCTIONS[how](column)
        return own, found
