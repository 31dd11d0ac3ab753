"""Moments in fewer bits: against a rule written down separately, kept again, over slow decays, beside large ones."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero import zero
from megazero.checkpoint import store
from megazero.config import ConfigError, make_config
from megazero.config.options.optimizers import MOMENT_DTYPES, OptimizerConfig
from megazero.kernels import adamw, moments
from megazero.kernels.arena import SCRATCH, Arena
from megazero.kernels.noise import Draws, Noise
from megazero.mesh.mesh import create_mesh
from megazero.zero.elementwise import (
    KEPT,
    POWERS,
    OnePassAdamW,
    Probe,
    best_adamw,
)
from megazero.zero.records import save_records
from tests.messages import refused
from tests.sizes import SMALL

CPU = torch.device("cpu")
PAIRS = [("bf16", "bf16"), ("int8", "int8"), ("fp32", "int8"), ("bf16", "fp32")]
BETAS = (0.9, 0.95)


def draws(noise: Noise, n: int) -> np.ndarray:
    """Shares of a step, in (-1/2, 1/2)."""
    with SCRATCH.frame(CPU) as frame:
        return Draws(noise, moments.whole(n), frame.take)(0, moments.whole(n))[:n].double().numpy() / 65536


def kept(values: torch.Tensor, dtype: str, power: int, drawn: np.ndarray) -> torch.Tensor:
    """What comes back of ``values``, fp32 or fp64 [n], one number after the other."""
    if dtype == "fp32":
        return values
    out, single = [], values.float().numpy()
    for low in range(0, len(single), 128):
        block = single[low : low + 128]
        roots = np.sqrt(np.abs(block)) if power == 2 else np.sqrt(np.sqrt(block))
        most = float(np.max(roots))
        step = 2.0 ** max(math.ceil(math.log2(most / 127)), -124 // power) if most else 0.0
        for value, root, draw in zip(block, roots, drawn[low : low + 128], strict=True):
            if dtype == "bf16":
                gap = 2.0 ** (math.frexp(float(value))[1] - 8)
                out.append(math.floor(abs(float(value)) / gap + 0.5 + draw) * gap * np.sign(value))
            elif power == 2:
                signed = float(np.copysign(root, value))
                digit = round(signed / step + draw) if step else 0
                out.append(math.copysign((digit * step) ** 2, digit))
            else:
                digit = max(round(float(root) / step + draw), 1) if step else 0
                out.append(float(np.float32((digit * step) ** 4)))
    return torch.tensor(out, dtype=values.dtype)


def opened(optimizer: OnePassAdamW, weight: torch.Tensor, name: str) -> torch.Tensor:
    """The moment's values, a copy."""
    held, n = optimizer.state[weight][name], weight.numel()
    if name in optimizer.coded:
        return moments.decode(held, POWERS[name], n, 0, n).to(weight.dtype)
    return held.to(weight.dtype, copy=True)


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
    """Of 700 elements, the last block in part. Before each step torch's AdamW is given what was kept."""
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
                torchs.state[theirs][name].copy_(opened(ours, mine, name))
        ours.step(noise={mine: noise})
        torchs.step()
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-7)
        for name, kind in zip(names, (first, second), strict=True):
            want = kept(torchs.state[theirs][name], kind, POWERS[name], draws(noise, n))
            got = opened(ours, mine, name)
            if kind == "fp32":
                torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-7)
                continue
            off += int((got != want).sum())  # where torch's own rounding moves a value past a draw
            torch.testing.assert_close(got, want, rtol=0.2, atol=float(want.abs().max()) * 1e-3)
    assert off <= 8 * 2 * n * 0.002


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 400), st.integers(0, 2**32 - 1), st.sampled_from(["bf16", "int8"]), st.integers(-30, 8),
    st.integers(0, 12),
)  # fmt: skip
def test_what_was_kept_is_kept_again(n: int, seed: int, kind: str, size: int, spread: int) -> None:
    """Values of all sizes, kept, decoded to fp32 and kept with other noise or to nearest decode to the same."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, generator=generator) * 10.0 ** (
        size + spread * torch.randn(n, generator=generator) / 3
    ).clamp(-37, 12)
    values *= torch.rand(n, generator=generator) > 0.1
    for power in POWERS.values():
        found = values if power == 2 else values.abs()
        for noise in (Noise(0, 0, seed), Noise(1, 2, 3), None):
            held = moments.room(found, KEPT[kind])
            rounded(found, held, power, noise)
            again = torch.empty(n).copy_(held) if kind == "bf16" else moments.decode(held, power, n, 0, n)
            if noise != Noise(0, 0, seed):
                assert torch.equal(found, again)
            found = again


def rounded(values: torch.Tensor, held: torch.Tensor, power: int, noise: Noise | None) -> None:
    """Keep ``values`` with this noise, or to nearest."""
    n = len(values)
    with SCRATCH.frame(CPU) as frame:
        pieces = moments.Pieces(held, power, n, torch.float32, frame.take)
        drawn = None if noise is None else Draws(noise, moments.whole(n), frame.take)(0, moments.whole(n))
        pieces.open(0, n).copy_(values)
        pieces.close(0, n, drawn)


def test_a_part_is_decoded_as_the_whole_is() -> None:
    values = torch.randn(500)
    held = moments.room(values, torch.uint8)
    moments.encode(values, held, 2)
    whole = moments.decode(held, 2, 500, 0, 500)
    for start, stop in ((0, 128), (130, 131), (255, 500), (499, 500)):
        assert torch.equal(moments.decode(held, 2, 500, start, stop), whole[start:stop])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_a_slow_decay_is_not_lost(kind: str) -> None:
    """Gradients become ten times smaller: v, which falls by a thousandth a step, follows; to nearest it stays."""
    found, n = {}, 2048
    for name, noisy, steps in (("random", True, 3000), ("nearest", False, 500)):
        held = moments.room(torch.zeros(n), KEPT[kind])
        rounded(torch.full((n,), 1.0), held, moments.EXP_AVG_SQ, None)
        for step in range(steps):
            v = held.float() if kind == "bf16" else moments.decode(held, moments.EXP_AVG_SQ, n, 0, n)
            noise = Noise(0, step, 0) if noisy else None
            rounded(v * 0.999 + 0.001 * 0.01, held, moments.EXP_AVG_SQ, noise)
        v = held.float() if kind == "bf16" else moments.decode(held, moments.EXP_AVG_SQ, n, 0, n)
        found[name] = float(v.mean())
    exact = 0.01 + 0.99 * 0.999**3000
    assert found["random"] == pytest.approx(exact, rel=0.02 if kind == "bf16" else 0.1)
    assert found["nearest"] > 0.9


def outlier(first: str, second: str, small: float) -> float:
    """The largest update, over the rate, of blocks of normal gradients of which one is ``small`` of the others."""
    n, most = 128 * 64, 0.0
    weight = torch.nn.Parameter(torch.zeros(n))
    optimizer = OnePassAdamW(
        [weight], lr=1.0, weight_decay=0.0, eps=1e-30, exp_avg_dtype=first, exp_avg_sq_dtype=second
    )
    size = torch.ones(n)
    size[::128] = small
    for step in range(60):
        weight.grad = torch.randn(n, generator=torch.Generator().manual_seed(step)) * size
        before = weight.detach().clone()
        optimizer.step()
        most = max(most, float((weight.detach() - before).abs().max()))
    return most


@pytest.mark.parametrize("small", [1e-2, 1e-4, 1e-6, 1e-12])
def test_updates_of_small_gradients_in_a_block_of_large_ones_are_bounded(small: float) -> None:
    """8 u + 8 r is the module's bound of one; linear INT8 to nearest makes one of 3,900 of the first of these."""
    assert outlier("int8", "int8", small) < 4 * outlier("fp32", "fp32", 1.0)


