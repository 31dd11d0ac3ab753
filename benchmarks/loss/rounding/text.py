"""The text that the real model reads, in the model's own tokens."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.loss.rounding.model import tokenizer
from benchmarks.loss.rounding.training import Batch
from megazero.data.text import stdlib_sources

END = 0  # <|endoftext|>, before each document
HELD = 0.05  # of the tokens, the last ones, are evaluated on
PIECE, LEAST = 20_000, 2_000  # bytes that are read of a document, characters that it has at least


@dataclass(frozen=True)
class Samples:
    """Sequences of one text on a device: those to train on in an order of a seed, and the held ones."""

    tokens: torch.Tensor  # int64 [n]
    length: int

    @classmethod
    def of(cls, tokens: np.ndarray, length: int, device: torch.device) -> Samples:
        return cls(torch.from_numpy(tokens.astype(np.int64)).to(device), length)

    @property
    def trained(self) -> int:
        """Return how many sequences are trained on."""
        return (int(len(self.tokens) * (1 - HELD)) - 1) // self.length

    def order(self, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).permutation(self.trained)

    def at(self, numbers: Iterable[int]) -> Batch:
        """Return tokens and labels, int64 [count, length], of the sequences of these numbers (they start again)."""
        return self._from(torch.tensor([int(number) % self.trained * self.length for number in numbers]))

    def held(self, count: int, batch: int) -> list[Batch]:
        """Return batches of ``count`` sequences spread over the held text. Raises ValueError if it has fewer."""
        first = int(len(self.tokens) * (1 - HELD))
        there = (len(self.tokens) - first - 1) // self.length
        if count > there:
            raise ValueError(f"{count} held sequences of {self.length} tokens: the text has {there}")
        starts = first + torch.arange(count) * (there // count) * self.length
        return [self._from(each) for each in starts.split(batch)]

    def _from(self, starts: torch.Tensor) -> Batch:
        where = (starts[:, None] + torch.arange(self.length + 1)).to(self.tokens.device)
        found = self.tokens[where]
        return found[:, :-1], found[:, 1:]


def prepare(folder: Path | None, characters: int) -> np.ndarray:
    """Return the tokens, uint16 [n], of documents of about so many characters in all, in an order without meaning:
    the text files of a folder, by default this Python's sources."""
    files = (
        stdlib_sources() if folder is None else sorted(each for each in folder.rglob("*") if each.is_file())
    )
    random.Random(1).shuffle(files)
    documents, total = list[str](), 0
    for file in files:
        text = file.read_bytes()[:PIECE].decode(errors="ignore")
        if total < characters and len(text) >= LEAST and "\0" not in text:
            documents.append(text)
            total += len(text)
    encoded = tokenizer()(documents, add_special_tokens=False)["input_ids"]
    return np.concatenate([np.array([END, *each], np.uint16) for each in encoded])


def random_text(vocabulary: int, n: int) -> np.ndarray:
    """Return a text for rehearsals, in which a token says something of the next one."""
    return (np.cumsum(np.random.default_rng(1).integers(0, 4, n)) % vocabulary).astype(np.uint16)
