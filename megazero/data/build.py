"""Builds the datasets of a run's parts (train, valid, test), of a corpus or of synthetic text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from megazero.config.options.data_inputs import SPLITS, Blend, parse_data_path, parse_split
from megazero.data.blend import SURPLUS, BlendedDataset, member_sizes, normalize
from megazero.data.gpt import GPTDataset, Sample, SampleSpec, finish_sample
from megazero.data.indexed import IndexedDataset
from megazero.data.tokenizer import TokenizerInfo, check_meta

MEAN_DOCUMENT = 64  # tokens of mock data


class Dataset(Protocol):
    """Gives samples by position. A sample is a dict of numpy arrays: tokens int64 [s], labels int64 [s],
    loss_mask float32 [s], and position_ids and document_starts int64 [s] where they are asked for.

    ``ordered_for`` is the number of samples that their order was made for. It is 0 where the order is the same for
    any number.
    """

    @property
    def ordered_for(self) -> int: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


class MockDataset:
    """Synthetic data with something to learn, for tests, and timing without a corpus.

    Its documents count upwards: a random first token, then +stride modulo the vocabulary, then the eod.
    Lengths are geometric with mean 64, so the best loss is about (ln(vocabulary) + 5.2) / 65 nats per token: all but
    the first token of a document can be learned, its end cannot. A sample depends on (seed, split, index) alone.
    ``split`` is 0 for train, 1 for valid and 2 for test.
    """

    ordered_for = 0

    def __init__(self, num_samples: int, split: int, spec: SampleSpec) -> None:
        if spec.tokenizer.vocab_size < 3:
            raise ValueError(f"mock data needs a vocabulary of at least 3, not {spec.tokenizer.vocab_size}")
        self.num_samples, self.split, self.spec = num_samples, split, spec

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        random = np.random.default_rng([self.spec.seed, self.split, int(index)])
        length, eod = self.spec.seq_length + 1, self.spec.tokenizer.eod
        words = self.spec.tokenizer.vocab_size - 1  # every id but the eod
        ends = random.random(length) < 1 / (MEAN_DOCUMENT + 1)
        at = np.arange(length)
        begins = np.maximum.accumulate(np.where(np.roll(ends, 1), at, 0))
        first = random.integers(0, words, length)[begins]
        stride = max(1, words // 3)
        word = (first + (at - begins) * stride) % words
        text = np.where(ends, eod, word + (word >= eod)).astype(np.int64)
        return finish_sample(text, self.spec)


def build_dataset(
    split: str,
    blend: Blend | None,
    spec: SampleSpec,
    count: int,
    *,
    ordered_for: int = 0,
    cache_dir: str | Path | None = None,
) -> Dataset:
    """Return a dataset of ``count`` samples of one part of the data (in SPLITS). Every rank may call it at once.

    blend: the data sets and their shares of documents. None is mock data.
    ordered_for: the dataset's own value of an earlier call, or 0. The earlier order is kept if it holds ``count``.
    cache_dir: folder of the indices (default: a folder ``cache`` beside the first data set).
    A blend without weights is one epoch of everything, so it may have fewer samples than ``count``.
    Raises ValueError for bad files, data of another tokenizer, and parts without tokens.
    """
    if blend is None:
        return MockDataset(count, SPLITS.index(split), spec)
    sources = [open_data(prefix, spec.tokenizer) for prefix in blend.prefixes]
    cache = Path(cache_dir) if cache_dir is not None else Path(blend.prefixes[0]).parent / "cache"
    return _Builder(split, blend, sources, spec, cache).build(count, ordered_for)


def blends_by_share(data_path: Sequence[str], split: str) -> dict[str, Blend]:
    """Return the blend of each of SPLITS: the same data sets, and of each its share of the documents."""
    prefixes, weights = parse_data_path(data_path)
    chosen = None if weights is None else tuple(weights)
    return {
        name: Blend(tuple(prefixes), chosen, (bounds,) * len(prefixes))
        for name, bounds in split_bounds(split).items()
    }


def open_data(prefix: str | Path, tokenizer: TokenizerInfo) -> IndexedDataset:
    """Open PREFIX.bin and PREFIX.idx and check them against the run's tokenizer."""
    source = IndexedDataset(prefix)
    source.check_vocabulary(tokenizer.vocab_size)
    check_meta(prefix, tokenizer)
    return source


def split_bounds(split: str) -> dict[str, tuple[float, float]]:
    """From "969,30,1" make the fractions where train, valid and test begin and end. Missing shares are 0."""
    edges = [0.0]
    for share in normalize(parse_split(split)):
        edges.append(edges[-1] + share)  # summed in this order: the rounding decides where a document goes
    return dict(zip(SPLITS, zip(edges[:-1], edges[1:], strict=True), strict=True))


class _Builder:
    def __init__(
        self, split: str, blend: Blend, sources: list[IndexedDataset], spec: SampleSpec, cache_dir: Path
    ) -> None:
        self.split, self.sources, self.spec, self.cache_dir = split, sources, spec, cache_dir
        self.weights = normalize(blend.weights) if blend.weights else None
        self.ranges = blend.ranges

    def build(self, count: int, before: int) -> Dataset:
        """Blend all sources by weights or by size. Without weights a source that is alone is taken as it is."""
        if self.weights is not None:
            members, number = self._ordered(self.weights, count, before, SURPLUS)
            size = sum(member_sizes(self.weights, max(count, number)))
            return BlendedDataset(members, self.weights, size, cache_dir=self.cache_dir, ordered_for=number)
        if len(self.sources) == 1:
            return self._ordered([1.0], count, before)[0][0]
        members = [self._member(i, None) for i in range(len(self.sources))]
        sizes = [len(member) for member in members]
        if not any(sizes):
            raise ValueError(
                f"no dataset's {self.split} split fills one sample of {self.spec.seq_length} + 1 tokens; shorten "
                f"the sequence length, give the split a larger share, or give weights (they repeat data)"
            )
        return BlendedDataset(members, sizes, min(count, sum(sizes)), cache_dir=self.cache_dir)

    def _ordered(
        self, weights: Sequence[float], count: int, before: int, surplus: float = 0.0
    ) -> tuple[list[GPTDataset], int]:
        """Return a member of every source, and the number of samples that their order was made for.

        That number is ``before`` where members made for that hold ``count``, too. Their epochs decide the order, so
        with more epochs the order would be another one. In a blend a longer order begins with the shorter one.
        """
        least = member_sizes(weights, count, surplus)
        for number in (before or count, count):
            sizes = member_sizes(weights, number, surplus)
            members = [self._member(i, size) for i, size in enumerate(sizes)]
            if all(len(member) >= size for member, size in zip(members, least, strict=True)):
                break
        return members, number

    def _member(self, which: int, count: int | None) -> GPTDataset:
        source = self.sources[which]
        first, end = (round(edge * float(len(source))) for edge in self.ranges[which])
        documents = np.arange(first, end, dtype=np.int32)
        if not source.lengths[first:end].any():
            raise ValueError(
                f"{source.prefix}: the {self.split} split gets {len(documents)} of {len(source)} documents and no "
                f"token; give it a larger share (--split), or no samples (--eval-iters 0, or a share of 0)"
            )
        return GPTDataset(source, documents, count, spec=self.spec, cache_dir=self.cache_dir)
