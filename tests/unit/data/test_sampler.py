"""Which samples a step takes: the same for every layout, no gap and no repeat after a resume."""

from __future__ import annotations

import threading
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.config.options.data_inputs import SPLITS
from megazero.config.options.data_sources import SOURCES
from megazero.config.options.sections import DataConfig
from megazero.data.sampler import Batches
from megazero.data.source import DatasetSource, SampleSource
from megazero.mesh.grid import make_grid
from megazero.mesh.mesh import Mesh
from megazero.train.data.feeding import Feeding
from megazero.train.state.progress import Progress
from tests.messages import refused


class Counting:
    """Sample i is filled with i; knows what was read, and by which thread."""

    def __init__(self, size: int, broken: int = -1) -> None:
        self.size, self.broken = size, broken
        self.read: list[int] = []
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, np.ndarray[Any, Any]]:
        assert 0 <= index < self.size
        self.read.append(index)
        self.threads.add(threading.current_thread().name)
        if index == self.broken:
            raise ValueError(f"sample {index} is broken")
        row = np.full(4, index, np.int64)
        return {"tokens": row, "labels": row + 1, "loss_mask": np.ones(4, np.float32)}


class Stream(SampleSource):
    """Sample i is filled with i, and lies at 10 * i of a file. It says nowhere how many there are."""

    def __init__(self) -> None:
        self.offset = 0

    def batch(self, count: int, own: range) -> list[dict[str, np.ndarray[Any, Any]]]:
        found = [np.full(4, self.offset // 10 + i, np.int64) for i in range(count)]
        self.offset += 10 * count
        return [{"tokens": found[i]} for i in own]

    def state(self) -> dict[str, int]:
        return {"offset": self.offset}

    def load_state(self, state: Any) -> None:
        self.offset = state["offset"] if state else 0


def numbered(data: Counting, consumed: int = 0) -> DatasetSource:
    source = DatasetSource(data)
    source.load_state(consumed)
    return source


def global_step(loaders: list[Batches], micro_batches: int) -> list[int]:
    """Sample ids of one step over all ranks, in micro-batch, rank, row order."""
    expected = [loader.sample_ids(micro_batches) for loader in loaders]
    steps = [loader.next_step(micro_batches) for loader in loaders]
    ids = [[batch["tokens"][:, 0].tolist() for batch in step] for step in steps]
    assert ids == expected
    return [i for m in range(micro_batches) for rank in range(len(loaders)) for i in ids[rank][m]]


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.integers(1, 4),
    micro=st.integers(1, 3),
    steps=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    consumed=st.integers(0, 10),
)
def test_every_id_once_in_order_for_any_layout(
    ranks: int, micro: int, steps: list[int], consumed: int
) -> None:
    total = consumed + sum(steps) * ranks * micro
    loaders = [
        Batches(
            numbered(Counting(total), consumed), micro_batch_size=micro, rank=r, size=ranks, consumed=consumed
        )
        for r in range(ranks)
    ]
    seen = [i for step in steps for i in global_step(loaders, step)]
    assert seen == list(range(consumed, total))
    assert all(loader.consumed == loader.state == total for loader in loaders)
    for loader in loaders:
        with pytest.raises(ValueError, match=f"the data has {total} samples; {total} are consumed"):
            loader.next_step(1)
        loader.close()


def test_one_step_is_prepared_in_the_background() -> None:
    data = Counting(8)
    loader = Batches(numbered(data), micro_batch_size=2, pin_memory=False)
    batches = loader.next_step(1)
    assert batches[0]["tokens"].shape == (2, 4) and str(batches[0]["loss_mask"].dtype) == "torch.float32"
    loader._ready[0].result()
    assert data.read == [0, 1, 2, 3] and loader.consumed == loader.state == 2
    assert threading.current_thread().name not in data.threads
    loader.next_step(2)  # more than was prepared
    assert loader.consumed == 6
    loader.next_step(1)
    loader.close()
    assert data.read == list(range(8))


@pytest.mark.parametrize("to", [2, 3, 4, 12])
@pytest.mark.parametrize("source", [Stream(), numbered(Counting(20))], ids=["stream", "numbered"])
def test_skipped_samples_are_consumed_unread(source: SampleSource, to: int) -> None:
    """Within and beyond the batches that the thread has ready. Who loads the state there goes on alike."""
    source.load_state(0)
    with Batches(source, micro_batch_size=1) as loader:
        assert global_step([loader], 2) == [0, 1]
        for future in loader._ready:
            future.result()
        assert len(loader._ready) == 2
        loader.skip(to - 2)
        assert global_step([loader], 3) == [to, to + 1, to + 2]
        assert loader.consumed == to + 3
        state = loader.state
        assert global_step([loader], 1) == [to + 3]
    assert state == ({"offset": 10 * (to + 3)} if isinstance(source, Stream) else to + 3)
    source.load_state(state)
    with Batches(source, micro_batch_size=1, consumed=to + 3) as loader:
        assert global_step([loader], 2) == [to + 3, to + 4]


def test_the_state_of_other_data_is_refused() -> None:
    with refused("offset", "--finetune"):
        numbered(Counting(3)).load_state({"offset": 7})


@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_data_names_what_opens_it(kind: str) -> None:
    parts = resolve_name(SOURCES[kind].parts)(DataConfig(data_path=("one",)))
    assert [*parts][:1] == ["train"] and {*parts} <= {*SPLITS}


def test_a_checkpoint_keeps_a_place_that_is_no_number() -> None:
    """Where it is the number of consumed samples, a checkpoint is as those of before there were sources."""
    for place, held in ((16, {}), (None, {}), ({"offset": 7}, {"source": {"offset": 7}})):
        state = Progress(iteration=2, consumed_samples=16, source=place).state()
        assert {name: state[name] for name in state if name == "source"} == held
        assert Progress.of_state(state, "", 8).source == held.get("source")


def test_limit_and_errors() -> None:
    loader = Batches(numbered(Counting(5)), micro_batch_size=2)
    loader.next_step(2)
    with refused("5 samples", "4 are consumed", "takes 2"):
        loader.next_step(1)
    assert loader.consumed == 4
    loader.close()
    broken = Batches(numbered(Counting(10, broken=5)), micro_batch_size=2)
    broken.next_step(2)
    for _ in range(2):
        with refused("sample 5"):
            broken.next_step(1)
        assert broken.consumed == 4
    broken.close()
    with refused("rank 2 of 2"):
        Batches(numbered(Counting(10)), micro_batch_size=2, rank=2, size=2)


class Host:
    """A tensor on the host that says what was copied, and how."""

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned

    def pin_memory(self) -> Host:
        return Host(pinned=True)

    def to(self, device: torch.device, non_blocking: bool) -> tuple[str, bool, bool]:
        return device.type, self.pinned, non_blocking


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batches_are_pinned_for_cuda_alone(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """What is copied without waiting is the pinned tensor."""
    monkeypatch.setattr(torch, "from_numpy", lambda _: Host())
    mesh: Any = SimpleNamespace(device=torch.device(device), batch_rank=0, batch_ranks=1)
    feeding = Feeding(mesh, micro_batch_size=1, loss_rank=0, masked=False)
    for position in ({}, {"consumed": 2}):
        with feeding.batches(numbered(Counting(4), **position), **position) as batches:
            (batch,) = batches.next_step(1)
        copied = feeding.to_device(batch)
        assert copied == dict.fromkeys(("tokens", "labels", "loss_mask"), (device, device == "cuda", True))


@pytest.mark.parametrize("masked", [False, True])
def test_tokens_count_once_whatever_stages_read_them(masked: bool) -> None:
    """Of 2 stages x 2 data-parallel ranks, in the order pp, dp: the second stage computes the loss."""
    mesh = Mesh(make_grid(4, 4, pp=2), 0, torch.device("cpu"), {})
    told = torch.tensor([[100.0], [200.0], [3.0], [4.0]], dtype=torch.float64)
    fake: Any = SimpleNamespace(
        gather_rows=lambda row: told, stage_rows=mesh.stage_rows, dp_size=2, grid=mesh.grid
    )
    feeding = Feeding(fake, micro_batch_size=1, loss_rank=1, masked=masked)
    step = [{"loss_mask": torch.ones(1, 5)}] * 3
    assert feeding.valid_tokens(step) == (7 if masked else 2 * 3 * 5)
    told.zero_()
    assert feeding.valid_tokens(step) == (1 if masked else 30), "never divide by nothing"
