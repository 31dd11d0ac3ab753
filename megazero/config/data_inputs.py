"""This module alone reads --data-path, --split and --tokenizer-type, which name data and tokenizers.

It needs no numpy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

# Tokenizers, with the option that each is made from.
TOKENIZERS: Mapping[str, str] = MappingProxyType(
    {
        "SentencePieceTokenizer": "tokenizer_model",
        "HuggingFaceTokenizer": "tokenizer_model",
        "NullTokenizer": "vocab_size",
    }
)


def parse_data_path(words: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Return the prefixes, and the weights as they were given, or None for the weights if there are none.

    The words are ``PREFIX...`` or ``WEIGHT PREFIX WEIGHT PREFIX...``. Raises ValueError for words that are neither.
    """
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


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
