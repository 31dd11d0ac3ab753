"""Values go between ranks as JSON and come back as they were; nothing that a rank sends is run or built unasked."""

from __future__ import annotations

import errno
import json
import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megazero.mesh.objects import packed, unpacked


@dataclass(frozen=True)
class Entry:
    size: int
    names: tuple[str, ...]


class Choice(NamedTuple):
    path: Path | None
    named: bool = False


VALUES = (
    None,
    [1, 2.5, "text", True, -(2**80)],
    {"a": {3: (1, (2, [3]))}, (0, 1): {"dict": []}, "tuple": {1, 2}},
    {"file": Entry(3, ("a", "b\udcff"))},
    [Choice(Path("a/b"), True), Choice(None)],
    math.inf,
)


@pytest.mark.parametrize("value", VALUES)
def test_values_come_back_as_they_were(value: Any) -> None:
    assert unpacked(packed(value), Entry, Choice) == value


def test_an_error_of_the_system_keeps_its_number_and_words() -> None:
    back = unpacked(packed(PermissionError(errno.EACCES, "Permission denied", "/a")))
    assert isinstance(back, PermissionError) and f"{back}" == "[Errno 13] Permission denied: '/a'"


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("touched"),)


@pytest.mark.parametrize(
    "sent",
    [
        pickle.dumps(Evil()),
        packed(Entry(1, ())),
        json.dumps({"eval": ["1"]}).encode(),
        json.dumps({"tuple": [1], "set": [2]}).encode(),
        b"[" * 100_000,
    ],
    ids=["a pickle", "a class that was not asked for", "a function", "two kinds", "deep"],
)
def test_what_is_no_value_is_refused_and_not_run(
    sent: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="a rank sent what is no value here"):
        unpacked(sent, Choice)
    assert not list(tmp_path.iterdir())


def test_a_value_of_another_kind_is_refused_where_it_is_sent() -> None:
    with pytest.raises(TypeError, match="Evil is no kind of value that ranks send each other"):
        packed([Evil()])
