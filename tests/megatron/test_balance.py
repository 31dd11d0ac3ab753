"""The losses and the step of the bias are megatron-core's, values and gradients."""

from __future__ import annotations

import pytest
import torch

from megazero.moe import Balance, BalanceLosses, Decision, Router, route
from megazero.moe.balance import move_bias

pytest.importorskip("megatron.core")

from megatron.core.transformer.moe.moe_utils import (  # noqa: E402
    compute_routing_scores_for_aux_loss,
    get_updated_expert_bias,
    switch_load_balancing_loss_func,
    z_loss_func,
)

EXPERTS, LENGTH, SAMPLES, WIDTH = 12, 10, 4, 8
COEFFICIENT, Z = 0.3, 0.1


def theirs(logits: torch.Tensor, kind: str, topk: int, score: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return megatron's balance loss and z loss of one micro-batch on one rank, with their coefficients."""
    chosen, scores = compute_routing_scores_for_aux_loss(logits, topk, score)
    samples, experts = 1, EXPERTS
    if kind == "seq_aux_loss":  # router.py: a sequence's experts are columns of their own
        samples = SAMPLES
        chosen, scores = chosen.reshape(LENGTH, -1), scores.reshape(LENGTH, -1)
    balance = switch_load_balancing_loss_func(scores, chosen.sum(0), len(scores), topk, experts, COEFFICIENT)
    return balance / samples, z_loss_func(logits, Z)


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss"])
@pytest.mark.parametrize(
    "router",
    [Router(2), Router(4, pre_softmax=True), Router(4, "sigmoid", num_groups=4, group_topk=2)],
    ids=["softmax", "of all", "groups of sigmoids"],
)
def test_losses_are_megatrons(kind: str, router: Router) -> None:
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    x, weight = drawn(LENGTH * SAMPLES, WIDTH), drawn(EXPERTS, WIDTH).requires_grad_()
    bias = drawn(EXPERTS) if router.score_function == "sigmoid" else None
    scale = 0.125
    losses = BalanceLosses(kind, COEFFICIENT, Z, SAMPLES, scale=lambda: scale)
    balance, nothing = Balance(losses, router, EXPERTS), torch.zeros(LENGTH * SAMPLES, router.topk)

    decision = Decision()
    routed = route(x, weight, router, decision, bias)
    attached = balance.attach(routed, decision, SAMPLES, LENGTH, lambda counts: counts)
    assert torch.equal(attached, routed.probabilities)
    (got,) = torch.autograd.grad(attached, weight, nothing)
    want = sum(theirs(x @ weight.t(), kind, router.topk, router.score_function))
    added = torch.autograd.grad(want, weight)[0] * scale
    assert float((got - added).norm() / added.norm()) < 1e-6
    value = COEFFICIENT * balance.values[0] + Z * balance.values[1]
    assert value.item() == pytest.approx(want.item(), rel=1e-6)


def test_a_bias_moves_as_megatrons(monkeypatch: pytest.MonkeyPatch) -> None:
    load = torch.tensor([4, 0, 9, 4, 3])
    bias = torch.tensor([0.5, -1.0, 0.25, 0.0, 2.0])
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr("megatron.core.parallel_state.get_tensor_and_data_parallel_group", lambda **_: None)
    want = get_updated_expert_bias(load, bias, 1e-3)
    move_bias(bias, load, 1e-3)
    assert torch.equal(bias, want)
