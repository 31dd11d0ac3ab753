"""What must not be printed: keys, tokens and passwords of the environment and of the command line.

``redact`` is the one place that knows them. What people read passes through it: the console and the error texts by
their streams (log/safe_stream.py), events, stacks, what loggers get. What is compared or read again never does:
config.yaml and the manifests of checkpoints hold every option as it was given, because two paths that redact alike
are two runs, and one environment does not decide what another reads. No option is a secret. If one holds a secret all
the same (``secret_options``), only the user may read the files of the run (train/command.py).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote, unquote

T = TypeVar("T")

HIDDEN = "***"
SHORTEST = 6  # characters of a value that is taken for a secret: shorter ones are in ordinary words
SHORTEST_WORD = 12  # letters that are taken for one, unless the variable's name is sure
_KIND = (
    r"(?:api_?key|access_?key|private_?key|key_id|key|token|secret|password|passwd|passphrase|pass|credentials?|"
    r"jwt|auth)"
)
# Names of variables and flags whose values are secrets: WANDB_API_KEY, --hf-token; not eos_token, a tokenizer's.
_NAME = re.compile(
    rf"(?!(?:.*_)?(?:eos|bos|pad|unk|eod|sep|cls|mask)_token$)(?:(?:.*[_-])?{_KIND}|.*(?:secret|password|passwd|apikey))",
    re.IGNORECASE,
)
# Names that mean nothing else. A MY_KEY or DATA_PASS may as well be a word, which stands in paths and texts.
_SURE = re.compile(
    r".*(?:api_?key|access_?key|private_?key|secret|password|passwd|passphrase)|"
    r"(?:hf|huggingface|hugging_face_hub|gh|github|gitlab|wandb|aws_session|neptune_api)_token",
    re.IGNORECASE,
)
_USER = re.compile(r"\b([a-z][a-z0-9+.-]*://)([^\s/?#'\"]+)@", re.IGNORECASE)
# Forms that are secrets wherever they stand.
_FORMS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[a-z]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|"
    r"sk-(?:ant|proj|svcacct|admin)-[\w-]{16,}|sk-[A-Za-z0-9]{20,}|"
    r"xox[a-z]-[\w-]{10,}|AKIA[0-9A-Z]{16}|wandb_v\d_\w{20,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
)
# hf_token='...', "password": "...", ?sig=..., Bearer ...
_SAID = re.compile(
    r"(\b(?!(?:eos|bos|pad|unk|eod|sep|cls|mask)_)(?:(?:[a-z0-9]+[_-])+(?:key|token|secret|signature)|api_?key|passwo?r?d|"
    r"passphrase|(?<=[?&])(?:sig|token|key|secret))['\"]?\s*[=:]\s*['\"]?|\bBearer +)([^\s'\",;&]{6,})",
    re.IGNORECASE,
)

_of_command_line: set[str] = set()


def names_secret(name: str) -> bool:
    """Whether a variable, a flag or a key of this name holds a secret."""
    return _NAME.fullmatch(name.lstrip("-")) is not None


def take_secrets(words: Sequence[str]) -> list[str]:
    """Remember the secrets among the words of a command line, and return the words without them.

    They are the values of flags whose names say so, and the users and passwords of URLs.
    """
    following = zip(words, [*words[1:], ""], strict=True)
    for word, after in following:
        name, has_value, value = word.partition("=")
        if name.startswith("--") and names_secret(name):
            value = value if has_value else after
            if len(value) >= SHORTEST and not value.startswith("--"):
                _of_command_line.add(value)
        _of_command_line.update(_of_urls(word))
    return redact(list(words))


def redact(value: T) -> T:
    """Return a text, or what a mapping or a sequence holds, with *** in the place of every secret.

    Mappings come back as dicts. What is neither text nor holds any comes back as it is.
    """
    known = sorted({form for secret in _known() for form in _forms(secret)}, key=len, reverse=True)
    return _walk(value, re.compile("|".join(map(re.escape, known))) if known else None)


def secret_options(values: Mapping[str, Any]) -> list[str]:
    """Return the names of options whose values hold what is taken for a secret."""
    shown = redact(values)
    return [name for name, value in values.items() if shown[name] != value]


def _walk(value: Any, known: re.Pattern[str] | None) -> Any:
    if isinstance(value, str):
        return _clean(value, known)
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if isinstance(item, str) and names_secret(str(key)) and item else _walk(item, known)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return type(value)(_walk(item, known) for item in value)
    return value


def _clean(text: str, known: re.Pattern[str] | None) -> str:
    if known is not None:
        text = known.sub(HIDDEN, text)
    text = _USER.sub(rf"\1{HIDDEN}@", text) if "://" in text else text
    return _SAID.sub(rf"\1{HIDDEN}", _FORMS.sub(HIDDEN, text))


def _known() -> Iterator[str]:
    """Yield the secrets of the environment as it is now, and of the command line."""
    for name, value in os.environ.items():
        if names_secret(name):
            if not _is_word(value.strip()) or _SURE.fullmatch(name):
                yield value
        elif "://" in value:
            yield from _of_urls(value)
    yield from _of_command_line


def _is_word(value: str) -> bool:
    return value.isalpha() and len(value) < SHORTEST_WORD


def _of_urls(text: str) -> Iterator[str]:
    for _, user in _USER.findall(text):
        name, _, password = user.partition(":")
        for secret in (password or name, unquote(password or name)):
            if len(secret) >= SHORTEST:
                yield secret


def _forms(secret: str) -> Iterable[str]:
    """Yield how a secret may stand in a text: as it is, by lines, in a repr, in JSON, in a URL."""
    lines = secret.split("\n") if "\n" in secret else ()
    for part in (secret, secret.strip(), *lines):
        if len(part) >= SHORTEST:
            yield from (part, repr(part)[1:-1], json.dumps(part)[1:-1], quote(part, safe=""))
