"""The words of --data-stages, each a JSON object: what a run trains on, one stage after the other. No numpy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megazero.bounded import load_json
from megazero.config.nearest import misspelt
from megazero.config.options.data_inputs import parse_data_path

FLAG = "--data-stages"
LENGTHS = ("until", "seq_length", "global_batch_size")  # whole numbers of at least 1
KEYS = (*LENGTHS, "data_path")


@dataclass(frozen=True)
class DataStage:
    """The training samples from the ``begin``-th consumed one on, up to ``end``; None: to the end of the run.

    data_path: words as --train-data-path takes them, instead of the run's training data. seq_length,
    global_batch_size: 0: those of the run.
    """

    begin: int = 0
    end: int | None = None
    data_path: tuple[str, ...] = ()
    seq_length: int = 0
    global_batch_size: int = 0


def stage_word(item: Any) -> str:
    """Return the word of an entry of a YAML list: a mapping as JSON, or text. Raises ValueError for another entry."""
    if not isinstance(item, str | dict):
        raise ValueError(f"takes mappings with {', '.join(map(_key, KEYS))}, got {item!r}")
    return item if isinstance(item, str) else json.dumps(item)


def parse_stages(words: Sequence[str]) -> tuple[DataStage, ...]:
    """Return the stages in order; without words one, which is the run. Raises ValueError for words that are none."""
    stages = list[DataStage]()
    for word in words:
        said = _read(word)
        begin, end = (stages[-1].end if stages else 0), said.pop("until", None)
        if begin is None:
            raise ValueError(
                f"{FLAG} has {word} after a stage without until; say where each but the last ends"
            )
        if end is not None and end <= begin:
            raise ValueError(
                f"{FLAG} {word} ends where it begins, at sample {begin}, or before; nearest: until {begin + 1}"
            )
        stages.append(DataStage(begin, end, **said))
    if stages and stages[-1].end is not None:
        raise ValueError(
            f"{FLAG} ends with {words[-1]}; the last stage lasts to the end of the run: leave until out there"
        )
    return tuple(stages) or (DataStage(),)


def _read(word: str) -> dict[str, Any]:
    """Return what a word says, by field of DataStage. Raises ValueError."""
    try:
        said = load_json(word)
    except ValueError as error:
        raise ValueError(f"{FLAG} {word} is not JSON: {error}") from None
    if not isinstance(said, dict):
        raise ValueError(f'{FLAG} {word} is no mapping such as {{"until": 1000, "seq-length": 4096}}')
    named = {key.replace("-", "_"): value for key, value in said.items()}
    for name, value in named.items():
        if name not in KEYS:
            near = misspelt(_key(name), map(_key, KEYS))
            raise ValueError(f"{FLAG} {word}: {_key(name)} is not one of {', '.join(map(_key, KEYS))}{near}")
        if name in LENGTHS and (type(value) is not int or value < 1):
            raise ValueError(f"{FLAG} {word}: {_key(name)} {value} must be a whole number of at least 1")
    if "data_path" in named:
        path = named["data_path"]
        named["data_path"] = tuple(map(str, path) if isinstance(path, list) else f"{path}".split())
        try:
            parse_data_path(named["data_path"])
        except ValueError as error:
            raise ValueError(f"{FLAG} {word}: data-path {error}") from None
    return named


def _key(name: str) -> str:
    return name.replace("_", "-")
