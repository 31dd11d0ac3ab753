"""Codecs: error bounds, what is not finite, message layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.comm.codec import Blockwise, Identity
from megazero.comm.wire import DEFAULT_BLOCK
from megazero.kernels.dispatch import CHUNK
from tests.messages import refused

BITS = st.sampled_from([2, 4, 8])
BLOCK = st.sampled_from([8, 16, 64, 128, 512])
MAGNITUDE = st.sampled_from([0.0, 1e-44, 1e-38, 1e-30, 1e-6, 1.0, 1e6, 1e30, 1e38])
DTYPE = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])
HEAVY = settings(max_examples=60, deadline=None)


def drawn(seed: int, k: int, n: int, magnitude: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(k, n, generator=generator, dtype=torch.float64).clamp(-3, 3) * magnitude
    return x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)


def round_trip(codec: Blockwise, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape)
    codec.decode(codec.encode(x), out)
    return out


def within(codec: Blockwise, x: torch.Tensor, decoded: torch.Tensor) -> bool:
    error = (decoded.double() - x.double()).abs().unflatten(1, (-1, codec.form.block))
    return bool((error <= codec.error_bound(x).double()[..., None]).all())


@HEAVY
@given(
    seed=st.integers(0, 1 << 30), bits=BITS, block=BLOCK, blocks=st.integers(0, 5), k=st.integers(1, 3),
    magnitude=MAGNITUDE, dtype=DTYPE,
)  # fmt: skip
def test_error_is_within_the_bound(
    seed: int, bits: int, block: int, blocks: int, k: int, magnitude: float, dtype: torch.dtype
) -> None:
    codec = Blockwise(bits, block)
    x = drawn(seed, k, blocks * block, magnitude, dtype)
    decoded = round_trip(codec, x)
    assert decoded.isfinite().all()
    assert within(codec, x, decoded)


def test_the_bound_is_tight_and_of_the_stated_form() -> None:
    x = drawn(0, 1, 1 << 16, 1.0)
    absmax = x.view(-1, 64).abs().amax(1)
    codec = Blockwise(4, 64)
    bound = codec.error_bound(x)[0]
    # Half a step of a scale at most 2 ** -7 (bf16) above absmax / qmax.
    assert (bound <= 0.5 * absmax / 7 * (1 + 2**-7) * (1 + 2**-16)).all()
    error = (round_trip(codec, x) - x).view(-1, 64).abs().amax(1)
    assert (error / bound).max() > 0.98


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_both_signs_of_the_largest_value_are_kept(bits: int) -> None:
    """No sign bias: the largest magnitudes are hit exactly where the scale is exact, and signs mirror."""
    codec = Blockwise(bits, 8)
    top = float(codec.form.qmax)
    x = torch.tensor([[top, -top, 1, -1, 0, 0, 1, 0]])
    assert torch.equal(round_trip(codec, x), x)
    x = drawn(1, 1, 4096, 1.0)
    assert torch.equal(round_trip(codec, -x), -round_trip(codec, x))


@HEAVY
@given(
    bits=BITS, block=BLOCK, at=st.integers(0, 1 << 20), value=st.sampled_from([torch.nan, torch.inf, -torch.inf]),
    dtype=DTYPE,
)  # fmt: skip
def test_not_finite_blocks_survive_and_stay_alone(
    bits: int, block: int, at: int, value: float, dtype: torch.dtype
) -> None:
    codec = Blockwise(bits, block)
    clean = drawn(at, 2, 4 * block, 1.0, dtype)
    x = clean.clone()
    x.view(-1)[at % x.numel()] = value
    bad = at % x.numel() // block
    decoded = round_trip(codec, x).view(-1, block)
    assert decoded[bad].isnan().all()
    keep = torch.arange(8) != bad
    assert torch.equal(decoded[keep], round_trip(codec, clean).view(-1, block)[keep])
    sums = torch.zeros(4 * block)
    codec.decode_sum(codec.encode(x), sums, True)
    assert sums.view(-1, block).isnan().all(1).nonzero().flatten().tolist() == [bad % 4]
    twice = torch.empty(2, 2 * block)
    middle = codec.decode_sum_encode(codec.encode(x), 4 * block, codec, 2)
    codec.decode(middle, twice)
    assert twice.view(-1, block).isnan().all(1).nonzero().flatten().tolist() == [bad % 4]


def test_zero_scales_have_zero_payload_and_tiny_values_round_to_it() -> None:
    for bits in (2, 4, 8):
        codec = Blockwise(bits, 64)
        assert not codec.encode(torch.zeros(1, 640)).any()
        assert not round_trip(codec, torch.full((1, 64), 1e-44)).any()


@HEAVY
@given(
    seed=st.integers(0, 1 << 30), bits=BITS, next_bits=BITS, k=st.integers(1, 4), rows=st.integers(1, 3),
    e=st.integers(0, 5), accumulate=st.booleans(),
)  # fmt: skip
def test_sums_and_the_middle_of_two_hops(
    seed: int, bits: int, next_bits: int, k: int, rows: int, e: int, accumulate: bool
) -> None:
    """decode_sum is decode, then sums by source; decode_sum_encode is decode_sum, then encode: bit for bit."""
    codec, following = Blockwise(bits, 32), Blockwise(next_bits, 64)
    n = rows * 128
    x, exact = drawn(seed, k, n, 1.0), drawn(seed + 1, k, e * rows, 1.0)
    messages = codec.encode(x, exact)
    decoded, exact_back = torch.empty(k, n), torch.empty(k, e * rows)
    codec.decode(messages, decoded, exact_back)
    assert torch.equal(exact_back, exact)
    for dtype in (torch.float32, torch.float64):
        out, exact_out = torch.ones(n, dtype=dtype), torch.ones(e * rows, dtype=dtype)
        codec.decode_sum(messages, out, accumulate, exact_out)
        for sums, rows_of in ((out, decoded), (exact_out, exact)):
            expected = torch.full_like(sums, float(accumulate))
            for row in rows_of:
                expected += row
            assert torch.equal(sums, expected)
    sums, exact_sums = torch.empty(n), torch.empty(e * rows)
    codec.decode_sum(messages, sums, False, exact_sums)
    fused = codec.decode_sum_encode(messages, n, following, rows, exact=e * rows)
    assert torch.equal(fused, following.encode(sums.view(rows, -1), exact_sums.view(rows, -1)))


@pytest.mark.parametrize("codec", [Blockwise(8, 32), Identity(torch.float32)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_the_own_row_is_added_before_the_messages(codec: Blockwise | Identity, accumulate: bool) -> None:
    own, x, exact = drawn(15, 1, 64, 1.0)[0], drawn(16, 2, 64, 1.0), drawn(17, 2, 3, 1.0)
    messages = codec.encode(x, exact)
    decoded, exact_back = torch.empty(2, 64), torch.empty(2, 3)
    codec.decode(messages, decoded, exact_back)
    sums, exact_sums = torch.full((64,), 5.0), torch.full((3,), 5.0)
    codec.decode_sum(messages, sums, accumulate, exact_sums, own=(own, own[:3]))
    for out, first, rows in ((sums, own, decoded), (exact_sums, own[:3], exact_back)):
        assert torch.equal(out, (5.0 + first if accumulate else first) + rows[0] + rows[1])


def test_exact_sums_in_fp64_stay_so_between_two_hops() -> None:
    codec = Blockwise(8, 32, exact_dtype=torch.float64)
    exact = 1 + torch.tensor([[2.0**-40, 2.0**-45], [2.0**-50, 0.0]], dtype=torch.float64)
    fused = codec.decode_sum_encode(codec.encode(drawn(18, 2, 64, 1.0), exact), 64, codec, 2, exact=2)
    assert torch.equal(codec.exact(fused, 32, 1).flatten(), exact[0] + exact[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_decode_rounds_the_fp32_value_once(dtype: torch.dtype) -> None:
    codec = Blockwise(8)
    x = drawn(4, 2, 1280, 1.0)
    out = torch.empty(2, 1280, dtype=dtype)
    codec.decode(codec.encode(x), out)
    assert torch.equal(out, round_trip(codec, x).to(dtype))


@HEAVY
@given(
    seed=st.integers(0, 1 << 30), bits=BITS, k=st.integers(1, 3), blocks=st.integers(0, 3), e=st.integers(0, 5),
    dtype=DTYPE,
)  # fmt: skip
def test_decode_add_rounds_the_fp32_sum_once(
    seed: int, bits: int, k: int, blocks: int, e: int, dtype: torch.dtype
) -> None:
    """In the middle columns of a wider tensor; the exact region is replaced."""
    codec, n = Blockwise(bits, 32), blocks * 32
    x, exact = drawn(seed, k, n, 0.1), drawn(seed + 1, k, e, 1.0)
    messages, wide = codec.encode(x, exact), drawn(seed + 2, k, n + 5, 1.0, dtype)
    working = torch.promote_types(dtype, torch.float32)
    decoded, expected = torch.empty(k, n), wide.clone()
    codec.decode(messages, decoded, torch.empty(k, e))
    expected[:, 2 : n + 2] = (wide[:, 2 : n + 2].to(working) + decoded.to(working)).to(dtype)
    exact_out = torch.ones(k, e)
    codec.decode_add(messages, wide[:, 2 : n + 2], exact_out)
    assert torch.equal(wide, expected)
    assert torch.equal(exact_out, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16, torch.float32])
def test_a_difference_is_taken_from_what_the_base_can_hold(dtype: torch.dtype, kept: torch.dtype) -> None:
    codec, n = Blockwise(4, 64), CHUNK // 2 + 64  # two rows in two chunks
    x, exact = drawn(1, 2, n, 1.0, dtype), drawn(2, 2, 3, 1.0)
    base = drawn(3, 2, n, 1.0, kept)
    base[:, :64] = x[:, :64]  # a block that differs in what is lost by rounding
    found = codec.encode_difference(x, base, exact)
    assert torch.equal(found, codec.encode(x.to(kept).to(dtype) - base.to(dtype), exact))
    assert not codec.form.scales(found, n)[:, 0].any()


def test_decode_add_keeps_what_rounded_differences_would_lose() -> None:
    """bf16 out: adding the difference rounded to bf16 gives other bits, so the test above could fail."""
    codec, x = Blockwise(8), drawn(12, 1, 1280, 0.1)
    held = drawn(13, 1, 1280, 1.0, torch.bfloat16)
    rounded_twice = held + round_trip(codec, x).bfloat16()
    codec.decode_add(codec.encode(x), held)
    assert not torch.equal(held, rounded_twice)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("e", [0, 6])
def test_slices_of_exact_elements_alone(bits: int, e: int) -> None:
    """A unit of small parameters has no coded elements."""
    codec, x, exact = Blockwise(bits), torch.empty(3, 0), drawn(14, 3, e, 1.0)
    messages = codec.encode(x, exact)
    assert messages.shape == (3, codec.message_numel(0, e))
    for decode in (codec.decode, codec.decode_add):
        back = torch.ones(3, e)
        decode(messages, torch.empty(3, 0), back)
        assert torch.equal(back, exact)
    sums = torch.ones(e)
    codec.decode_sum(messages, torch.empty(0), True, sums)
    assert torch.equal(sums, 1 + exact[0] + exact[1] + exact[2])
    middle, following = codec.decode_sum_encode(messages, 0, codec, 2, exact=e), torch.empty(2, e // 2)
    codec.decode(middle, torch.empty(2, 0), following)
    assert torch.equal(following.flatten(), exact[0] + exact[1] + exact[2])


def test_long_slices_are_taken_in_chunks() -> None:
    codec, x = Blockwise(4), drawn(5, 1, (1 << 19) + 128, 1.0)
    parts = [round_trip(codec, x[:, i : i + 65600]) for i in range(0, x.shape[1], 65600)]
    assert torch.equal(round_trip(codec, x), torch.cat(parts, 1))


def test_message_bytes() -> None:
    n = 1 << 20
    assert [Blockwise(bits).message_numel(n) / n for bits in (8, 4, 2)] == [1.015625, 0.53125, 0.28125]
    assert Blockwise(4, 64).message_numel(64) == 48  # 34, filled up
    assert Blockwise(4, 64).message_numel(64, 5) == 48 + 32
    assert Blockwise(4, 64, exact_dtype=torch.bfloat16).message_numel(64, 5) == 48 + 16
    assert Blockwise(8).message_numel(0) == 0
    assert Blockwise(8).form.block == DEFAULT_BLOCK[8]


def test_out_is_written_and_filling_is_zero() -> None:
    codec = Blockwise(4, 8)
    x, exact = drawn(6, 2, 8, 1.0), drawn(7, 2, 3, 1.0)
    out = torch.full((2, codec.message_numel(8, 3)), 255, dtype=torch.uint8)
    assert codec.encode(x, exact, out=out) is out
    assert torch.equal(out, codec.encode(x, exact))
    assert not out[:, 6:16].any() and not out[:, 28:].any()


def test_identity_stays_free_and_takes_an_exact_region() -> None:
    codec, x = Identity(torch.float32), drawn(8, 2, 8, 1.0)
    assert codec.encode(x) is x
    message = codec.encode(x, x[:, :3])
    assert message.shape == (2, codec.message_numel(8, 3))
    out, exact = torch.empty(2, 8), torch.empty(2, 3)
    codec.decode(message, out, exact)
    assert torch.equal(out, x) and torch.equal(exact, x[:, :3])
    sums, exact_sums = torch.ones(8), torch.ones(3)
    codec.decode_sum(message, sums, True, exact_sums)
    assert torch.equal(sums, 1 + x[0] + x[1]) and torch.equal(exact_sums, sums[:3])


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"bits": 5}, ["5 bits", "nearest: 4"]),
        ({"bits": 8, "block": 100}, ["100", "nearest: 128"]),
        ({"bits": 8, "block": 1 << 20}, [f"{1 << 20}", "nearest: 2048"]),
    ],
)
def test_impossible_settings_are_refused(arguments: dict, words: list[str]) -> None:
    with refused(*words):
        Blockwise(**arguments)


def test_slices_are_whole_blocks() -> None:
    with refused("100 elements", "64", "128"):
        Blockwise(4, 64).encode(torch.zeros(1, 100))
    with refused("16 coded", "into 3"):
        Blockwise(4, 8).decode_sum_encode(torch.zeros(1, 16, dtype=torch.uint8), 16, Blockwise(4, 8), 3)
