"""Builds the data sets of a run's parts (train, valid, test) from Megatron's indexed files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from megazero.config.options.data_inputs import SPLITS, parse_data_path, parse_split
from megazero.config.options.sections import DataConfig
from megazero.data.blend import SURPLUS, BlendedDataset, Member, member_sizes, normalize
from megazero.data.chats import ChatDataset
from megazero.data.gpt import GPTDataset, SampleSpec
from megazero.data.indexed import IndexedDataset, has_mask
from megazero.data.source import DatasetSource, OpenPart
from megazero.data.tokenizer import TokenizerInfo, check_meta


@dataclass(frozen=True)
class Blend:
    """The data sets that samples are drawn from, mixed by weight.

    ``prefixes`` are paths without .bin and .idx. Without ``weights`` each data set counts by its size. ``share`` has
    the fractions of each data set's documents at which the part begins and ends.
    """

    prefixes: Sequence[str]
    weights: Sequence[float] | None
    share: tuple[float, float] = (0.0, 1.0)


def indexed_parts(data: DataConfig) -> dict[str, OpenPart]:
    """Return how each part of the data opens.

    The test share of --split is not used: it is for those who evaluate the model later.
    """
    if data.data_path:
        blends = blends_by_share(data.data_path, data.split)
        del blends["test"]
    else:
        named = {split: getattr(data, f"{split}_data_path") for split in SPLITS}
        blends = {split: whole_blend(words) for split, words in named.items() if words}
    return {split: partial(_open, split, blend, data.data_cache_path) for split, blend in blends.items()}


def _open(
    split: str, blend: Blend, cache_dir: str | None, spec: SampleSpec, count: int, ordered_for: int
) -> DatasetSource:
    made = build_dataset(split, blend, spec, count, ordered_for=ordered_for, cache_dir=cache_dir)
    return DatasetSource(made, made.ordered_for)


def build_dataset(
    split: str,
    blend: Blend,
    spec: SampleSpec,
    count: int,
    *,
    ordered_for: int = 0,
    cache_dir: str | Path | None = None,
) -> Member | BlendedDataset:
    """Return a dataset of ``count`` samples of one part of the data (in SPLITS). Every rank may call it at once.

    blend: the data sets and their shares of documents.
    ordered_for: the dataset's own value of an earlier call, or 0. The earlier order is kept if it holds ``count``.
    cache_dir: folder of the indices (default: a folder ``cache`` beside the first data set).
    A blend without weights is one epoch of everything, so it may have fewer samples than ``count``.
    Raises ValueError for bad files, data of another tokenizer, and parts without tokens.
    """
    sources = [open_data(prefix, spec.tokenizer) for prefix in blend.prefixes]
    cache = Path(cache_dir) if cache_dir is not None else Path(blend.prefixes[0]).parent / "cache"
    return _Builder(split, blend, sources, spec, cache).build(count, ordered_for)


def whole_blend(words: Sequence[str]) -> Blend:
    """Return the blend of whole data sets. Of a single one the weight says nothing, and Megatron does not read it."""
    prefixes, weights = parse_data_path(words)
    return Blend(prefixes, weights if len(prefixes) > 1 else None)


def blends_by_share(data_path: Sequence[str], split: str) -> dict[str, Blend]:
    """Return the blend of each of SPLITS: the same data sets, and of each its share of the documents."""
    return {name: Blend(*parse_data_path(data_path), share) for name, share in split_bounds(split).items()}


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
        self.share = blend.share

    def build(self, count: int, before: int) -> Member | BlendedDataset:
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
    ) -> tuple[list[Member], int]:
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

    def _member(self, which: int, count: int | None) -> Member:
        source = self.sources[which]
        if has_mask(source.prefix) and not self.spec.chats:
            raise ValueError(
                f"{source.prefix} holds conversations, of which the loss counts the answers: add --chats (or remove "
                f"{source.prefix}.mask.* to train on all of their tokens)"
            )
        first, end = (round(edge * float(len(source))) for edge in self.share)
        documents = np.arange(first, end, dtype=np.int32)
        if not source.lengths[first:end].any():
            raise ValueError(
                f"{source.prefix}: the {self.split} split gets {len(documents)} of {len(source)} documents and no "
                f"token; give it a larger share (--split), or no samples (--eval-iters 0, or a share of 0)"
            )
        made = ChatDataset if self.spec.chats else GPTDataset
        return made(source, documents, count, spec=self.spec, cache_dir=self.cache_dir)
