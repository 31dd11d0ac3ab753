"""What samples come from: a source, which hands them out one after the other.

A run knows this protocol alone: checkpoints keep a source's state unread, a resume loads it, iterations that are left
out skip samples, and sampler.py deals samples to ranks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Any, Protocol

from megazero.data.gpt import Sample, SampleSpec


class SampleSource(ABC):
    """Hands out the samples of a part of the data. Its state alone decides which ones, so all ranks agree on them.

    samples: how many it has from its beginning on; infinite if nobody knows. ordered_for: the number of samples that
    their order was made for, or 0 where the order is the same for any number.
    """

    samples: float = math.inf
    ordered_for: int = 0

    @abstractmethod
    def batch(self, count: int, own: range) -> list[Sample]:
        """Consume the next ``count`` samples, and return those of them, counted from 0, that are in ``own``.

        A sample is a dict of numpy arrays: tokens int64 [s], labels int64 [s], loss_mask float32 [s], and
        position_ids and document_starts int64 [s] where they are asked for. Raises ValueError if it has fewer.
        """

    def numbers(self, state: Any, consumed: int) -> Iterable[int]:
        """Return the numbers of the samples that follow where ``state`` was returned, after ``consumed`` ones."""
        return count(consumed)

    @abstractmethod
    def state(self) -> Any:
        """Return where it stands, in JSON types.

        It does not change when the source goes on. Each rank's leads to the same samples, whatever ``own`` was.
        """

    def whole_state(self, state: Any) -> Any:
        """Return one state for all ranks, of the ``state`` that each has after the same samples. Collective."""
        return state

    @abstractmethod
    def load_state(self, state: Any) -> None:
        """Go to where ``state`` was returned, or to the beginning, which is 0.

        Raises ValueError for the state of another kind of source.
        """


# Opens a part of the data (train, valid or test) at its beginning. It takes how samples are cut, how many are wanted,
# and ``ordered_for`` of an earlier start, or 0: that order is kept if it holds so many.
OpenPart = Callable[[SampleSpec, int, int], SampleSource]


class Dataset(Protocol):
    """Samples by number, as a source returns them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


class DatasetSource(SampleSource):
    """The samples of a data set in the order of their numbers. Its state is the number of the next one."""

    def __init__(self, data_set: Dataset, ordered_for: int = 0) -> None:
        self.data_set, self.samples, self.ordered_for = data_set, len(data_set), ordered_for
        self._next = 0

    def batch(self, count: int, own: range) -> list[Sample]:
        first, end = self._next, self._next + count
        if end > (size := len(self.data_set)):
            raise ValueError(
                f"the data has {size} samples; {first} are consumed and the next batch takes {count}: "
                f"train for fewer samples or iterations, add data, or give the blend weights (they repeat data)"
            )
        found = [self.data_set[first + i] for i in own]
        self._next = end
        return found

    def state(self) -> int:
        return self._next

    def load_state(self, state: Any) -> None:
        if not isinstance(state, int):
            raise wrong_kind(state)
        self._next = state


class StagedSource(SampleSource):
    """One source after the other. Its state is how many samples are consumed, and the state of the source in use.

    sources: by the number of samples that are consumed before the first of each, which ascends from 0. A number alone
    is a state, too, if it is one of the source in use, counted from its first sample.
    """

    def __init__(self, sources: Mapping[int, SampleSource]) -> None:
        self.sources, self.begins, self._consumed = dict(sources), [*sources], 0
        self.samples = self.begins[-1] + sources[self.begins[-1]].samples

    def batch(self, count: int, own: range) -> list[Sample]:
        made, done = list[Sample](), 0
        while done < count:
            begin = self._begin(self._consumed)
            end = next((each for each in self.begins if each > begin), math.inf)
            taken = int(min(count - done, end - self._consumed))
            part = range(max(own.start - done, 0), min(own.stop - done, taken))
            made += self.sources[begin].batch(taken, part)
            done, self._consumed = done + taken, self._consumed + taken
        return made

    def state(self) -> Any:
        return {"consumed": self._consumed, "source": self.sources[self._begin(self._consumed)].state()}

    def whole_state(self, state: Any) -> Any:
        source = self.sources[self._begin(state["consumed"])]
        return {**state, "source": source.whole_state(state["source"])}

    def load_state(self, state: Any) -> None:
        consumed = state["consumed"] if isinstance(state, dict) and "consumed" in state else state
        if not isinstance(consumed, int):
            raise wrong_kind(state)
        begin, self._consumed = self._begin(consumed), consumed
        for source in self.sources.values():
            source.load_state(0)
        self.sources[begin].load_state(consumed - begin if state is consumed else state["source"])

    def _begin(self, consumed: int) -> int:
        """Return where the source begins that has the sample after ``consumed``."""
        return self.begins[bisect_right(self.begins, consumed) - 1]


def wrong_kind(state: Any) -> ValueError:
    return ValueError(
        f"the checkpoint stands at {state!r} of data of another kind: name the data that it was trained on, "
        "or start a new run from its weights (--finetune)"
    )
