"""What the ranks of a job must have in common before a patch begins."""

from __future__ import annotations

import dataclasses
from typing import Any

from megazero.config.errors import ConfigError
from megazero.mesh.objects import gather_objects


def agree_on(options: Any) -> None:
    """Raise ConfigError on every rank unless all were given the same options, a dataclass. Collective."""
    own = dataclasses.asdict(options)
    every: list[dict[str, Any]] = gather_objects(own)
    faults = []
    for name, first in every[0].items():
        other = next((rank for rank, given in enumerate(every) if given[name] != first), None)
        if other is not None:
            faults.append(
                f"{name} is {first} on rank 0 and {every[other][name]} on rank {other}: give all ranks the same"
            )
    if faults:
        raise ConfigError(faults)


def nothing_quantised(numel: int) -> str:
    """Return the error for options that quantise nothing, as no parameter has more than ``numel`` elements."""
    return (
        f"exact_numel={numel}: no parameter has more elements on a rank, or all that do are sent exactly anyway, so "
        "nothing would be quantised; give less, or weights='none', gradients='none'"
    )
