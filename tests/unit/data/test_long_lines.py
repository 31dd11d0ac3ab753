"""A line of JSON that is too long or too deep is a bad line like any other, and is not read whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from megazero.data import text
from megazero.data.preprocess import Job, preprocess

GOOD = b'{"text": "1 2"}\n'
BAD = {"long": b'{"text": "' + b"3 " * 5_000 + b'"}\n', "deep": b'{"text": ' + b"[" * 100_000 + b"\n"}
SAID = {"long": "line 2: longer than 4,096 bytes", "deep": "line 2: it is nested more deeply"}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("chunk_bytes", [1_000, 10_000_000])
def test_a_long_or_deep_line_is_named_or_left_out(
    kind: str, chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "long":
        monkeypatch.setattr(text, "MOST_LINE", 4_096)
    file = tmp_path / "lines.jsonl"
    file.write_bytes(GOOD + BAD[kind] + GOOD * 3)

    def run(skip: bool) -> int:
        job = Job((f"{file}",), ("text",), "NullTokenizer", None, 10, append_eod=False, skip_bad_lines=skip)
        return preprocess(job, tmp_path / "out", chunk_bytes=chunk_bytes, say=lambda _: None)[1].documents

    with pytest.raises(ValueError, match=SAID[kind]):
        run(skip=False)
    assert run(skip=True) == 4


def test_no_more_than_the_limit_of_a_line_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "MOST_LINE", 100)
    monkeypatch.setattr(text, "_PIECE", 64)
    file = tmp_path / "lines.jsonl"
    file.write_bytes(GOOD + b"x" * 10_000 + b"\n" + GOOD)
    for cut in (1, len(GOOD), len(GOOD) + 1, 5_000, 10_016, 10_017, 10_020):
        lines = [*text.json_lines(f"{file}", 0, cut), *text.json_lines(f"{file}", cut, file.stat().st_size)]
        assert [(at, len(line)) for at, line in lines] == [(0, 16), (16, 101), (10_017, 16)], cut
    assert [text.line_number(f"{file}", at) for at in (0, 16, 10_017)] == [1, 2, 3]
