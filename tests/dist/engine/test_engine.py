"""The engine on a plain torch module against one process of bare torch, in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megazero import zero
from megazero.comm.codec import Blockwise
from megazero.mesh.levels import INTER, INTRA
from megazero.mesh.mesh import create_mesh
from tests.dist.capture import assemble, capture_gradients, weights
from tests.dist.pool import run_ranks


class Block(nn.Module):
    def __init__(self, width: int, recompute: bool):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)
        self.recompute = recompute

    def inner(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x)


class Net(nn.Module):
    """Tied embedding and head, a frozen parameter, one that sometimes has no gradient."""

    def __init__(self, recompute=False, width=6, vocabulary=11):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, recompute) for _ in range(3))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)
        self.sometimes = nn.Parameter(torch.ones(width))

    def forward(self, tokens, use):
        x = self.embed(tokens) * self.frozen
        for block in self.blocks:
            x = block(x)
        if use:
            x = x * self.sometimes
        return self.head(x)


def make_net(recompute=False, dtype=torch.float64):
    torch.manual_seed(1)
    return Net(recompute).to(dtype)


def batches(step, count):
    g = torch.Generator().manual_seed(step)
    return [torch.randint(0, 11, (2, 5), generator=g) for _ in range(count)]


def loss_of(net, tokens, index):
    logits = net(tokens, index % 2 == 1)
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten(), reduction="sum")


ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
STEPS, CLIP = 4, 0.5


def reference(total, recompute=False):
    net = make_net(recompute)
    decay = [p for p in net.parameters() if p.ndim >= 2 and p.requires_grad]
    rest = [p for p in net.parameters() if p.ndim < 2 and p.requires_grad]
    opt = ADAMW([{"params": decay}, {"params": rest, "weight_decay": 0.0}])
    losses, norms, grads = [], [], {}
    for step in range(STEPS):
        loss = sum(loss_of(net, b, i) for i, b in enumerate(batches(step, total))) / (total * 10)
        opt.zero_grad()
        loss.backward()
        grads = {
            n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in net.named_parameters()
        }
        for p in (net.sometimes,):  # a missing gradient is a zero one
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), CLIP)))
        opt.step()
        losses.append(loss.item())
    return losses, norms, grads, {n: p.detach().clone() for n, p in net.named_parameters()}


def sharded(shards, ranks_per_node, micro_batches, policy, recompute=False, root=False):
    mesh = create_mesh(shards=shards, ranks_per_node=ranks_per_node)
    net = make_net(recompute)
    units = [] if root else [net.embed, *net.blocks, net.head]
    engine = zero.shard(net, mesh=mesh, policy=policy, units=units, optimizer=ADAMW, clip_norm=CLIP)
    store, losses, norms = {}, [], []
    capture_gradients(engine, store)
    total = micro_batches * mesh.world_size
    for step in range(STEPS):
        engine.begin_step(micro_batches, divisor=total * 10)
        mine = list(enumerate(batches(step, total)))[mesh.dp_rank :: mesh.world_size]
        loss = torch.zeros((), dtype=torch.float64)
        for index, tokens in mine:
            value = loss_of(net, tokens, index)
            value.backward()
            loss += value.detach()
        dist.all_reduce(loss)
        info = engine.step()
        losses.append(float(loss) / (total * 10))
        norms.append(info.grad_norm)
        if step == 1:
            with engine.evaluation():
                loss_of(net, batches(99, 1)[0], 1)
    shapes = {s.name: s.shape for u in engine.units for s in u.layout.slots if s.name in u.trainable}
    grads = assemble([s for s in store["slices"] if s[0] in shapes], shapes)
    return losses, norms, grads, weights(engine)


def compare(got, want, tolerance=1e-10):
    losses, norms, grads, final = got
    torch.testing.assert_close(losses, want[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(norms, want[1], rtol=tolerance, atol=tolerance)
    total = torch.cat([g.flatten() for g in want[2].values()]).norm()
    for name, grad in grads.items():
        error = (grad - want[2][name]).norm() / max(want[2][name].norm(), 1e-6 * total)
        assert error < tolerance, (name, float(error))
    for name, value in final.items():
        torch.testing.assert_close(value, want[3][name], rtol=1e-8, atol=1e-10, msg=name)


LAYOUTS = [  # shards, ranks per node
    (2, (1, 1, 1), 2),
    (2, (2, 2, 2), 1),
    (4, (1, 1, 1), 2),
    (4, (1, 1, 4), 2),
    (4, (1, 4, 4), 2),
    (4, (4, 4, 4), 4),
    (4, (4, 4, 4), 2),
    (4, (2, 2, 2), 2),
    (4, (2, 4, 4), 2),
    (4, (2, 2, 4), 2),
    (4, (1, 2, 4), 2),
    (4, (1, 2, 2), 4),
]


@pytest.mark.first(10)
@pytest.mark.parametrize("world,shards,per_node", LAYOUTS)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_every_layout_equals_bare_torch(world, shards, per_node, micro_batches):
    want = reference(world * micro_batches)
    for got in run_ranks(world, sharded, shards, per_node, micro_batches, zero.Policy(block=4)):
        compare(got, want)


BOTH = ((4, 4, 4), (2, 2, 4))
POLICIES = {  # policy, arguments of ``sharded``, shards
    "recompute": ({}, {"recompute": True}, BOTH),
    "one unit": ({}, {"root": True}, BOTH),
    "exact region": ({"exact_numel": 18}, {}, BOTH),
    "chunks": ({"chunk_numel": 100}, {}, BOTH[1:]),
    "no prefetch": ({"prefetch_bytes": 0, "pending_reductions": 0}, {}, BOTH),
    "keep gathered": ({"block": 64, "keep_gathered": True}, {}, BOTH),
    "whole gradients": ({"whole_gradients": True}, {}, BOTH),
    "lifetime step": ({"lifetime": "step"}, {}, ((2, 4, 4), (1, 1, 4))),
    "lifetime resident": ({"lifetime": "resident"}, {}, ((2, 4, 4), (1, 1, 4))),
}


@pytest.mark.first(4)
@pytest.mark.parametrize("name", POLICIES)
def test_policies_equal_bare_torch(name):
    options, kwargs, every = POLICIES[name]
    want = reference(12, kwargs.get("recompute", False))
    for shards in every:
        for got in run_ranks(4, sharded, shards, 2, 3, zero.Policy(**{"block": 4, **options}), **kwargs):
            compare(got, want)


QUANTISED = zero.Codecs(
    weights=Blockwise(8, 16), gradients={INTRA: Blockwise(8, 16), INTER: Blockwise(4, 16)}
)


@pytest.mark.parametrize(
    "policy", [{"block": 4}, {"block": 16, "codecs": QUANTISED}], ids=["exact", "quantised"]
)
def test_hpz_equals_zero3_bit_for_bit(policy):
    zero3, hpz = (
        run_ranks(4, sharded, shards, 2, 3, zero.Policy(**policy))[0] for shards in ((4, 4, 4), (2, 4, 4))
    )
    assert zero3[:2] == hpz[:2] and all(torch.equal(zero3[3][n], hpz[3][n]) for n in hpz[3])
