"""The text of all studies of loss: Python sources of this machine, tokenized once into a folder."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path

import torch

from megazero.data.build import blends_by_share, build_dataset
from megazero.data.gpt import SampleSpec
from megazero.data.preprocess import Job, preprocess
from megazero.data.source import Dataset
from megazero.data.text import stdlib_sources, text_sources
from megazero.data.tokenizer import load_tokenizer
from megazero.data.tokenizer_training import sample_lines, train_tokenizer
from megazero.files import write_text

KIND = "SentencePieceTokenizer"
SPLIT = "95,5,0"  # 5% of the standard library are about 200,000 tokens, of files that training does not see
EVALUATION_SEED = 1234  # one evaluation set for every run
STDLIB = "Python"
# Folders of installed packages by distribution, all of them brought by the tests' requirements.
PACKAGES = {
    "torch": "torch", "sympy": "sympy", "matplotlib": "matplotlib", "fonttools": "fontTools", "pygments": "pygments",
    "mypy": "mypy", "numpy": "numpy", "networkx": "networkx", "huggingface_hub": "huggingface_hub",
    "tensorboard": "tensorboard", "hypothesis": "hypothesis", "mpmath": "mpmath", "triton": "triton",
}  # fmt: skip
TEXTS: Mapping[str, tuple[str, ...]] = {"stdlib": (STDLIB,), "packages": (STDLIB, *PACKAGES)}
NOTE = "digest"  # of a prepared text, written last


def sources(name: str) -> list[Path]:
    """Return the .py files of the standard library or of an installed package, without their tests."""
    if name == STDLIB:
        return stdlib_sources()
    return text_sources(Path(str(distribution(name).locate_file(PACKAGES[name]))))


def prepare(work: Path, text: str, vocabulary: int) -> Path:
    """Write tokenizer and indexed tokens into a folder of ``work`` unless they are there (5 s for the standard
    library, a minute or two for all); return the folder."""
    folder = work / (f"data-{vocabulary}" if text == "stdlib" else f"data-{text}-{vocabulary}")
    if (folder / NOTE).exists():
        return folder
    # An order without meaning, since the last documents are what is evaluated on.
    files = sorted(
        (path for name in TEXTS[text] for path in sources(name)),
        key=lambda path: hashlib.sha256("/".join(path.parts[-3:]).encode()).digest(),
    )
    print(f"{len(files)} files into {folder}", file=sys.stderr, flush=True)
    model = _tokenizer(folder)
    if not model.exists():
        train_tokenizer(sample_lines(map(str, files)), model, vocab_size=vocabulary)
    job = Job(tuple(map(str, files)), ("text",), KIND, str(model), None, True, False)
    preprocess(job, folder / "corpus", workers=2)
    total = hashlib.sha256()
    for suffix in (".idx", ".bin"):
        total.update(_prefix(folder).with_suffix(suffix).read_bytes())
    write_text(folder / NOTE, total.hexdigest()[:16])
    return folder


def corpus(folder: Path) -> str:
    """Return a digest of a prepared text's tokens, and of where its documents begin."""
    return (folder / NOTE).read_text()


def train_samples(folder: Path, sequence: int, seed: int, count: int) -> Dataset:
    """Return ``count`` samples (or more) to train on, in ``seed``'s order.

    Raises ValueError where the text has fewer: a token that a run sees twice is learned otherwise.
    """
    data = _dataset(folder, sequence, seed, "train")
    if count > len(data):
        raise ValueError(f"{count} samples of {sequence} tokens: the text has {len(data)}")
    return data


def evaluation_samples(folder: Path, sequence: int, numbers: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels, int64 [count, sequence], of these samples of the one evaluation set.

    Raises ValueError where the text has fewer: what is evaluated on twice would count double.
    """
    data = _dataset(folder, sequence, EVALUATION_SEED, "valid")
    if numbers.stop > len(data):
        raise ValueError(f"{numbers.stop} evaluation samples of {sequence} tokens: the text has {len(data)}")
    samples = [data[number] for number in numbers]
    tokens, labels = (torch.stack([torch.from_numpy(s[k].copy()) for s in samples]) for k in KEYS)
    return tokens, labels


KEYS = ("tokens", "labels")


def _dataset(folder: Path, sequence: int, seed: int, part: str) -> Dataset:
    """One epoch of a part of a prepared text."""
    spec = SampleSpec(sequence, seed, load_tokenizer(KIND, _tokenizer(folder)).info)
    return build_dataset(part, blends_by_share([str(_prefix(folder))], SPLIT)[part], spec, 1)


def _tokenizer(folder: Path) -> Path:
    return folder / "tokenizer.model"


def _prefix(folder: Path) -> Path:
    return folder / "corpus_text_document"
