"""What must not be printed: keys, tokens and passwords that the environment holds, and those in URLs.

``redact`` is the one place that knows them. What people read passes through it: the console and the error texts by
their streams (log/safe_stream.py), events, stacks, what loggers get. What is compared or read again never does:
config.yaml and the manifests of checkpoints hold every option as it was given. No option is a secret.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import quote, unquote

T = TypeVar("T")

HIDDEN = "***"
SHORTEST = 6  # characters of a value that is taken for a secret: shorter ones are in ordinary words
# Names of variables whose values are secrets: WANDB_API_KEY, HF_TOKEN. A MY_KEY may as well be a word of paths.
_NAME = re.compile(
    r".*(api_?key|access_?key|private_?key|secret|password|passwd|passphrase|credentials?|(?<![^_])token)",
    re.IGNORECASE,
)
_USER = re.compile(r"\b([a-z][a-z0-9+.-]*://)([^\s/?#'\"]+)@", re.IGNORECASE)


def redact(value: T) -> T:
    """Return a text, or what a mapping or a sequence holds, with *** in the place of every secret.

    Mappings come back as dicts. What is neither text nor holds any comes back as it is.
    """
    known = sorted({form for secret in _known() for form in _forms(secret)}, key=len, reverse=True)
    return _walk(value, re.compile("|".join(map(re.escape, known))) if known else None)


def _walk(value: Any, known: re.Pattern[str] | None) -> Any:
    if isinstance(value, str):
        text = known.sub(HIDDEN, value) if known is not None else value
        return _USER.sub(rf"\1{HIDDEN}@", text) if "://" in text else text
    if isinstance(value, Mapping):
        return {key: _walk(item, known) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_walk(item, known) for item in value)
    return value


def _known() -> Iterator[str]:
    """Yield the secrets of the environment as it is now."""
    for name, value in os.environ.items():
        if _NAME.fullmatch(name):
            yield value
        for _, user in (
            _USER.findall(value) if "://" in value else ()
        ):  # a proxy's, which errors name without its URL
            word, _, password = user.partition(":")
            yield from (password or word, unquote(password or word))


def _forms(secret: str) -> Iterable[str]:
    """Yield how a secret may stand in a text: as it is, by lines, in a repr, in JSON, in a URL."""
    lines = secret.split("\n") if "\n" in secret else ()
    for part in (secret, secret.strip(), *lines):
        if len(part) >= SHORTEST:
            yield from (part, repr(part)[1:-1], json.dumps(part)[1:-1], quote(part, safe=""))
