"""A run says once where coding costs more than its messages save."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megazero.comm.codec import Blockwise
from megazero.train.callbacks import codec_costs
from megazero.train.callbacks.codec_costs import LAST, WARM_UP, CodecCosts, gather_rate
from megazero.zero import Codecs

CODECS = Codecs(weights=Blockwise(8), gradients_inter=Blockwise(4))
SENT = {"refresh_intra_node_bytes": 0, "refresh_inter_node_bytes": 10**6, "reduce_inter_node_bytes": 10**6}


def engine(device: str = "cpu", codecs: Codecs = CODECS) -> Any:
    axes = [SimpleNamespace(size=2, link=f"{where}_node", gather_group=None) for where in ("intra", "inter")]
    unit = SimpleNamespace(
        codecs=codecs, dtype=torch.bfloat16, sum_dtype=torch.float32, axes=SimpleNamespace(g=0)
    )
    mesh = SimpleNamespace(data_axes=axes, device=torch.device(device))
    policy = SimpleNamespace(codecs=codecs)
    return SimpleNamespace(mesh=mesh, policy=policy, units=[unit], micro_batches=1)


def said(monkeypatch: pytest.MonkeyPatch, costs: CodecCosts, rate: float, coding: float) -> list[list[str]]:
    """What each of some steps says, whose gradients take ``coding`` seconds to code."""
    monkeypatch.setattr(codec_costs, "gather_rate", lambda axis: rate)
    lines = []
    for step in range(1, LAST + 3):
        assert CODECS.gradients_inter is not None
        CODECS.gradients_inter.spent[0] += coding if step > WARM_UP else 100.0
        lines.append(costs.take(SENT))
    return lines


@pytest.mark.parametrize("rate, tells", [(1e9, True), (1e7, False)])
def test_a_run_says_once_that_coding_does_not_pay(
    monkeypatch: pytest.MonkeyPatch, rate: float, tells: bool
) -> None:
    """1 MB at 4 bits is 7.5 MB in fp32: 6.5 ms more at 1 GB/s, 650 at 10 MB/s. Coding them takes 20."""
    lines = said(monkeypatch, CodecCosts(engine()), rate, 0.020)
    assert [bool(each) for each in lines] == [step == LAST and tells for step in range(1, LAST + 3)]
    if tells:
        (line,) = lines[LAST - 1]
        assert "gradients across nodes takes 20.0 ms" in line and "--no-zero-quantized-gradients" in line
        assert "1.00 MB take 1.0 ms, 7.53 MB would take 7.5" in line


@pytest.mark.parametrize("other", [engine("cuda"), engine(codecs=Codecs())])
def test_nothing_is_measured_on_cuda_or_without_codecs(monkeypatch: pytest.MonkeyPatch, other: Any) -> None:
    assert not any(said(monkeypatch, CodecCosts(other), 1e12, 1.0))


def test_a_link_is_timed_by_the_gather_that_runs_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CPU ranks swap; by gloo's all-gather the link would seem half as fast, and coding worth its time."""
    sent = list[int]()

    def swap(_: torch.Tensor, own: torch.Tensor, *__: Any, group: str, async_op: bool) -> Any:
        sent.append(own.nbytes)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(torch.distributed, "all_to_all_single", swap)
    spec = SimpleNamespace(role="data")
    axis: Any = SimpleNamespace(size=2, index=1, link="inter_node", gather_group="gathers", spec=spec)
    assert gather_rate(axis) > 0 and len(set(sent)) == 1


def test_codecs_count_their_seconds() -> None:
    codec, values = Blockwise(8), torch.randn(2, 4096)
    message = codec.encode(values)
    encoding = codec.spent[0]
    codec.decode(message, torch.empty_like(values))
    assert 0 < encoding < codec.spent[0] and Blockwise(8).spent == [0.0]
