"""The tokenizer that transformers makes of a folder, and whether it is the one that the folder's files say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tokenizers

from megazero.data.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer


class Theirs:
    """The tokenizer that transformers makes of a folder, in which a text's special tokens are what its files say."""

    def __init__(self, transformers: Any, folder: Path) -> None:
        from transformers.utils import is_protobuf_available

        self.version = transformers.__version__
        try:
            self._made = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:  # noqa: BLE001 - what a reader of that library would see
            why: Any = error
            if "trust_remote_code" in f"{error}":
                why = "it asks for code of its own, which is never run"
            elif (folder / "tokenizer.model").is_file() and not is_protobuf_available():
                why = "it reads tokenizer.model with protobuf, which is not installed (pip install protobuf)"
            raise ValueError(
                f"transformers {self.version} cannot read the tokenizer in '{folder}': {why}\nWhere the folder's "
                "files are right, --no-check leaves the comparison out"
            ) from error
        self.name = type(self._made).__name__

    def __call__(self, text: str) -> list[int]:
        return self._made.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        return self._made.decode(ids)

    def rebuilt(self, ours: Tokenizer) -> tuple[str, Callable[[str], list[int]]] | None:
        """Return what of the file the class replaces, and how ids are found with the file's own; None if nothing.

        Added tokens stay those of transformers: they are compared in any case.
        """
        if not self._made.is_fast:
            return None
        if isinstance(ours, HuggingFaceTokenizer):
            backend = json.loads(self._made.backend_tokenizer.to_str())
            file = json.loads(ours.model.to_str())
            other = [part for part in ("normalizer", "pre_tokenizer", "model") if backend[part] != file[part]]
            made = tokenizers.Tokenizer.from_str(
                json.dumps({**backend, **{part: file[part] for part in other}})
            )
            made.encode_special_tokens = self._made.split_special_tokens
            what = f"it has another {', '.join(other)} than the files say"
            return (what, lambda text: made.encode(text, add_special_tokens=False).ids) if other else None
        if isinstance(ours, SentencePieceTokenizer) and self._made.get_vocab() == ours.vocabulary():
            return "it is a conversion of tokenizer.model", ours.encode
        return None


def their_tokenizer(folder: Path) -> Theirs | None:
    """Return what transformers makes of a folder's tokenizer; None where transformers is not installed."""
    if find_spec("transformers") is None:
        return None
    import transformers

    return Theirs(transformers, folder)


def is_rebuilt(files: Mapping[str, bytes], ours: Tokenizer, texts: Iterable[str]) -> bool:
    """Tell whether transformers' class builds another tokenizer than these files, by name, say: one of other ids.

    It is not known where transformers is not installed, or cannot read them, which the check of the folder reports.
    """
    with TemporaryDirectory() as folder:
        for name, data in files.items():
            Path(folder, name).write_bytes(data)
        try:
            theirs = their_tokenizer(Path(folder))
        except ValueError:
            return False
        if theirs is None or theirs.rebuilt(ours) is None:
            return False
        return any(theirs(text) != ours.encode(text) for text in texts)
