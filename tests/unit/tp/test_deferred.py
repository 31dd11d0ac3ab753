"""Weight gradients that are put off: which they are, what they hold meanwhile. tests/dist/models/test_tp.py compares
them with the direct backward's, to the bit."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from megazero.models import Decoder, make_model
from megazero.tp import (
    ColumnParallelLinear,
    DeferredGradients,
    RowParallelLinear,
    TensorParallel,
    column_parallel,
)
from tests.messages import refused
from tests.sizes import DECODER

BIASES = make_model(**DECODER, add_bias_linear=True, normalization="LayerNorm")


def deferrable(decoder: Decoder) -> set[nn.Parameter]:
    """What W owes on one rank: everything but norms and learned positions."""
    kinds = (ColumnParallelLinear, RowParallelLinear)
    linears = {p for m in decoder.modules() if isinstance(m, kinds) for p in m.parameters()}
    return {*linears, decoder.embedding.tokens.weight, decoder.head.weight}


def test_micro_batches_are_kept_apart_and_one_key_adds_up():
    deferred = DeferredGradients()
    decoder = Decoder(BIASES, TensorParallel(deferred=deferred), dtype=torch.float64)
    decoder.initialize(3)
    batches = torch.randint(0, 101, (2, 3, 12), generator=torch.Generator().manual_seed(0))

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        return decoder(tokens, tokens.roll(-1, 1)).sum()

    expected = [torch.autograd.grad(loss(tokens), list(decoder.parameters())) for tokens in batches]
    for key, tokens in zip(("a", "b", "both", "both"), (*batches, *batches), strict=True):
        with deferred.recording(key):
            loss(tokens).backward()
    got = {key: dict(deferred.compute(key)) for key in ("b", "both", "a")}
    for parameter, first, second in zip(decoder.parameters(), *expected, strict=True):
        if parameter in deferrable(decoder):
            assert torch.equal(got["a"][parameter], first)
            assert torch.equal(got["b"][parameter], second)
            assert torch.equal(got["both"][parameter], first + second)


def small(deferred: DeferredGradients, bias: bool = True) -> nn.Sequential:
    tp = TensorParallel(deferred=deferred)
    torch.manual_seed(0)
    model = nn.Sequential(
        ColumnParallelLinear(4, 6, tp, bias=bias), nn.Tanh(), RowParallelLinear(6, 4, tp, bias=bias)
    )
    for p in model.parameters():
        nn.init.normal_(p)
    return model


def test_compute_reads_no_weights():
    deferred = DeferredGradients()
    model = small(deferred)
    x = torch.randn(3, 2, 4)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    with deferred.recording(0):
        model(x).sum().backward()
    for p in model.parameters():
        p.untyped_storage().resize_(0)
    got = dict(deferred.compute(0))
    assert all(torch.equal(got[p], g) for p, g in zip(model.parameters(), expected, strict=True))


def test_entries_hold_no_graph_and_go_as_they_are_drawn():
    deferred = DeferredGradients()
    model = small(deferred, bias=False)

    class Watched(torch.autograd.Function):
        contexts: list[weakref.ref] = []

        @staticmethod
        def forward(ctx, x):
            Watched.contexts.append(weakref.ref(ctx))
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad

    inputs = []
    for m in (model[0], model[2]):
        m.register_forward_pre_hook(lambda _, args: inputs.append(args[0].untyped_storage()._weak_ref()))
    with deferred.recording(0):
        model(Watched.apply(torch.randn(3, 2, 4, requires_grad=True))).sum().backward()

    def alive() -> list[bool]:
        return [not torch.UntypedStorage._expired(ref) for ref in inputs]

    assert Watched.contexts[0]() is None
    assert alive() == [True, True]
    pairs = deferred.compute(0)
    next(pairs)
    assert alive()[0]
    next(pairs)
    assert alive() == [True, False]
    assert next(pairs, None) is None
    assert alive() == [False, False]
    for ref in inputs:
        torch.UntypedStorage._free_weak_ref(ref)


@pytest.mark.parametrize("frozen", [{"0.weight"}, {"0.bias"}, {"0.weight", "0.bias"}, {"2.weight"}])
@pytest.mark.parametrize("record", [False, True])
def test_frozen_parameters_are_left_out(frozen, record):
    deferred = DeferredGradients()
    model = small(deferred)
    x = torch.randn(3, 2, 4, requires_grad=True)
    expected = dict(
        zip(
            [n for n, _ in model.named_parameters()],
            torch.autograd.grad(model(x).sum(), list(model.parameters())),
            strict=True,
        )
    )
    for name, p in model.named_parameters():
        p.requires_grad_(name not in frozen)
    if record:
        with deferred.recording(0):
            model(x).sum().backward()
        gradients = dict(deferred.compute(0))
    else:
        model(x).sum().backward()
        gradients = {p: p.grad for p in model.parameters() if p.grad is not None}
    got = {name: gradients[p] for name, p in model.named_parameters() if p in gradients}
    assert got.keys() == expected.keys() - frozen
    assert all(torch.equal(g, expected[name]) for name, g in got.items())
    assert x.grad is not None


def test_what_the_backward_does_not_need_is_not_saved():
    deferred = DeferredGradients()
    model = small(deferred)
    x = torch.randn(3, 2, 4)

    def saved(x: torch.Tensor) -> list[torch.Size]:
        shapes: list[torch.Size] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(t.shape) or t, lambda t: t):
            model[0](x)
        return shapes

    assert saved(x) == [(3, 2, 4)]  # an input without gradient: no weight
    assert saved(x.requires_grad_()) == [(3, 2, 4), (6, 4)]
    model[0].weight.requires_grad_(False)
    assert saved(x) == [(6, 4)]  # a frozen weight: no input


def test_discard_and_errors():
    deferred = DeferredGradients()
    model = small(deferred)
    x = torch.randn(3, 2, 4)
    with deferred.recording("a"):
        model(x).sum().backward()
        with (
            refused("recording('b')", "recording('a')", by=RuntimeError),
            deferred.recording("b"),
        ):
            pass
        with refused("compute('a')", by=RuntimeError):
            deferred.compute("a")
    deferred.discard()
    with refused("'a'", by=KeyError):
        deferred.compute("a")
    with deferred.recording("a"):
        pass
    assert list(deferred.compute("a")) == []
    with pytest.raises(KeyError):  # computed already
        deferred.compute("a")
    with pytest.raises(ZeroDivisionError), deferred.recording("a"):
        raise ZeroDivisionError
    assert not deferred.is_recording


def test_second_derivatives_are_refused():
    deferred = DeferredGradients()
    weight = nn.Parameter(torch.randn(5, 4))
    x = torch.randn(3, 2, 4, requires_grad=True)
    (y,) = column_parallel(x, [(weight, None)], TensorParallel(deferred=deferred))
    (grad,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
    with refused("once_differentiable", by=RuntimeError):
        grad.sum().backward()
