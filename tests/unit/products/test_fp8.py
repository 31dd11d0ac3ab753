"""Products in fp8 against torchao's, against fp64 within the bound of rounding, and at the edges of the formats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from megazero.products import FP8_PRODUCTS, make_product
from megazero.products import fp8 as fp8_module
from megazero.products.fp8 import BLOCK, E4M3, E5M2, WHOLE, Rounded, multiply, rounded
from megazero.products.product import PLAIN, Product
from megazero.tp import DeferredGradients, RowParallelLinear, TensorParallel, column_parallel
from tests.messages import refused

# Half of the last place of a normal number, and of the largest number what is rounded to zero.
HALF = {E4M3: 2.0**-4, E5M2: 2.0**-3}
LOST = {E4M3: 2.0**-17, E5M2: 2.0**-31}
BLOCKS = (None, (1, WHOLE), (1, BLOCK), (BLOCK, BLOCK))
Parts = tuple[Tensor, ...]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of many sizes."""
    made = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=made) * torch.randn(shape, generator=made).exp2()).bfloat16()


def parts(product: Product, x: Tensor, weights: list[Tensor], grads: list[Tensor]) -> Parts:
    """The outputs of linears of one input, and the gradients of the input and of the weights."""
    leaves = [each.detach().requires_grad_() for each in (x, *weights)]
    outputs = column_parallel(leaves[0], [(w, None) for w in leaves[1:]], TensorParallel(product=product))
    return (*outputs, *torch.autograd.grad(outputs, leaves, grads))


def torchao_config(recipe: str, gradients: torch.dtype) -> Any:
    """Its configuration, with scales that are powers of two."""
    config = pytest.importorskip("torchao.float8.config")
    name = {"tensorwise": "tensorwise", "rowwise": "rowwise_with_gw_hp"}[recipe]
    made = config.Float8LinearConfig.from_recipe_name(name)
    cast = replace(made.cast_config_grad_output, target_dtype=gradients)
    if recipe == "tensorwise":
        made = replace(made, cast_config_grad_output=cast, cast_config_grad_output_for_grad_weight=cast)
    return replace(made, emulate=True, round_scales_to_power_of_2=True)


@pytest.mark.parametrize(
    ("recipe", "gradients"), [("tensorwise", E4M3), ("tensorwise", E5M2), ("rowwise", E4M3)], ids=str
)
def test_torchao_has_the_same_bits(recipe: str, gradients: torch.dtype) -> None:
    config = torchao_config(recipe, gradients)
    from torchao.float8.float8_linear import Float8Linear

    x, weight, grad = drawn(8, 3, 64), drawn(48, 64, seed=1), drawn(8, 3, 48, seed=2)
    linear = Float8Linear.from_float(torch.nn.Linear(64, 48, bias=False).bfloat16(), config=config)
    with torch.no_grad():
        linear.weight.copy_(weight)
    leaf = x.clone().requires_grad_()
    y = linear(leaf)
    want = (y, *torch.autograd.grad(y, (leaf, linear.weight), grad))
    product = make_product(f"fp8_{recipe}", gradients=str(gradients).removeprefix("torch."))
    for got, expected in zip(parts(product, x, [weight], [grad]), want, strict=True):
        assert torch.equal(got, expected)


def bound(a: Tensor, b: Tensor, halves: tuple[float, float], lost: tuple[float, float]) -> Tensor:
    """How far a b^T may be from the exact one, if numbers are off by a half of the last place, or by what is lost."""
    a, b = a.double().abs(), b.double().abs()
    off = [half * x + gone * x.max() for half, gone, x in zip(halves, lost, (a, b), strict=True)]
    return off[0] @ b.t() + (a + off[0]) @ off[1].t() + 2.0**-8 * (a @ b.t())


