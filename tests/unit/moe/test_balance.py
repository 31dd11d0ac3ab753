"""Losses that balance experts, counts of tokens and the bias: against plain loops."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megazero.config import World, make_config
from megazero.models import Decoder, make_model
from megazero.moe import Balance, BalanceLosses, Decision, Router, evened, route
from megazero.moe.balance import counted, move_bias
from megazero.train.distributed import make_mesh
from megazero.train.expert_balance import ExpertBalance, LayerBalance, StepBalance, memory_explained
from megazero.train.parallelize import build_decoder, shard_decoder
from megazero.zero.engine import Engine
from tests.sizes import TINY
from tests.unit.moe.test_moe import BIASED, drawn

LENGTH, SAMPLES, E, H = 5, 6, 8, 4
COEFFICIENT, Z, SCALE = 0.5, 0.25, 3.0
ROUTERS = {
    "softmax": Router(2),
    "of all": Router(2, pre_softmax=True),
    "sigmoids": Router(2, "sigmoid"),
    "groups": Router(2, num_groups=4, group_topk=1),
}


def likeliest(logits: Tensor, router: Router) -> tuple[Tensor, list[list[int]]]:
    """Return the likelihoods of each token, and its likeliest experts of all."""
    shares = logits.softmax(-1) if router.score_function == "softmax" else logits.sigmoid()
    shares = shares / shares.sum(-1, keepdim=True)
    return shares, [row.argsort(descending=True)[: router.topk].tolist() for row in shares]


def by_hand(logits: Tensor, router: Router, size: int, so_far: bool) -> Tensor:
    """Return the mean over blocks of ``size`` samples, token by token. Samples alternate. so_far: the blocks before
    count, too."""
    shares, chosen = likeliest(logits, router)
    losses, seen = [], [0] * E
    for number, first in enumerate(range(0, SAMPLES, size)):
        tokens = [t for t in range(len(logits)) if first <= t % SAMPLES < first + size]
        counts = [sum(expert in chosen[t] for t in tokens) for expert in range(E)]
        if so_far:
            seen = [n + m for n, m in zip(seen, counts, strict=True)]
            counts = [n / (number + 1) for n in seen]
        sums = [sum(shares[t, expert] for t in tokens) for expert in range(E)]
        total = sum(n * p for n, p in zip(counts, sums, strict=True))
        losses.append(E * total / (router.topk * len(tokens) ** 2))
    return sum(losses, torch.zeros(())) / len(losses)


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
@pytest.mark.parametrize(
    ("kind", "size"),
    [("over_micro_batches", 3), ("over_micro_batches", SAMPLES), ("over_samples", 1), ("over_step", 3)],
)
def test_a_loss_is_the_mean_over_blocks_and_its_gradient_is_added(
    router: Router, kind: str, size: int
) -> None:
    x, weight = drawn(LENGTH * SAMPLES, H), drawn(E, H, seed=1).requires_grad_()
    losses = BalanceLosses(**{kind: COEFFICIENT}, z=Z, samples=size, scale=lambda: SCALE)
    balance, decision, given = Balance(losses, router, E), Decision(), drawn(LENGTH * SAMPLES, 2, seed=2)
    routed = route(x, (weight, None), router, decision)
    out = balance.attach(routed, decision, SAMPLES, LENGTH, lambda counts: counts)
    assert torch.equal(out, routed.probabilities)
    (got,) = torch.autograd.grad(out, weight, given, retain_graph=True)
    (without,) = torch.autograd.grad(routed.probabilities, weight, given)
    logits = x @ weight.t()
    loss, z = by_hand(logits, router, size, kind == "over_step"), logits.logsumexp(-1).square().mean()
    (added,) = torch.autograd.grad(COEFFICIENT * loss + Z * z, weight)
    assert torch.allclose(got - without, SCALE * added, rtol=1e-9, atol=1e-12)
    assert torch.allclose(balance.values, torch.stack([loss, z]).detach(), rtol=1e-12)
    assert balance.load.tolist() == [int((routed.experts == expert).sum()) for expert in range(E)]


def test_several_losses_add_up_and_their_mean_is_told() -> None:
    x, weight, router = drawn(LENGTH * SAMPLES, H), drawn(E, H, seed=1).requires_grad_(), Router(2)
    weights = {"over_samples": 0.5, "over_micro_batches": 0.25, "over_step": 1.0}

    def attached(**of: float) -> tuple[Tensor, float]:
        balance, decision = Balance(BalanceLosses(**of, samples=3), router, E), Decision()
        out = balance.attach(
            route(x, (weight, None), router, decision), decision, SAMPLES, LENGTH, lambda own: own
        )
        return torch.autograd.grad(out, weight, torch.zeros_like(out))[0], balance.values[0].item()

    apart = {kind: attached(**{kind: each}) for kind, each in weights.items()}
    got, value = attached(**weights)
    assert torch.allclose(got, sum(gradient for gradient, _ in apart.values()), rtol=1e-9, atol=1e-12)
    assert value == pytest.approx(sum(weights[kind] * each for kind, (_, each) in apart.items()) / 1.75)


def test_sinkhorn_makes_experts_as_likely_in_each_micro_batch() -> None:
    logits, size = 2 * drawn(LENGTH * SAMPLES, E), 3
    ranks = evened(logits, SAMPLES, size, lambda own: own).view(LENGTH, SAMPLES, E)
    for first in (0, size):
        own = ranks[:, first : first + size].flatten(0, 1).softmax(-1).sum(0)  # tokens have the same sums
        assert torch.allclose(own, torch.full_like(own, LENGTH * size / E), rtol=0.02)
        alone = logits.view(LENGTH, SAMPLES, E)[:, first : first + size].flatten(0, 1)
        assert torch.equal(
            evened(alone, size, size, lambda own: own), ranks[:, first : first + size].flatten(0, 1)
        )


def test_tokens_are_counted_by_blocks_of_samples() -> None:
    experts = torch.tensor([[0, 3], [1, 2], [2, 3], [0, 1], [3, 0], [1, 3], [0, 2], [1, 0]])
    for blocks, samples in product((1, 2, 4), (4,)):
        want = torch.zeros(blocks, 4, dtype=torch.int64)
        for token, chosen in enumerate(experts.tolist()):
            for expert in chosen:
                want[token % samples // (samples // blocks), expert] += 1
        assert torch.equal(counted(experts, blocks, samples, 4), want)


def test_a_bias_moves_by_the_rate_towards_the_mean() -> None:
    bias = torch.zeros(4)
    move_bias(bias, torch.tensor([5, 3, 4, 4]), 0.5)
    assert bias.tolist() == [-0.5, 0.5, 0, 0]
    move_bias(
        bias, torch.tensor([2**53 + 4, 2**53 + 1, 2**53 + 1, 2**53 + 1]), 0.5
    )  # beyond a float's integers
    assert bias.tolist() == [-1, 1, 0.5, 0.5]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_step_is_counted_once_and_an_evaluation_never(recompute: str) -> None:
    losses = BalanceLosses(over_samples=COEFFICIENT, z=Z)
    decoder = Decoder(make_model(**BIASED), recompute=recompute, balance=losses, dtype=torch.float64)
    plain = Decoder(make_model(**BIASED), dtype=torch.float64)
    tokens = torch.arange(12).view(2, 6)
    results = []
    for each in (decoder, plain):
        each.initialize(0)
        each.eval()(tokens)
        loss = each.train()(tokens, tokens.roll(-1, 1)).sum()
        loss.backward()
        results.append((loss.item(), each.layers["1"].mlp.router.weight.grad.clone()))
    assert results[0][0] == results[1][0] and not torch.allclose(results[0][1], results[1][1])
    for balance in decoder.balances().values():
        assert balance.load.sum() == 2 * tokens.numel()
        assert 0.9 < balance.values[0] < 2 and balance.values[1] > 0
    decoder.eval()(tokens)
    assert all(balance.load.sum() == 2 * tokens.numel() for balance in decoder.balances().values())


def test_a_loss_scale_changes_no_gradient() -> None:
    """A step's divisor has the scale, and so has what is attached: both are powers of 2, so bits are the same."""
    values = {
        **TINY,
        "num_experts": 4,
        "moe_ffn_hidden_size": 8,
        "micro_batch_size": 2,
        "params_dtype": "fp32",
    }
    values |= {"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.25}
    config = make_config(values, World(1, 1))
    mesh, tokens = make_mesh(config, World(1, 1), torch.device("cpu")), torch.arange(24).view(2, 12)
    found = []
    for scale, coefficient in ((1.0, 0.5), (1024.0, 0.5), (1.0, 0.0)):
        training = replace(config.training, moe_aux_loss_coeff=(coefficient,))
        own = replace(config, training=training)
        decoder = build_decoder(own, mesh)
        engine = shard_decoder(decoder, own, mesh)
        engine.begin_step(2, 64 * scale)
        for batch in (tokens, tokens.flip(1)):
            (decoder(batch, batch.roll(-1, 1)).sum() * scale).backward()
        found.append({name: gradient.clone() for name, gradient in engine.gradients()})
        engine.step()
        mesh.release()
    plain, scaled, without = found
    assert all(torch.equal(gradient, scaled[name]) for name, gradient in plain.items())
    router = "layers.0.mlp.router.weight"
    assert not torch.allclose(plain[router], without[router])


def test_a_skipped_or_aborted_step_moves_no_bias_and_its_tokens_are_forgotten() -> None:
    values = {**TINY, "num_experts": 4, "moe_ffn_hidden_size": 8, "init_method_std": 0.3}
    values |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    config = make_config(values, World(1, 1))
    mesh, tokens = make_mesh(config, World(1, 1), torch.device("cpu")), torch.arange(24).view(2, 12)
    decoder = build_decoder(config, mesh)
    engine = shard_decoder(decoder, config, mesh)
    bias = decoder.layers["0"].mlp.router.e_score_correction_bias
    engine.begin_step(1, 24)
    decoder(tokens, tokens.roll(-1, 1))
    engine.abort_step()
    for factor, moved in ((torch.inf, False), (1.0, True)):
        engine.begin_step(1, 24)
        (decoder(tokens, tokens.roll(-1, 1)).sum() * factor).backward()
        balance = decoder.balances()[0]
        load = balance.load.clone()
        assert load.sum() == 2 * tokens.numel()
        assert engine.step().skipped is not moved
        assert bias.any() == moved and not balance.load.any()
    assert torch.equal(bias, 1e-3 * (load.float().mean() - load).sign())
    mesh.release()


@dataclass
class Parts:
    parts: list[Any] = field(default_factory=list)

    part = Engine.part


def test_an_error_of_memory_names_the_fullest_expert() -> None:
    engine: Any = Parts()
    with pytest.raises(torch.OutOfMemoryError, match="^no room$"), memory_explained(engine):
        raise torch.OutOfMemoryError("no room")
    balance = object.__new__(ExpertBalance)
    balance.last = StepBalance(LayerBalance(0, 0, 3.217), 7, {})
    engine.parts.append(balance)
    said = "no room In the step before, the fullest expert of layer 7 got 3.22 times the mean"
    with pytest.raises(torch.OutOfMemoryError, match=said), memory_explained(engine):
        raise torch.OutOfMemoryError("no room")
