"""The quickstart's text for loss.py: the running Python's own sources, tokenized once into a folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from megazero.data.build import Dataset, build_datasets
from megazero.data.preprocess import Job, preprocess
from megazero.data.text import stdlib_sources
from megazero.data.tokenizer import load_tokenizer
from megazero.data.tokenizer_training import sample_lines, train_tokenizer

KIND = "SentencePieceTokenizer"
SPLIT = "95,5,0"  # 5% are about 200,000 tokens, of files that training does not see
EVALUATION_SEED = 1234  # one evaluation set for every run


def prepare(folder: Path, vocabulary: int) -> None:
    """Write tokenizer and indexed tokens into ``folder`` unless they are there (5 s)."""
    model = _tokenizer(folder)
    # An order without meaning, since the last documents are what is evaluated on.
    files = sorted(
        stdlib_sources(), key=lambda path: hashlib.sha256("/".join(path.parts[-3:]).encode()).digest()
    )
    if not model.exists():
        train_tokenizer(sample_lines(map(str, files)), model, vocab_size=vocabulary)
    if not _prefix(folder).with_suffix(".idx").exists():
        job = Job(tuple(map(str, files)), ("text",), KIND, str(model), None, True, False)
        preprocess(job, folder / "corpus", workers=2)


def train_samples(folder: Path, sequence: int, seed: int, count: int) -> Dataset:
    """``count`` samples (or more) to train on, in the order that ``seed`` says."""
    data = _datasets(folder, sequence, seed, (count, 0, 0))[0]
    assert data is not None
    return data


def evaluation_samples(folder: Path, sequence: int, numbers: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, int64 [count, sequence], of these samples of the one evaluation set.

    Raises ValueError where the text has fewer: what is evaluated on twice would count double.
    """
    data = _datasets(folder, sequence, EVALUATION_SEED, (0, 1, 0))[1]
    assert data is not None
    if numbers.stop > len(data):
        raise ValueError(f"{numbers.stop} evaluation samples of {sequence} tokens: the text has {len(data)}")
    samples = [data[number] for number in numbers]
    tokens, labels = (torch.stack([torch.from_numpy(s[k].copy()) for s in samples]) for k in KEYS)
    return tokens, labels


KEYS = ("tokens", "labels")


def _datasets(folder: Path, sequence: int, seed: int, samples: tuple[int, int, int]):
    return build_datasets(
        data_path=[str(_prefix(folder))],
        split=SPLIT,
        seq_length=sequence,
        seed=seed,
        samples=samples,
        tokenizer=load_tokenizer(KIND, _tokenizer(folder)).info,
    )


def _tokenizer(folder: Path) -> Path:
    return folder / "tokenizer.model"


def _prefix(folder: Path) -> Path:
    return folder / "corpus_text_document"
