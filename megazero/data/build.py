"""From the data flags the train, valid and test datasets are built here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from megazero.config.data_inputs import parse_data_path, parse_split
from megazero.data.blend import SURPLUS, BlendedDataset, member_sizes, normalize
from megazero.data.gpt import GPTDataset, Sample, SampleSpec
from megazero.data.indexed import IndexedDataset
from megazero.data.mock import MockDataset
from megazero.data.tokenizer import TokenizerInfo, check_meta

SPLITS = ("train", "valid", "test")


class Dataset(Protocol):
    """It gives samples by position. A sample is a dict of numpy arrays: tokens int64 [s], labels int64 [s],
    loss_mask float32 [s], and position_ids and document_starts int64 [s] where they are asked for.

    ``ordered_for`` is the number of samples that their order was made for. It is 0 where the order is the same for
    any number.
    """

    @property
    def ordered_for(self) -> int: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


Datasets = tuple[Dataset | None, Dataset | None, Dataset | None]


def build_datasets(
    *,
    data_path: Sequence[str] | None,
    split: str,
    seq_length: int,
    seed: int,
    samples: tuple[int, int, int],
    tokenizer: TokenizerInfo,
    cache_dir: str | Path | None = None,
    eod_mask_loss: bool = False,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    ordered_for: tuple[int, int, int] = (0, 0, 0),
) -> Datasets:
    """Return train, valid and test datasets, None where 0 samples are asked for. Every rank may call it at once.

    data_path: It holds words as config.data_inputs reads them (prefixes, or weights and prefixes). None is mock data.
    split: It gives shares of the documents, such as "969,30,1".
    samples: Each dataset must have at least so many.
    cache_dir: The indices are kept there. By default it is a folder ``cache`` beside the first prefix.
    ordered_for: It gives each dataset's own value of an earlier call, or 0. The earlier order is kept where it holds
    ``samples``.
    A blend without weights is one epoch of everything, so it may have fewer samples than asked for.
    Raises ValueError for bad files, a bad split, data of another tokenizer, and splits without tokens.
    """
    spec = SampleSpec(seq_length, seed, tokenizer, eod_mask_loss, reset_position_ids, reset_attention_mask)
    if data_path is None:
        mocks = [MockDataset(count, which, spec) if count else None for which, count in enumerate(samples)]
        return mocks[0], mocks[1], mocks[2]
    prefixes, weights = parse_data_path(data_path)
    sources = [open_data(prefix, tokenizer) for prefix in prefixes]
    cache = Path(cache_dir) if cache_dir is not None else Path(prefixes[0]).parent / "cache"
    builder = _Builder(sources, normalize(weights) if weights else None, spec, cache)
    bounds = split_bounds(split)
    built = [
        builder.build(name, bounds[name], count, before) if count else None
        for name, count, before in zip(SPLITS, samples, ordered_for, strict=True)
    ]
    return built[0], built[1], built[2]


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
        self, sources: list[IndexedDataset], weights: list[float] | None, spec: SampleSpec, cache_dir: Path
    ) -> None:
        self.sources, self.weights, self.spec, self.cache_dir = sources, weights, spec, cache_dir

    def build(self, name: str, bounds: tuple[float, float], count: int, before: int) -> Dataset:
        """Build one split of all sources: they are blended by weights or by size, or there is one source alone."""
        if self.weights is not None:
            members, number = self._ordered(name, bounds, self.weights, count, before, SURPLUS)
            size = sum(member_sizes(self.weights, max(count, number)))
            return BlendedDataset(members, self.weights, size, cache_dir=self.cache_dir, ordered_for=number)
        if len(self.sources) == 1:
            return self._ordered(name, bounds, [1.0], count, before)[0][0]
        members = [self._member(i, name, bounds, None) for i in range(len(self.sources))]
        sizes = [len(member) for member in members]
        if not any(sizes):
            raise ValueError(
                f"no dataset's {name} split fills one sample of {self.spec.seq_length} + 1 tokens; shorten "
                f"the sequence length, give the split a larger share, or give weights (they repeat data)"
            )
        return BlendedDataset(members, sizes, min(count, sum(sizes)), cache_dir=self.cache_dir)

    def _ordered(
        self,
        name: str,
        bounds: tuple[float, float],
        weights: Sequence[float],
        count: int,
        before: int,
        surplus: float = 0.0,
    ) -> tuple[list[GPTDataset], int]:
        """Return a member of every source, and the number of samples that their order was made for.

        That number is ``before`` where members made for that hold ``count``, too. Their epochs decide the order, so
        with more epochs the order would be another one. In a blend a longer order begins with the shorter one.
        """
        least = member_sizes(weights, count, surplus)
        for number in (before or count, count):
            sizes = member_sizes(weights, number, surplus)
            members = [self._member(i, name, bounds, size) for i, size in enumerate(sizes)]
            if all(len(member) >= size for member, size in zip(members, least, strict=True)):
                break
        return members, number

    def _member(self, which: int, name: str, bounds: tuple[float, float], count: int | None) -> GPTDataset:
        source = self.sources[which]
        first, end = (round(edge * float(len(source))) for edge in bounds)
        documents = np.arange(first, end, dtype=np.int32)
        if not source.lengths[first:end].any():
            raise ValueError(
                f"{source.prefix}: the {name} split gets {len(documents)} of {len(source)} documents and no token; "
                f"give it a larger share in the split, or ask for no {name} samples"
            )
        return GPTDataset(source, documents, count, spec=self.spec, cache_dir=self.cache_dir)
