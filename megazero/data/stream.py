"""Samples from a store: records are fetched, encoded and packed while a run trains.

The order is a function of the seed, the files and --stream-shards, never of ranks or workers. Each epoch shuffles the
pieces of a member of the blend, and each piece its records. The pieces of all epochs, one after the other, are dealt
to K virtual shards: shard k has the pieces k, k + K, k + 2K, ... and packs their documents, end to end, into texts of
s + 1 tokens, which begin s tokens apart. Sample i comes from shard i mod K, of the member that the i-th term of a
sequence of low discrepancy names.

So a rank reads the shards of its own samples alone: where K is a multiple of the samples of a micro-batch over all
ranks, each shard has one reader. Of others it counts how many texts were consumed; a save gathers who stands where.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megazero.config.options.data_inputs import SPLITS, parse_data_path
from megazero.config.options.sections import DataConfig
from megazero.data.gpt import Sample, SampleSpec, finish_sample
from megazero.data.records import (
    Encode,
    EncodeText,
    FilePiece,
    Ids,
    Mask,
    Record,
    pieces_of,
    place_of,
    records_of,
)
from megazero.data.source import OpenPart, SampleSource, wrong_kind
from megazero.data.store import FileStore
from megazero.data.workers import Workers
from megazero.mesh.objects import gather_objects

RUN_BYTES = 1 << 16  # of records that are encoded at once
_AHEAD = 2  # batches that are prepared
_GOLDEN = np.uint64(11400714819323198485)  # 2^64 / the golden ratio


class Document(NamedTuple):
    """An encoded record: its place in the shard's order, and the records that were left out up to it."""

    ordinal: int
    record: int
    skipped: int
    ids: Ids
    mask: Mask


@dataclass(frozen=True)
class Member:
    """One of the data sets of a blend, and its order."""

    number: int
    pieces: Sequence[FilePiece]
    seed: int
    shuffle: bool

    def piece(self, ordinal: int) -> FilePiece:
        """Return a piece by its place in the order of all epochs."""
        epoch, at = divmod(ordinal, len(self.pieces))
        order = _shuffled(len(self.pieces), (self.seed, self.number, epoch) if self.shuffle else None)
        return self.pieces[order[at]]

    def records(self, ordinal: int, count: int) -> NDArray[np.int64]:
        """Return the order of a piece's records."""
        return _shuffled(count, (self.seed, self.number, ordinal, count) if self.shuffle else None)


@lru_cache(maxsize=64)
def _shuffled(count: int, seed: tuple[int, ...] | None) -> NDArray[np.int64]:
    return np.arange(count) if seed is None else np.random.default_rng(seed).permutation(count)


def _turns(begin: int, count: int) -> NDArray[np.float64]:
    """Return the terms [begin, begin + count) of the sequence i / golden ratio mod 1."""
    return (np.arange(begin, begin + count).astype(np.uint64) * _GOLDEN).astype(np.float64) / 2.0**64


@dataclass(frozen=True)
class Reading:
    """How records become tokens, in one run."""

    store: FileStore
    encode: Encode
    workers: Workers
    skip_bad_lines: bool