def test_choices_and_their_bytes_are_those_of_the_table() -> None:
    assert set(KEPT) == set(MOMENT_DTYPES)
    weight = torch.zeros(128 * 100)
    for name, own in MOMENT_DTYPES.items():
        held = moments.room(weight, KEPT[name])
        assert held.nbytes == len(weight) * (4 if own.held is None else own.held)
    assert OptimizerConfig(lr=1.0).moment_bytes(8) == 16
    small = OptimizerConfig(lr=1.0, exp_avg_dtype="bf16", exp_avg_sq_dtype="int8")
    assert (small.moment_bytes(4), small.stored_moment_bytes(4)) == (3 + 2 / 128, 6)
    assert small.moment_block == moments.BLOCK and OptimizerConfig(lr=1.0).moment_block == 1
    assert OptimizerConfig(lr=1.0, optimizer="lion").moment_bytes(4) == 4


@pytest.mark.parametrize("first, second", PAIRS)
def test_it_is_elementwise_and_starts_from_zeros(first: str, second: str) -> None:
    factory = partial(best_adamw, lr=0.1, exp_avg_dtype=first, exp_avg_sq_dtype=second)
    probe = Probe(factory, [()], torch.float32, CPU)
    probe.refuse_unless_elementwise()
    probe.refuse_unless_from_zeros()


