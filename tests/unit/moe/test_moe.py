"""Routing, the way of rows to experts and back, grouped products: against plain loops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.kernels.weighted_swiglu import weighted_swiglu
from megazero.models import Decoder, make_model
from megazero.moe import Decision, Dispatch, ExpertParallel, Router, biased, route, weighted
from megazero.products.product import PLAIN
from tests.hugging_face import to_hf_state_dict

T, H, E, K = 23, 12, 5, 2


def drawn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def by_hand(scores: Tensor, router: Router, bias: Tensor) -> tuple[list[int], Tensor]:
    """Return the experts of one token by scores [E], and their probabilities, in plain steps."""
    sigmoid = router.score_function == "sigmoid"
    shares = scores.sigmoid() if sigmoid else scores.softmax(0)
    ranks = shares + bias if sigmoid else shares
    if not sigmoid and not router.pre_softmax:
        ranks = scores
    allowed = set(range(len(scores)))
    if router.group_topk is not None:
        assert router.num_groups is not None
        size, best = len(scores) // router.num_groups, router.topk // router.group_topk
        groups = [list(range(first, first + size)) for first in range(0, len(scores), size)]
        groups.sort(key=lambda own: -sum(sorted((float(ranks[e]) for e in own), reverse=True)[:best]))
        allowed = {e for own in groups[: router.group_topk] for e in own}
    chosen = sorted(allowed, key=lambda e: -float(ranks[e]))[: router.topk]
    kept = shares[chosen]
    normed = router.topk > 1 if sigmoid else not router.pre_softmax
    return chosen, (kept / kept.sum() if normed else kept) * (router.scaling_factor or 1)


ROUTERS = {
    "softmax of the chosen": Router(K),
    "softmax of all": Router(K, pre_softmax=True),
    "scaled": Router(K, scaling_factor=2.5),
    "one of all": Router(1, pre_softmax=True),
    "sigmoids": Router(K, "sigmoid"),
    "one sigmoid": Router(1, "sigmoid"),
    "groups of logits": Router(4, num_groups=4, group_topk=2),
    "groups of shares": Router(4, pre_softmax=True, num_groups=3, group_topk=2),
    "groups of sigmoids": Router(4, "sigmoid", scaling_factor=1.5, num_groups=4, group_topk=2),
    "one group": Router(3, "sigmoid", num_groups=2, group_topk=1),
}
MANY = 12


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_a_router_chooses_the_likeliest_experts(router: Router) -> None:
    x, weight, decision = drawn(T, H), drawn(MANY, H, seed=1), Decision()
    bias = drawn(MANY, seed=2).float() if router.score_function == "sigmoid" else None
    logits, experts, probabilities = route(x, (weight, None), router, decision, bias)
    for token, (chosen, shares) in enumerate(zip(experts, probabilities, strict=True)):
        want, p = by_hand(weight @ x[token], router, torch.zeros(MANY) if bias is None else bias)
        assert chosen.tolist() == want and torch.allclose(shares, p, rtol=1e-12)
    assert decision.experts is not None and torch.equal(decision.experts.long(), experts)
    ranks = router.ranks(logits, bias)
    assert not router.regret(ranks, experts).any()
    worse = torch.stack([ranks[t].argsort()[: router.topk] for t in range(T)])  # the unlikeliest
    assert (router.regret(ranks, worse) > 0).all()


def test_the_regret_of_groups_that_are_as_good_is_none_whichever_were_taken() -> None:
    router = Router(2, "sigmoid", num_groups=3, group_topk=1)
    ranks = torch.tensor([[0.5, 0.1, 0.4, 0.2, 0.1, 0.1]])
    for taken in ([0, 1], [2, 3]):
        assert router.regret(ranks, torch.tensor([taken])).item() == pytest.approx(0, abs=1e-7)
    assert router.regret(ranks, torch.tensor([[4, 5]])).item() == pytest.approx(0.4)
    assert router.regret(ranks, torch.tensor([[0, 2]])).item() == torch.inf  # of two groups


def test_a_bias_chooses_and_has_no_part_in_probabilities() -> None:
    x, weight, router = drawn(T, H), drawn(E, H, seed=1), Router(K, "sigmoid")
    bias = torch.zeros(E)
    bias[3] = 2.0  # above every sigmoid
    logits, experts, probabilities = route(x, (weight, None), router, Decision(), bias)
    assert (experts == 3).any(1).all()
    shares = logits.gather(1, experts).sigmoid()
    assert torch.allclose(probabilities, shares / shares.sum(1, keepdim=True))


def test_a_decision_is_taken_once_and_scores_are_in_fp32() -> None:
    x, weight, decision = (
        drawn(T, H, dtype=torch.bfloat16),
        drawn(E, H, dtype=torch.bfloat16, seed=1),
        Decision(),
    )
    routed = route(x, (weight, None), Router(K), decision)
    assert routed.probabilities.dtype is torch.float32
    other = route(-x, (weight, None), Router(K), decision)  # whose likeliest are others
    assert torch.equal(other.experts, routed.experts)
    logits = -x.float() @ weight.float().t()
    assert torch.allclose(other.probabilities, logits.gather(1, other.experts).softmax(1))


@pytest.mark.parametrize("weighted", [False, True])
def test_rows_take_the_bias_of_their_expert(weighted: bool) -> None:
    ends = torch.tensor([3, 3, 8], dtype=torch.int32)  # the second expert has none
    tensors = [drawn(8, H), drawn(3, H, seed=1), drawn(8, seed=2)]
    rows, bias, probabilities = (x.requires_grad_() for x in tensors)
    own = bias[torch.tensor([0, 0, 0, 2, 2, 2, 2, 2])]
    expected = rows + (own * probabilities[:, None] if weighted else own)
    found = biased(rows, bias, ends, probabilities if weighted else None)
    assert torch.allclose(found, expected, rtol=1e-12)
    wanted = [x for x in (rows, bias, probabilities) if weighted or x is not probabilities]
    along = drawn(8, H, seed=3)
    for one, other in zip(*(torch.autograd.grad(y, wanted, along) for y in (found, expected)), strict=True):
        assert torch.allclose(one, other, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 13], ids=["aligned", "odd"])
def test_grouped_products_are_those_of_each_expert(dtype: torch.dtype, width: int) -> None:
    counts = [7, 0, 11, 1, 0]
    rows, weight = drawn(sum(counts), width, dtype=dtype), drawn(E, 24, width, dtype=dtype, seed=1)
    rows.requires_grad_(), weight.requires_grad_()
    out = PLAIN.grouped(rows, weight, torch.tensor(counts).cumsum(0).int())
    wanted = torch.cat([own @ w.t() for own, w in zip(rows.split(counts), weight, strict=True)])
    assert torch.equal(out, wanted)
    grad = drawn(*out.shape, dtype=dtype, seed=2)
    for got, want in zip(*(torch.autograd.grad(y, (rows, weight), grad) for y in (out, wanted)), strict=True):
        assert torch.allclose(got, want, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5)
    assert not torch.autograd.grad(
        PLAIN.grouped(rows, weight, torch.tensor(counts).cumsum(0).int()), weight, grad
    )[0][1].any()


def test_rows_go_to_their_experts_and_back() -> None:
    """Ordered by expert and then by token; sums and gradients are those of indexing."""
    x = drawn(T, H).requires_grad_()
    experts = torch.stack(
        [torch.randperm(E - 1, generator=torch.Generator().manual_seed(i))[:K] for i in range(T)]
    )
    dispatch = Dispatch(experts, E)  # the last expert gets none
    shares = drawn(T, K, seed=3).requires_grad_()
    rows, of_rows = dispatch.spread(x, shares)
    owners = sorted((int(e), t) for t, own in enumerate(experts) for e in own)
    assert torch.equal(rows, x[[t for _, t in owners]])
    assert dispatch.ends.tolist() == [sum(e <= last for e, _ in owners) for last in range(E)]
    factors = torch.tensor([e + 1.0 for e, _ in owners], dtype=torch.float64)
    out = dispatch.collect(rows * (of_rows * factors)[:, None])
    wanted = x * (shares * (experts + 1)).sum(1, keepdim=True)
    assert torch.allclose(out, wanted, rtol=1e-12)
    grad = drawn(T, H, seed=4)
    for got, want in zip(*(torch.autograd.grad(y, (x, shares), grad) for y in (out, wanted)), strict=True):
        assert torch.allclose(got, want, rtol=1e-12)


def test_a_tokens_rows_are_added_before_they_are_rounded() -> None:
    """256 + 1 is 256 in bf16."""
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert Dispatch(torch.tensor([[0, 1, 2]]), 3).collect(rows).tolist() == [[258]]


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


def test_initial_values_of_experts_in_one_tensor_are_each_its_own() -> None:
    """Of gate and up projection, too, which are parts of it, and on ranks that share the experts."""
    choices = {"model_family": "granitemoe", "max_position_embeddings": 16, "hidden_size": 32}
    decoder = Decoder(make_model(**{**SIZES, **choices}))
    decoder.initialize(3)
    whole, shared = to_hf_state_dict(decoder), dict[str, Tensor]()
    for rank in range(2):
        own = Decoder(decoder.config, ep=ExpertParallel(rank=rank, size=2))
        own.initialize(3)
        to_hf_state_dict(own, shared)
    assert all(torch.equal(shared[name], tensor) for name, tensor in whole.items())
    stored = whole["model.layers.1.block_sparse_moe.input_linear.weight"]
    assert stored.shape == (4, 2 * decoder.config.expert_width, 32)
    rows = stored.flatten(0, 1)
    assert 0.015 < rows.std() < 0.025 and len(rows.unique(dim=0)) == len(rows)


BIASED = {**MIXTURE, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


WEIGHTED = {
    "weighted": (1, weighted, lambda x: x),
    "swiglu": (2, weighted_swiglu, lambda gate, up: F.silu(gate) * up),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, T])
@pytest.mark.parametrize("inputs, own, plain", WEIGHTED.values(), ids=WEIGHTED)
def test_rows_are_weighted_as_by_a_product_that_is_rounded(
    inputs: int, own: Callable[..., Tensor], plain: Callable[..., Tensor], rows: int, dtype: torch.dtype
) -> None:
    """Bit for bit, gradients too."""
    grad, *xs = (drawn(rows, H, dtype=dtype, seed=seed).requires_grad_() for seed in range(inputs + 1))
    probabilities = drawn(rows, seed=3).to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    found, wanted = own(*xs, probabilities), (plain(*xs) * probabilities.unsqueeze(-1)).to(dtype)
    pairs = zip(
        (found, *torch.autograd.grad(found, (*xs, probabilities), grad)),
        (wanted, *torch.autograd.grad(wanted, (*xs, probabilities), grad)),
        strict=True,
    )
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)
