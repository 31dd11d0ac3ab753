"""Makes the callbacks that --callbacks names. Whatever is wrong with one is a ValueError that names it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from inspect import signature
from typing import Any

from megazero.config.nearest import did_you_mean
from megazero.config.options.callback_words import parse_callback
from megazero.train.callbacks.callback import REDUCTIONS, Callback
from megazero.train.callbacks.chain import described


def make_callbacks(words: Sequence[str]) -> dict[str, Callback]:
    """Return the callbacks by name: MODULE:NAME, with #2 and so on where a class is named again."""
    made: dict[str, Callback] = {}
    for word in words:
        path, options = parse_callback(word)
        count = sum(name.partition("#")[0] == path for name in made)
        made[f"{path}#{count + 1}" if count else path] = _make(path, options)
    return made


def _make(path: str, options: dict[str, Any]) -> Callback:
    made = _found(path)
    known = [name for name, each in signature(made).parameters.items() if each.kind != each.VAR_KEYWORD]
    any_name = len(known) < len(signature(made).parameters)
    for name in options:
        if name not in known and not any_name:
            raise ValueError(f"--callbacks {path} takes no option {name!r}{did_you_mean(name, known)}")
    try:
        callback = made(**options)
    except Exception as error:
        raise ValueError(f"--callbacks {path} cannot be made: {described(error)}") from error
    for name, how in callback.exchanged.items():
        if how not in REDUCTIONS:
            raise ValueError(
                f"--callbacks {path} exchanges {name!r} as {how!r}, which is not one of {', '.join(REDUCTIONS)}"
            )
    return callback


def _found(path: str) -> type[Callback]:
    """Import the class. Raises ValueError if it is not there, or no Callback."""
    module, _, name = path.partition(":")
    try:
        inside = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ValueError(f"--callbacks {path}: {described(error)}") from error
        raise ValueError(
            f"--callbacks {path}: there is no module {error.name}: install it, or add its folder to PYTHONPATH"
        ) from error
    except Exception as error:
        raise ValueError(f"--callbacks {path}: the import fails: {described(error)}") from error
    found = getattr(inside, name, None)
    if isinstance(found, type) and issubclass(found, Callback) and found is not Callback:
        return found
    classes = [
        key for key, each in vars(inside).items() if isinstance(each, type) and issubclass(each, Callback)
    ]
    known = [key for key in classes if vars(inside)[key] is not Callback]
    what = "is no subclass of megazero.train.callbacks.callback.Callback" if found else "does not exist"
    raise ValueError(f"--callbacks {path}: {name} {what} in {inside.__file__}{did_you_mean(name, known)}")
