"""All callbacks of a run as one: they are called in turn, and errors of a user's callback name it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from traceback import extract_tb
from typing import Any, Concatenate, ParamSpec

import torch
import torch.distributed as dist

from megazero.comm.lane import CommunicationError
from megazero.log.metrics import IterationMetrics, encode
from megazero.train.callbacks.callback import REDUCTIONS, Callback, Numbers, TrainedStep, WatchedRun
from megazero.zero.scalars import NOTHING, Rows, StepPart, Sums

Told = ParamSpec("Told")
Received = Mapping[Callback | None, Mapping[str, Any]]  # numbers of all ranks, by who exchanges them

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

    def tell(
        self, moment: Callable[Concatenate[Any, Told], None], *told: Told.args, **named: Told.kwargs
    ) -> None:
        """Call a moment of every callback, such as Callback.saved."""
        for _ in self._each(moment.__name__, *told, **named):
            pass

    def numbers(self) -> dict[Callback | None, Numbers]:
        """Return what every callback exchanges in this step, on this rank."""
        found: dict[Callback | None, Numbers] = {}
        for callback, given in self._each("numbers"):
            with self._named(callback, "numbers"):
                if set(given) != set(callback.exchanged):
                    raise ValueError(
                        f"it returned {sorted(given)}, but exchanges {sorted(callback.exchanged)}"
                    )
            found[callback] = given
        return found

    def after_step(self, step: TrainedStep, numbers: Received, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``metrics`` with those that callbacks add to the iteration's line."""
        metrics = dict(metrics)
        for callback in self.members:
            with self._named(callback, "after_step"):
                given = callback.after_step(replace(step, numbers=numbers[callback])) or {}
                self._check(callback, given, metrics)
            metrics |= given
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Return the results of the user's evaluations by name."""
        results = dict[str, float]()
        for callback, given in self._each("evaluate"):
            with self._named(callback, "evaluate"):
                self._check(callback, given or {}, results)
            results |= given or {}
        return results

    def state(self) -> dict[str, Any]:
        """Return the state of the user's callbacks by name, of those that have some."""
        of_users = ((each, state) for each, state in self._each("state") if each in self._names)
        return {self._names[callback]: dict(state) for callback, state in of_users if state}

    def load_state(self, states: Mapping[str, Any]) -> None:
        for name, callback in self.users.items():
            if name in states:
                with self._named(callback, "load_state"):
                    callback.load_state(states[name])

    def _each(self, moment: str, *told: Any, **named: Any) -> Iterator[tuple[Callback, Any]]:
        for callback in self.members:
            with self._named(callback, moment):
                result = getattr(callback, moment)(*told, **named)
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


class Exchange(StepPart):
    """The numbers of the trainer and of callbacks, in the one exchange of a step.

    own: names of the trainer's numbers, of which every rank sees all ranks'. given: this rank's numbers of the step;
    received: those of all ranks, reduced. Both are by callback, and the trainer's are under None.
    """

    given: Mapping[Callback | None, Numbers]
    received: Received

    def __init__(self, own: Sequence[str], callbacks: Sequence[Callback]) -> None:
        self.callbacks = callbacks
        self.names: list[tuple[Callback | None, str, str]] = [(None, name, "each") for name in own]
        self.names += [(each, name, how) for each in callbacks for name, how in each.exchanged.items()]
        self.columns = len(self.names)

    def write(self, row: torch.Tensor) -> None:
        for slot, (callback, name, _) in zip(row, self.names, strict=True):
            value = self.given[callback][name]
            slot.copy_(value) if isinstance(value, torch.Tensor) else slot.fill_(value)

    def read(self, rows: Rows, sums: Sums) -> Mapping[str, Any]:
        found: dict[Callback | None, dict[str, Any]] = {each: {} for each in (None, *self.callbacks)}
        for (callback, name, how), column in zip(self.names, zip(*rows, strict=True), strict=True):
            found[callback][name] = REDUCTIONS[how](column)
        self.received = found
        return NOTHING
