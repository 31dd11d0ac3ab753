"""Routers choose and weigh experts as megatron-core's do."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from megazero.moe import Decision, Router, route

pytest.importorskip("megatron.core")

from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function  # noqa: E402

EXPERTS = 12
# score function, pre-softmax, groups and of those, factor, bias
CASES = [
    (score, pre, groups, factor, biased)
    for score, pre, groups, factor, biased in product(
        ("softmax", "sigmoid"), (False, True), (None, (4, 2), (3, 1)), (None, 2.5), (False, True)
    )
    if score == "softmax" or not pre
    if score == "sigmoid" or not biased
]


@pytest.mark.parametrize(("score", "pre", "groups", "factor", "biased"), CASES)
@pytest.mark.parametrize("topk", [1, 4])
def test_a_router_is_megatrons(
    score: str, pre: bool, groups: tuple[int, int] | None, factor: float | None, biased: bool, topk: int
) -> None:
    count, kept = groups or (None, None)
    if kept is not None and kept > topk:
        return
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 8, generator=draw), torch.randn(EXPERTS, 8, generator=draw)
    bias = torch.randn(EXPERTS, generator=draw) if biased else None
    router = Router(topk, score, pre, factor, count, kept)
    ours = route(x, (weight, None), router, Decision(), bias)
    theirs, chosen = topk_routing_with_score_function(
        x @ weight.t(), topk, pre, count, kept, factor, score, bias
    )
    assert torch.equal(torch.zeros(64, EXPERTS).scatter(1, ours.experts, 1.0).bool(), chosen)
    assert torch.allclose(ours.probabilities, theirs.gather(1, ours.experts), rtol=1e-6, atol=0)
