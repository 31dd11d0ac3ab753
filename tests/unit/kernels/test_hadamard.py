"""The Hadamard transform: orthogonal, exact where it is said to be, linear, and inside a codec's bounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.comm.codec import Blockwise
from megazero.kernels.arena import SCRATCH
from megazero.kernels.dequantize_sum_quantize import dequantize_sum_quantize
from megazero.kernels.format import Format
from megazero.kernels.hadamard import SIZES, Hadamard, Mixing, mixed
from tests.messages import refused

BITS = st.sampled_from([2, 4, 8])


def matrix(size: int, seed: int = 0) -> torch.Tensor:
    """D H as the definition has it: Sylvester's doubling, then the signs that the transform of ones shows."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    one = torch.zeros(1, size, dtype=torch.float64)
    one[0, 0] = size  # H's first column is ones, so what comes back is D
    with SCRATCH.frame(one.device) as frame:
        signs = one.view(-1)
        Mixing.of(frame, Hadamard(size, seed), size, torch.float64).inverse(signs, signs)
    assert set(signs.tolist()) <= {size, -size}
    return signs[:, None] / size * h


@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_defined_matrix_and_orthogonal(size: int) -> None:
    dh = matrix(size)
    assert torch.equal(dh @ dh.t(), size * torch.eye(size, dtype=torch.float64))
    x = torch.randn(3, 4 * size, dtype=torch.float64)
    sent = mixed(x, Hadamard(size))
    assert torch.allclose(sent.view(-1, size), x.view(-1, size) @ dh / size, rtol=1e-14, atol=1e-14)
    assert torch.allclose(sent.square().sum() * size, x.square().sum())
    with SCRATCH.frame(x.device) as frame:
        back = torch.empty_like(x)
        Mixing.of(frame, Hadamard(size), x.numel(), x.dtype).inverse(sent.view(-1), back.view(-1))
    assert torch.allclose(back, x, rtol=1e-14, atol=1e-14)


def stage_by_stage(x: torch.Tensor, size: int) -> torch.Tensor:
    """H of x's blocks in the order that is part of the format: first between halves, last between neighbours."""
    stride = size // 2
    while stride:
        a, b = x.view(-1, 2, stride).unbind(1)
        x, stride = torch.stack((a + b, a - b), 1).view(-1), stride // 2
    return x


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Those of zeros, too. What is not finite is as good as any such value."""
    bits = torch.int64 if a.dtype == torch.float64 else torch.int32
    finite = a.isfinite()
    return torch.equal(finite, b.isfinite()) and torch.equal(a[finite].view(bits), b[finite].view(bits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES)
def test_the_order_of_additions_is_the_formats(size: int, dtype: torch.dtype) -> None:
    """Bit for bit, however much is transformed at a time, and for digits by a product that has another order."""
    signs = matrix(size)[:, 0].to(dtype).sign()
    with SCRATCH.frame(signs.device) as frame:
        mixing = Mixing.of(frame, Hadamard(size), 1 << 13, dtype)
        for n in (1 << 13, 5 * size, size):
            x = torch.randn(n, dtype=dtype).exp() * torch.randn(n, dtype=dtype)
            x.view(-1, size)[1::4, 2] = torch.inf
            x.view(-1, size)[2::4, 3:] = 0
            x.view(-1, size)[3::8] = 1e-42
            wanted = stage_by_stage((x.view(-1, size) * signs / size).view(-1), size)
            # + 0.0: digits do not tell a -0
            assert same_bits(mixing.forward(x) + 0.0, wanted + 0.0)
            for y in (x, torch.randint(-127, 128, (n,)).to(dtype)):
                y.view(-1, size)[4::4] = 0
                wanted = (stage_by_stage(y, size).view(-1, size) * signs).view(-1)
                back = torch.empty_like(y)
                mixing.inverse(y, back)
                assert same_bits(back, wanted)
            mixing.inverse_of_digits(y, back)
            assert same_bits(back, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_message_is_summed_as_it_is_decoded(dtype: torch.dtype) -> None:
    codec, x = Blockwise(4, 128, hadamard=32), torch.randn(1, (1 << 18) + 384)
    messages, held = codec.encode(x), torch.randn(x.shape[1], dtype=dtype)
    decoded, summed, added = torch.empty(x.shape, dtype=dtype), torch.empty_like(held), held.clone()
    codec.decode(messages, decoded)
    codec.decode_sum(messages, summed, accumulate=False)
    codec.decode_sum(messages, added, accumulate=True)
    assert same_bits(summed, decoded[0]) and same_bits(added, held + decoded[0])


def test_signs_are_those_of_the_seed() -> None:
    first, again, other = (matrix(128, seed)[:, 0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert 40 < (first > 0).sum() < 88 and 40 < (first == other).sum() < 88  # 4 standard deviations


@pytest.mark.parametrize(
    "seed, expected",
    [(0, "+----------+-++++----+-----+--+-"), (7, "+++----+-++---++--+-+-+-++--++-+")],
)
def test_signs_are_what_kernels_have(seed: int, expected: str) -> None:
    """Both ends of a message have to have the same, and one may be a CPU. Worked out from the kernel's integers."""
    signs = "".join("+" if sign > 0 else "-" for sign in matrix(32, seed)[:, 0].tolist())
    assert signs == expected == "".join("+" if draw > 0 else "-" for draw in kernel_draws(seed, 32))


