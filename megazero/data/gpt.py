"""Samples of fixed length from an indexed dataset, in the order of megatron-core's GPTDataset (0.16.1).

Documents of all epochs are shuffled and laid end to end. Sample i covers tokens i*s .. i*s + s of that stream (s + 1
of them, neighbours share one), and a second shuffle orders the samples. Both shuffles draw from one
``numpy.random.RandomState(seed)``. When less than 80% of the last epoch is needed, it is shuffled apart.
What Megatron calls a document here is a sequence of the index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from megazero.data.cache import Arrays, cached_arrays
from megazero.data.indexed import IndexedDataset
from megazero.data.tokenizer import TokenizerInfo

SEPARATE_LAST_EPOCH = 0.80
Sample = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class SampleSpec:
    """How samples are cut and masked.

    ``seq_length`` is the tokens per sample. ``seed`` is the seed of both shuffles. With ``reset_position_ids`` or
    ``reset_attention_mask`` samples say where documents begin (``document_fields``). ``goldfish`` is (k, h) of
    ``dropped``, or None. ``change`` makes another text of one, by the seed and the sample's number (data/fim.py).
    ``chats``: the data are conversations (data/chats.py).
    """

    seq_length: int
    seed: int
    tokenizer: TokenizerInfo
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    goldfish: tuple[int, int] | None = None
    change: Callable[[NDArray[np.int64], int, int], NDArray[np.int64]] | None = None
    chats: bool = False


def finish_sample(
    text: NDArray[np.int64],
    spec: SampleSpec,
    counted: NDArray[np.uint8] | None = None,
    ends: NDArray[np.bool_] | None = None,
) -> Sample:
    """From text int64 [s + 1] make tokens int64 [s], labels int64 [s], loss_mask float32 [s], and
    ``document_fields``.

    With eod_mask_loss a position whose *token* (not label) is the end of document has weight 0, because it would have
    to predict the first token of an unrelated document.
    counted: 1 for each token of the text that the loss counts, else 0 (default: all). ends: as in ``document_fields``
    (default: at end-of-document tokens).
    """
    tokens = text[:-1]
    mask = np.ones(len(tokens), np.float32) if counted is None else counted[1:].astype(np.float32)
    if spec.eod_mask_loss:
        mask[tokens == spec.tokenizer.eod] = 0.0
    if spec.goldfish:
        mask[dropped(text[1:], *spec.goldfish)] = 0.0
    fields = document_fields(
        tokens == spec.tokenizer.eod if ends is None else ends,
        reset_position_ids=spec.reset_position_ids,
        reset_attention_mask=spec.reset_attention_mask,
    )
    return {"tokens": tokens, "labels": text[1:], "loss_mask": mask, **fields}


@cache
def _table() -> NDArray[np.float32]:
    """Return the numbers of ``dropped`` by key, which the paper's code and Apertus's draw with torch, too."""
    generator = torch.Generator().manual_seed(2971215073)
    return torch.rand(1_000_003, generator=generator, dtype=torch.float32, device="cpu").numpy()


def dropped(labels: NDArray[np.int64], k: int, h: int) -> NDArray[np.bool_]:
    """Say which of the labels [s] the loss leaves out, about one in k: those whose last h labels, their own included,
    have a product, modulo 2^64, with a number below 1 / k in a table (Hans et al. 2024, arXiv 2406.10209).

    So a text loses the same tokens wherever it stands. The first h - 1 labels of a sample stay. Of random ids a tenth
    of the products of 50 is 0, which stays, too: one label in 62 is left out at k = 50.
    """
    out = np.zeros(len(labels), np.bool_)
    if len(labels) >= h:
        table, keys = _table(), sliding_window_view(labels, h).prod(-1)
        out[h - 1 :] = table[keys % len(table)] < np.float32(1 / k)
    return out


def document_fields(
    ends: NDArray[np.bool_], *, reset_position_ids: bool, reset_attention_mask: bool
) -> Sample:
    """Say where documents begin, in the fields that are asked for, int64 [..., s] each.

    ``ends`` is bool [..., s], True at the last token of a document, its end-of-document token. The next document
    begins after it. ``position_ids`` count from 0 within each document. ``document_starts`` is where the document of
    each token begins.
    """
    at = np.arange(ends.shape[-1])
    begins = np.zeros(ends.shape, np.int64)
    begins[..., 1:] = np.where(ends[..., :-1], at[1:], 0)
    starts = np.maximum.accumulate(begins, axis=-1)
    fields = {}
    if reset_position_ids:
        fields["position_ids"] = at - starts
    if reset_attention_mask:
        fields["document_starts"] = starts
    return fields


def epochs_needed(num_samples: int, tokens_per_epoch: int, seq_length: int) -> int:
    """Return the epochs that hold ``num_samples`` samples of seq_length tokens and the one token after the last."""
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def document_order(
    documents: NDArray[np.int32], epochs: int, random: np.random.RandomState, separate_last: bool
) -> NDArray[np.int32]:
    """Return int32 [epochs * len(documents)]: all epochs shuffled together, the last one apart when asked."""
    together = epochs - 1 if separate_last else epochs
    parts = (
        [np.tile(documents, together), documents.copy()] if separate_last else [np.tile(documents, epochs)]
    )
    for part in parts:
        random.shuffle(part)
    return np.concatenate(parts)


def sample_starts(sizes: NDArray[np.int32], num_samples: int, seq_length: int) -> NDArray[Any]:
    """Return where each sample starts, [num_samples + 1, 2]: position in the document order, token offset in it.

    ``sizes`` is int32, the tokens of each document in order. Boundary i is stream token i * seq_length, and its
    document is the first whose running end lies beyond it. The result is int32, or int64 where Megatron needs that.
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    at = np.arange(num_samples + 1, dtype=np.int64) * seq_length
    where = np.searchsorted(ends, at, side="right")
    where[0] = 0  # Megatron's first entry names document 0 even when that is empty
    dtype = np.int64 if len(sizes) > np.iinfo(np.int32).max else np.int32
    starts = np.empty((num_samples + 1, 2), dtype)
    starts[:, 0] = where
    starts[:, 1] = at - (ends[where] - sizes[where])
    return starts


