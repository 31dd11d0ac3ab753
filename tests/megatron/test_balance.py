"""The losses and the step of the bias are megatron-core's, values and gradients."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from megazero.moe import Balance, BalanceLosses, Decision, Router, evened, route
from megazero.moe.balance import move_bias

pytest.importorskip("megatron.core")

from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.moe.moe_utils import (  # noqa: E402
    compute_routing_scores_for_aux_loss,
    get_updated_expert_bias,
    switch_load_balancing_loss_func,
    z_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402

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


WEIGHTS = {
    "aux_loss": {"over_micro_batches": COEFFICIENT},
    "seq_aux_loss": {"over_samples": COEFFICIENT},
    "aux_loss and seq_aux_loss": {"over_micro_batches": COEFFICIENT, "over_samples": COEFFICIENT},
}


@pytest.mark.parametrize("kind", WEIGHTS)
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
    losses = BalanceLosses(**WEIGHTS[kind], z=Z, samples=SAMPLES, scale=lambda: scale)
    balance, nothing = Balance(losses, router, EXPERTS), torch.zeros(LENGTH * SAMPLES, router.topk)

    decision = Decision()
    routed = route(x, (weight, None), router, decision, bias)
    attached = balance.attach(routed, decision, SAMPLES, LENGTH, lambda counts: counts)
    assert torch.equal(attached, routed.probabilities)
    (got,) = torch.autograd.grad(attached, weight, nothing)
    pairs = [theirs(x @ weight.t(), each, router.topk, router.score_function) for each in kind.split(" and ")]
    want = sum(loss for loss, _ in pairs) + pairs[0][1]
    added = torch.autograd.grad(want, weight)[0] * scale
    assert float((got - added).norm() / added.norm()) < 1e-6
    value = losses.weight * balance.values[0] + Z * balance.values[1]
    assert value.item() == pytest.approx(want.item(), rel=1e-6)


RANKS, ROUNDS = 2, 3


def theirs_of_a_step(logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Return the sum of megatron's global_aux_loss over ranks, without coefficient, of the logits
    [rounds, ranks, tokens, experts]. Each rank's router is one of its own."""
    router = Router(2)
    zero = torch.zeros(EXPERTS)
    losses = list[torch.Tensor]()
    config = SimpleNamespace(num_moe_experts=EXPERTS, moe_router_fusion=False)
    of_all: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(
        moe_utils, "reduce_from_tensor_model_parallel_region", lambda own, _: of_all["counts"]
    )
    group = SimpleNamespace(size=lambda: RANKS)
    ranks = [
        SimpleNamespace(
            **{"topk": router.topk, "config": config, "tp_dp_cp_group": group, "ga_steps": zero[0].clone()},
            global_tokens_per_expert=zero.clone(),
            get_aux_loss_coeff=lambda _: 1.0,
            attach_and_log_load_balancing_loss=lambda probs, _, loss, *rest, **more: losses.append(loss),
        )
        for _ in range(RANKS)
    ]
    for of_round in logits:
        chosen, scores = zip(
            *(compute_routing_scores_for_aux_loss(own, router.topk, "softmax") for own in of_round),
            strict=True,
        )
        of_all["counts"] = torch.cat(chosen).sum(0)
        for own, own_scores, own_chosen in zip(ranks, scores, chosen, strict=True):
            TopKRouter._apply_global_aux_loss(own, own_scores, own_scores, own_chosen)
    return torch.stack(losses).sum()


def test_a_loss_over_the_step_is_megatrons_on_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's is the mean over rounds of the sum of megatron's over ranks. That is what megatron logs; its gradients
    are means over ranks, so it trains on this loss divided by the number of data-parallel ranks."""
    draw = torch.Generator().manual_seed(0)
    router = Router(2)
    x = torch.randn(ROUNDS, RANKS, SAMPLES, LENGTH, WIDTH, generator=draw)
    weight = torch.randn(EXPERTS, WIDTH, generator=draw).requires_grad_()
    want = theirs_of_a_step((x @ weight.t()).permute(0, 1, 3, 2, 4).flatten(2, 3), monkeypatch) / ROUNDS
    (wanted,) = torch.autograd.grad(want, weight)

    def ours(rows: torch.Tensor, losses: BalanceLosses, balance: Balance) -> torch.Tensor:
        """The added gradient of a forward of samples [n, length, width]."""
        decision, tokens = Decision(), rows.transpose(0, 1).flatten(0, 1)
        routed = route(tokens, (weight, None), router, decision)
        attached = balance.attach(routed, decision, len(rows), LENGTH, lambda counts: counts)
        return torch.autograd.grad(attached, weight, torch.zeros_like(attached))[0]

    at_once = BalanceLosses(over_step=1.0, samples=SAMPLES, together=RANKS)
    balance = Balance(at_once, router, EXPERTS)
    got = ours(x.flatten(0, 2), at_once, balance)
    assert float((got - wanted).norm() / wanted.norm()) < 1e-6
    assert balance.values[0].item() == pytest.approx(want.item(), rel=1e-6)
    by_round = Balance(at_once, router, EXPERTS)
    got = sum(ours(each.flatten(0, 1), at_once, by_round) for each in x) / ROUNDS
    assert float((got - wanted).norm() / wanted.norm()) < 1e-6
    by_round.clear()
    ours(x[0].flatten(0, 1), at_once, by_round)
    assert by_round.rounds == 1


@pytest.mark.parametrize("training", [True, False])
def test_sinkhorn_chooses_and_weighs_as_megatrons(training: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(LENGTH * SAMPLES, WIDTH, generator=draw)
    weight = torch.randn(EXPERTS, WIDTH, generator=draw).requires_grad_()
    router, decision = Router(1, "sigmoid"), Decision()
    even = partial(evened, samples=SAMPLES, size=SAMPLES, gathered=lambda logits: logits)
    routed = route(x, (weight, None), router, decision, even=even if training else None)
    this = SimpleNamespace(topk=1, training=training, config=SimpleNamespace(moe_aux_loss_coeff=0))
    scores, chosen = TopKRouter.sinkhorn_load_balancing(this, x @ weight.t())
    assert torch.equal(torch.zeros_like(scores).scatter(1, routed.experts, 1.0).bool(), chosen)
    wanted = scores.gather(1, routed.experts)
    assert torch.allclose(routed.probabilities, wanted, rtol=1e-6, atol=0)
    given = torch.randn(wanted.shape, generator=draw)
    (got,), (want,) = (torch.autograd.grad(each, weight, given) for each in (routed.probabilities, wanted))
    assert float((got - want).norm() / want.norm()) < 1e-6
    likeliest = (x @ weight.t()).argmax(1, keepdim=True)
    assert torch.equal(routed.experts, likeliest) != training


def test_a_bias_moves_as_megatrons(monkeypatch: pytest.MonkeyPatch) -> None:
    load = torch.tensor([4, 0, 9, 4, 3])
    bias = torch.tensor([0.5, -1.0, 0.25, 0.0, 2.0])
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr("megatron.core.parallel_state.get_tensor_and_data_parallel_group", lambda **_: None)
    want = get_updated_expert_bias(load, bias, 1e-3)
    move_bias(bias, load, 1e-3)
    assert torch.equal(bias, want)
