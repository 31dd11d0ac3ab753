"""Tokenizers under Megatron's type names, and the record of the one that made a dataset."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from megazero.config.data_inputs import TOKENIZERS
from megazero.config.nearest import did_you_mean
from megazero.data.files import replacing

KNOWN_EOD = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


@dataclass(frozen=True)
class TokenizerInfo:
    """Data and model need this of a tokenizer.

    ``fingerprint`` is the sha256 of the model, ``vocab_size`` the largest id + 1, ``eod`` the id of the end of
    document.
    """

    fingerprint: str
    vocab_size: int
    eod: int


class Tokenizer(Protocol):
    """It turns text into ids and back. ``encode`` adds no token of its own (no begin, no end of text)."""

    info: TokenizerInfo

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class SentencePieceTokenizer:
    """It reads a SentencePiece ``.model`` file, whose end-of-sentence piece marks the end of a document."""

    def __init__(self, model: Path) -> None:
        import sentencepiece

        raw = _read(model, "SentencePieceTokenizer", "a .model file")
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=raw)
        except RuntimeError as error:
            raise ValueError(f"{model} is not a SentencePiece model: {error}") from None
        if self._model.eos_id() < 0:
            raise ValueError(
                f"{model} has no end-of-sentence piece to mark the end of a document; train it with eos_id >= 0"
            )
        self.info = TokenizerInfo(
            hashlib.sha256(raw).hexdigest(), self._model.vocab_size(), self._model.eos_id()
        )

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids])


class HuggingFaceTokenizer:
    """It reads a ``tokenizer.json`` of the tokenizers library, or a directory that holds one.

    The end of document is the ``eos_token`` that tokenizer_config.json or special_tokens_map.json beside it names,
    else the first of KNOWN_EOD in the vocabulary.
    """

    def __init__(self, model: Path) -> None:
        import tokenizers

        path = model / "tokenizer.json" if model.is_dir() else model
        raw = _read(path, "HuggingFaceTokenizer", "a tokenizer.json or a directory that holds one")
        try:
            self._model = tokenizers.Tokenizer.from_buffer(raw)
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception and ValueError
            raise ValueError(f"{path} is not a tokenizer.json: {error}") from None
        vocabulary = self._model.get_vocab(with_added_tokens=True)
        named = _eos_token(path.parent)
        eod = next(
            (vocabulary[word] for word in ([named] if named else KNOWN_EOD) if word in vocabulary), None
        )
        if eod is None:
            raise ValueError(
                f"{path}: no end of document, {named or ' '.join(KNOWN_EOD)!r} not in the vocabulary; "
                f'put {{"eos_token": "..."}} in special_tokens_map.json beside it'
            )
        self.info = TokenizerInfo(hashlib.sha256(raw).hexdigest(), max(vocabulary.values()) + 1, eod)

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids], skip_special_tokens=False)


class NullTokenizer:
    """Its text is decimal integers below ``vocab_size``, separated by spaces. The eod is ``vocab_size`` itself."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ValueError(f"NullTokenizer needs a vocabulary of at least 1 token, not {vocab_size}")
        digest = hashlib.sha256(f"null tokenizer {vocab_size}".encode()).hexdigest()
        self.info = TokenizerInfo(digest, vocab_size + 1, vocab_size)

    def encode(self, text: str) -> list[int]:
        ids = [int(word) for word in text.split()]
        wrong = next((i for i in ids if not 0 <= i < self.info.vocab_size), None)
        if wrong is not None:
            raise ValueError(
                f"token {wrong} is outside 0..{self.info.vocab_size - 1}; raise the vocabulary size"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(i)) for i in ids)


def load_tokenizer(kind: str, model: str | Path | None = None, vocab_size: int | None = None) -> Tokenizer:
    """Load a tokenizer of a kind in config.data_inputs.TOKENIZERS, from its model or (NullTokenizer) a vocabulary
    size.

    Raises ValueError for another kind, and where the model or the size is missing or cannot be read.
    """
    if kind not in TOKENIZERS:
        raise ValueError(
            f"tokenizer {kind!r} is none of {', '.join(TOKENIZERS)}{did_you_mean(kind, TOKENIZERS)}"
        )
    if kind == "NullTokenizer" and vocab_size is not None:
        return NullTokenizer(vocab_size)
    if kind == "NullTokenizer" or not model:
        raise ValueError(f"{kind} needs its {TOKENIZERS[kind].replace('_', ' ')}")
    made: dict[str, Callable[[Path], Tokenizer]] = {
        "SentencePieceTokenizer": SentencePieceTokenizer,
        "HuggingFaceTokenizer": HuggingFaceTokenizer,
    }
    return made[kind](Path(model))


def meta_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.meta.json")


def write_meta(prefix: str | Path, info: TokenizerInfo) -> None:
    """Record beside PREFIX.bin which tokenizer made it."""
    with replacing(meta_path(prefix)) as handle:
        handle.write((json.dumps({"tokenizer": asdict(info)}, indent=1) + "\n").encode())


def check_meta(prefix: str | Path, info: TokenizerInfo) -> None:
    """Refuse data that another tokenizer made. Data without a record (made by Megatron) passes."""
    path = meta_path(prefix)
    if not path.exists():
        return
    try:
        made_by = TokenizerInfo(**json.loads(path.read_bytes())["tokenizer"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); run tools/preprocess_data.py again, or remove it to go unchecked"
        ) from None
    for name, what in (
        ("vocab_size", "vocabulary size"),
        ("eod", "end-of-document id"),
        ("fingerprint", "sha256"),
    ):
        theirs, ours = getattr(made_by, name), getattr(info, name)
        if theirs != ours:
            raise ValueError(
                f"{prefix} was made with another tokenizer: {what} {theirs}, this run's has {ours}; "
                f"name the data's tokenizer model, or preprocess the data with this one"
            )


def _read(path: Path, kind: str, wanted: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"cannot read tokenizer {path}: {error.strerror}; {kind} takes {wanted} as its tokenizer model"
        ) from None


def _eos_token(directory: Path) -> str | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = directory / name
        if path.is_file():
            token: Any = json.loads(path.read_bytes()).get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
            if token:
                return token
    return None
