"""Moments in bf16: against a rule written down separately, and over slow decays."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from megazero.config import ConfigError, make_config
from megazero.config.options.optimizers import MOMENT_DTYPES, OptimizerConfig
from megazero.kernels import adamw
from megazero.kernels.arena import SCRATCH, Arena
from megazero.kernels.dispatch import CHUNK
from megazero.kernels.noise import Draws, Noise
from megazero.zero.elementwise import KEPT, OnePassAdamW, Probe, best_adamw
from tests.messages import refused
from tests.sizes import SMALL

CPU = torch.device("cpu")
PAIRS = [("bf16", "bf16"), ("fp32", "bf16"), ("bf16", "fp32")]
BETAS = (0.9, 0.95)


def draws(noise: Noise, n: int) -> np.ndarray:
    """Shares of a step, in (-1/2, 1/2)."""
    with SCRATCH.frame(CPU) as frame:
        return Draws(noise, n, frame.take)(0, n).double().numpy() / 65536


def kept(values: torch.Tensor, dtype: str, drawn: np.ndarray) -> torch.Tensor:
    """What comes back of ``values``, fp32 or fp64 [n], one number after the other."""
    if dtype == "fp32":
        return values
    out = []
    for value, draw in zip(values.float().tolist(), drawn, strict=True):
        gap = 2.0 ** (math.frexp(value)[1] - 8)
        out.append(math.copysign(math.floor(abs(value) / gap + 0.5 + draw) * gap, value))
    return torch.tensor(out, dtype=values.dtype)


def gradient(step: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Of all sizes: by element over four decades, and from step to step over two."""
    drawn = torch.randn(n, generator=torch.Generator().manual_seed(step), dtype=dtype)
    size = torch.logspace(-4, 0, 97, dtype=dtype).repeat(n // 97 + 1)[:n]
    return drawn * size * 10.0 ** (step % 3 - 1)


@pytest.mark.parametrize("first, second", PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_updates_are_torchs_with_moments_rounded_by_the_rule(
    first: str, second: str, dtype: torch.dtype
) -> None:
    """Of 700 elements. Before each step torch's AdamW is given what was kept."""
    n, names = 700, ("exp_avg", "exp_avg_sq")
    mine, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, n, dtype=dtype)) for _ in range(2))
    options = {"lr": 1e-2, "betas": BETAS, "weight_decay": 0.1}
    ours = OnePassAdamW([mine], **options, exp_avg_dtype=first, exp_avg_sq_dtype=second)
    torchs = torch.optim.AdamW([theirs], **options, foreach=False)
    off = 0
    for step in range(1, 9):
        noise = Noise(7, step, 11, 64)
        mine.grad, theirs.grad = (gradient(step, n, dtype) for _ in range(2))
        if step > 1:
            theirs.data.copy_(mine.data)
            for name in names:
                torchs.state[theirs][name].copy_(ours.state[mine][name])
        ours.step(noise={mine: noise})
        torchs.step()
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-7)
        for name, kind in zip(names, (first, second), strict=True):
            want = kept(torchs.state[theirs][name], kind, draws(noise, n))
            got = ours.state[mine][name].to(dtype)
            if kind == "fp32":
                torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-7)
                continue
            off += int((got != want).sum())  # where torch's own rounding moves a value past a draw
            torch.testing.assert_close(got, want, rtol=2**-7, atol=0)
    assert off <= 8 * 2 * n * 0.002


@pytest.mark.long
def test_a_slow_decay_is_not_lost() -> None:
    """Gradients become ten times smaller: v, which falls by a thousandth a step, follows; to nearest it stays."""
    weight = torch.nn.Parameter(torch.zeros(2048))
    optimizer = OnePassAdamW([weight], lr=0.0, exp_avg_sq_dtype="bf16")
    weight.grad = torch.full_like(weight, 0.1)
    optimizer.step()
    held = optimizer.state[weight]["exp_avg_sq"].fill_(1.0)
    nearest = held.clone()
    for _ in range(3000):
        optimizer.step()
        nearest = (nearest.float() * 0.999 + 0.001 * 0.01).bfloat16()
    assert float(held.float().mean()) == pytest.approx(0.01 + 0.99 * 0.999**3000, rel=0.02)
    assert float(nearest.mean()) > 0.9


def test_choices_and_their_bytes_are_those_of_the_table() -> None:
    assert set(KEPT) == set(MOMENT_DTYPES)
    assert OptimizerConfig(lr=1.0).moment_bytes(8) == 16
    assert OptimizerConfig(lr=1.0, exp_avg_dtype="bf16").moment_bytes(4) == 6
    assert OptimizerConfig(lr=1.0, optimizer="lion").moment_bytes(4) == 4


@pytest.mark.parametrize("first, second", PAIRS)
def test_it_is_elementwise_and_starts_from_zeros(first: str, second: str) -> None:
    factory = partial(best_adamw, lr=0.1, exp_avg_dtype=first, exp_avg_sq_dtype=second)
    probe = Probe(factory, [()], torch.float32, CPU)
    probe.refuse_unless_elementwise()
    probe.refuse_unless_from_zeros()


def test_what_is_not_built_is_refused() -> None:
    with refused("exp_avg_dtype='fp8'", "fp32, bf16"):
        best_adamw([{"params": [torch.nn.Parameter(torch.zeros(3))]}], exp_avg_dtype="fp8")
    assert isinstance(best_adamw([{"params": [torch.zeros(3)]}], exp_avg_dtype="fp32"), torch.optim.AdamW)


@pytest.mark.parametrize(
    "values, said",
    [
        ({"exp_avg_dtype": "bf16", "optimizer_impl": "torch"}, ["impl torch", "--exp-avg-dtype bf16", "auto"]),
        ({"exp_avg_dtype": "fp16"}, ["fp16"]),
        ({"exp_avg_sq_dtype": "int8"}, ["int8"]),
    ],
)  # fmt: skip
def test_combinations_are_refused_when_they_are_configured(values: dict[str, Any], said: list[str]) -> None:
    with refused(*said, by=ConfigError):
        make_config({**SMALL, **values})
    make_config({**SMALL, "exp_avg_sq_dtype": "bf16", "optimizer_impl": "triton"})


def test_small_moments_take_no_memory_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what an update has of them in fp32 is bounded, whatever the slice."""
    n, arena = 4 * CHUNK, Arena()
    monkeypatch.setattr(adamw, "SCRATCH", arena)
    weight, grad = torch.zeros(2, n).unbind(0)
    held = [torch.zeros(n, dtype=torch.bfloat16) for _ in range(2)]
    rates = adamw.Rates.of(1, 1e-2, BETAS, 1e-8, 0.0, 1.0)
    adamw.adamw(weight, grad, *held, rates)
    before = arena.nbytes
    adamw.adamw(weight, grad, *held, rates)
    assert arena.nbytes == before and arena.used == 0
    assert arena.peak <= 64 * CHUNK
