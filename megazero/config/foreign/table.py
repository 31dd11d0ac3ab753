"""Reads the tables of other programs' words. The head of megatron.tsv says how they are written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

MAP, ACCEPT, REFUSE = "map", "accept", "refuse"
TYPED = "X"  # stands for the value that is typed
BOOLEANS = {"true": True, "false": False}


class Row(NamedTuple):
    """A name, what follows it, the options of its line's last column, and the heading that it is under."""

    name: str
    value: str
    options: Mapping[str, str | bool]
    kind: str
    text: str


@lru_cache(maxsize=2)
def rows(file: str) -> Mapping[str, tuple[Row, ...]]:
    """Return the rows of each name, in the order of the file."""
    table: dict[str, tuple[Row, ...]] = {}
    for row in _rows(Path(__file__).with_name(file)):
        table[row.name] = (*table.get(row.name, ()), row)
    return MappingProxyType(table)


def _rows(path: Path) -> Iterator[Row]:
    kind = text = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        heading, *cells = line.split("\t")
        if heading and not line.startswith("#"):
            kind, text = heading, "".join(cells)
        elif cells:
            names, value, options = (*cells, "", "")[:3]
            for name in names.split():
                yield Row(name, value, dict(map(_option, options.split())), kind, text)


def _option(word: str) -> tuple[str, str | bool]:
    name, _, value = word.partition("=")
    return name.replace("-", "_"), BOOLEANS.get(value, value)
