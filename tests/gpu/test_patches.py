"""The patches of FSDP2 and of megatron-core over NCCL: four ranks on one card, as two nodes of two.

Each training runs without the patch, with it, and with it where the data of every collective come late: a kernel that
did not wait for them would read what was there before. MEGAZERO_RANKS_ON=cpu runs them on gloo, without delays.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.shared_card import together
from tests.fsdp2 import job as fsdp2
from tests.megatron import training as megatron
from tests.megatron.case import Case as MegatronCase
from tests.megatron.case import replicas_differ, step_losses
from tests.megatron.cases import CASES as MEGATRON_CASES

DEVICE = os.environ.get("MEGAZERO_RANKS_ON", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RANKS, SECONDS = 4, 240.0
CYCLES = 1_000_000  # 0.5 ms on an H100
COLLECTIVES = ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
Words = Mapping[str, Any] | None
EXACT: dict[str, Any] = {"weights": "none", "gradients": "none"}
INT4 = {"gradients": "int4", "exact_numel": 0}
INT8_INT4 = {"weights": "int8", **INT4}
DELTA_INT4 = {"weights": "int4-delta", **INT4}
BF16 = (torch.bfloat16, torch.float32)
FSDP2_CASES = {
    "2d": (fsdp2.Case("2d", 4, device=DEVICE), (EXACT, INT4)),
    "1d": (fsdp2.Case("1d", 4, device=DEVICE), (EXACT, INT8_INT4, DELTA_INT4)),
    "1d, bf16": (fsdp2.Case("1d", 2, BF16, device=DEVICE), (EXACT, INT8_INT4)),
    "1d, experts": (
        fsdp2.Case("1d", 2, experts=2, divide=RANKS, device=DEVICE), (EXACT, INT8_INT4, DELTA_INT4),
    ),
}  # fmt: skip


def on_card(name: str) -> MegatronCase:
    return replace(MEGATRON_CASES[name], device=DEVICE)


MEGATRON = {
    name: (on_card(name), (EXACT, {**INT8_INT4, "exact_numel": 1024}, {**DELTA_INT4, "exact_numel": 1024}))
    for name in ("dp4 overlap", "tp2 sp overlap", "pp2 overlap", "moe ep2 overlap")
}


@contextmanager
def late() -> Iterator[None]:
    """Let each collective, on whichever stream, begin behind a pause."""

    def behind(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            torch.cuda._sleep(CYCLES)
            return collective(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in COLLECTIVES if DEVICE == "cuda" else ():
            stack.enter_context(mock.patch.object(dist, name, behind(getattr(dist, name))))
        yield


def of_fsdp2(case: fsdp2.Case, words: Words, delayed: bool) -> fsdp2.Run:
    with late() if delayed else nullcontext():
        return fsdp2.train(case, words)


def of_megatron(case: MegatronCase, words: Words, delayed: bool) -> Any:
    with late() if delayed else nullcontext():
        return megatron.train(case, words)


def all_runs(train: Callable[..., Any], cases: Mapping[str, tuple[Any, Sequence[Words]]]) -> dict:
    """Return by case, words' place (0: without the patch) and delay the runs of all ranks."""
    keys, work = list[tuple[str, int, bool]](), list[Callable[[], Any]]()
    for name, (case, formats) in cases.items():
        for place, words in enumerate((None, *formats)):
            for delayed in (False, True) if place else (False,):
                keys.append((name, place, delayed))
                work.append(partial(train, case, words, delayed))
    ranks = together(
        RANKS, work, torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE), SECONDS
    )
    return dict(zip(keys, zip(*ranks, strict=True), strict=True))


@pytest.fixture(scope="module")
def fsdp2_runs() -> dict:
    return all_runs(of_fsdp2, FSDP2_CASES)


@pytest.fixture(scope="module")
def megatron_runs() -> dict:
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron asks for it
    return all_runs(of_megatron, MEGATRON)


@pytest.mark.parametrize("name", FSDP2_CASES)
def test_fsdp2_with_exact_messages_trains_the_same(fsdp2_runs: dict, name: str) -> None:
    plain, runs = fsdp2_runs[name, 0, False], fsdp2_runs[name, 1, False]
    for run, other in zip(runs, plain, strict=True):
        assert run.sent["inter_node_bytes"] > 0 and not run.warned  # it was on
        assert run.losses == pytest.approx(other.losses, rel=1e-5)
        assert run.norms == pytest.approx(other.norms, rel=1e-4)
    assert all(run.whole == runs[0].whole for run in runs)


@pytest.mark.parametrize("name", FSDP2_CASES)
def test_fsdp2_with_quantised_messages_loses_little(fsdp2_runs: dict, name: str) -> None:
    plain = fsdp2_runs[name, 0, False][0].losses
    gain = max(before - after for before, after in zip(plain, plain[1:], strict=False))
    for place in range(2, 1 + len(FSDP2_CASES[name][1])):
        runs = fsdp2_runs[name, place, False]
        assert all(run.whole == runs[0].whole for run in runs)
        assert 0 < max(abs(a - b) for a, b in zip(runs[0].losses, plain, strict=True)) < gain


@pytest.mark.parametrize("name", FSDP2_CASES)
def test_fsdp2_waits_for_late_data(fsdp2_runs: dict, name: str) -> None:
    for place in range(1, 1 + len(FSDP2_CASES[name][1])):
        assert fsdp2_runs[name, place, True] == fsdp2_runs[name, place, False]


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron_with_exact_messages_trains_the_same(megatron_runs: dict, name: str) -> None:
    case, plain, runs = MEGATRON[name][0], megatron_runs[name, 0, False], megatron_runs[name, 1, False]
    assert step_losses(case, runs) == pytest.approx(step_losses(case, plain), rel=1e-5)
    for run, other in zip(runs, plain, strict=True):
        assert run.norms == pytest.approx(other.norms, rel=1e-4)
    assert not replicas_differ(runs) and all(sum(run.sent.values()) > 0 for run in runs)


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron_with_quantised_messages_loses_little(megatron_runs: dict, name: str) -> None:
    case = MEGATRON[name][0]
    plain = step_losses(case, megatron_runs[name, 0, False])
    gain = max(before - after for before, after in zip(plain, plain[1:], strict=False))
    for place in (2, 3):
        runs = megatron_runs[name, place, False]
        losses = step_losses(case, runs)
        assert not replicas_differ(runs)
        assert 0 < max(abs(a - b) for a, b in zip(losses, plain, strict=True)) < gain


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron_waits_for_late_data(megatron_runs: dict, name: str) -> None:
    for place in (1, 2, 3):
        assert megatron_runs[name, place, True] == megatron_runs[name, place, False]
