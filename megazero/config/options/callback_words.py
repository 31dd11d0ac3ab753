"""How --callbacks names a callback: MODULE:NAME, and behind it the options as a JSON object, if there are some."""

from __future__ import annotations

import json
import re
from typing import Any

from megazero.bounded import load_json

_FORM = re.compile(r"((?:[^\W\d]\w*\.)*[^\W\d]\w*:[^\W\d]\w*)(?:\s+(\{.*\}))?", re.DOTALL)


def parse_callback(word: str) -> tuple[str, dict[str, Any]]:
    """Return MODULE:NAME and the options. Raises ValueError if the word has another form."""
    found = _FORM.fullmatch(word.strip())
    if found is None:
        raise ValueError(
            f"{word!r} is no callback: MODULE:NAME is (package.module:Name), or with options "
            "'package.module:Name {\"every\": 10}'"
        )
    path, options = found.groups()
    try:
        return path, load_json(options) if options else {}
    except ValueError as error:
        raise ValueError(f"{word!r} has options that are not JSON: {error}") from None


def word_of(item: Any) -> str:
    """Return the word of an entry of a YAML list: text, or a mapping of MODULE:NAME to its options.

    Raises ValueError for another entry.
    """
    if isinstance(item, str):
        return item
    if isinstance(item, dict) and len(item) == 1:
        ((path, options),) = item.items()
        if isinstance(options, dict):
            return f"{path} {json.dumps(options)}"
    raise ValueError(f"takes MODULE:NAME, or a mapping of it to options, got {item!r}")
