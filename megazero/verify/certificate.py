"""The certificate: what was asked for, what was run, and every check with its figure, limit and verdict.

It is written as JSON and as Markdown, and printed as a table on the console.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from megazero.log.terminal import SafeConsole
from megazero.verify.checks import Check

JSON, MARKDOWN = "certificate.json", "certificate.md"


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
    diagnosis: tuple[str, ...]
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

    def as_dict(self) -> dict[str, Any]:
        return {"verdict": self.verdict, "good": self.good, **asdict(self)}

    def save(self, folder: str) -> Path:
        """Write both files, and return the path of the readable one."""
        root = Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        (root / JSON).write_text(json.dumps(self.as_dict(), indent=1, default=str) + "\n")
        (root / MARKDOWN).write_text(self.markdown())
        return root / MARKDOWN

    def markdown(self) -> str:
        """Return the whole readable certificate."""
        lines = ["# Parity certificate", "", f"**{self.verdict}**", ""]
        lines += [*(f"- likely cause: {line}" for line in self.diagnosis), ""] if self.diagnosis else []
        lines += [
            "## Asked for",
            "",
            "```",
            *self.asked,
            "```",
            "",
            "## What was run",
            "",
            "```",
            *self.run,
            "```",
            "",
        ]
        lines += ["| option | asked for | run |", "|---|---|---|"]
        lines += [
            f"| {name.replace('_', '-')} | {_cell(a)} | {_cell(b)} |" for name, (a, b) in self.changes.items()
        ]
        lines += ["", *(f"- {note}" for note in self.notes), ""]
        for section in self.sections:
            lines += [
                f"## {section.name}",
                "",
                section.title,
                "",
                "| check | figure | limit | verdict | where |",
            ]
            lines += ["|---|---|---|---|---|", *(_row(check) for check in section.checks), ""]
        lines += ["## Made with", "", *(f"- {name}: {value}" for name, value in self.facts.items()), ""]
        return "\n".join(lines)

    def print(self) -> None:
        """Print the short table on standard output: every check with its figure, limit and verdict.

        Of the first that fails it says where, too.
        """
        console = SafeConsole(sys.stdout, highlight=False)
        table = Table(box=None, pad_edge=False)
        for title in ("check", "figure", "limit", "verdict"):
            table.add_column(title, overflow="fold")
        for section in self.sections:
            table.add_row(f"[bold]{section.name}[/bold]", "", "", "")
            for check in section.checks:
                word = "[green]holds[/green]" if check.good else "[bold red]FAILS[/bold red]"
                table.add_row(f"  {check.name}", check.figure, check.limit, word)
        console.print(self.run[0], markup=False)
        for note in self.notes:
            if note.startswith("sub-layout"):
                console.print(note, markup=False)
        console.print(table)
        places = [check.where for section in self.sections for check in section.checks if not check.good]
        if places:
            console.print(f"first failure: {self.failed[0]}: {places[0]}", markup=False, soft_wrap=True)
        for line in self.diagnosis:
            console.print(f"likely cause: {line}", markup=False)
        console.print(f"parity {self.verdict}; {self.facts['wall time']}", markup=False)


def _row(check: Check) -> str:
    word = "holds" if check.good else "**fails**"
    cells = (check.name, check.figure, check.limit, word, check.where)
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(map(str, value))
    return str(value).replace("|", "\\|")
