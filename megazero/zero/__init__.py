"""ZeRO data parallelism, with one verb: ``shard``. Names load torch at first use; plan.py and layout.py do not."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megazero.zero.sharding import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("__") or find_spec(f"{__name__}.{name}"):  # the import of a submodule asks first
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module("megazero.zero.sharding"), name)
    return found