def sample_order(first: int, total: int, random: np.random.RandomState) -> NDArray[Any]:
    """Permute range(total), as uint32 or int64 [total]. The ranges below and from ``first`` stay apart."""
    dtype = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    parts = [np.arange(first, dtype=dtype)]
    if first != total:
        parts.append(np.arange(first, total, dtype=dtype))
    for part in parts:
        random.shuffle(part)
    return np.concatenate(parts)


def build_order(
    lengths: NDArray[np.int32], documents: NDArray[np.int32], num_samples: int | None, spec: SampleSpec
) -> Arrays:
    """Return the three indices: ``documents`` int32 [E * n], ``starts`` [samples + 1, 2], ``shuffle`` [samples].

    If ``num_samples`` is None, they are for one epoch.
    """
    tokens, s = int(lengths[documents].sum(dtype=np.int64)), spec.seq_length
    epochs = 1 if num_samples is None else epochs_needed(num_samples, tokens, s)
    before_last = ((epochs - 1) * tokens - 1) // s
    separate = False
    if epochs > 1 and num_samples is not None:
        separate = num_samples - before_last < int(SEPARATE_LAST_EPOCH * ((tokens - 1) // s))
    random = np.random.RandomState(spec.seed)
    order = document_order(documents, epochs, random, separate)
    total = (epochs * tokens - 1) // s
    starts = sample_starts(lengths[order], total, s)
    return {
        "documents": order,
        "starts": starts,
        "shuffle": sample_order(before_last if separate else total, total, random),
    }


class GPTDataset:
    """Samples of one split of one indexed dataset. ``self[i]`` is a Sample.

    ``documents`` is int32, the sequences of the split, with at least one token. ``num_samples`` asks for at least so
    many samples (as many epochs as that takes), or is None for one epoch. Reading a sample raises ValueError when it
    holds a token outside the vocabulary.
    """

    def __init__(
        self,
        source: IndexedDataset,
        documents: NDArray[np.int32],
        num_samples: int | None,
        *,
        spec: SampleSpec,
        cache_dir: Path,
    ) -> None:
        self.source, self.spec, self.ordered_for = source, spec, num_samples or 0
        description = {
            "what": "gpt",
            **source.fingerprint(),
            "first": int(documents[0]),
            "count": len(documents),
            "num_samples": num_samples,
            "seq_length": spec.seq_length,
            "seed": spec.seed,
            "tokenizer": spec.tokenizer.fingerprint,
        }
        arrays = cached_arrays(
            cache_dir, description, lambda: build_order(source.lengths, documents, num_samples, spec)
        )
        self.documents, self.starts, self.shuffle = arrays["documents"], arrays["starts"], arrays["shuffle"]

    def __len__(self) -> int:
        return len(self.shuffle)

    def text(self, index: int) -> NDArray[np.int64]:
        """Return int64 [s + 1]: the tokens of sample ``index`` and the one after them."""
        (first, start), (last, stop) = self.starts[self.shuffle[index] :][:2].tolist()
        if first == last:
            parts = [self.source.get(self.documents[first], start, stop - start + 1)]
        else:
            middle = [self.source.get(document) for document in self.documents[first + 1 : last]]
            head = self.source.get(self.documents[first], start)
            parts = [head, *middle, self.source.get(self.documents[last], 0, stop + 1)]
        text = np.concatenate(parts, dtype=np.int64)
        self.source.check_tokens(text, self.spec.tokenizer.vocab_size)
        return text

    def __getitem__(self, index: int) -> Sample:
        text, spec = self.text(index), self.spec
        if spec.change is not None:
            text = spec.change(text, spec.seed, int(self.shuffle[index]))
        return finish_sample(text, spec)
