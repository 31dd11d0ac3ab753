"""The command ``megazero convert``: checkpoints to Hugging Face and back, and from Megatron, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megazero.config import run_with_arguments
from megazero.config.options.fields import section_options
from megazero.config.read.flags import pick, section_text
from megazero.convert.options import SECTIONS

STATUS = "Exit status 0: done; 1: a check does not hold; 2: nothing was converted."


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 is good, 1 a check does not hold, 2 nothing was converted."""
    name, status = pick("megazero convert", {key: section_text(cls) for key, cls in SECTIONS.items()}, argv)
    if not name:
        return status
    cls = SECTIONS[name]
    places = " ".join(opt.place for opt in section_options(name, cls) if opt.place)
    usage = f"usage: megazero convert {name} {places} [flags below]\n\n{section_text(cls)}\n{STATUS}\n"
    return run_with_arguments(
        f"convert {name}", argv[1:], usage, cls, lambda options: _convert(name, options)
    )


def _convert(name: str, options: Any) -> int:
    from megazero.convert.conversions import CONVERSIONS  # brings torch, which --help does not need

    return CONVERSIONS[name](options)
