"""The certificate: what was asked for, what was run, and every check with its figure, limit and verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megazero.verify.checks import Check

JSON, MARKDOWN = "certificate.json", "certificate.md"
COLUMNS = ("check", "figure", "limit", "verdict")


@dataclass(frozen=True)
class Section:
    """The checks of one pass. ``title`` says in one line what was run."""

    name: str
    title: str
    checks: tuple[Check, ...]


@dataclass(frozen=True)
class Certificate:
    """The result of a verification.

    asked: lines that describe the configuration. run: lines that describe what was run. changes: maps an option to
    (the value asked for, the value run).
    """

    asked: tuple[str, ...]
    run: tuple[str, ...]
    changes: Mapping[str, tuple[Any, Any]]
    notes: tuple[str, ...]
    sections: tuple[Section, ...]
    facts: Mapping[str, Any]
    configuration: Mapping[str, Any] | None = None

    @property
    def failed(self) -> list[str]:
        return [f"{s.name}: {check.name}" for s in self.sections for check in s.checks if not check.good]

    @property
    def good(self) -> bool:
        return not self.failed

    @property
    def verdict(self) -> str:
        count = sum(len(section.checks) for section in self.sections)
        if self.good:
            return f"holds: all {count} checks"
        return f"does not hold: {len(self.failed)} of {count} checks fail: {', '.join(self.failed)}"

    def save(self, folder: str) -> Path:
        """Write both files, and return the path of the readable one."""
        root = Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        stored = {"verdict": self.verdict, "good": self.good, **asdict(self)}
        (root / JSON).write_text(json.dumps(stored, indent=1, default=str) + "\n")
        (root / MARKDOWN).write_text(self.markdown())
        return root / MARKDOWN

    def markdown(self) -> str:
        """Return the whole readable certificate."""
        changes = [(name.replace("_", "-"), *pair) for name, pair in self.changes.items()]
        blocks = [
            f"# Parity certificate\n\n**{self.verdict}**",
            "\n".join(["## Asked for\n\n```", *self.asked, "```"]),
            "\n".join(["## What was run\n\n```", *self.run, "```"]),
            _table([("option", "asked for", "run"), *changes]),
            "\n".join(f"- {note}" for note in self.notes),
        ]
        for section in self.sections:
            rows = [(*_cells(check), check.where) for check in section.checks]
            blocks += [f"## {section.name}", section.title, _table([(*COLUMNS, "where"), *rows])]
        facts = [f"- {name}: {value}" for name, value in self.facts.items()]
        return "\n\n".join([*blocks, "## Made with", "\n".join(facts)]) + "\n"

    def print(self) -> None:
        """Print every check with its figure, limit and verdict. Of the first that fails it says where, too."""
        rows: list[tuple[str, ...]] = [COLUMNS]
        for section in self.sections:
            rows.append((section.name, "", "", ""))
            rows += [("  " + name, *rest) for name, *rest in map(_cells, section.checks)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        print(self.run[0], *(note for note in self.notes if note.startswith("sub-layout")), sep="\n")
        for row in rows:
            print("  ".join(map(str.ljust, row, widths)).rstrip())
        places = [check.where for section in self.sections for check in section.checks if not check.good]
        if places:
            print(f"first failure: {self.failed[0]}: {places[0]}")
        print(f"parity {self.verdict}; {self.facts['wall time']}")


def _cells(check: Check) -> tuple[str, str, str, str]:
    return check.name, check.figure, check.limit, "holds" if check.good else "FAILS"


def _table(rows: Sequence[Sequence[Any]]) -> str:
    """Return a table of Markdown, whose first row has the titles."""
    first, *rest = ("| " + " | ".join(map(_cell, row)) + " |" for row in rows)
    return "\n".join([first, "|---" * len(rows[0]) + "|", *rest])


def _cell(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(map(str, value))
    return str(value).replace("|", "\\|")
