"""Reads raw text: which files, their lines, and errors that name file and line.

Text that every machine has: the sources of the running Python's standard library.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from megazero.bounded import load_json

JSON_SUFFIXES = {".jsonl", ".json", ".ndjson"}
Text = str | list[str]
MOST_LINE = 1 << 26  # bytes of a JSON line: encoding one takes 18 times as much memory
_PIECE = 1 << 20
_SHOWN = 3  # files that an error names
LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
}  # of a folder of sources


def find_inputs(inputs: Sequence[str], pattern: str = "*") -> tuple[str, ...]:
    """Return the files that are named, matched by a glob, or lie anywhere in a directory (those that match
    ``pattern``, without hidden ones).
    """
    found: list[Path] = []
    for word in inputs:
        path = Path(word)
        if path.is_dir():
            inside = sorted(p for p in path.rglob(pattern) if p.is_file())
            matches = [p for p in inside if not any(x.startswith(".") for x in p.relative_to(path).parts)]
        elif path.is_file():
            matches = [path]
        else:
            anchor = Path(path.anchor) if path.is_absolute() else Path()
            matches = sorted(p for p in anchor.glob(str(path.relative_to(anchor))) if p.is_file())
        if not matches and path.is_dir():
            raise ValueError(f"input {word}: this folder holds no file that matches {pattern!r} (--pattern)")
        if not matches:
            raise ValueError(f"input {word}: no such file, and nothing matches it")
        found += matches
    return tuple(dict.fromkeys(str(p) for p in found))


def only_text(files: Sequence[str], skip_binary: bool, say: Callable[[str], None]) -> tuple[str, ...]:
    """Return the files that are UTF-8 text or JSON lines. Others are left out, if ``skip_binary`` allows it, and
    ``say`` gets a line. Raises ValueError with their number otherwise, or if no file is left.
    """
    faults = dict[str, str]()
    for file in files:
        try:
            refuse_document(file) if is_json(file) else read_text(file)
        except ValueError as error:
            faults[file] = f"{error}"
    if not faults:
        return tuple(files)
    said = f"{len(faults)} of {len(files)} files are neither text nor JSON lines"
    if skip_binary and len(faults) < len(files):
        say(f"{said} and are left out")
        return tuple(file for file in files if file not in faults)
    more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    raise ValueError(
        f"{said}: {'; '.join(list(faults.values())[:_SHOWN])}{more}. Leave them out (--skip-binary), name those to "
        "read (--pattern '*.txt'), or convert them"
    )


def is_json(file: str) -> bool:
    """Return whether a file holds one JSON object a line. Any other file is one document of plain text."""
    return Path(file).suffix in JSON_SUFFIXES


def read_text(file: str) -> str:
    raw = Path(file).read_bytes()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{file}, line {line}: not UTF-8 text ({error.reason})") from None


def refuse_document(file: str) -> None:
    """Raise ValueError if a file with the name of JSON lines is one document of JSON over many lines."""
    with open(file, "rb") as handle:
        if handle.readline(_PIECE).strip() in (b"{", b"[", b"[{"):
            raise ValueError(f"{file}: one JSON document, not JSON lines")


def json_lines(file: str, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) of the lines that begin in bytes [start, stop). Blank ones are left out.

    Of a line that is longer than MOST_LINE only the beginning is read, one byte more than that.
    """
    with open(file, "rb") as handle:
        yield from lines_between(handle, start, stop)


def lines_between(handle: IO[bytes], start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """Yield what ``json_lines`` does of an open file."""
    if start:
        handle.seek(start - 1)
        _skip_line(handle, stop)  # the rest of one that began earlier, or just its newline
    while (at := handle.tell()) < stop:
        line = handle.readline(MOST_LINE + 1)
        if len(line) > MOST_LINE:
            _skip_line(handle, stop)
        if line.strip():
            yield at, line


def _skip_line(handle: IO[bytes], stop: int) -> None:
    """Go to the end of the line, or to ``stop`` or beyond if it ends after that."""
    while handle.tell() < stop and not handle.readline(_PIECE).endswith(b"\n"):
        pass


def line_number(file: str, offset: int) -> int:
    """Return the number, counted from 1, of the line that begins at ``offset``."""
    with open(file, "rb") as handle:
        return number_at(handle, offset)


def number_at(handle: IO[bytes], offset: int) -> int:
    """Return what ``line_number`` does of an open file, which is at its beginning."""
    number = 1
    while piece := handle.read(min(_PIECE, offset - handle.tell())):
        number += piece.count(b"\n")
    return number


def read_line(line: bytes) -> Mapping[str, Any]:
    """Return the object of a JSON line. A ValueError says what is wrong, not where."""
    if len(line) > MOST_LINE:
        raise ValueError(f"longer than {MOST_LINE:,} bytes; a document has a line of its own")
    try:
        record = load_json(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text ({error.reason})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{_in_json(record)}, not an object")
    return record


def text_at(record: Mapping[str, Any], key: str) -> Text:
    """Return the text under a key. A ValueError says what is wrong, not where."""
    if key not in record:
        raise ValueError(f"no key {key!r}; it has {', '.join(map(repr, record)) or 'none'}")
    text: Text = record[key]
    for piece in text if isinstance(text, list) else [text]:
        if not isinstance(piece, str):
            raise ValueError(f"{key!r} holds {_in_json(piece)}, not text")
        if not _is_unicode(piece):
            raise ValueError(f"{key!r} holds half a surrogate pair, which is no character")
    return text


def _in_json(value: object) -> str:
    """Say what JSON calls a value."""
    words = {type(None): "null", bool: "true or false", list: "a list", dict: "an object", str: "a string"}
    return words.get(type(value), "a number")


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def stdlib_sources() -> list[Path]:
    """Return the standard library's UTF-8 .py files, sorted, without its tests and installed packages.

    They are about 660 files and 12 MB on Python 3.11.
    """
    return text_sources(Path(sysconfig.get_path("stdlib")))


def text_sources(root: Path) -> list[Path]:
    """Return the UTF-8 .py files below a folder, sorted, without tests and without installed packages in it."""
    found = [path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts)]
    return sorted(path for path in found if path.is_file() and _is_text(path))


def _is_text(path: Path) -> bool:
    try:
        return bool(path.read_text("utf-8").strip())
    except (UnicodeDecodeError, OSError):
        return False
