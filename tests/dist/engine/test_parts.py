"""An engine over a module that runs part by part: programs, weight gradients on their own, misuse, broken steps."""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

from megazero import zero
from megazero.mesh.mesh import create_mesh
from tests.dist.capture import assemble, capture_gradients, weights
from tests.dist.pool import run_ranks
from tests.dist.quantised.cases import bits_of
from tests.messages import refused

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
PARTS, MICRO_BATCHES = 2, 3
SHARDS = [(1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 2, 2)]
Plan = list[tuple[str, int, int]]  # kind, part, micro-batch


class Product(torch.autograd.Function):
    """x @ layer.weight; while a recording is open the weight's gradient goes there."""

    @staticmethod
    def forward(ctx, x, weight, layer):
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        own = x.T @ grad
        if ctx.layer.owed is None:
            return grad @ weight.T, own, None
        ctx.layer.owed.append((ctx.layer.weight, own))
        return grad @ weight.T, None, None


class Layer(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, dtype=torch.float64) / 2)
        self.bias = nn.Parameter(torch.randn(width, dtype=torch.float64))  # never put off
        self.owed: list | None = None

    def forward(self, x):
        return (Product.apply(x, self.weight, self) + self.bias).tanh()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(Layer() for _ in range(2 * PARTS))

    def part(self, index: int) -> list[nn.Module]:
        return list(self.layers[2 * index : 2 * index + 2])

    @contextmanager
    def recording(self, owed: list | None):
        for layer in self.layers:
            layer.owed = owed
        yield
        for layer in self.layers:
            layer.owed = None


class Runner:
    """Runs plans on one engine, as a pipeline's executor does."""

    def __init__(self, shards, **policy):
        mesh = create_mesh(shards=shards)
        self.net, self.store = Net(), {}
        self.joined = False  # a backward of the last part goes on through the others
        self.engine = zero.shard(
            self.net,
            mesh=mesh,
            policy=zero.Policy(block=4, **policy),
            units=self.net.layers,
            parts=[self.net.part(i) for i in range(PARTS)],
            optimizer=ADAMW,
            clip_norm=1.0,
        )
        capture_gradients(self.engine, self.store)

    def begin(self, plan: Plan, micro_batches: int = MICRO_BATCHES) -> None:
        self.saved, self.grads, self.owed = {}, {}, defaultdict(list)
        self.engine.begin_step(micro_batches, 2.0, [(kind, part) for kind, part, _ in plan])

    def run(self, plan: Plan, step: int = 0) -> None:
        for kind, part, m in plan:
            getattr(self, {"F": "forward", "W": "weights"}.get(kind, "backward"))(kind, part, m, step)

    def forward(self, kind, part, m, step):
        x = data(self.engine.mesh.rank, m, step) if part == 0 else self.saved[part - 1, m][1]
        if part and not self.joined:
            x = x.detach().requires_grad_()
        y = x
        with self.engine.segment(kind, part, m):
            for layer in self.net.part(part):
                y = layer(y)
        self.saved[part, m] = x, y

    def backward(self, kind, part, m, step):
        x, y = self.saved[part, m]
        root, grad = (y, self.grads[m]) if part < PARTS - 1 else (y.square().sum(), None)
        with (
            self.engine.segment(kind, part, m),
            self.net.recording(self.owed[part, m] if kind == "I" else None),
        ):
            torch.autograd.backward(root, grad, retain_graph=True)
        self.grads[m] = x.grad

    def weights(self, kind, part, m, step):
        self.engine.weight_gradients(part, m, self.owed.pop((part, m)))

    def step(self, plan: Plan, step: int = 0) -> zero.StepInfo:
        self.begin(plan)
        self.run(plan, step)
        return self.engine.step()


def data(rank: int, m: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + m)
    return torch.randn(5, 6, generator=generator, dtype=torch.float64)