@pytest.mark.parametrize("gradients", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("name", FP8_PRODUCTS)
def test_within_the_bound_of_fp64(name: str, gradients: torch.dtype) -> None:
    """Odd sizes: some blocks are not filled, and rows are no multiple of what kernels take."""
    x, w, g = drawn(5, 3, 200), drawn(24, 200, seed=1), drawn(5, 3, 24, seed=2)
    product = make_product(name, gradients=str(gradients).removeprefix("torch."))
    rows, grads = x.flatten(0, 1), g.flatten(0, 1)
    weights_exact = name == "fp8_rowwise"
    y, to_x, to_w = (each.double().flatten(0, -2) for each in parts(product, x, [w], [g]))
    of_weights = [(0.0, 0.0)] * 2 if weights_exact else [(HALF[d], LOST[d]) for d in (gradients, E4M3)]
    pairs = [
        (y, rows, w, (HALF[E4M3],) * 2, (LOST[E4M3],) * 2),
        (to_x, grads, w.t(), (HALF[gradients], HALF[E4M3]), (LOST[gradients], LOST[E4M3])),
        (to_w, grads.t(), rows.t(), *zip(*of_weights, strict=True)),
    ]
    for index, (got, a, b, halves, lost) in enumerate(pairs):
        error = (got - a.double() @ b.double().t()).abs()
        assert (error <= bound(a, b, halves, lost)).all(), index
        plain = (a @ b.t()).double()
        assert torch.equal(got, plain) == (weights_exact and index == 2), "nothing was rounded"


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_rounding(block: tuple[int, int] | None, dtype: torch.dtype) -> None:
    """Scales are powers of two that make the largest number fit; under larger ones numbers are rounded alike; bf16
    has what the numbers stand for; and they are rounded again without loss."""
    x = drawn(130, 300)
    made = rounded(x, dtype, block)
    wide = made.wide(torch.float64)
    assert (made.scale.log2() == made.scale.log2().round()).all()
    assert torch.equal(made.wide(torch.bfloat16).double(), wide)
    assert torch.equal(rounded(wide, dtype, block).wide(torch.float64), wide)
    off = (wide - x.double()).abs()
    assert (off <= HALF[dtype] * x.double().abs() + LOST[dtype] * x.double().abs().max()).all()
    larger = rounded(torch.cat([x, 8 * x]).bfloat16(), dtype).wide(torch.float64)[:130]
    normal = x.abs() > 2.0**-10 * x.abs().max()
    assert torch.equal(larger[normal], wide[normal])


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("value", [0.0, 1e-40, 3e38, 448.0, 449.0, torch.inf, -torch.inf, torch.nan])
def test_extremes(value: float, block: tuple[int, int] | None) -> None:
    """Finite numbers stay finite; what is not makes its block NaN."""
    x = torch.zeros(130, 300).bfloat16()
    x[3, 7] = value
    found = rounded(x, E4M3, block).wide(torch.bfloat16)
    if torch.isfinite(x).all():
        assert torch.isfinite(found).all()
        assert torch.allclose(found, x, rtol=HALF[E4M3], atol=1e-38)
    else:
        assert found[3, 7].isnan() and found[3, :100].isnan().all()


@pytest.mark.parametrize("name", FP8_PRODUCTS)
def test_what_is_not_finite_is_seen(name: str) -> None:
    """An infinite input reaches the loss and every gradient that reads it; one of a gradient, the norm."""
    for place in range(3):
        x, w, g = drawn(4, 2, 32), drawn(16, 32, seed=1), drawn(4, 2, 16, seed=2)
        (x, w, g)[place].view(-1)[5] = torch.inf
        y, to_x, to_w = parts(make_product(name), x, [w], [g])
        seen = [not torch.isfinite(each).all() for each in (y, to_x, to_w)]
        assert seen == [[True, False, True], [True, True, False], [False, True, True]][place]


@pytest.mark.parametrize("name", FP8_PRODUCTS)
def test_put_off_it_has_the_same_bits(name: str) -> None:
    product, deferred = make_product(name), DeferredGradients()
    x, weights = drawn(4, 2, 48), [drawn(32, 48, seed=1), drawn(16, 48, seed=2)]
    grads = [drawn(4, 2, 32, seed=3), drawn(4, 2, 16, seed=4)]
    leaf, held = x.clone().requires_grad_(), [torch.nn.Parameter(w.clone()) for w in weights]
    tp = TensorParallel(product=product, deferred=deferred)
    outputs = column_parallel(leaf, [(w, None) for w in held], tp)
    with deferred.recording(0):
        torch.autograd.backward(outputs, grads)
    assert all(w.grad is None for w in held)
    found = (*outputs, leaf.grad, *(gradient for _, gradient in deferred.compute(0)))
    assert all(map(torch.equal, found, parts(product, x, weights, grads)))


@pytest.mark.long
@pytest.mark.parametrize("name", FP8_PRODUCTS)
def test_compiled_it_is_one_graph_of_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights = drawn(4, 2, 48), [drawn(32, 48, seed=1), drawn(16, 48, seed=2)]
    grads = [drawn(4, 2, 32, seed=3), drawn(4, 2, 16, seed=4)]
    want = parts(make_product(name), x, weights, grads)
    compiled = torch.compile(column_parallel, backend="aot_eager", fullgraph=True)
    monkeypatch.setitem(globals(), "column_parallel", compiled)
    assert all(map(torch.equal, parts(make_product(name), x, weights, grads), want))


def test_linears_of_one_input_follow_the_largest_whatever_the_layout() -> None:
    product = make_product("fp8_tensorwise", least=64)
    small, large, thin = drawn(32, 64), drawn(64, 64), drawn(64, 32)
    assert product.chosen([large, small], 1, 0) is product and product.chosen([small], 1, 0) is PLAIN
    assert product.chosen([small], 2, 0) is product and product.chosen([thin], 2, 0) is PLAIN
    assert product.chosen([thin], 2, 1) is product
    x, tp = drawn(4, 2, 64), TensorParallel(product=make_product("fp8_tensorwise", least=65))
    assert torch.equal(column_parallel(x, [(large, None)], tp)[0], F.linear(x, large))
    linear = RowParallelLinear(64, 64, tp, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        linear.weight.copy_(large)
    assert torch.equal(linear(x), F.linear(x, large))


# -- what only a card runs --------------------------------------------------------------------------------


def scaled(
    a: Tensor, b: Tensor, of_a: Tensor, kind_a: ScalingType, of_b: Tensor, kind_b: ScalingType, **more: Any
) -> Tensor:
    """torch's scaled_mm with scales of blocks, by the shapes and strides that its ScaledBlas.cpp demands."""

    def wide(numbers: Tensor, scale: Tensor, kind: ScalingType) -> Tensor:
        n, blocks = len(numbers), -(-numbers.shape[1] // BLOCK)
        assert numbers.is_contiguous() and numbers.shape[1] % 16 == 0
        if kind == ScalingType.BlockWise1x128:
            assert scale.shape == (n, blocks) and scale.stride() in ((1, n), (1, 1)[: 2 * (blocks == 1)])
            return Rounded(numbers, scale, (1, BLOCK)).wide(torch.float32)
        filled = -(-blocks // 4) * 4
        assert kind == ScalingType.BlockWise128x128 and scale.shape == (filled, -(-n // BLOCK))
        assert scale.stride() == (1, filled)
        return Rounded(numbers, scale[:blocks].t(), (BLOCK, BLOCK)).wide(torch.float32)

    assert kind_a == ScalingType.BlockWise1x128 and b.shape[1] % 16 == 0
    return (wide(a, of_a, kind_a) @ wide(b.t(), of_b, kind_b).t()).to(more["output_dtype"])


def of_rows(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, **more: Any) -> Tensor:
    """torch's _scaled_mm, whose CPU kernel takes one scale alone, with scales of rows, too."""
    assert a.is_contiguous() and b.t().is_contiguous() and a.shape[1] % 16 == b.shape[1] % 16 == 0
    if of_a.dim() == 0:
        return SCALED_MM(a, b, of_a, of_b, **more)
    assert of_a.shape == (len(a), 1) and of_b.shape == (1, b.shape[1])
    assert of_a.is_contiguous() and of_b.is_contiguous()
    return ((a.float() * of_a) @ (b.float() * of_b)).to(more["out_dtype"])


SCALED_MM = torch._scaled_mm


def pairs(block: tuple[int, int] | None) -> Iterator[tuple[Rounded, Rounded]]:
    """What is multiplied in a forward, in a gradient of the input and in one of the weight; odd sizes."""
    for m, n, k in ((32, 48, 640), (5, 130, 200), (24, 200, 15)):
        a, b = drawn(m, k), drawn(n, k, seed=1)
        yield rounded(a, E5M2, block), rounded(b, E4M3, block)
        if block and block[0] == 1:
            yield rounded(a, E4M3, block), rounded(b, E4M3, None if block[1] == WHOLE else (BLOCK, BLOCK))


@pytest.mark.parametrize("block", [None, (1, WHOLE), (1, BLOCK)], ids=str)
def test_kernels_are_given_what_they_take(
    block: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", of_rows)
    monkeypatch.setattr(F, "scaled_mm", scaled)
    for a, b in pairs(block):
        got = fp8_module._multiply_scaled(a, b, torch.bfloat16, fast=True)
        want = multiply(a, b, torch.bfloat16)
        assert got.shape == want.shape
        assert (got - want).abs().max() <= 2.0**-7 * want.abs().max()


def test_devices_without_the_recipe_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    for name, legal in (("tensorwise", (8, 9)), ("rowwise", (9, 0)), ("blockwise", (9, 0))):
        product = make_product(f"fp8_{name}")
        product.require(torch.device("cpu"))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, it=legal: it)
        product.require(torch.device("cuda"))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        with refused(f"--fp8-recipe {name}", "A100", "no --fp8-format"):
            product.require(torch.device("cuda"))
