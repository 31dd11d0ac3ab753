"""A console of rich. Its colours and bars are its own; what is printed on it goes by the rule of safe_stream.py."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from megazero.log.safe_stream import printable, unguarded


class SafeConsole(Console):
    """Prints on ``file``, standard error by default, which may be a SafeStream. options: rich's own."""

    def __init__(self, file: TextIO | None = None, **options: Any) -> None:
        super().__init__(file=unguarded(file or sys.stderr), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
