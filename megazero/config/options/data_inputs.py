"""Parses the words of --data-path and its relatives, --split and --tokenizer-type. No numpy."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

GPT2BPE = "GPT2BPETokenizer"
# Tokenizers, with the options that each is made from.
TOKENIZERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "SentencePieceTokenizer": ("tokenizer_model",),
        "HuggingFaceTokenizer": ("tokenizer_model",),
        GPT2BPE: ("vocab_file", "merge_file"),
        "NullTokenizer": ("vocab_size",),
    }
)
# Of these, what names files.
FILE_OPTIONS = ("tokenizer_model", "vocab_file", "merge_file")


def tokenizer_type(said: str | None, given: Collection[str]) -> str | None:
    """Return the type that is given, else Megatron's default, GPT2BPETokenizer, if one of its options is given."""
    return said or (GPT2BPE if set(given) & set(TOKENIZERS[GPT2BPE]) else None)


def run_vocabulary(kind: str | None, size: int | None) -> int | None:
    """Return the vocabulary of a run with --tokenizer-type ``kind`` and --vocab-size ``size``, if it is known.

    A null tokenizer has the end of document beyond it, as in Megatron. Other tokenizers have at most ``size``.
    """
    return size + 1 if kind == "NullTokenizer" and size is not None else size


SPLITS = ("train", "valid", "test")
# The options that name the data of one part.
PARTS = tuple(f"{split}_data_path" for split in SPLITS)


def parse_data_path(words: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Return the prefixes, and the weights as they were given, or None for the weights if there are none.

    The words are ``PREFIX...`` or ``WEIGHT PREFIX WEIGHT PREFIX...``. Raises ValueError for words that are neither.
    """
    if not all(word.strip() for word in words):
        raise ValueError("has an empty word, which names no data; is a variable of the script empty?")
    numbers = [_number(word) for word in words]
    if all(number is None for number in numbers):
        return list(words), None
    weights, prefixes = numbers[::2], list(words[1::2])
    if len(words) % 2 or None in weights or any(number is not None for number in numbers[1::2]):
        raise ValueError(f"{' '.join(words)} must be PREFIX ... or a weight before every prefix")
    found = [weight for weight in weights if weight is not None]
    for word, weight, prefix in zip(words[::2], found, prefixes, strict=True):
        if not 0 < weight < math.inf:
            raise ValueError(f"weight {word} of {prefix} must be above 0; leave that data set out instead")
    return prefixes, found


def parse_split(split: str) -> tuple[float, float, float]:
    """Return the shares of train, valid and test as "969,30,1" gives them.

    Missing shares are 0. Quotes that a script left around it are no part of it, as in Megatron. Raises ValueError for
    other text.
    """
    split = split.strip("'\"")
    legal = re.fullmatch(r"\s*\d*\.?\d+\s*([,/]\s*\d*\.?\d+\s*){0,2}", split)
    shares = [float(word) for word in re.split("[,/]", split)] if legal else []
    if not sum(shares):
        raise ValueError(f"{split!r} must be up to three shares with a sum above 0; nearest: 969,30,1")
    train, valid, test = [*shares, 0.0, 0.0][:3]
    return train, valid, test


def missing_file(prefix: str) -> str:
    """Return the line for the file of a data set that is not there, or ''."""
    for ending in (".idx", ".bin"):
        if not Path(f"{prefix}{ending}").is_file():
            near = _nearest_prefix(prefix)
            cure = (
                f"nearest: {near}"
                if near
                else "as megazero preprocess prints it, usually ending in _text_document"
            )
            return (
                f"{prefix}{ending} does not exist; the data path is the common prefix of a .bin and an .idx file "
                f"({cure})"
            )
    return ""


def _nearest_prefix(prefix: str) -> str:
    """Return the prefix of a whole data set that was probably meant, or ''."""
    bare = re.sub(r"\.(bin|idx|meta\.json|jsonl?|txt)$", "", prefix)
    beside = (f"{path}".removesuffix(".idx") for path in sorted(Path(bare).parent.glob("*.idx")))
    known = [each for each in beside if each.startswith(bare) and Path(f"{each}.bin").is_file()]
    return known[0] if known else ""


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
