"""In a steady step the host waits for the device once: where it reads the step's scalars.

What waits on CUDA is forbidden in whole iterations of the trainer on 4 ranks as 2 nodes of 2, that one call apart.
``numpy`` is not among it, which tensors of a device do not have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megazero.models.decoder import Decoder
from megazero.train.trainer import Trainer
from tests.dist.pool import RankError, run_ranks
from tests.dist.runs import train
from tests.messages import refused
from tests.sizes import TINY

READING = ("item", "cpu", "tolist", "__bool__", "__float__", "__int__", "__index__")
ALLOWED = ("zero/scalars.py", "read", "tolist")
STEADY = 3  # the first iterations may make what is kept
STEPS = 6
NODES = {"ranks_per_node": 2, "train_iters": STEPS, "exit_signal_handler": True}
ZEROPP = {"zero_preset": "zeropp", "zero_exact_numel": 40}
CASES: dict[str, dict[str, Any]] = {
    "zero3": {"zero_preset": "zero3"},
    "zeropp": ZEROPP,
    "PP 2": {"pipeline_model_parallel_size": 2, "zero_preset": "zero2"},
    "fp16": {**ZEROPP, "params_dtype": "fp16", "initial_loss_scale": 1024.0},
}


@contextmanager
def forbidden(seen: list[str]) -> Iterator[None]:
    """Every call that waits raises but the allowed one, which is noted."""

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            frame = sys._getframe(1)
            place = frame.f_code.co_filename, frame.f_code.co_name
            if not place[0].endswith(ALLOWED[0]) or (place[1], name) != ALLOWED[1:]:
                raise AssertionError(f"{place[0]}:{frame.f_lineno} {place[1]} calls {name}: the host waits")
            seen.append(name)
            return call(*arguments, **options)

        return run

    owners = [(torch.Tensor, name) for name in READING]
    owners += [(owner, "synchronize") for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event)]
    patches = [patch.object(owner, name, watched(name, getattr(owner, name))) for owner, name in owners]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def waits(values: dict[str, Any], and_in_forward: bool = False) -> list[int]:
    """How often the host waited in every steady iteration of a run in this rank."""
    found: list[int] = []
    iterate, run_stage = Trainer._iterate, Decoder.run_stage

    def watched(trainer: Trainer, batches: Any) -> Any:
        if trainer.progress.iteration < STEADY:
            return iterate(trainer, batches)
        seen: list[str] = []
        with forbidden(seen):
            info = iterate(trainer, batches)
        found.append(len(seen))
        return info

    def asking(decoder: Decoder, *arguments: Any) -> torch.Tensor:
        out = run_stage(decoder, *arguments)
        assert out.isfinite().all()
        return out

    with patch.object(Trainer, "_iterate", watched):
        if and_in_forward:
            with patch.object(Decoder, "run_stage", asking):
                train({**NODES, **values})
        else:
            train({**NODES, **values})
    return found


def every(cases: list[dict[str, Any]]) -> list[list[int]]:
    return [waits(values) for values in cases]


@pytest.mark.slow
def test_the_host_waits_once_a_step(tmp_path: Path) -> None:
    logs = {"log_dir": str(tmp_path)}
    for found in run_ranks(4, every, [{**values, **logs} for values in CASES.values()]):
        assert dict(zip(CASES, found, strict=True)) == {name: [1] * (STEPS - STEADY) for name in CASES}


def test_another_wait_is_found(tmp_path: Path) -> None:
    """The test above can fail."""
    assert TINY["train_iters"] > STEADY
    with refused("__bool__", by=RankError):
        run_ranks(1, waits, {"zero_preset": "ddp", "ranks_per_node": 1, "log_dir": str(tmp_path)}, True)
