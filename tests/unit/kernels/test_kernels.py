"""Every Triton kernel equals its torch reference bit for bit, in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from megazero.kernels import adamw, dispatch
from megazero.kernels.noise import Draws, Noise
from tests import ROOT, kernel_cases


@pytest.fixture(scope="module")
def interpreted() -> dict[str, list[str]]:
    """Case -> operations that differ, from a process with the interpreter on (a choice made at import)."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed (it has wheels for Linux only)")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernel_cases"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", [case.name for case in kernel_cases.CASES])
def test_kernels_equal_their_references(case: str, interpreted: dict[str, list[str]]) -> None:
    assert interpreted[case] == []


@pytest.mark.parametrize("operation", ["adamw", "weighted SwiGLU"])
def test_other_kernels_equal_their_references(operation: str, interpreted: dict[str, list[str]]) -> None:
    assert interpreted[operation] == []


@pytest.mark.parametrize("dtype, most", [(torch.float32, 4e-7), (torch.float64, 1e-15)])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_update_is_that_of_torch(dtype: torch.dtype, most: float, decay: float) -> None:
    """To rounding, over ten steps with a clip factor, a schedule, and gradients of all sizes."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(3000, generator=generator, dtype=dtype))
    theirs = torch.optim.AdamW([weight], betas=(0.9, 0.95), weight_decay=decay)
    state = [weight.detach().clone(), *(torch.zeros(3000, dtype=dtype) for _ in range(2))]
    for step in range(1, 11):
        grad = torch.randn(3000, generator=generator, dtype=dtype) * 10.0 ** (step % 4 - 2)
        rate, scale = 1e-2 / step, 0.25 * step
        weight.grad, theirs.param_groups[0]["lr"] = grad * scale, rate
        theirs.step()
        rates = adamw.Rates.of(step, rate, (0.9, 0.95), 1e-8, decay, scale)
        adamw.adamw(state[0], grad, *state[1:], rates)
    held = (weight.detach(), *(theirs.state[weight][name] for name in ("exp_avg", "exp_avg_sq")))
    for mine, other in zip(state, held, strict=True):
        assert float((mine - other).abs().max()) <= most * float(other.abs().max())


def test_the_kernel_that_is_tried_at_a_start_runs(interpreted: dict[str, list[str]]) -> None:
    assert interpreted["why none runs"] == [""]


def test_offsets_reach_beyond_31_bits(interpreted: dict[str, list[str]]) -> None:
    """The scales of a row of 16 GiB lie 2 ** 33 int16 from its start."""
    assert interpreted["scales_at"] == [str(7 * (1 << 34) // 2 + (1 << 33) + 5)]


def test_without_cuda_the_reference_runs_and_triton_stays_out() -> None:
    code = (
        "import sys, megazero.kernels.dequantize_sum_quantize, torch\n"
        "print(torch.version.cuda is not None or 'triton' not in sys.modules)"
    )
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr
    x = torch.zeros(8)
    assert dispatch.use_kernel(x, x) == dispatch.INTERPRETED


def test_cuda_without_triton_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCuda(torch.Tensor):
        is_cuda = True

    x = torch.zeros(8).as_subclass(OnCuda)
    monkeypatch.setattr(dispatch, "AVAILABLE", False)
    with pytest.warns(RuntimeWarning, match="pip install triton") as warned:
        assert not dispatch.use_kernel(x, x)
        assert not dispatch.use_kernel(x, x)
        assert not dispatch.use_kernel(x, x.double())  # has no kernel anywhere
    assert len(warned) == 1


def draws(noise: Noise, n: int, at: int = 0) -> torch.Tensor:
    return Draws(noise, n, lambda numel, dtype: torch.empty(numel, dtype=dtype))(at, n)


def test_draws_do_not_depend_on_where_a_chunk_starts() -> None:
    whole = draws(Noise(3, 4, 5), 4096)
    assert torch.equal(whole[1000:], draws(Noise(3, 4, 5), 3096, 1000))
    assert torch.equal(whole[1000:], draws(Noise(3, 4, 5, 1000), 3096))


def test_draws_are_uniform_and_independent() -> None:
    n = 1 << 18
    first = draws(Noise(0, 0, 0), n) / 65536
    assert first.abs().max() < 0.5 and (first.mul(65536) % 2 == 1).all()
    # Standard errors of a uniform draw's mean and variance over n draws; 5 of them.
    assert abs(first.mean()) < 5 * (1 / 12 / n) ** 0.5
    assert abs(first.var() - 1 / 12) < 5 * (1 / 180 / n) ** 0.5
    others = [Noise(1, 0, 0), Noise(0, 1, 0), Noise(0, 0, 1), Noise(0, 0, 0, 2), Noise(0, 0, 0, 64)]
    for other in [draws(noise, n) / 65536 for noise in others] + [first.roll(1)]:
        assert abs((first * other).mean() * 12) < 5 / n**0.5
