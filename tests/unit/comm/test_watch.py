"""What is measured of quantised messages, against numpy, and when a run is warned of what they lose."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megazero.comm.codec import Blockwise, at_least_fp32, decoded
from megazero.comm.watch import LossyGradients, write_squares
from megazero.comm.wire import Codecs, Coding
from megazero.kernels.arena import Arena
from megazero.mesh.levels import INTER, INTRA

CPU = torch.device("cpu")
BLOCK = 64
PLAIN, MIXED = Blockwise(4, BLOCK), Blockwise(4, BLOCK, hadamard=BLOCK)
COLUMN = 15.0  # an outlier: 4 bits round what is below 15 / 14 to 0


def outliers(rows: int, blocks: int, dtype: torch.dtype) -> torch.Tensor:
    """Blocks of one outlier, 15 elements of 3 that survive it, 32 of 0.5 that do not, and 16 without a gradient."""
    values = torch.zeros(rows, blocks, BLOCK)
    values[..., 0], values[..., 1:16], values[..., 16:48] = COLUMN, 3.0, 0.5
    return values.flatten(1).to(dtype)


def measured(
    codec: Blockwise, exact: torch.Tensor
) -> tuple[list[float], list[float], np.ndarray, np.ndarray]:
    """What is measured of rows' messages, and what numpy sees: the rows, and what they decode to."""
    found = torch.full((4,), math.nan, dtype=torch.float64)
    with Arena().frame(CPU) as frame:
        messages = codec.encode(exact)
        (sent,) = decoded(codec, messages, [exact], frame.take, at_least_fp32(exact.dtype))
        seen = sent.double().numpy().copy()
        write_squares(sent, exact, found[:2], frame, found[2:])
    return found[:2].tolist(), found[2:].tolist(), exact.double().numpy(), seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_elements_that_arrive_as_zero_are_counted(dtype: torch.dtype) -> None:
    """Of 48 elements with a gradient 32 vanish behind an outlier; those without one do not count."""
    squares, counts, exact, sent = measured(PLAIN, outliers(3, 5, dtype))
    assert counts == [3 * 5 * 32, 3 * 5 * 48] == [((exact != 0) & (sent == 0)).sum(), (exact != 0).sum()]
    assert squares == pytest.approx([((sent - exact) ** 2).sum(), (exact**2).sum()], rel=1e-6)


def test_with_a_transform_few_elements_arrive_as_zero() -> None:
    """The mixed-in padding is not counted, either, though it decodes to values."""
    exact = torch.randn(2, 40 * BLOCK, generator=torch.Generator().manual_seed(1))
    exact[:, ::BLOCK] *= 30
    exact[:, 5::BLOCK] = 0
    (lost, whole), (gone, given), values, sent = measured(MIXED, exact)
    (plain_lost, _), (plain_gone, _), *_ = measured(PLAIN, exact)
    assert given == (values != 0).sum() == exact.numel() - 80 and (sent[:, 5::BLOCK] != 0).any()
    assert gone == ((values != 0) & (sent == 0)).sum() < 0.05 * given < plain_gone
    assert lost < 0.5 * plain_lost < 0.5 * whole and plain_gone > 0.5 * given


# -- the warning ----------------------------------------------------------------------------------

INT4, H64, INT8, TWO = Coding(4), Coding(4, hadamard=64), Coding(8), Coding(2)


@pytest.mark.parametrize(
    "across, inside, flag",
    [
        (INT4, None, "--zero-gradient-transform hadamard"),
        (INT4, INT8, "--zero-gradient-transform hadamard"),
        (None, INT4, "--zero-gradient-transform hadamard"),
        (PLAIN, None, "--zero-gradient-transform hadamard"),
        (H64, None, "--zero-gradient-bits 8"),
        (TWO, INT4, "--zero-gradient-bits 8"),
        (INT8, H64, "--zero-gradient-bits-intra-node 8"),
        (INT8, INT8, "--no-zero-quantized-gradients"),
    ],
)
def test_the_warning_comes_once_and_names_the_flag_that_helps(
    across: Coding | None, inside: Coding | None, flag: str
) -> None:
    watch = LossyGradients(Codecs(gradients={INTER: across, INTRA: inside}))
    said = [watch.take(error) for error in [0.19] * 40]
    assert [line is not None for line in said] == [i == watch.WINDOW - 1 for i in range(40)]
    line = said[watch.WINDOW - 1]
    assert line is not None and "0.19" in line and "0.15" in line and line.endswith(f"use {flag}")


def test_a_few_modules_that_lose_much_are_no_reason() -> None:
    """Nor are steps without a measurement, and those that were not finite."""
    watch = LossyGradients(Codecs(gradients={INTER: INT4}))
    assert not any(watch.take(error) for error in [0.112, 0.17, 0.9] * 100 if error != 0.9)
    assert not any(watch.take(error) for error in [None, math.nan, math.inf] * 100)
    assert any(watch.take(0.16) for _ in range(watch.WINDOW))
