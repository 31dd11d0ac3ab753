"""What a step tells: whole gradients before it, and the numbers of parts that join it. Ranks assert."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megazero import zero
from megazero.comm.codec import Blockwise
from megazero.mesh.levels import INTRA
from megazero.mesh.mesh import create_mesh
from tests import ROOT
from tests.dist.capture import weights
from tests.dist.engine.test_engine import make_net
from tests.dist.pool import run_ranks
from tests.messages import refused

DIVISOR = 3.0


def micro_batches(rank: int) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(rank)
    return [torch.randint(0, 11, (2, 5), generator=drawn) for _ in range(2)]


def one_ranks(world: int) -> dict[str, torch.Tensor]:
    """The gradients of plain torch over all ranks' micro-batches."""
    net = make_net()
    for rank in range(world):
        for index, tokens in enumerate(micro_batches(rank)):
            (net(tokens, use=bool(index)).square().sum() / DIVISOR).backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def engine_of(shards: tuple[int, int, int], **options) -> tuple[nn.Module, zero.Engine]:
    model = make_net()
    engine = zero.shard(
        model,
        mesh=create_mesh(shards=shards, ranks_per_node=2),
        units=[model.embed, *model.blocks],
        optimizer=partial(torch.optim.SGD, lr=0.1),
        **options,
    )
    return model, engine


def backwards(model: nn.Module, engine: zero.Engine) -> None:
    engine.begin_step(2, divisor=DIVISOR)
    for index, tokens in enumerate(micro_batches(dist.get_rank())):
        model(tokens, use=bool(index)).square().sum().backward()


def whole_gradients(shards, whole):
    """They are plain torch's, and reading leaves the step as it is."""
    masters = []
    for reads in (0, 2):
        policy = zero.Policy(block=4, whole_gradients=whole)
        model, engine = engine_of(shards, policy=policy, clip_norm=0.5)
        backwards(model, engine)
        for _ in range(reads):
            found = dict(engine.gradients())
        engine.step()
        masters.append(weights(engine))
    wanted = one_ranks(dist.get_world_size())
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-12, atol=1e-12 * float(grad.norm()))
    assert all(torch.equal(masters[0][n], masters[1][n]) for n in masters[0])


@pytest.mark.first(4)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    "shards", [(1, 1, 1), (1, 1, 4), (1, 4, 4), (2, 2, 2), (2, 4, 4), (4, 4, 4)], ids=str
)
def test_whole_gradients_are_those_of_one_rank(shards, whole):
    run_ranks(4, whole_gradients, shards, whole)


def in_two_regions():
    """Gradients are near those of a unit of one region, where they are rounded to 8 bits."""
    found = []
    for exact_numel in (0, 20):
        codecs = zero.Codecs(gradients={INTRA: Blockwise(8, 8)})
        policy = zero.Policy(block=8, codecs=codecs, exact_numel=exact_numel)
        model, engine = engine_of((1, 1, 4), policy=policy)
        assert any(len(unit.layout.regions) == 1 + bool(exact_numel) for unit in engine.units)
        backwards(model, engine)
        found.append(dict(engine.gradients()))
    apart = [float((g - found[1][n]).norm() / g.norm().clamp(min=1e-9)) for n, g in found[0].items()]
    assert 0 < max(apart) < 0.02


def gradients_too_early():
    model, engine = engine_of((2, 2, 2))
    with refused("gradients()", "begin_step()", by=RuntimeError):
        next(engine.gradients())
    engine.begin_step()
    with refused("gradients()", "0 backwards of 1", by=RuntimeError):
        next(engine.gradients())


class Counting(zero.StepPart):
    """Two numbers of each rank, the first of them added up. Notes what it is told."""

    columns, summed = 2, 1

    def __init__(self, rank: int) -> None:
        self.rank, self.told = rank, []

    def write(self, row):
        row.copy_(torch.tensor([10.0**self.rank, self.rank]))

    def read(self, rows, sums):
        self.told.append((rows, sums))
        return {}

    def updated(self, made):
        self.told.append(made)

    def aborted(self):
        self.told.append("aborted")


def a_part_from_outside():
    """It is told of a good step, a step that is not finite and one given up; bits stay."""
    masters = []
    for joins in (False, True):
        model, engine = engine_of((2, 4, 4))
        part = Counting(dist.get_rank())
        if joins:
            engine.join(part)
        for factor in (1.0, torch.inf):
            engine.begin_step()
            (model(micro_batches(dist.get_rank())[0], True).square().sum() * factor).backward()
            engine.step()
        engine.begin_step()
        engine.abort_step()
        masters.append(weights(engine))
    numbers = (tuple((10.0**rank, float(rank)) for rank in range(4)), (1111.0,))
    assert part.told == [numbers, True, numbers, False, "aborted"]
    assert all(torch.equal(masters[0][n], masters[1][n]) for n in masters[0])


@pytest.mark.parametrize("rule", [in_two_regions, gradients_too_early, a_part_from_outside])
def test_rule(rule):
    run_ranks(4, rule)


def evened(source: str) -> tuple[list[float], list[float]]:
    """Biases after a good step and one that is not finite, and what is counted then. Expert 1 took most."""
    page: dict = {}
    exec(compile(source, "extending.md", "exec"), page)  # noqa: S102 - our own page
    taken, bias = torch.zeros(3), torch.zeros(3)
    model, engine = engine_of((2, 2, 2))
    engine.join(page["ExpertLoad"](taken, bias))
    for factor in (1.0, torch.inf):
        taken += torch.tensor([1.0, 3.0, float(dist.get_rank())])
        engine.begin_step()
        (model(micro_batches(0)[0], True).square().sum() * factor).backward()
        engine.step()
    return bias.tolist(), taken.tolist()


def test_the_pages_part_evens_the_load_of_experts():
    page = (ROOT / "docs" / "develop" / "extending.md").read_text("utf-8")
    (source,) = [
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "ExpertLoad" in block
    ]
    for bias, taken in run_ranks(2, evened, source):
        assert bias == pytest.approx([1e-3, -1e-3, 1e-3]) and taken == [0.0] * 3
