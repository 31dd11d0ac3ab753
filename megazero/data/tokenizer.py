"""Tokenizers under Megatron's type names, and the record of the one that made a dataset."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megazero.bounded import load_json, read_json
from megazero.config.nearest import misspelt
from megazero.config.options.data_inputs import TOKENIZERS
from megazero.data.tokenizer_settings import TokenizerSettings
from megazero.files import replacing

KNOWN_EOD = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


@dataclass(frozen=True)
class TokenizerInfo:
    """What data and model need to know of a tokenizer.

    ``fingerprint`` is the sha256 of the model, ``vocab_size`` the largest id + 1, ``eod`` the id of the end of
    document.
    """

    fingerprint: str
    vocab_size: int
    eod: int


class Tokenizer(Protocol):
    """Turns text into ids and back. ``encode`` adds no token of its own (no begin, no end of text)."""

    info: TokenizerInfo

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token(self, word: str) -> int | None:
        """Return the id of a token, or None if there is none of this name."""


class SentencePieceTokenizer:
    """Reads a SentencePiece ``.model`` file, or a directory that holds a tokenizer.model.

    The end of document is the model's end-of-sentence piece, else the eos_token_id of generation_config.json or
    config.json beside it. Tokens that files beside it add are refused, because readers differ in how they find them
    in a text.
    """

    def __init__(self, model: Path) -> None:
        path = model / "tokenizer.model" if model.is_dir() else model
        wanted = "a .model file or a directory that holds a tokenizer.model as its tokenizer model"
        raw = _read(path, "SentencePieceTokenizer", wanted)
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=raw)
        except RuntimeError as error:
            other = "; nearest: --tokenizer-type HuggingFaceTokenizer" if raw.lstrip()[:1] == b"{" else ""
            raise ValueError(f"{path} is not a SentencePiece model: {error}{other}") from None
        size, settings = self._model.vocab_size(), TokenizerSettings.beside(path)
        eod = next((i for i in (self._model.eos_id(), settings.end) if 0 <= i < size), None)
        if eod is None:
            raise ValueError(
                f"{path} has no end-of-sentence piece to mark the end of a document; train it with eos_id >= 0"
            )
        _refuse_added(path, settings, size)
        self.info = TokenizerInfo(hashlib.sha256(raw).hexdigest(), size, eod)

    def vocabulary(self) -> dict[str, int]:
        return {self._model.id_to_piece(i): i for i in range(self.info.vocab_size)}

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids])

    def token(self, word: str) -> int | None:
        return self.vocabulary().get(word)


class HuggingFaceTokenizer:
    """Reads a ``tokenizer.json`` of the tokenizers library, or a directory that holds one.

    Files beside it apply, too: the tokens that they add, and the settings of tokenizer_config.json. The end of
    document is the eos_token that these name, else the eos_token_id of generation_config.json or config.json,
    else the first of KNOWN_EOD in the vocabulary. ``model`` is the library's, ``settings`` those of the files.
    """

    def __init__(self, model: Path) -> None:
        path = model / "tokenizer.json" if model.is_dir() else model
        wanted = "a tokenizer.json or a directory that holds one as its tokenizer model"
        raw = _read(path, "HuggingFaceTokenizer", wanted)
        try:
            self.model = tokenizers.Tokenizer.from_buffer(raw)
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception and ValueError
            other = "; nearest: --tokenizer-type SentencePieceTokenizer" if path.suffix == ".model" else ""
            raise ValueError(f"{path} is not a tokenizer.json: {error}{other}") from None
        self.settings = settings = TokenizerSettings.beside(path)
        changed = settings.apply(self.model)
        vocabulary = self.model.get_vocab(with_added_tokens=True)
        named, size = settings.special.get("eos"), max(vocabulary.values()) + 1
        words = [vocabulary[word] for word in ([named] if named else KNOWN_EOD) if word in vocabulary]
        eod = settings.end if named is None and 0 <= settings.end < size else next(iter(words), None)
        if eod is None:
            raise ValueError(
                f"{path}: no end of document, {named or ' '.join(KNOWN_EOD)!r} not in the vocabulary; "
                f'put {{"eos_token": "..."}} in special_tokens_map.json beside it'
            )
        digest = hashlib.sha256(raw)  # alone where nothing else decides, as in older checkpoints
        if changed:
            digest.update(json.dumps(changed, sort_keys=True).encode())
        self.info = TokenizerInfo(digest.hexdigest(), size, eod)

    def encode(self, text: str) -> list[int]:
        return self.model.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.model.decode([int(i) for i in ids], skip_special_tokens=False)

    def token(self, word: str) -> int | None:
        return self.model.token_to_id(word)


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
        _refuse_added(vocabulary, TokenizerSettings.beside(vocabulary), max(ids.values()) + 1)
        self.info = TokenizerInfo(fingerprint, max(ids.values()) + 1, ids[self.EOD])

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids], skip_special_tokens=False)

    def token(self, word: str) -> int | None:
        return self._model.token_to_id(word)

    def to_json(self) -> bytes:
        """Return a tokenizer.json with these ids, where the end of document is a special token."""
        made = tokenizers.Tokenizer.from_str(self._model.to_str())
        made.add_special_tokens([self.EOD])
        return made.to_str().encode()


class NullTokenizer:
    """Its text is decimal integers below ``vocab_size``, separated by spaces. The eod is ``vocab_size`` itself."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ValueError(f"NullTokenizer needs a vocabulary of at least 1 token, not {vocab_size}")
        digest = hashlib.sha256(f"null tokenizer {vocab_size}".encode()).hexdigest()
        self.info = TokenizerInfo(digest, vocab_size + 1, vocab_size)

    def encode(self, text: str) -> list[int]:
        """Return the ids that ``text`` spells. Raises ValueError for other words, and for ids that are none."""
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            raise ValueError(
                f"text of the NullTokenizer is token ids and spaces, such as '5 12', not {text[:40]!r}"
            ) from None
        wrong = next((i for i in ids if not 0 <= i < self.info.vocab_size), None)
        if wrong is not None:
            raise ValueError(
                f"token {wrong} is outside 0..{self.info.vocab_size - 1}; raise the vocabulary size"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(i)) for i in ids)

    def token(self, word: str) -> int | None:
        return None


def load_tokenizer(
    kind: str,
    tokenizer_model: str | Path | None = None,
    vocab_size: int | None = None,
    *,
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
) -> Tokenizer:
    """Load a tokenizer of a kind in TOKENIZERS (config/options/data_inputs.py), from the parts listed there.

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
        made_by = TokenizerInfo(**read_json(path)["tokenizer"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); run megazero preprocess again, or remove it to go unchecked"
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
        raise ValueError(f"cannot read tokenizer {path}: {error.strerror}; {kind} takes {wanted}") from error


def _token_ids(path: Path, raw: bytes) -> dict[str, int]:
    try:
        ids = load_json(raw)
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


def _refuse_added(path: Path, settings: TokenizerSettings, size: int) -> None:
    beyond = [token.content for i, token in settings.added.items() if i >= size]
    if beyond:
        raise ValueError(
            f"{path} has {size} ids, and the files beside it add {len(beyond)} tokens, such as {beyond[0]!r}: they "
            "are read with a tokenizer.json only, which transformers' save_pretrained writes"
        )