def kernel_draws(seed: int, n: int) -> list[int]:
    """The first draws of ``draws_tile`` under the keys of the signs, in Python's integers."""
    key0, key1 = (key & 0xFFFFFFFF for key in Hadamard(8, seed).noise.keys)
    draws = []
    for element in range(n):
        word = (element // 2 + key0) & 0xFFFFFFFF
        word ^= word >> 16
        word = (word * 0x7FEB352D & 0xFFFFFFFF) ^ key1
        word ^= word >> 15
        word = word * 0x846CA68B & 0xFFFFFFFF
        half = ((word ^ word >> 16) | 0x00010001) >> 16 * (element % 2) & 0xFFFF
        draws.append((half ^ 0x8000) - 0x8000)
    return draws


def round_trip(codec: Blockwise, x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    codec.decode(codec.encode(x), out)
    return out


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 30), bits=BITS, size=st.sampled_from(SIZES), wider=st.sampled_from([1, 2, 4]),
    magnitude=st.sampled_from([0.0, 1e-44, 1e-30, 1.0, 1e30, 1e38]),
)  # fmt: skip
def test_errors_are_within_the_bounds(seed: int, bits: int, size: int, wider: int, magnitude: float) -> None:
    """Of decoded values, and the sharper one of mixed errors."""
    codec = Blockwise(bits, size * wider, hadamard=size, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(2, 3 * size * wider, generator=generator).double().clamp(-3, 3) * magnitude).float()
    error = round_trip(codec, x, torch.float64) - x.double()
    bound = codec.error_bound(x).double().repeat_interleave(codec.form.block, 1)
    assert (error.abs() <= bound).all()
    assert (codec.mixed(error).abs() <= bound / size * (1 + 1e-9)).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_one_message_decodes_exactly(bits: int) -> None:
    """fp32 holds s D H q without rounding: fp64 gives the same values."""
    codec = Blockwise(bits, 128, hadamard=128)
    x = torch.randn(4, 1 << 12).exp()
    assert torch.equal(round_trip(codec, x).double(), round_trip(codec, x, torch.float64))


def test_outliers_cost_less() -> None:
    x = torch.randn(1, 1 << 14)
    x[0, ::64] *= 20
    plain, mixing = Blockwise(4, 64), Blockwise(4, 64, hadamard=64)
    errors = [(round_trip(codec, x) - x).norm() / x.norm() for codec in (plain, mixing)]
    assert errors[1] < 0.5 * errors[0]


def test_sums_between_hops_stay_transformed() -> None:
    """With one transform the next messages are those of the plain codec for the sum of what was sent."""
    here, onward = Format(8, 128, transform=Hadamard(64, 5)), Format(4, 64, transform=Hadamard(64, 5))
    x, n = torch.randn(3, 512), 512
    messages = Blockwise(8, 128, hadamard=64, seed=5).encode(x)
    out = torch.zeros(2, -(-onward.coded_bytes(n // 2) // 16) * 16, dtype=torch.uint8)
    dequantize_sum_quantize(messages, n, here, out, onward)
    sums = torch.empty(1, n)
    Blockwise(8, 128).decode_sum(messages, sums[0], accumulate=False)  # without the inverse
    assert torch.equal(out, Blockwise(4, 64).encode(sums.view(2, -1)))


def test_messages_are_summed_before_the_inverse() -> None:
    codec, x = Blockwise(4, 64, hadamard=64), torch.randn(5, 256)
    messages, own = codec.encode(x), torch.randn(256)
    summed = own.clone()
    codec.decode_sum(messages, summed, accumulate=True)
    each = torch.empty(5, 256)
    codec.decode(messages, each)
    assert torch.allclose(summed, own + each.sum(0), atol=1e-5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_arrives(value: float) -> None:
    codec, x = Blockwise(4, 128, hadamard=64), torch.randn(1, 512)
    x[0, 200] = value
    decoded = round_trip(codec, x)
    assert decoded[0, 128:256].isnan().all() and decoded[0, :128].isfinite().all()
    assert decoded[0, 256:].isfinite().all()


def test_what_it_refuses() -> None:
    with refused("100", "nearest: 128"):
        Hadamard(100)
    with refused("64", "blocks of 32", "nearest: 32"):
        Blockwise(4, 32, hadamard=64)
