"""Names of another library that a patch replaces: whether they are there, and their own meaning back afterwards."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

# Module -> name in it -> the parameters that a patch relies on; None: it does not call it.
Needed = Mapping[str, Mapping[str, tuple[str, ...] | None]]


def lookup(module: str, path: str) -> tuple[Any, str]:
    """Return the object that holds a name, and the name in it. Raises AttributeError or ImportError."""
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    getattr(owner, name)
    return owner, name


def missing(needed: Needed) -> Iterator[str]:
    """Say which names, or parameters of them, a patch needs and does not find."""
    for module, names in needed.items():
        for path, parameters in names.items():
            try:
                owner, name = lookup(module, path)
            except (ImportError, AttributeError) as error:
                yield f"{module}.{path} ({error})"
                continue
            if parameters is not None:
                has = list(inspect.signature(getattr(owner, name)).parameters)
                lacking = [p for p in parameters if p not in has]
                if lacking:
                    yield f"{module}.{path} takes {', '.join(has)}, not {', '.join(lacking)}"


class Replaced:
    """Names that are replaced until ``restore``."""

    def __init__(self) -> None:
        self.originals: list[tuple[Any, str, Any]] = []

    def wrap(self, module: str, path: str, wrapper: Callable[[Any], Any]) -> None:
        """Replace a name by ``wrapper`` of what it means, which shows the original's signature."""
        owner, name = lookup(module, path)
        original = getattr(owner, name)
        self.originals.append((owner, name, original))
        setattr(owner, name, update_wrapper(wrapper(original), original))

    def restore(self) -> None:
        while self.originals:
            owner, name, original = self.originals.pop()
            setattr(owner, name, original)


@contextmanager
def replaced(module: Any, **names: Any) -> Iterator[None]:
    """Replace names of a module inside the block."""
    originals = {name: getattr(module, name) for name in names}
    for name, value in names.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in originals.items():
            setattr(module, name, value)
