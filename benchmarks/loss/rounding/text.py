"""The text that the real model reads: what Debian's packages and Python carry, in the model's own tokens.

    apt-get download debian-handbook dict-gcide fortunes linux-doc-6.1 python3.11-doc

into a folder, with ``--debs FOLDER``, gives prose, documentation and code in equal parts. Without it, or for what is
missing there, the text is documentation and code of this Python and its packages.
"""

from __future__ import annotations

import gzip
import html
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.loss.rounding.weights import Gguf
from megazero.data.text import stdlib_sources

END = 0  # <|endoftext|>, before each document
HELD = 0.05  # of the tokens, the last ones, are evaluated on
PIECE = 20_000  # characters of a document that is one long file
LEAST = 2_000  # characters of a document
NONE = 65_535  # no token: the largest uint16
PROSE = (
    "debian-handbook/**/en-US/**/*.html",
    "fortunes/usr/share/games/fortunes/*",
    "dict-gcide/**/gcide.dict.dz",
)
DOCUMENTATION = ("linux-doc*/**/*.rst*", "python3*-doc/**/*.rst*")


@dataclass(frozen=True)
class Text:
    """tokens: uint16 [n]. pairs: uint16 [vocabulary, 2], the two tokens that each one is merged from, or NONE."""

    tokens: np.ndarray
    pairs: np.ndarray

    @classmethod
    def open(cls, file: Path) -> Text:
        with np.load(file) as stored:
            return cls(stored["tokens"], stored["pairs"])

    def save(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file, tokens=self.tokens, pairs=self.pairs)

    def within(self, vocabulary: int) -> np.ndarray:
        """Return the tokens with each one above ``vocabulary`` split into those that it is merged from."""
        if vocabulary >= len(self.pairs):
            return self.tokens
        parts = [_parts(token, self.pairs, vocabulary) for token in range(len(self.pairs))]
        lengths = np.array([len(each) for each in parts])
        starts, flat = np.concatenate([[0], lengths.cumsum()[:-1]]), np.concatenate(parts)
        count = lengths[self.tokens]
        firsts = np.repeat(starts[self.tokens] - np.concatenate([[0], count.cumsum()[:-1]]), count)
        return flat[firsts + np.arange(count.sum())].astype(np.uint16)


def _parts(token: int, pairs: np.ndarray, vocabulary: int) -> list[int]:
    if token < vocabulary:
        return [token]
    left, right = pairs[token].tolist()
    if left == NONE:  # a character that the smaller vocabulary lacks
        return [token % vocabulary]
    return _parts(left, pairs, vocabulary) + _parts(right, pairs, vocabulary)


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

    def at(self, numbers: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and labels, int64 [count, length], of the sequences of these numbers (they start again)."""
        starts = torch.tensor([int(number) % self.trained * self.length for number in numbers])
        return self._from(starts)

    def held(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and labels of ``count`` sequences spread over the held text. Raises ValueError if it has
        fewer."""
        first = int(len(self.tokens) * (1 - HELD))
        there = (len(self.tokens) - first - 1) // self.length
        if count > there:
            raise ValueError(f"{count} held sequences of {self.length} tokens: the text has {there}")
        return self._from(first + torch.arange(count) * (there // count) * self.length)

    def _from(self, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        where = (starts[:, None] + torch.arange(self.length + 1)).to(self.tokens.device)
        found = self.tokens[where]
        return found[:, :-1], found[:, 1:]


def tokenizer_of(gguf: Gguf) -> Any:
    """Return the file's byte-pair tokenizer, of Hugging Face's ``tokenizers``."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate(gguf["tokenizer.ggml.tokens"])}
    merges = [tuple(each.split(" ")) for each in gguf["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return made


def pairs_of(gguf: Gguf) -> np.ndarray:
    vocabulary = {token: i for i, token in enumerate(gguf["tokenizer.ggml.tokens"])}
    pairs = np.full((len(vocabulary), 2), NONE, np.uint16)
    for merge in gguf["tokenizer.ggml.merges"]:
        left, right = merge.split(" ")
        pairs[vocabulary[left + right]] = vocabulary[left], vocabulary[right]
    return pairs


def prepare(gguf: Gguf, debs: Path | None, characters: int) -> Text:
    """Read documents of at most ``characters`` in all, in an order of no meaning, and tokenize them."""
    groups = [_sources()] if debs is None else [*_unpacked(debs), _sources()]
    groups = [group for group in groups if group]
    documents = [each for group in groups for each in _up_to(group, characters // len(groups))]
    random.Random(1).shuffle(documents)
    size = sum(map(len, documents))
    print(f"{len(documents)} documents of {size / 1e6:.1f}M characters", file=sys.stderr, flush=True)
    encoded = tokenizer_of(gguf).encode_batch(documents, add_special_tokens=False)
    tokens = np.concatenate([np.array([END, *each.ids], np.uint16) for each in encoded])
    return Text(tokens, pairs_of(gguf))


def random_text(vocabulary: int, n: int) -> Text:
    """Return a text for rehearsals, in which a token says something of the next one."""
    steps = np.random.default_rng(1).integers(0, 4, n)
    return Text((np.cumsum(steps) % vocabulary).astype(np.uint16), np.full((vocabulary, 2), NONE, np.uint16))


def _unpacked(debs: Path) -> list[list[str]]:
    """Return the documents of the .deb files of a folder: prose, then documentation."""
    with tempfile.TemporaryDirectory() as folder:
        for deb in sorted(debs.glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", deb, Path(folder) / deb.name.partition("_")[0]], check=True)
        return [_documents(Path(folder), patterns) for patterns in (PROSE, DOCUMENTATION)]


def _documents(root: Path, patterns: Sequence[str]) -> list[str]:
    files = [file for pattern in patterns for file in sorted(root.glob(pattern)) if file.is_file()]
    texts = [piece for file in files if file.suffix not in (".dat", ".u8") for piece in _pieces(file)]
    return [text for text in texts if len(text) >= LEAST]


def _pieces(file: Path) -> Iterator[str]:
    opened = gzip.open if file.suffix in (".gz", ".dz") else open
    with opened(file, "rt", errors="ignore") as lines:  # type: ignore[operator]
        text = lines.read()
    if file.suffix == ".html":
        text = html.unescape(re.sub(r"<[^>]+>", "", re.sub(r"(?s)<(script|style).*?</\1>", "", text)))
    text = re.sub(r"\n\s*\n+", "\n\n", re.sub(r"[ \t]{3,}", "  ", text.replace("\n%\n", "\n\n")))
    yield from (text[i : i + PIECE] for i in range(0, len(text), PIECE))


def _sources() -> list[str]:
    """Return this Python's own sources, then those of its packages."""
    packages = sorted(Path(sysconfig.get_paths()["purelib"]).glob("*/**/*.py"))
    texts = (path.read_text(errors="ignore") for path in [*stdlib_sources(), *packages[:5000]])
    return [text for text in texts if len(text) >= LEAST]


def _up_to(documents: list[str], characters: int) -> list[str]:
    """Return documents in a drawn order, of about so many characters."""
    drawn, total = [], 0
    for text in random.Random(1).sample(documents, len(documents)):
        if total >= characters:
            break
        drawn.append(text)
        total += len(text)
    return drawn