class VirtualShard:
    """Texts of a virtual shard, one after the other. A thread may fill it ahead; all else is of its owner's.

    place: (ordinal, record, token) at which the next text begins, and how many records were left out before it.
    behind: texts that other ranks have taken since.
    """

    def __init__(
        self, member: Member, stride: int, reading: Reading, place: Sequence[int], behind: int
    ) -> None:
        self._member, self._stride, self._reading = member, stride, reading
        self.behind = behind
        self._ordinal, self._record, self._token, self._skipped = place
        self._held: deque[Document] = deque()
        self._documents = self._encoded(self._ordinal, self._record, self._skipped)
        self._filling: Future[None] | None = None

    def state(self) -> list[int]:
        return [self._ordinal, self._record, self._token, self._skipped, self.behind]

    def prepare(self, length: int) -> None:
        """Begin to read what the next text takes."""
        if self._reading.workers.count and self._filling is None:
            tokens = length * (1 + bool(self.behind))
            self._filling = self._reading.workers.begin(partial(self._fill, tokens))

    def take(self, length: int) -> tuple[NDArray[np.int64], Mask]:
        """Return the next text and its mask, [length + 1] each, after those that others have taken."""
        for _ in range(self.behind):
            self._text(length)
        self.behind = 0
        return self._text(length)

    def _text(self, length: int) -> tuple[NDArray[np.int64], Mask]:
        if self._filling is not None:
            filling, self._filling = self._filling, None
            filling.result()
        self._fill(length)
        wanted, begin = length + 1, self._token
        ids, mask = list[Ids](), list[Mask]()
        for document in self._held:
            ids.append(document.ids[begin : begin + wanted])
            mask.append(document.mask[begin : begin + wanted])
            wanted, begin = wanted - len(ids[-1]), 0
            if not wanted:
                break
        self._advance(length)
        return np.concatenate(ids, dtype=np.int64), np.concatenate(mask)

    def _advance(self, tokens: int) -> None:
        self._token += tokens
        while self._token >= len(self._held[0].ids):
            self._token -= len(self._held.popleft().ids)
        self._ordinal, self._record, self._skipped, *_ = self._held[0]

    def _fill(self, length: int) -> None:
        """Hold ``length`` tokens and the one after them."""
        held = sum(len(document.ids) for document in self._held) - self._token
        while held <= length:
            self._held.append(next(self._documents))
            held += len(self._held[-1].ids)

    def _encoded(self, ordinal: int, record: int, skipped: int) -> Iterator[Document]:
        """Yield the documents from a place on, without end. Raises ValueError where a whole epoch has none."""
        reading, empty = self._reading, 0
        while empty < len(self._member.pieces):
            piece = self._member.piece(ordinal)
            found = records_of(reading.store, piece, reading.encode.key)
            order, bad, empty = self._member.records(ordinal, len(found)), 0, empty + 1
            for first, last in _runs([found[i][1] for i in order], record):
                encoded = reading.workers.encode(reading.encode, [found[i][1] for i in order[first:last]])
                for at, each in enumerate(encoded, first):
                    if isinstance(each, str):
                        self._refuse_bad(piece, found[order[at]][0], each)
                        skipped, bad = skipped + 1, bad + 1
                    elif len(each[0]):
                        empty = 0
                        yield Document(ordinal, at, skipped, *each)
            if bad:
                warnings.warn(
                    f"{piece.address}: {bad} bad records left out, near {piece.first}", stacklevel=2
                )
            ordinal, record = ordinal + self._stride, 0
        raise ValueError(f"{piece.address} and the files beside it hold no text; name others")

    def _refuse_bad(self, piece: FilePiece, place: int, error: str) -> None:
        if not self._reading.skip_bad_lines:
            raise ValueError(
                f"{place_of(self._reading.store, piece, place)}: {error}; mend it, name another key (--stream-key), "
                "or leave such records out (--skip-bad-lines)"
            )


