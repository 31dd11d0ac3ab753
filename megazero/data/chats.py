"""Samples of whole conversations, and the mask that says which of their tokens the loss counts.

PREFIX.bin and PREFIX.idx hold the conversations' tokens, so that Megatron reads them. PREFIX.mask.bin and
PREFIX.mask.idx are an indexed data set, too, of the same shape: 1 for a token that counts, else 0 (uint8).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megazero.data.cache import Arrays, cached_arrays
from megazero.data.gpt import Sample, SampleSpec, finish_sample
from megazero.data.indexed import IndexedDataset, has_mask, idx_path, mask_prefix


def open_mask(source: IndexedDataset) -> IndexedDataset:
    """Open the mask of the conversations of ``source``. Raises ValueError if there is none, or that of others."""
    if not has_mask(source.prefix):
        raise ValueError(
            f"{source.prefix} holds no conversations: {idx_path(mask_prefix(source.prefix))} is not there; make it "
            "with megazero preprocess --chats, or leave --chats out"
        )
    mask = IndexedDataset(mask_prefix(source.prefix))
    if mask.dtype != np.uint8 or not np.array_equal(mask.lengths, source.lengths):
        raise ValueError(f"{mask.prefix} is the mask of other conversations: run megazero preprocess again")
    return mask


def pack(sizes: NDArray[np.int32], room: int) -> Arrays:
    """Put items of ``sizes`` [n], of 1 to ``room`` each, into samples of ``room`` by best fit decreasing.

    Returns ``items`` int64 [n], those of a sample side by side, the largest first, and ``starts`` int64
    [samples + 1], where each sample begins in them.
    """
    order = np.argsort(-sizes, kind="stable")
    least, count = int(sizes.min()), 0
    which = np.empty(len(sizes), np.int64)
    left: list[tuple[int, int]] = []  # free room of samples that another item may fit in, ascending
    for place, size in enumerate(sizes[order].tolist()):
        at = bisect_left(left, (size, 0))
        if at < len(left):
            free, sample = left.pop(at)
        else:
            free, sample, count = room, count, count + 1
        which[place] = sample
        if free - size >= least:
            insort(left, (free - size, sample))
    starts = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(which, minlength=count), out=starts[1:])
    return {"items": order[np.argsort(which, kind="stable")], "starts": starts}


@lru_cache(maxsize=4)
def _shuffled(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    return np.random.RandomState([seed, epoch]).permutation(count)


class ChatDataset:
    """Samples of one split of one set of conversations. ``self[i]`` is a Sample.

    A sample holds whole conversations and is filled up with end-of-document tokens, which do not count. What is
    longer than a sample loses its end: ``truncated`` is the number of such conversations. All epochs have the same
    samples, each in an order of its own. documents, num_samples, errors: as in GPTDataset.
    """

    ordered_for = 0

    def __init__(
        self,
        source: IndexedDataset,
        documents: NDArray[np.int32],
        num_samples: int | None,
        *,
        spec: SampleSpec,
        cache_dir: Path,
    ) -> None:
        self.source, self.spec, self.mask = source, spec, open_mask(source)
        self.documents = documents[source.lengths[documents] > 0]
        sizes = source.lengths[self.documents]
        self.truncated = int((sizes > spec.seq_length).sum())
        description = {
            "what": "chats",
            **source.fingerprint(),
            "first": int(documents[0]),
            "count": len(documents),
            "seq_length": spec.seq_length,
        }
        fitting = np.minimum(sizes, spec.seq_length)
        arrays = cached_arrays(cache_dir, description, lambda: pack(fitting, spec.seq_length))
        self.items, self.starts = arrays["items"], arrays["starts"]
        self.epochs = 1 if num_samples is None else max(1, -(-num_samples // self.samples))

    @property
    def samples(self) -> int:
        """The samples of one epoch."""
        return len(self.starts) - 1

    def __len__(self) -> int:
        return self.epochs * self.samples

    def __getitem__(self, index: int) -> Sample:
        epoch, turn = divmod(index, self.samples)
        sample = _shuffled(self.spec.seed, epoch, self.samples)[turn]
        length = self.spec.seq_length
        text = np.full(length + 1, self.spec.tokenizer.eod, np.int64)
        counted, ends = np.zeros(length + 1, np.uint8), np.zeros(length, np.bool_)
        begin = 0
        for document in self.documents[self.items[self.starts[sample] : self.starts[sample + 1]]].tolist():
            size = min(int(self.source.lengths[document]), length)
            end = begin + size
            text[begin:end] = self.source.get(document, 0, size)
            counted[begin + 1 : end] = self.mask.get(
                document, 1, size - 1
            )  # nothing predicts the first token
            ends[end - 1] = True
            begin = end
        self.source.check_tokens(text, self.spec.tokenizer.vocab_size)
        return finish_sample(text, self.spec, counted, ends)
