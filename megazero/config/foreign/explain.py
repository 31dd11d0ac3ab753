"""Explains a flag or a key: what it means here, in Megatron and in a DeepSpeed file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from megazero.config.foreign import deepspeed, megatron
from megazero.config.foreign.table import ACCEPT, MAP
from megazero.config.foreign.typos import meaning
from megazero.config.read.flags import options_help
from megazero.config.read.sources import all_switches
from megazero.config.run import REMOVED


@cache
def differences() -> list[list[str]]:
    """Return the rows of differences.tsv: flag, what Megatron does, what megazero does, why."""
    text = (Path(__file__).parent / "differences.tsv").read_text(encoding="utf-8")
    return [line.split("\t") for line in text.splitlines() if not line.startswith("#")]


def explain(word: str) -> Iterator[str]:
    """Yield the lines about a flag or key, without dashes or with them; none if nothing knows it."""
    name = word.lstrip("-").replace("_", "-")
    if name in all_switches():
        yield from options_help([all_switches()[name].option])
    if removed := REMOVED.get(name.removeprefix("no-").replace("-", "_")):
        yield f"  --{name}\n        was removed: {removed.cure}"
    yield from difference_lines(
        [row for row in differences() if f"--{name}" in row[0].replace(",", " ").split()]
    )
    if name in megatron.flags():
        reason = f": {megatron.flags()[name][0].text}" if megatron.kind(name) == ACCEPT else ""
        yield f"  --{name}\n        Megatron's, {meaning(name)}{reason}"
    for row in (*megatron.flags().get(name, ()), *megatron.other_values().get(name, ())):
        if row.value not in megatron.COUNTS:
            means = (
                " ".join(f"{key}={value}" for key, value in row.options.items())
                if row.kind == MAP
                else row.text
            )
            yield f"        {row.value}: {row.kind}: {means}"
    for key, row in deepspeed.keys().items():
        if word.lower() in (key, key.rpartition(".")[2]):
            here = ", ".join(f"--{option.replace('_', '-')}" for option in row.options)
            yield f"  {key}\n        DeepSpeed's: {here or row.text}"


def difference_lines(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield what rows of differences.tsv say, in lines."""
    for flag, theirs, ours, why in rows:
        yield f"  {flag}\n        Megatron: {theirs}\n        here: {ours}\n        why: {why}"
