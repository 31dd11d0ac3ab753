"""The loss in chunks of tokens: equal to F.cross_entropy of whole logits, and to the decoder's own whole loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.models import Decoder, make_model
from megazero.models.layer import soft_cap
from megazero.tp import IGNORED_LABEL, DeferredGradients, TensorParallel, VocabShard, chunked_loss
from megazero.tp import vocab_parallel_cross_entropy as cross_entropy
from tests.unit.models.test_decoder import SIZES, batch

VALID, ROWS, TOKENS, CAP, Z_LOSS = 29, 32, 14, 2.0, 0.1
SHARD, ONE = VocabShard(0, ROWS, VALID), TensorParallel()
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}


def inputs(dtype: torch.dtype) -> tuple[Tensor, nn.Parameter, Tensor, Tensor]:
    """Return x [7, 2, 8], the weight [rows, 8], labels and weights [7, 2], of which some do not count."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 2, 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = nn.Parameter(torch.randn(ROWS, 8, generator=generator, dtype=torch.float64).to(dtype))
    labels = torch.randint(0, VALID, (7, 2), generator=generator)
    labels[2, 1] = IGNORED_LABEL
    weights = torch.rand(7, 2, generator=generator) * (torch.rand(7, 2, generator=generator) > 0.3)
    return x, weight, labels, weights


def losses(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(soft_cap(logits, CAP), labels, SHARD, ONE, Z_LOSS)


def in_chunks(
    size: int, dtype: torch.dtype, scale: float = 1.0, **tp: Any
) -> tuple[Tensor, Tensor, nn.Parameter]:
    x, weight, labels, weights = inputs(dtype)
    context = TensorParallel(**tp)
    loss = chunked_loss(x, weight, labels, weights, losses, context, size=size, scale=scale)
    return loss, x, weight


def expected(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and its gradients by x and weight, by torch's own functions in fp64 at the rounded inputs."""
    x, weight, labels, weights = inputs(dtype)
    x, weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logits = (CAP * torch.tanh(x @ weight[:VALID].t() / CAP)).flatten(0, 1)
    each = F.cross_entropy(logits, labels.flatten(), reduction="none")
    each = each + Z_LOSS * (logits.logsumexp(-1) ** 2).masked_fill(labels.flatten() == IGNORED_LABEL, 0)
    loss = (each * weights.flatten().double()).sum()
    return loss.detach(), *torch.autograd.grad(loss, (x, weight))


def assert_close(got: Tensor, want: Tensor, bound: float) -> None:
    assert (got.double() - want).norm() <= bound * want.norm()


@pytest.mark.parametrize("size", [1, 3, 7, 13, 14, 100])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_equals_torch_for_any_size(dtype: torch.dtype, size: int) -> None:
    loss, x, weight = in_chunks(size, dtype)
    loss.backward()
    want, bound = expected(dtype), TOLERANCE[dtype]
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert x.grad is not None and weight.grad is not None and weight.grad.dtype == dtype
    for got, exact in zip((loss, x.grad, weight.grad), want, strict=True):
        assert_close(got, exact, bound)
    assert torch.all(weight.grad[VALID:] == 0)


def test_the_gradient_that_the_backward_starts_from_scales() -> None:
    want = expected(torch.float64)
    for scale in (1.0, 3.0):
        loss, x, weight = in_chunks(5, torch.float64, scale)
        loss.backward(torch.tensor(3.0, dtype=torch.float64))
        assert_close(loss, want[0], 1e-13)
        assert x.grad is not None and weight.grad is not None
        assert_close(x.grad / 3, want[1], 1e-13)
        assert_close(weight.grad / 3, want[2], 1e-13)


def test_a_loss_scale_keeps_gradients_of_fp16_in_range() -> None:
    """Of 1e-6, fp16 has a few bits: with the scale in the forward it has all."""
    x, weight, labels, weights = inputs(torch.float16)
    want, small = expected(torch.float16), 2.0**-20
    errors = []
    for scale in (2.0**20, 1.0):
        x.grad = None
        loss = chunked_loss(x, weight, labels, weights * small, losses, ONE, size=5, scale=scale)
        loss.backward(torch.tensor(2.0**20))
        assert x.grad is not None
        errors.append(float((x.grad.double() - want[1]).norm() / want[1].norm()))
    assert errors[0] < TOLERANCE[torch.float16] < 10 * TOLERANCE[torch.float16] < errors[1]


def test_only_what_needs_a_gradient_gets_one() -> None:
    want = expected(torch.float64)
    for frozen in (0, 1):
        x, weight, labels, weights = inputs(torch.float64)
        (x, weight)[frozen].requires_grad_(False)
        chunked_loss(x, weight, labels, weights, losses, ONE, size=4).backward()
        got = (x.grad, weight.grad)
        assert got[frozen] is None
        assert_close(got[1 - frozen], want[2 - frozen], 1e-13)  # type: ignore[arg-type]
    with torch.no_grad():
        loss, *_ = in_chunks(4, torch.float64)
    assert not loss.requires_grad
    assert_close(loss, want[0], 1e-13)


def test_the_weight_s_gradient_can_be_put_off() -> None:
    deferred, want = DeferredGradients(), expected(torch.float64)
    loss, x, weight = in_chunks(4, torch.float64, deferred=deferred)
    with deferred.recording("I"):
        loss.backward(retain_graph=True)
    assert weight.grad is None and x.grad is not None
    assert_close(x.grad, want[1], 1e-13)
    ((owner, gradient),) = deferred.compute("I")
    assert owner is weight
    assert_close(gradient, want[2], 1e-13)
    with pytest.raises(RuntimeError, match="once"):
        loss.backward()


@pytest.mark.parametrize(
    "values",
    [
        {"model_family": "llama"},
        {"model_family": "gemma2", "untie_embeddings_and_output_weights": False},
        {"model_family": "granite"},
    ],
    ids=lambda values: values["model_family"],
)
@pytest.mark.parametrize("chunk", [7, 32, 100])
def test_a_decoder_s_loss(values: dict[str, Any], chunk: int) -> None:
    config = make_model(**{**SIZES, "vocab_size": 301, **values})
    tokens, labels = batch()
    weights = (torch.arange(32).reshape(2, 16) % 5 > 0).float()
    found = []
    for size in (None, chunk):
        decoder = Decoder(config, z_loss=1e-2, loss_chunk=size, dtype=torch.float64)
        decoder.initialize(7)
        loss = decoder(tokens, labels, loss_weights=weights)
        loss.backward()
        decoder.eval()
        with torch.no_grad():
            evaluated = decoder(tokens, labels, loss_weights=weights)
            each = decoder(tokens, labels)
        assert_close(evaluated, (each * weights).sum(), 1e-14)
        found.append((loss.detach(), *(p.grad for p in decoder.parameters())))
    for whole, chunked in zip(*found, strict=True):
        if chunk >= tokens.numel():
            assert torch.equal(whole, chunked)
        assert_close(chunked, whole, 1e-12)
