"""The tokenizer of a checkpoint in a Hugging Face folder, verified to give the same ids."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from sentencepiece import SentencePieceProcessor

from megazero.checkpoint import store
from megazero.config.options.data_inputs import TOKENIZERS
from megazero.convert.sentencepiece_json import differences, read_spec, spelt, to_tokenizer_json
from megazero.data.tokenizer import GPT2BPETokenizer, Tokenizer, load_tokenizer
from megazero.data.tokenizer_files import (
    MODEL_FILES,
    TOKENIZER_FILES,
    held_tokenizer,
    load_run_tokenizer,
    read_tokenizer_files,
    tokenizer_options,
)

CONFIG, GENERATION = "tokenizer_config.json", "generation_config.json"
# transformers 4 and 5 both have this class; what 5 writes by itself, "TokenizersBackend", 4 does not know.
CLASS = "PreTrainedTokenizerFast"
# The texts of a training spell no special token: a text that does is a text.
SPELT = {"split_special_tokens": True}
SAMPLES = (
    "",
    " ",
    "Hello, world!",
    "  two spaces before, one inside , three after   ",
    "line\nline\n\n\n  indented\r\n\ttab\n",
    "def f(x):\n    return x ** 2  # 3.14159 1,000,000\n",
    "naïve café Ærøskøbing, Straße; e\u0301 \ufb01 \u2163 \u2460",
    "Привет, мир. 你好,世界。 こんにちは 안녕하세요 שלום مرحبا नमस्ते",
    "🙂👩‍👩‍👧‍👦🇩🇪 ∑∫√ \u200bzero\u00a0width\u3000space",
    "aaaaaaaaaaaaaaaaaaaaaaaa ================ ........",
    "null\0byte \x7f \ufffd",
    "<s>spelt</s> <|endoftext|> <unk> <pad> [INST] <0x0A>",
)


@dataclass(frozen=True)
class RunTokenizer:
    """A checkpoint's tokenizer: its type, its loaded model, and its files by name (none for a null tokenizer)."""

    kind: str
    tokenizer: Tokenizer
    files: Mapping[str, bytes]


def of_checkpoint(path: Path, values: Mapping[str, Any], named: Path | None = None) -> RunTokenizer:
    """Load the tokenizer that a checkpoint holds, or the one that is ``named``, a file or a folder.

    values: the options that the checkpoint was made with, by name.

    Checkpoints of before they held their tokenizer give the path that it had in training. Raises ValueError if the
    tokenizer is not there, or is not the one that the model was trained with.
    """
    kind, manifest = values["tokenizer_type"] or "NullTokenizer", store.read_manifest(path)
    if kind == "NullTokenizer":
        if named:
            raise ValueError(f"--tokenizer {named}: '{path}' was trained on token ids, without a tokenizer")
        return RunTokenizer(kind, load_tokenizer(kind, vocab_size=values["vocab_size"] - 1), {})
    held, names = held_tokenizer(kind, path, manifest.files), MODEL_FILES[kind]
    given = (
        {option: named / name if named.is_dir() else named for option, name in names.items()} if named else {}
    )
    try:
        tokenizer = load_run_tokenizer(values, held, given)
    except ValueError as error:
        raise ValueError(f"{error}. Name the tokenizer with --tokenizer") from None
    trained = store.read_state(path)["tokenizer"]
    if tokenizer.info.fingerprint != trained:
        raise ValueError(
            f"'{named or 'what it names'}' is not the tokenizer that '{path}' was trained with: its sha256 is "
            f"{tokenizer.info.fingerprint[:12]}, that one's {trained[:12]}; name that one with --tokenizer"
        )
    if held and not named:
        files = {name: store.read_file(path, name) for name in manifest.files if name in TOKENIZER_FILES}
        return RunTokenizer(kind, tokenizer, files)
    return RunTokenizer(kind, tokenizer, read_tokenizer_files(kind, {**tokenizer_options(values), **given}))


def special_ids(run: RunTokenizer) -> dict[str, int]:
    """Return the ids of special tokens by role: "eos" ends a document; SentencePiece has bos, unk and pad, too."""
    if run.kind != "SentencePieceTokenizer":
        return {"eos": run.tokenizer.info.eod}
    spec = read_spec(run.files["tokenizer.model"])
    roles = {"bos": spec.bos, "eos": spec.eos, "unk": spec.unknown, "pad": spec.pad}
    return {role: i for role, i in roles.items() if 0 <= i < len(spec.pieces)}


def special_tokens(run: RunTokenizer) -> dict[str, str]:
    """Return the special tokens as tokenizer_config.json has them: eos_token and so on, as text."""
    if run.kind == "SentencePieceTokenizer":
        pieces = read_spec(run.files["tokenizer.model"]).pieces
        return {f"{role}_token": pieces[i].text for role, i in special_ids(run).items()}
    if isinstance(run.tokenizer, GPT2BPETokenizer):
        return {"eos_token": run.tokenizer.EOD}
    model = tokenizers.Tokenizer.from_buffer(run.files["tokenizer.json"])
    return {f"{role}_token": model.id_to_token(i) or "" for role, i in special_ids(run).items()}


