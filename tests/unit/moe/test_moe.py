"""Routing, the way of rows to experts and back, grouped products: against plain loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megazero.models import Decoder, make_model
from megazero.moe import Decision, Dispatch, grouped_linear, route
from tests.hugging_face import to_hf_state_dict

T, H, E, K = 23, 12, 5, 2


def drawn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("pre_softmax", [False, True])
def test_a_router_chooses_the_likeliest_experts(pre_softmax: bool) -> None:
    x, weight, decision = drawn(T, H), drawn(E, H, seed=1), Decision()
    experts, probabilities = route(x, weight, K, pre_softmax, decision)
    for token, (chosen, share) in enumerate(zip(experts, probabilities, strict=True)):
        scores = weight @ x[token]
        assert chosen.tolist() == scores.argsort(descending=True)[:K].tolist()
        exps = scores.exp()
        assert torch.allclose(share, exps[chosen] / (exps if pre_softmax else exps[chosen]).sum())
    assert decision.experts is not None and torch.equal(decision.experts.long(), experts)


def test_a_decision_is_taken_once_and_scores_are_in_fp32() -> None:
    x, weight, decision = (
        drawn(T, H, dtype=torch.bfloat16),
        drawn(E, H, dtype=torch.bfloat16, seed=1),
        Decision(),
    )
    experts, probabilities = route(x, weight, K, False, decision)
    assert probabilities.dtype is torch.float32
    other, shares = route(-x, weight, K, False, decision)  # whose likeliest are others
    assert torch.equal(other, experts)
    assert torch.allclose(shares, (-x.float() @ weight.float().t()).gather(1, experts).softmax(1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 13], ids=["aligned", "odd"])
def test_grouped_products_are_those_of_each_expert(dtype: torch.dtype, width: int) -> None:
    counts = [7, 0, 11, 1, 0]
    rows, weight = drawn(sum(counts), width, dtype=dtype), drawn(E, 24, width, dtype=dtype, seed=1)
    rows.requires_grad_(), weight.requires_grad_()
    out = grouped_linear(rows, weight, torch.tensor(counts).cumsum(0).int())
    wanted = torch.cat([own @ w.t() for own, w in zip(rows.split(counts), weight, strict=True)])
    assert torch.equal(out, wanted)
    grad = drawn(*out.shape, dtype=dtype, seed=2)
    for got, want in zip(*(torch.autograd.grad(y, (rows, weight), grad) for y in (out, wanted)), strict=True):
        assert torch.allclose(got, want, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5)
    assert not torch.autograd.grad(
        grouped_linear(rows, weight, torch.tensor(counts).cumsum(0).int()), weight, grad
    )[0][1].any()


def test_rows_go_to_their_experts_and_back() -> None:
    """Ordered by expert and then by token; sums and gradients are those of indexing."""
    x = drawn(T, H).requires_grad_()
    experts = torch.stack(
        [torch.randperm(E - 1, generator=torch.Generator().manual_seed(i))[:K] for i in range(T)]
    )
    dispatch = Dispatch(experts, E)  # the last expert gets none
    rows = dispatch.spread(x)
    owners = sorted((int(e), t) for t, own in enumerate(experts) for e in own)
    assert torch.equal(rows, x[[t for _, t in owners]])
    assert dispatch.ends.tolist() == [sum(e <= last for e, _ in owners) for last in range(E)]
    shares = drawn(T, K, seed=3).requires_grad_()
    factors = torch.tensor([e + 1.0 for e, _ in owners], dtype=torch.float64)
    out = dispatch.collect(rows * (dispatch.per_row(shares) * factors)[:, None])
    wanted = x * (shares * (experts + 1)).sum(1, keepdim=True)
    assert torch.allclose(out, wanted, rtol=1e-12)
    grad = drawn(T, H, seed=4)
    for got, want in zip(*(torch.autograd.grad(y, (x, shares), grad) for y in (out, wanted)), strict=True):
        assert torch.allclose(got, want, rtol=1e-12)


SIZES = {"num_layers": 3, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 40, "num_experts": 4}
MIXTURE = {"model_family": "qwen3_moe", "moe_layer_freq": (0, 1, 1), "max_position_embeddings": 16, **SIZES}


def test_a_recompute_replays_the_first_forwards_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the router's weights changed in between, as rounding may turn a near tie around."""
    decoder = Decoder(make_model(**MIXTURE), recompute="full", dtype=torch.float64)
    decoder.initialize(0)
    tokens, decisions = torch.arange(12).view(2, 6), dict[int, Decision]()
    loss = decoder(tokens, tokens.roll(-1, 1), decisions=decisions).sum()
    assert list(decisions) == [1, 2]
    router = decoder.layers["2"].mlp.router.weight
    before = {n: decision.experts.clone() for n, decision in decisions.items()}
    with torch.no_grad():
        router.copy_(router.flip(0))
    loss.backward()
    assert all(torch.equal(decisions[n].experts, experts) for n, experts in before.items())
    experts = decoder.layers["2"].mlp.experts.up_proj.weight.grad.flatten(1).norm(dim=1)
    assert set(experts.nonzero().flatten().tolist()) == set(before[2].flatten().tolist())


def test_decisions_of_another_run_are_taken_as_they_are() -> None:
    decoder = Decoder(make_model(**MIXTURE), dtype=torch.float64)
    decoder.initialize(0)
    tokens = torch.arange(12).view(2, 6)
    free = decoder.full_logits(tokens)
    given = {n: Decision(torch.tensor([[3, 0]] * 12, dtype=torch.int32)) for n in (1, 2)}
    assert not torch.allclose(decoder(tokens, decisions=given)[..., :40], free)
    assert all(decision.experts.tolist() == [[3, 0]] * 12 for decision in given.values())


def test_initial_values_are_drawn_by_the_names_of_single_experts() -> None:
    few, many = (Decoder(make_model(**{**MIXTURE, "num_experts": count})) for count in (4, 6))
    for decoder in (few, many):
        decoder.initialize(3)
    one, other = (to_hf_state_dict(decoder) for decoder in (few, many))
    names = [name for name in one if ".experts." in name]
    assert len(names) == 2 * 4 * 3 and all(torch.equal(one[name], other[name]) for name in names)
    first, second = (one[f"model.layers.1.mlp.experts.{i}.up_proj.weight"] for i in (0, 1))
    assert not torch.equal(first, second) and 0.015 < first.std() < 0.025


def test_initial_values_of_experts_in_one_tensor_are_each_its_own() -> None:
    """Of gate and up projection, too, which are parts of it."""
    choices = {"model_family": "granitemoe", "max_position_embeddings": 16, "hidden_size": 32}
    decoder = Decoder(make_model(**{**SIZES, **choices}))
    decoder.initialize(3)
    stored = to_hf_state_dict(decoder)["model.layers.1.block_sparse_moe.input_linear.weight"]
    assert stored.shape == (4, 2 * decoder.config.expert_width, 32)
    assert 0.015 < stored.std() < 0.025 and len(stored.flatten(0, 1).unique(dim=0)) == 8 * decoder.config.expert_width
