"""Methods whose results are kept in their object: chains ask for the same views and places in every step."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


def made_once(method: Method) -> Method:
    """Keep in the object what the method returned, by its positional arguments."""
    name = f"_{method.__name__}_made"

    @wraps(method)
    def found(self: Any, *asked: Any) -> Any:
        try:
            return vars(self)[name][asked]
        except KeyError:
            pass
        made = vars(self).setdefault(name, {})[asked] = method(self, *asked)
        return made

    return cast(Method, found)
