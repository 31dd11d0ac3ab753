"""Steady steps allocate nothing: not the hops, not the engine, not the codecs."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks import steps
from megazero import zero
from megazero.kernels import arena as arena_module
from megazero.kernels.arena import SCRATCH, Arena, Frame
from megazero.zero.elementwise import best_adamw
from tests import allocations

CPU = torch.device("cpu")
ALWAYS = ("zero3", "zeropp", "PP 2, zeropp")
OURS = ("comm", "zero", "codecs")
AS_A_RUN = partial(best_adamw, lr=1e-4, weight_decay=0.1)


def steady(name: str, **options: Any) -> dict[tuple[str, str], tuple[int, int]]:
    """What the three packages allocate in steps 5 to 10, by place."""
    with allocations.stepping(name, **{"optimizer": AS_A_RUN, **options}) as (step, engine):
        for _ in range(1, allocations.FIRST):
            step()
        found = allocations.allocated(step, allocations.LAST - allocations.FIRST + 1)
        assert engine.arena.used == SCRATCH.used == 0, "every frame was closed"
        assert engine.arena.nbytes <= 1.25 * engine.arena.peak
    return {place: figures for place, figures in found.items() if place[0] in OURS}


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in ALWAYS)) for name in allocations.CASES],
)
def test_steady_steps_allocate_nothing(name: str) -> None:
    assert steady(name) == {}


@pytest.mark.slow
def test_steady_steps_with_small_moments_allocate_nothing() -> None:
    small = zero.default_adamw(lr=1e-3, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    policy = replace(steps.policies()["zeropp"][1], block=128)
    assert steady("zeropp", optimizer=small, policy=policy) == {}


@pytest.mark.slow
def test_without_the_arenas_memory_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    monkeypatch.setattr(Arena, "region", lambda arena, device: arena_module._Region(device))
    assert {place.split(":")[0] for _, place in steady("zeropp")} == {"megazero/kernels/arena.py"}


# -- the arena itself ----------------------------------------------------------------------------------


def addresses(*buffers: torch.Tensor) -> list[int]:
    return [buffer.data_ptr() for buffer in buffers]


def test_buffers_in_use_do_not_overlap_and_memory_is_used_again() -> None:
    arena = Arena()
    drawn = torch.Generator().manual_seed(0)
    frames: list[tuple[Frame, torch.Tensor, int]] = []
    sizes = torch.randint(0, 5000, (300,), generator=drawn).tolist()
    for round_of in range(2):
        for number, numel in enumerate(sizes):
            frame = arena.frame(CPU)
            frames.append((frame, frame.take(numel, torch.float32).fill_(number), number))
            while len(frames) > 7 or (number == len(sizes) - 1 and frames):
                frame, buffer, of = frames.pop(number % len(frames))
                assert buffer.eq(of).all()
                frame.close()
        if round_of == 0:
            held = arena.nbytes
    assert arena.used == 0 and arena.nbytes <= held <= 2 * arena.peak, "gaps between random sizes"


def test_what_is_made_of_a_buffer_lives_as_long_as_its_memory() -> None:
    arena, made = Arena(), list[int]()

    def bound(numel: int, key: str) -> list[torch.Tensor]:
        def make(buffer: torch.Tensor) -> list[torch.Tensor]:
            made.append(numel)
            return [buffer[:1], buffer[1:]]

        with arena.frame(CPU) as frame:
            return frame.bind(numel, torch.float32, key, make)

    bound(1000, "a")  # of a block that a larger buffer replaces
    for _ in range(3):
        first, second = bound(5000, "a"), bound(5000, "b")
        assert first is not second and addresses(first[0]) == addresses(second[0])
    assert made == [1000, 5000, 5000]
    alive = weakref.ref(first[0])
    del first
    bound(9000, "a")
    assert alive() is None, "views do not keep memory that the arena has given up"


def test_blocks_become_one_that_holds_the_most_that_was_in_use() -> None:
    arena = Arena()
    for _ in range(3):
        with arena.frame(CPU) as frame:
            small, large = frame.take(100, torch.float32), frame.take(1000, torch.float64)
            assert small.shape == (100,) and large.dtype == torch.float64
            assert all(address % 16 == 0 for address in addresses(small, large))
        with arena.frame(CPU) as frame:
            frame.take(50, torch.int8)
    assert arena.nbytes == arena.peak == 512 + 8192


def test_a_frame_closes_once() -> None:
    arena = Arena()
    first = arena.frame(CPU)
    first.take(10, torch.float32)
    first.close()
    with arena.frame(CPU) as second:
        taken = second.take(10, torch.float32)
        first.close()
        with arena.frame(CPU) as third:
            assert third.take(10, torch.float32).data_ptr() != taken.data_ptr()


def test_buffers_taken_in_inference_mode_can_be_written_outside_of_it() -> None:
    arena = Arena()
    with torch.inference_mode(), arena.frame(CPU) as frame:
        first = frame.take(10, torch.float32).zero_().data_ptr()
    with arena.frame(CPU) as frame:
        taken = frame.take(10, torch.float32).fill_(1.0)
        assert taken.data_ptr() == first and not taken.is_inference() and taken.sum() == 10


def test_streams_have_their_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one stream has closed, another does not take: it need not come after it."""
    current = ["a"]
    monkeypatch.setattr("megazero.kernels.arena.home_of", lambda device: current[0])
    arena = Arena()
    with arena.frame(CPU) as frame:
        first = frame.take(10, torch.float32).data_ptr()
    current[0] = "b"
    with arena.frame(CPU) as frame:
        assert frame.take(10, torch.float32).data_ptr() != first
    current[0] = "a"
    with arena.frame(CPU) as frame:
        assert frame.take(10, torch.float32).data_ptr() == first