def _runs(records: Sequence[Record], begin: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of records of about RUN_BYTES in turn, from ``begin`` on."""
    size, first = 0, begin
    for at in range(begin, len(records)):
        record = records[at]
        if isinstance(record, np.ndarray):
            size += record.nbytes
        else:
            size += len(record if isinstance(record, bytes) else repr(record))
        if size >= RUN_BYTES or at + 1 == len(records):
            yield first, at + 1
            size, first = 0, at + 1


class StreamSource(SampleSource):
    """Samples of a blend of members. Its state says where each shard stands; of those that this rank does not read it
    counts what is consumed, so that any rank's state is a true one, and the merged one needs no reading again.
    """

    def __init__(
        self,
        members: Sequence[Member],
        weights: Sequence[float],
        shards: int,
        spec: SampleSpec,
        reading: Reading,
    ) -> None:
        self.members, self.spec, self.reading = members, spec, reading
        self._bounds = np.cumsum(weights)[:-1] / np.sum(weights)  # of the members' shares
        self._shards = [min(shards, len(member.pieces)) for member in members]
        self._count = shards
        text = repr([(shards, member.pieces) for member in members])
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.load_state(0)

    def batch(self, count: int, own: range) -> list[Sample]:
        found = []
        for i, key in enumerate(self._keys(self._next, count)):
            shard = self._shard(key)
            if i in own:
                text, mask = shard.take(self.spec.seq_length)
                found.append(self._sample(text, mask, self._next + i))
            else:
                shard.behind += 1
        self._next += count
        for ahead in range(_AHEAD if own else 0):
            keys = [*self._keys(self._next + ahead * count, count)]
            for i in own:
                self._shard(keys[i]).prepare(self.spec.seq_length)
        return found

    def _keys(self, begin: int, count: int) -> Iterator[tuple[int, int]]:
        """Yield (member, shard) of samples."""
        members = np.searchsorted(self._bounds, _turns(begin, count), side="right").tolist()
        for i, member in enumerate(members, begin):
            yield member, i % self._count % self._shards[member]

    def _shard(self, key: tuple[int, int]) -> VirtualShard:
        if key not in self._open:
            member, k = key
            *place, behind = self._at.get(f"{member}.{k}", (k, 0, 0, 0, 0))
            self._open[key] = VirtualShard(
                self.members[member], self._shards[member], self.reading, place, behind
            )
        return self._open[key]

    def _sample(self, text: NDArray[np.int64], mask: Mask, number: int) -> Sample:
        if self.spec.change is not None:
            text = self.spec.change(text, self.spec.seed, number)
        sample = finish_sample(text, self.spec)
        sample["loss_mask"] *= mask[1:]
        return sample

    def state(self) -> Any:
        if not self._next:
            return 0
        at = {f"{member}.{k}": shard.state() for (member, k), shard in self._open.items()}
        return {"stream": self.fingerprint, "samples": self._next, "shards": {**self._at, **at}}

    def whole_state(self, state: Any) -> Any:
        return furthest(gather_objects(state)) if state else state

    def load_state(self, state: Any) -> None:
        if state and not (isinstance(state, dict) and "stream" in state):
            raise wrong_kind(state)
        if state and state["stream"] != self.fingerprint:
            raise ValueError(
                "the files of the stream, or --stream-shards, are others than when the checkpoint was written, so "
                "its place in them is lost: name the same ones, or start a new run from its weights (--finetune)"
            )
        self._next: int = state["samples"] if state else 0
        self._at: dict[str, list[int]] = state["shards"] if state else {}
        self._open: dict[tuple[int, int], VirtualShard] = {}


def furthest(states: Sequence[Any]) -> Any:
    """Merge the states of all ranks after the same samples. Of each shard the rank that took its last text stands
    furthest, and every rank has counted those since alike.
    """
    if len({each["stream"] for each in states}) > 1:
        raise ValueError("ranks have found different files; let all of them see one store")
    shards: dict[str, list[int]] = {}
    for key, place in ((key, place) for each in states for key, place in each["shards"].items()):
        shards[key] = max(place, shards.get(key, place))
    return {**states[0], "shards": shards}


def stream_parts(data: DataConfig) -> dict[str, OpenPart]:
    """Return how each part of the data opens. --data-path is trained on as a whole."""
    named = {split: getattr(data, f"{split}_data_path") for split in SPLITS}
    named["train"] = named["train"] or data.data_path
    store, workers = FileStore(data.data_cache_path), Workers(data.stream_workers)

    def open_part(words: Sequence[str], spec: SampleSpec, count: int, ordered_for: int) -> StreamSource:
        reading = Reading(store, EncodeText.of(data, spec.tokenizer), workers, data.skip_bad_lines)
        prefixes, weights = parse_data_path(words)
        groups = [prefixes] if weights is None else [[prefix] for prefix in prefixes]
        members = [
            Member(number, pieces_of(store, group), spec.seed, data.stream_shuffle)
            for number, group in enumerate(groups)
        ]
        return StreamSource(members, weights or [1.0], data.stream_shards, spec, reading)

    return {split: partial(open_part, words) for split, words in named.items() if words}