def one_rank(steps: int) -> tuple[list[float], dict, dict]:
    """Norms, the last step's gradients, weights: plain torch over both ranks' micro-batches."""
    net, norms = Net(), []
    decay = [p for p in net.parameters() if p.ndim > 1]
    rest = [p for p in net.parameters() if p.ndim == 1]
    adamw = ADAMW([{"params": decay}, {"params": rest, "weight_decay": 0.0}])
    for step in range(steps):
        adamw.zero_grad()
        for rank, m in product(range(2), range(MICRO_BATCHES)):
            x = data(rank, m, step)
            for layer in net.layers:
                x = layer(x)
            (x.square().sum() / 2).backward()
        grads = {n: p.grad.clone() for n, p in net.named_parameters()}
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 1.0)))
        adamw.step()
    return norms, grads, {n: p.detach() for n, p in net.named_parameters()}


EVERY = range(MICRO_BATCHES)
FORWARDS: Plan = [("F", part, m) for part in range(PARTS) for m in EVERY]
INPUTS: Plan = [("I", part, m) for m in EVERY for part in (1, 0)]
PLANS: dict[str, Plan] = {
    "whole backwards": [*FORWARDS, *(("B", part, m) for m in EVERY for part in (1, 0))],
    "one at a time": [
        action
        for m in EVERY
        for action in [("F", 0, m), ("F", 1, m), ("I", 1, m), ("W", 1, m), ("I", 0, m), ("W", 0, m)]
    ],
    "weights last": [*FORWARDS, *INPUTS, *(("W", part, m) for part in (0, 1) for m in EVERY)],
    "weights last, backwards": [
        *FORWARDS,
        *INPUTS,
        *(("W", part, m) for m in reversed(EVERY) for part in (0, 1)),
    ],
    "weights of another micro-batch first": [
        *FORWARDS,
        *INPUTS[:4],
        ("W", 0, 1),
        ("W", 1, 0),
        *INPUTS[4:],
        *(("W", part, m) for part, m in ((1, 2), (0, 0), (1, 1), (0, 2))),
    ],
    "one part split": [*FORWARDS, *(a for m in EVERY for a in (("I", 1, m), ("B", 0, m), ("W", 1, m)))],
}


def trained(shards, plan: Plan, policy: dict, declared: bool = True, announced: bool = True):
    """Steps of a runner. declared: its engine is told which part runs; announced: and which will."""
    runner = Runner(shards, **policy)
    if not declared:
        runner.engine.segment = lambda *_: nullcontext()
    runner.joined = not any(
        action[:2] in (("B", 0), ("I", 0)) for action in plan
    )  # one backward does both parts
    norms = []
    for step in range(3):
        runner.begin(plan if announced else [])
        runner.run(plan, step)
        norms.append(runner.engine.step().grad_norm)
    shapes = {n: s.shape for u in runner.engine.units for n, s in u.slots.items()}
    return norms, assemble(runner.store["slices"], shapes), weights(runner.engine)


def assert_one_ranks_step(every):
    norms, grads, values = one_rank(3)
    for got in every:
        assert all(abs(a - b) <= 1e-12 * b for a, b in zip(got[0], norms, strict=True))
        for have, want in ((got[1], grads), (got[2], values)):
            for n in want:
                torch.testing.assert_close(have[n], want[n], rtol=1e-10, atol=1e-12)


@pytest.mark.first(3)
@pytest.mark.parametrize("name", PLANS)
def test_any_order_of_weight_gradients_gives_one_ranks_step(name):
    for shards, policy in [*((s, {}) for s in SHARDS), ((2, 2, 2), {"keep_gathered": True})]:
        assert_one_ranks_step(run_ranks(2, trained, shards, PLANS[name], policy))


# -- a foreign pipeline, which declares no segments --------------------------------------------------

UNDECLARED: dict[str, Plan] = {
    "part by part": [*FORWARDS, *(("B", part, m) for m in EVERY for part in (1, 0))],
    "one at a time": [a for m in EVERY for a in [("F", 0, m), ("F", 1, m), ("B", 1, m), ("B", 0, m)]],
    "interleaved": [
        *(("F", part, m) for m in (0, 1) for part in range(PARTS)),
        *(
            ("B", 1, 0),
            ("F", 0, 2),
            ("B", 0, 0),
            ("B", 1, 1),
            ("F", 1, 2),
            ("B", 0, 1),
            ("B", 1, 2),
            ("B", 0, 2),
        ),
    ],
    "one backward": [a for m in EVERY for a in [("F", 0, m), ("F", 1, m), ("B", 1, m)]],
}


