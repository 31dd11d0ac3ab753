"""Tokenizers under Megatron's type names, and the record of the one that made a dataset."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megazero.config.nearest import misspelt
from megazero.config.options.data_inputs import TOKENIZERS
from megazero.files import replacing

EOS_FILES = ("tokenizer_config.json", "special_tokens_map.json")  # the first that names a token decides
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
    """Turns text into ids and back. ``encode`` adds no token of its own (no begin, no end of text).

    ``files`` are all that it was read from, so that they can be carried with what it made.
    """

    info: TokenizerInfo
    files: tuple[Path, ...]

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class SentencePieceTokenizer:
    """Reads a SentencePiece ``.model`` file, whose end-of-sentence piece marks the end of a document."""

    def __init__(self, model: Path) -> None:
        raw = _read(model, "SentencePieceTokenizer", "a .model file as its tokenizer model")
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
        self.files: tuple[Path, ...] = (model,)

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids])


class HuggingFaceTokenizer:
    """Reads a ``tokenizer.json`` of the tokenizers library, or a directory that holds one.

    The end of document is the ``eos_token`` that tokenizer_config.json or special_tokens_map.json beside it names,
    else the first of KNOWN_EOD in the vocabulary.
    """

    def __init__(self, model: Path) -> None:
        path = model / "tokenizer.json" if model.is_dir() else model
        wanted = "a tokenizer.json or a directory that holds one as its tokenizer model"
        raw = _read(path, "HuggingFaceTokenizer", wanted)
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
        self.files: tuple[Path, ...] = (
            path,
            *(side for side in map(path.with_name, EOS_FILES) if side.is_file()),
        )

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids], skip_special_tokens=False)


class GPT2BPETokenizer:
    """Reads GPT-2's two files: vocab.json, which gives each token its id, and merges.txt.

    Ids are those of Megatron's tokenizer of this name. So the first line of merges.txt is a header and what follows
    its last newline is no merge; and ``<|endoftext|>`` in a text is these 13 characters, while the token of that name
    is the end of document alone. What Megatron would turn into token 0 is refused: a vocabulary without a token for
    each byte, and merges whose result is no token.
    """

    EOD = "<|endoftext|>"

    def __init__(self, vocabulary: Path, merges: Path) -> None:
        raw = _read(vocabulary, "GPT2BPETokenizer", "a vocab.json as its vocab file")
        raw_merges = _read(merges, "GPT2BPETokenizer", "a merges.txt as its merge file")
        ids = _token_ids(vocabulary, raw)
        if self.EOD not in ids:
            raise ValueError(
                f"{vocabulary} has no {self.EOD}, which ends documents; add it, with an id of its own"
            )
        bytes_left_out = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - ids.keys())
        if bytes_left_out:
            raise ValueError(
                f"{vocabulary} has no token for {len(bytes_left_out)} of the 256 bytes, such as "
                f"{bytes_left_out[0]!r}: text with them would be lost; is it a vocabulary of GPT-2's kind?"
            )
        try:
            model = models.BPE(ids, _merges(merges, raw_merges))
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception
            raise ValueError(f"{merges} does not belong to {vocabulary}: {error}") from None
        self._model = tokenizers.Tokenizer(model)
        self._model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._model.decoder = decoders.ByteLevel()
        digests = (hashlib.sha256(part).digest() for part in (raw, raw_merges))
        fingerprint = hashlib.sha256(b"".join(digests)).hexdigest()
        self.info = TokenizerInfo(fingerprint, max(ids.values()) + 1, ids[self.EOD])
        self.files: tuple[Path, ...] = (vocabulary, merges)

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids], skip_special_tokens=False)

    def to_json(self) -> bytes:
        """Return a tokenizer.json with these ids, where the end of document is a special token."""
        made = tokenizers.Tokenizer.from_str(self._model.to_str())
        made.add_special_tokens([self.EOD])
        return made.to_str().encode()


class NullTokenizer:
    """Its text is decimal integers below ``vocab_size``, separated by spaces. The eod is ``vocab_size`` itself."""

    files: tuple[Path, ...] = ()

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


def load_tokenizer(
    kind: str,
    tokenizer_model: str | Path | None = None,
    vocab_size: int | None = None,
    *,
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
) -> Tokenizer:
    """Load a tokenizer of a kind in config.data_inputs.TOKENIZERS, from what that says it is made from.

    Raises ValueError for another kind, and where something is missing or cannot be read.
    """
    if kind not in TOKENIZERS:
        raise ValueError(f"tokenizer {kind!r} is none of {', '.join(TOKENIZERS)}{misspelt(kind, TOKENIZERS)}")
    given = {"tokenizer_model": tokenizer_model, "vocab_size": vocab_size}
    given |= {"vocab_file": vocab_file, "merge_file": merge_file}
    parts = {name: given[name] for name in TOKENIZERS[kind]}
    missing = [name.replace("_", " ") for name, part in parts.items() if part in (None, "")]
    if missing:
        raise ValueError(f"{kind} needs its {' and '.join(missing)}")
    if kind == "NullTokenizer":
        return NullTokenizer(int(str(parts["vocab_size"])))
    made: dict[str, Callable[..., Tokenizer]] = {
        "SentencePieceTokenizer": SentencePieceTokenizer,
        "HuggingFaceTokenizer": HuggingFaceTokenizer,
        "GPT2BPETokenizer": GPT2BPETokenizer,
    }
    return made[kind](*(Path(str(part)) for part in parts.values()))


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
                f"name the data's tokenizer, or preprocess the data with this one"
            )


def _read(path: Path, kind: str, wanted: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read tokenizer {path}: {error.strerror}; {kind} takes {wanted}") from None


def _token_ids(path: Path, raw: bytes) -> dict[str, int]:
    try:
        ids = json.loads(raw)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    whole = isinstance(ids, dict) and all(type(i) is int and i >= 0 for i in ids.values())
    if not whole or len(set(ids.values())) != len(ids):
        raise ValueError(f"{path} is not a vocab.json: it must map each token to an id of its own, from 0 on")
    return ids


def _merges(path: Path, raw: bytes) -> list[tuple[str, str]]:
    try:
        lines = raw.decode("utf-8").split("\n")[1:-1]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason})") from None
    pairs = [(number, line.split()) for number, line in enumerate(lines, 2) if line.strip()]
    wrong = next((number for number, pair in pairs if len(pair) != 2), None)
    if wrong is not None:
        raise ValueError(f"{path}, line {wrong}: not two tokens; is it a merges.txt?")
    return [(one, two) for _, (one, two) in pairs]


def _eos_token(directory: Path) -> str | None:
    for name in EOS_FILES:
        path = directory / name
        if path.is_file():
            token: Any = json.loads(path.read_bytes()).get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
            if token:
                return token
    return None
