"""Replace names of another library, and give them back; check before that it has them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

from megazero.config.errors import ConfigError

# Module -> name in it -> the parameters that a patch relies on; None: it does not call it.
Needed = Mapping[str, Mapping[str, tuple[str, ...] | None]]
Version = tuple[int, ...]


def release(version: str) -> Version:
    """Return the first two numbers of a library's version."""
    return tuple(int(part) for part in version.split(".")[:2])


def lookup(module: str, path: str) -> tuple[Any, str]:
    """Return the object that holds a name, and the name in it. Raises AttributeError or ImportError."""
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    getattr(owner, name)
    return owner, name


def missing(needed: Needed) -> Iterator[str]:
    """Name what a patch needs and does not find: names, or parameters of them."""
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


def check_version(
    patch: str, library: str, version: str, known: tuple[Version, Version], needed: Needed, *, newer: bool
) -> list[str]:
    """Return notes on a version that was not tried. ``known``: the first and the last that were.

    newer: later ones are taken, too. Raises ConfigError for others, and where names or parameters are missing.
    """
    number, (first, last) = release(version), (".".join(map(str, each)) for each in known)
    if number < known[0] or number > known[1] and not newer:
        raise ConfigError([f"{patch}: {library} {version} was not tried: take {first} to {last}"])
    lacking = [f"{patch}: {library} {version} lacks {text}" for text in missing(needed)]
    if lacking:
        raise ConfigError([*lacking, f"nothing is patched; known are {first} to {last}"])
    if number <= known[1]:
        return []
    return [f"{library} {version} is newer than {last}, the last that was tried: names and parameters fit"]


class Replaced:
    """Names that are replaced until ``restore``."""

    def __init__(self) -> None:
        self.originals: list[tuple[Any, str, Any]] = []

    def wrap(self, module: str, path: str, around: Callable[..., Any]) -> None:
        """Replace a function or method by ``around(original, *args, **kwargs)``, with the original's signature."""
        owner, name = lookup(module, path)
        original = getattr(owner, name)

        @wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        self.originals.append((owner, name, original))
        setattr(owner, name, wrapped)

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
