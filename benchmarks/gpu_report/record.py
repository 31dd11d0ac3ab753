"""A piece's results: rows and notes in a JSON file, written anew after each row, so that a piece that is stopped
keeps what it has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megazero.files import write_text

REASON = "reason"  # the cell of a row that has no figures: why


class Skip(Exception):
    """Raised inside ``Record.attempt`` with the reason why the row cannot be measured here."""


class Record:
    """Rows of one piece. file: where they are kept; None: nowhere (tests)."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def row(self, **cells: Any) -> None:
        self.rows.append(cells)
        self._write()

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            self._write()

    @contextmanager
    def attempt(self, **cells: Any) -> Iterator[dict[str, Any]]:
        """Yield a row's cells for the block to fill in. If the block raises, the row has the reason instead."""
        found: dict[str, Any] = {}
        try:
            yield found
        except Skip as error:
            found = {REASON: str(error)}
        except Exception as error:  # noqa: BLE001 - a failure is a row
            found = {REASON: one_line(error)}
        self.row(**cells, **found)

    def _write(self) -> None:
        if self.file is not None:
            write_text(self.file, json.dumps({"rows": self.rows, "notes": self.notes}, indent=1))


def one_line(error: BaseException, most: int = 300) -> str:
    """Return an exception as a table's cell."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).replace("|", "/")
    return text if len(text) <= most else text[: most - 3] + "..."