def hub_files(run: RunTokenizer) -> dict[str, bytes]:
    """Return the tokenizer's files of a Hugging Face folder, by name. What was imported stays byte for byte.

    A SentencePiece model, and GPT-2's two files, are written as a tokenizer.json, too. Raises ValueError if the ids
    of that would not be the same.
    """
    if run.kind == "NullTokenizer":
        return {}
    if run.kind not in MODEL_FILES:
        raise ValueError(f"a {run.kind} is not exported; only {', '.join(TOKENIZERS)} are")
    files, told = dict(run.files), json.loads(run.files.get(CONFIG, b"{}"))
    files.pop(GENERATION, None)
    defaults: dict[str, Any] = {"tokenizer_class": CLASS, "clean_up_tokenization_spaces": False}
    if run.kind == "SentencePieceTokenizer":
        made = to_tokenizer_json(files["tokenizer.model"])
        _prove(files["tokenizer.model"], made)
        files["tokenizer.json"] = made.to_str(pretty=False).encode()
        told |= {**defaults, **special_tokens(run), **SPELT, **added_to_texts(files["tokenizer.model"])}
    elif isinstance(run.tokenizer, GPT2BPETokenizer):
        files["tokenizer.json"] = run.tokenizer.to_json()
        told |= {**defaults, **special_tokens(run), **SPELT, "add_prefix_space": False}
    elif told.get("tokenizer_class") in (None, "TokenizersBackend"):
        told |= {**defaults, **special_tokens(run)}
    else:
        return files
    files[CONFIG] = (json.dumps(told, indent=2, ensure_ascii=False) + "\n").encode()
    return files


def added_to_texts(raw: bytes) -> dict[str, bool]:
    """Return what a SentencePiece model puts around a text, for readers that add a space and <s> unless told."""
    return {
        "add_prefix_space": read_spec(raw).dummy_prefix,
        "add_bos_token": False,
        "add_eos_token": False,
    }


def token_ids(run: RunTokenizer) -> dict[str, Any]:
    """Return bos_token_id, eos_token_id and pad_token_id: what was imported says, else the tokenizer, else None."""
    given, own = json.loads(run.files.get(GENERATION, b"{}")), special_ids(run)
    return {
        f"{role}_token_id": given.get(f"{role}_token_id", own.get(role)) for role in ("bos", "eos", "pad")
    }


def generation_config(run: RunTokenizer) -> bytes:
    """Return generation_config.json: as it was imported, or the ids of the special tokens."""
    ids = {name: value for name, value in token_ids(run).items() if value is not None}
    return run.files.get(GENERATION) or (json.dumps(ids, indent=2) + "\n").encode()


def sample_texts(tokenizer: Tokenizer, count: int = 200) -> list[str]:
    """Return SAMPLES and texts of tokens drawn at random, so that every kind of token comes next to every other."""
    draw = random.Random(0)
    size = tokenizer.info.vocab_size
    made = (tokenizer.decode([draw.randrange(size) for _ in range(30)]) for _ in range(count))
    return [*SAMPLES, *made]


def _prove(raw: bytes, made: Any) -> None:
    """Compare a tokenizer.json with its SentencePiece model. Raises ValueError, naming a text with other ids."""
    model, spec, draw = SentencePieceProcessor(model_proto=raw), read_spec(raw), random.Random(1)
    drawn = [[draw.randrange(len(spec.pieces)) for _ in range(30)] for _ in range(200)]
    texts = [
        *SAMPLES,
        *(model.decode(ids) for ids in drawn),
        *(model.decode([i]) for i in range(len(spec.pieces))),
    ]
    wrong = differences(
        raw,
        lambda text: made.encode(text, add_special_tokens=False).ids,
        [text for text in texts if not spelt(spec, text)],
    )
    if wrong:
        raise ValueError(
            f"this SentencePiece model cannot be written as a tokenizer.json with the same ids: {wrong[0]!r} has "
            f"others ({len(wrong)} of {len(texts)} texts). Export without it is not offered: its ids would be wrong "
            "in silence"
        )


def other_ids(run: RunTokenizer, encode: Callable[[str], list[int]]) -> tuple[list[str], list[str], int]:
    """Compare ``encode`` with the training's tokenizer on ``sample_texts``.

    Returns the texts to which it gives other ids, those that were left out (they spell a special token, of a unigram
    model or of a published GPT-2, which is found in a text there), and how many were compared.
    """
    texts, raw = sample_texts(run.tokenizer), run.files.get("tokenizer.model")
    if run.kind != "SentencePieceTokenizer" or raw is None:
        found_in_texts = (
            isinstance(run.tokenizer, GPT2BPETokenizer) and len(encode(GPT2BPETokenizer.EOD)) == 1
        )
        left_out = [text for text in texts if found_in_texts and GPT2BPETokenizer.EOD in text]
        compared = [text for text in texts if text not in left_out]
        wrong = [text for text in compared if run.tokenizer.encode(text) != encode(text)]
        return wrong, left_out, len(compared)
    spec = read_spec(raw)
    left_out = [text for text in texts if spelt(spec, text)]
    compared = [text for text in texts if not spelt(spec, text)]
    return differences(raw, encode, compared), left_out, len(compared)
