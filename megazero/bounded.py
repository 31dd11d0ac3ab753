"""Reads JSON and YAML of anyone's making: a file within a size, nested within what Python can walk, and no aliases
that unfold without end. Every fault is a ValueError in one sentence.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Hashable
from typing import Any

MOST_BYTES = 1 << 26  # of a JSON file: the manifest of 500,000 ranks, six times the largest vocabulary
MOST_YAML = 1 << 20  # of a YAML text: PyYAML reads 0.2 MB/s
MOST_VALUES = 100_000  # of a YAML text whose aliases are written out: 330 bytes can be 10^8
MERGE = "tag:yaml.org,2002:merge"  # of the key <<, whose mappings are taken in
DEEP = "it is nested more deeply than anything that is written for this program"


def read_bytes(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
    """Return a file's bytes. Raises ValueError, before they are read, if they are more than ``most``."""
    with open(path, "rb") as file:
        data = b"" if (size := os.fstat(file.fileno()).st_size) > most else file.read(most + 1)
    if max(size, len(data)) > most:
        raise ValueError(f"it has {max(size, len(data)):,} bytes, and such a file has at most {most:,}")
    return data


def load_json(text: str | bytes, **hooks: Any) -> Any:
    """Return what a JSON text holds. hooks: those of json.loads. Raises ValueError for any text that is none."""
    try:
        return json.loads(text, **hooks)
    except RecursionError:
        raise ValueError(DEEP) from None


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return what a JSON file holds. Raises ValueError, which does not name the file, or OSError."""
    return load_json(read_bytes(path))


def load_yaml(text: str) -> tuple[Any, list[str]]:
    """Return what a YAML text holds, and the keys that stand twice (PyYAML takes the last silently).

    Raises ValueError for a text that is none, or of more than MOST_VALUES values with its aliases written out.
    """
    import yaml  # 0.03 s, only when a file is given

    twice: set[str] = set()

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            own = [key for key, _ in node.value if key.tag != MERGE]
            keys = [self.construct_object(key, deep=True) for key in own]
            twice.update(f"{key}" for key in keys if keys.count(key) > 1)
            return super().construct_mapping(node, deep)

    if len(text) > MOST_YAML:
        raise ValueError(f"it has {len(text):,} characters, and such a file has at most {MOST_YAML:,}")
    loader = Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, []
        if _values(node, {}) > MOST_VALUES:
            raise ValueError(
                f"it holds more than {MOST_VALUES:,} values, with its aliases (*name) written out"
            )
        return loader.construct_document(node), sorted(twice)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(f"{error}".split())) from None
    except RecursionError:
        raise ValueError(DEEP) from None
    finally:
        loader.dispose()


def _values(node: Any, known: dict[int, float]) -> float:
    """Return how many values a node of YAML is with its aliases written out. One within itself is infinite."""
    if id(node) not in known:
        known[id(node)] = math.inf
        inner = node.value if isinstance(node.value, list) else []
        parts = [part for each in inner for part in (each if isinstance(each, tuple) else (each,))]
        known[id(node)] = 1 + sum(_values(part, known) for part in parts)
    return known[id(node)]


def read_yaml(path: str | os.PathLike[str]) -> tuple[Any, list[str]]:
    """Do the same as ``load_yaml`` for a file of UTF-8. Raises OSError, too."""
    return load_yaml(read_bytes(path, MOST_YAML).decode("utf-8"))
