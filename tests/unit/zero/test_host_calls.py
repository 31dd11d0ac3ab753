"""What a step asks of its host: few operations, and nothing of a hidden parameter that costs what a read does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megazero.kernels.add_to import add_each
from megazero.zero import gradients
from megazero.zero.parameters import Released
from tests.unit.zero.test_engine_alone import engine, step

LAYOUTS = pytest.mark.parametrize("shards", [(1, 1, 4), (2, 4, 4)], ids=str)  # G = 1, and G > 1


def masters(shards: tuple[int, int, int], patch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The master weights after two steps."""
    cluster = engine(patch, shards)
    for _ in range(2):
        step(cluster)
    return [unit.master.value.clone() for unit in cluster.engine.units]


@LAYOUTS
def test_a_small_units_gradients_are_staged_in_one_operation(
    shards: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, staged = torch._foreach_copy_, list[int]()

    def counting(targets: Any, gradients: Any) -> None:
        staged.append(len(targets))
        copy(targets, gradients)

    monkeypatch.setattr(torch, "_foreach_copy_", counting)
    together = masters(shards, monkeypatch)
    assert staged == [2] * 2 * len(together), "weight and bias of every unit, in each of two steps"
    staged.clear()
    monkeypatch.setattr(gradients, "STAGED_BYTES", 0)  # every unit is a large one
    one_by_one = masters(shards, monkeypatch)
    assert staged == [1] * 4 * len(together)
    assert all(map(torch.equal, together, one_by_one))


@LAYOUTS
def test_gradients_that_wait_are_forgotten_with_their_step(
    shards: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = engine(monkeypatch, shards)
    unit = cluster.engine.units[0]
    name, param = next(iter(unit.params.items()))
    cluster.engine.begin_step()
    param.grad = torch.ones_like(param)
    unit.gradients.take(name, param)
    assert unit.gradients.arrived and param.grad is None
    cluster.engine.abort_step()
    for _ in range(2):
        step(cluster)
    assert not unit.gradients.arrived and unit.gradients.arrived_bytes == 0
    assert all(map(torch.equal, [u.master.value for u in cluster.engine.units], masters(shards, monkeypatch)))


@LAYOUTS
def test_steady_steps_leave_hidden_parameters_alone(
    shards: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attribute of a hidden parameter costs 10 times that of a plain one: it is an intercepted operation."""
    cluster = engine(monkeypatch, shards)
    step(cluster)
    looked, intercept = list[str](), Released.__torch_function__.__func__  # type: ignore[attr-defined]

    def counting(cls: type, func: Any, *rest: Any) -> Any:
        looked.append(f"{getattr(func, '__name__', func)} {getattr(func, '__self__', '')}")
        return intercept(cls, func, *rest)

    monkeypatch.setattr(Released, "__torch_function__", classmethod(counting))
    step(cluster)
    assert looked == []


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float32", "bfloat16"), ("float64", "float32")])
def test_gradients_are_added_as_one_by_one(dtypes: tuple[str, str]) -> None:
    sums, added = (getattr(torch, dtype) for dtype in dtypes)
    drawn = torch.Generator().manual_seed(0)
    outs = [torch.randn(n, generator=drawn).to(sums) for n in (3, 700)]
    xs = [torch.randn(n, generator=drawn).to(added) for n in (3, 700)]
    expected = [out + x for out, x in zip(outs, xs, strict=True)]
    add_each(outs, xs)
    assert all(map(torch.equal, outs, expected))