@pytest.mark.first(2)
@pytest.mark.parametrize("name", UNDECLARED)
def test_parts_whose_segments_nobody_declares_give_one_ranks_step(name):
    for shards, announced in (((1, 1, 2), False), ((2, 2, 2), False), ((2, 2, 2), True)):
        assert_one_ranks_step(run_ranks(2, trained, shards, UNDECLARED[name], {}, False, announced))


# -- wrong use ------------------------------------------------------------------------------------


def misuse(shards):
    """After wrong use the next step is as one of a fresh engine."""
    plan, whole = PLANS["weights last"], PLANS["whole backwards"]
    too_many = [*FORWARDS, *(("B", 1, m) for m in EVERY), ("B", 1, 0)]  # in part 1, while part 0 lacks one
    too_few = [a for a in whole if a != ("B", 0, 2)]
    joined = [*FORWARDS, ("B", 1, 0)]
    for words, opened, act in (
        (["number 4", "3 micro-batches"], whole, lambda r: r.run(too_many)),
        (["2 backwards of 3"], whole, lambda r: (r.run(too_few), r.engine.step())),
        (["2 backwards of 3"], plan, lambda r: (r.run(plan[:-1]), r.engine.step())),
        (["number 4"], plan, lambda r: (r.run(plan), r.engine.weight_gradients(1, 0, []))),
        (["evaluation()"], plan, lambda r: (r.run(plan[:7]), r.engine.evaluation().__enter__())),
        (["begin_step", "twice"], plan, lambda r: r.begin(plan)),
        (
            ["engine.segment(kind, part, micro_batch)"],
            whole,
            lambda r: (setattr(r, "joined", True), r.run(joined)),
        ),
    ):
        runner, fresh = Runner(shards), Runner(shards)
        runner.begin(opened)
        with refused(*words, by=RuntimeError):
            act(runner)
        runner.engine.abort_step()
        runner.joined = False
        infos = [r.step(plan) for r in (runner, fresh)]
        assert infos[0] == infos[1] and bits_of(runner.engine) == bits_of(fresh.engine), words


@pytest.mark.first(1)
@pytest.mark.parametrize("shards", [(1, 1, 2), (2, 2, 2)], ids=str)
def test_misuse_of_parts_is_named_and_a_step_after_it_is_good(shards):
    run_ranks(2, misuse, shards)


def broken_off(shards, plan: Plan, policy: dict) -> list[int]:
    """After how many actions a step that is given up changes a good step after it."""
    runner, fresh = Runner(shards, **policy), Runner(shards, **policy)
    bad = []
    for done in range(len(plan) + 1):
        runner.begin(plan)
        runner.run(plan[:done], step=50)
        runner.engine.abort_step()
        infos = [r.step(plan, step=done) for r in (runner, fresh)]
        if infos[0] != infos[1] or bits_of(runner.engine) != bits_of(fresh.engine):
            bad.append(done)
    return bad


@pytest.mark.first(2)
@pytest.mark.parametrize("shards", SHARDS, ids=str)
def test_a_step_that_is_given_up_anywhere_leaves_nothing(shards):
    policy = {"lifetime": "step"} if shards == (1, 1, 2) else {}
    assert run_ranks(2, broken_off, shards, PLANS["weights of another micro-batch first"], policy) == [[]] * 2


def refusals():
    shared, crossing, plain = Net(), Net(), Net()
    shared.layers[2].weight = shared.layers[0].weight
    tied = {"layers.0.weight": "shared"}

    def sharded(net, **options):
        parts = [net.part(i) for i in range(PARTS)]
        return lambda: zero.shard(net, mesh=create_mesh(shards=(2, 2, 2)), parts=parts, **options)

    for words, act in (
        ("several parts", sharded(shared, units=shared.layers)),
        ("several parts", sharded(crossing, units=[tuple(crossing.layers[1:3])])),
        ("create_mesh(ends=True)", sharded(plain, units=plain.layers, tied=tied)),
    ):
        with refused(words):
            act()


def test_refusals_name_the_rule():
    run_ranks(2, refusals)
