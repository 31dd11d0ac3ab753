"""Bandwidth of the kernels on a GPU, as a share of a copy's, measured in the same run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.gpu_report.setting import elapsed
from megazero.comm.codec import Blockwise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def seconds(run: Callable[[], object]) -> float:
    """Best of 5 means of 4, by the device's clock, behind a pause in which the host launches them."""
    run()
    return min(elapsed(run, torch.device("cuda"), 4) for _ in range(5))


# Least shares of a copy's rate. An H100 gave 0.82 to 1.03 where 0.7 is asked for, 0.71 to 0.78 to "accumulate". An
# H200 copies 4.2 TB/s with the same multiprocessors: there kernels wait for these (0.58 to 0.64 of its copy, 0.31 of
# "sum_quantize"), so no more is asked for than of an H100.
H100 = 3.0e12  # bytes/s of its copy
LEAST = {
    "quantize": 0.7,
    "dequantize": 0.7,
    "dequantize and add": 0.7,
    "accumulate": 0.6,
    "sum_quantize": 0.4,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", [Blockwise(8), Blockwise(4)])
def test_bandwidth(codec: Blockwise, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes that each kernel's docstring counts, per second, against a copy's of 1 GB, at most an H100's."""
    source = torch.empty(1 << 28, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / seconds(lambda: target.copy_(source))
    rate = min(copied, H100)
    k, n = 4, 1 << 26
    x = torch.randn(k, n, device="cuda").to(dtype)
    messages, sums = codec.encode(x), torch.zeros(n, device="cuda")
    moved = {
        "quantize": (x.nbytes + messages.nbytes, lambda: codec.encode(x, out=messages)),
        "dequantize": (x.nbytes + messages.nbytes, lambda: codec.decode(messages, x)),
        "dequantize and add": (2 * x.nbytes + messages.nbytes, lambda: codec.decode_add(messages, x)),
        "accumulate": (messages.nbytes + 2 * sums.nbytes, lambda: codec.decode_sum(messages, sums, True)),
        "sum_quantize": (
            messages.nbytes * (1 + 1 / k),
            lambda: codec.decode_sum_encode(messages, n, codec, k),
        ),
    }
    shares = {name: size / seconds(run) / rate for name, (size, run) in moved.items()}
    with capsys.disabled():
        print(f"\ncopy {copied / 1e12:.2f} TB/s;", {name: f"{share:.0%}" for name, share in shares.items()})
    assert not {name: share for name, share in shares.items() if share < LEAST[name]}
