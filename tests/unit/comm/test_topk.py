"""Sparse messages: what is sent, its bytes, and bytes that no sender writes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.comm.topk import CHUNK, KEPT, PARTS, PIECE, TopK
from megazero.comm.wire import Sparse
from megazero.config import World, make_config
from megazero.config.layout.outer import feedback, outer_coding
from megazero.config.summary import describe
from megazero.mesh.grid import make_grid
from megazero.plan.communication import Formats, OuterFormat, UnitShape
from megazero.plan.compare import rungs
from megazero.plan.report import outer_words
from megazero.zero.plan import UnitCut
from tests.messages import refused
from tests.sizes import SMALL

CODEC = TopK()


def drawn(seed: int, k: int, n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(k, n, generator=generator).pow(3)


def round_trip(x: torch.Tensor, codec: TopK = CODEC) -> torch.Tensor:
    out = torch.empty(x.shape)
    codec.decode(codec.encode(x), out)
    return out


def by_hand(chunk: torch.Tensor) -> torch.Tensor:
    """Sort the whole chunk, earlier ones first among equals; give each kept value its group's mean magnitude."""
    sizes, out = chunk.abs(), torch.zeros_like(chunk)
    kept = sorted(range(len(chunk)), key=lambda at: (-sizes[at], at))[:KEPT]
    mean = sizes[kept].mean() * bool(sizes[kept].all())
    for group in ([at for at in kept if sizes[at] <= mean], [at for at in kept if sizes[at] > mean]):
        if group:
            out[group] = sizes[group].mean().bfloat16().float() * (1 - 2 * (chunk[group] < 0).float())
    return out


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 30), levels=st.sampled_from([0, 0.03, 1, 3]), last=st.integers(0, CHUNK))
def test_the_largest_are_sent_in_two_bits(seed: int, levels: float, last: int) -> None:
    """Rounded to few levels most magnitudes are equal. The last chunk is filled with zeros."""
    x = drawn(seed, 2, CHUNK + last)
    x = (x * levels).round() if levels else x
    arrived, filled = round_trip(x), torch.nn.functional.pad(x, (0, CHUNK - last))
    for row, got in zip(filled, arrived, strict=True):
        want = torch.cat([by_hand(chunk) for chunk in row.split(CHUNK)])
        assert torch.allclose(got, want[: len(got)], rtol=1e-2, atol=0)
        assert torch.equal(got != 0, (want != 0)[: len(got)]) and not got[row[: len(got)] == 0].any()


def test_bytes_are_as_counted_whatever_the_values() -> None:
    n = 3 * CHUNK + 100
    assert CODEC.message_numel(CHUNK) == 96 and CODEC.message_bytes(1 << 24) / (1 << 24) == 0.0205078125
    for x in (torch.zeros(2, n), torch.ones(2, n), drawn(1, 2, n)):
        exact = drawn(2, 2, 5)
        message = CODEC.encode(
            x, exact, out=torch.full((2, CODEC.message_numel(n, 5)), 255, dtype=torch.uint8)
        )
        assert message.numel() == 2 * CODEC.message_bytes(n, 20) == 2 * (336 + 32)
        out, back = torch.empty(2, n), torch.empty(2, 5)
        CODEC.decode(message, out, back)
        assert torch.equal(back, exact) and torch.equal(message, CODEC.encode(x, exact))
    assert not round_trip(torch.zeros(1, n)).any()
    assert CODEC.encode(torch.empty(2, 0), drawn(2, 2, 4)).shape == (2, 16)


def test_long_rows_are_taken_in_pieces_and_sums_are_by_source() -> None:
    x = drawn(3, 2, (PIECE + 1) * CHUNK + 8)
    arrived = round_trip(x)
    assert torch.equal(arrived[:, PIECE * CHUNK :], round_trip(x[:, PIECE * CHUNK :]))
    sums, own = torch.ones(x.shape[1]), x[0]
    CODEC.decode_sum(CODEC.encode(x), sums, True, own=(own,))
    assert torch.equal(sums, 1 + own + arrived[0] + arrived[1])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_chunk(value: float) -> None:
    x = drawn(4, 1, 2 * CHUNK)
    clean = round_trip(x)
    x[0, 7] = value
    arrived = round_trip(x)[0]
    assert not arrived[7].isfinite() and torch.equal(arrived[CHUNK:], clean[0, CHUNK:])


def test_what_residuals_keep_is_sent_later() -> None:
    """A constant difference: what is left out comes to the same sum, element by element, after some messages."""
    x, owed, sent = drawn(5, 1, CHUNK), torch.zeros(1, CHUNK), torch.zeros(1, CHUNK)
    for _ in range(400):
        arrived = round_trip(x + owed)
        owed, sent = x + owed - arrived, sent + arrived
    assert (sent / 400 - x).norm() < 0.15 * x.norm()


def test_bytes_that_no_sender_writes_are_refused() -> None:
    message, out = CODEC.encode(drawn(6, 1, CHUNK)), torch.empty(1, CHUNK)
    picks = message[0].split(PARTS + (12,))[2]
    first = torch.arange(128) < KEPT
    cases = {
        (f"other than {KEPT} places",): (torch.arange(128) <= KEPT, picks),
        ("ascend", f"{CHUNK}"): (first, picks.flip(0)),  # high bits are all zero
        ("not below", f"{CHUNK}"): (first.flip(0), torch.arange(KEPT) * 4),  # ascend, from CHUNK on
    }
    for words, (spread, low) in cases.items():
        bad = message.clone()
        high_of, picks_of = bad[0].split(PARTS + (12,))[1:3]
        high_of.copy_((spread.view(-1, 8) * 2 ** torch.arange(8)).sum(1))
        picks_of.copy_(low)
        with refused(*words):
            CODEC.decode(bad, out)


def test_a_run_sends_and_plans_them() -> None:
    """At most 0.03 bytes a parameter go up in a meeting, whatever the number of replicas."""
    run = {
        **SMALL,
        "outer_meet": "local:9",
        "outer_format": "topk",
        "train_iters": None,
        "train_samples": 1 << 20,
    }
    config = make_config(run, World(4, 4))
    assert outer_coding(config.outer) == Sparse() and feedback(config.outer) == 0.95
    assert "differences topk, error feedback" in "\n".join(describe(config, World(4, 4)))
    form, grid = OuterFormat.of(config.outer, sums=4), make_grid(4, 4)
    assert form is not None
    plan = UnitShape(1 << 24, 0, False).plan(UnitCut.of(grid.data_axes), Formats(2, 4))
    assert form.message(plan) * grid.dp == CODEC.message_bytes(1 << 24) < 0.03 * (1 << 24)
    assert {bits for bits, _ in rungs(run)} == {32} and outer_words(config).startswith(
        "each of 9 replicas with a batch of 8, topk every"
    )
    with refused("--outer-bits 4", "--outer-format dense"):
        make_config({**run, "outer_bits": 4}, World(4, 4))