def test_what_is_not_built_is_refused() -> None:
    with refused("exp_avg_dtype='fp8'", "fp32, bf16, int8"):
        best_adamw([{"params": [torch.nn.Parameter(torch.zeros(3))]}], exp_avg_dtype="fp8")
    assert isinstance(best_adamw([{"params": [torch.zeros(3)]}], exp_avg_dtype="fp32"), torch.optim.AdamW)


@pytest.mark.parametrize(
    "values, said",
    [
        ({"exp_avg_dtype": "bf16", "optimizer_impl": "torch"}, ["impl torch", "--exp-avg-dtype bf16", "auto"]),
        ({"exp_avg_sq_dtype": "int8", "optimizer_impl": "torch"}, ["--exp-avg-sq-dtype int8", "nearest: auto"]),
        ({"exp_avg_dtype": "fp16"}, ["fp16"]),
        ({"exp_avg_sq_dtype": "fp8"}, ["fp8"]),
    ],
)  # fmt: skip
def test_combinations_are_refused_when_they_are_configured(values: dict[str, Any], said: list[str]) -> None:
    with refused(*said, by=ConfigError):
        make_config({**SMALL, **values})
    make_config({**SMALL, "exp_avg_dtype": "int8", "exp_avg_sq_dtype": "bf16", "optimizer_impl": "triton"})


def test_slices_that_would_cut_blocks_are_refused() -> None:
    module, policy = torch.nn.Linear(20, 10), zero.Policy(block=192)
    first = zero.default_adamw(exp_avg_dtype="int8")
    with refused("block=192", "128", "exp_avg", "nearest: 256"):
        zero.shard(module, mesh=create_mesh(), policy=policy, units=[module], optimizer=first)
    other = torch.nn.Linear(20, 10)  # an engine had the first one
    zero.shard(other, mesh=create_mesh(), policy=policy, optimizer=zero.default_adamw(exp_avg_dtype="bf16"))


def test_small_moments_take_no_memory_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what an update has of them in fp32 is bounded, whatever the slice."""
    n, arena = 4 * moments.CHUNK, Arena()
    monkeypatch.setattr(adamw, "SCRATCH", arena)
    weight, grad = torch.zeros(2, n).unbind(0)
    held = [moments.room(weight, torch.uint8) for _ in range(2)]
    rates = adamw.Rates.of(1, 1e-2, BETAS, 1e-8, 0.0, 1.0)
    adamw.adamw(weight, grad, *held, rates)
    before = arena.nbytes
    adamw.adamw(weight, grad, *held, rates)
    assert arena.nbytes == before and arena.used == 0
    assert arena.peak <= 64 * moments.CHUNK


def test_records_hold_decoded_moments(tmp_path: Path) -> None:
    module = torch.nn.Linear(20, 10)
    optimizer = partial(OnePassAdamW, exp_avg_dtype="int8", exp_avg_sq_dtype="bf16")
    engine = zero.shard(module, mesh=create_mesh(), units=[module], optimizer=optimizer)
    engine.begin_step()
    module(torch.randn(3, 20)).square().sum().backward()
    engine.step()
    own = save_records(engine)
    path = store.save(tmp_path, store.Snapshot(1, own))
    for kind in POWERS:
        found = store.load_full(path, kind)
        for record in own:
            held = record.tensors[kind]
            assert record.make is not None
            wanted = record.make(kind) if held.is_meta else held
            assert wanted.any() and torch.equal(found[record.placement.name].view(-1), wanted)
