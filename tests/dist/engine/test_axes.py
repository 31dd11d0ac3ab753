"""Units of one engine on different data axes against one process of bare torch, in float64.

Four ranks are two nodes of two. Dense units lie on the mesh's axes. Routed units lie on the same axes with
other factors, on the same axes with the one across nodes first, or, as experts do, on the axis across nodes
alone: the ranks of a node then hold different experts and exchange tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megazero import zero
from megazero.checkpoint import store
from megazero.comm.codec import Blockwise
from megazero.mesh.levels import INTER, INTRA
from megazero.mesh.mesh import create_mesh
from megazero.zero.records import load_records, save_records
from tests.dist.capture import assemble, capture_gradients, local_slices
from tests.dist.engine.test_engine import compare
from tests.dist.pool import run_ranks
from tests.messages import names, refused

WIDTH, EXPERTS, STEPS, CLIP = 8, 2, 4, 0.5
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


class Exchange(torch.autograd.Function):
    """Row i of x [experts, ...] goes to rank i of a group, and the gradients take the same way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return Exchange.apply(grad, ctx.group), None


class Routed(nn.Module):
    """The first half of every sample's tokens goes to expert 0, the second to expert 1."""

    def __init__(self, own: int | None, group: dist.ProcessGroup | None) -> None:
        """own: the expert of this rank, which exchanges its tokens in the group; None: all are here."""
        super().__init__()
        every = [nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)]
        self.experts = nn.ModuleDict({str(i): e for i, e in enumerate(every) if own in (None, i)})
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = torch.stack(x.chunk(EXPERTS, dim=1))
        if self.group is None:
            out = torch.stack([e(half) for e, half in zip(self.experts.values(), halves, strict=True)])
        else:
            (expert,) = self.experts.values()
            out = Exchange.apply(expert(Exchange.apply(halves, self.group)), self.group)
        return torch.cat(out.unbind(), dim=1).tanh()


class Net(nn.Module):
    def __init__(self, own: int | None = None, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(11, WIDTH)
        self.dense = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.routed = nn.ModuleList(Routed(own, group) for _ in range(2))
        self.head = nn.Linear(WIDTH, 11)
        self.to(torch.float64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for dense, routed in zip(self.dense, self.routed, strict=True):
            x = x + routed(dense(x).tanh())
        return self.head(x)


def loss_of(net: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = net(tokens)
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten(), reduction="sum")


def batches(step: int, count: int) -> list[torch.Tensor]:
    return list(torch.randint(0, 11, (count, 2, 6), generator=torch.Generator().manual_seed(step)))


def reference(total: int) -> tuple:
    net = Net()
    decay = [p for p in net.parameters() if p.ndim >= 2]
    rest = [p for p in net.parameters() if p.ndim < 2]
    optimizer = ADAMW([{"params": decay}, {"params": rest, "weight_decay": 0.0}])
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = sum(loss_of(net, tokens) for tokens in batches(step, total)) / (total * 12)
        loss.backward()
        grads = {n: p.grad.clone() for n, p in net.named_parameters()}
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), CLIP)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, grads, {n: p.detach().clone() for n, p in net.named_parameters()}


# -- layouts -----------------------------------------------------------------------------------------


def inside(mesh, shards):
    """The node's axis first; with factors up to 2 each node has a replica."""
    return zero.DataAxes.over(mesh.data_axes, shards)


def across(mesh, shards):
    """The axis across nodes first; with factors up to 2 the ranks of a node hold replicas."""
    return zero.DataAxes.over(mesh.data_axes[::-1], shards)


def experts(mesh, shards):
    """The axis across nodes alone."""
    return zero.DataAxes.over(mesh.data_axes[1:], shards)


def make(shards, first, second, policy, **options):
    """first, second: the place of each routed unit, and its factors; None: as dense ones. Experts go together.

    options: of zero.shard.
    """
    mesh = create_mesh(shards=shards, ranks_per_node=min(2, dist.get_world_size()))
    net = Net()
    if first and first[0] is experts:
        nodes = [dist.new_group([2 * node, 2 * node + 1]) for node in range(2)]
        net = Net(mesh.rank % 2, nodes[mesh.rank // 2])
    units: list = [net.embed]
    for dense, routed, place in zip(net.dense, net.routed, (first, second), strict=True):
        units += [dense, zero.On(routed, place[0](mesh, place[1])) if place else routed]
    options = {"optimizer": ADAMW, "clip_norm": CLIP, **options}
    return net, zero.shard(net, mesh=mesh, policy=policy, units=[*units, net.head], **options)


def train(net, engine, steps, micro_batches):
    """losses, norms, and the last step's gradients and weights as slices."""
    mesh, store_, losses, norms = engine.mesh, {}, [], []
    capture_gradients(engine, store_)
    total = micro_batches * mesh.world_size
    for step in steps:
        engine.begin_step(micro_batches, divisor=total * 12)
        loss = torch.zeros((), dtype=torch.float64)
        for tokens in batches(step, total)[mesh.dp_rank :: mesh.world_size]:
            value = loss_of(net, tokens)
            value.backward()
            loss += value.detach()
        dist.all_reduce(loss)
        losses.append(float(loss) / (total * 12))
        norms.append(engine.step().grad_norm)
        if step == 1:
            with engine.evaluation():
                loss_of(net, batches(99, 1)[0])
    shapes = {n: p.shape for n, p in Net().named_parameters()}
    final = local_slices(engine, lambda u, a, b: u.master.value[a:b])
    return losses, norms, assemble(store_["slices"], shapes), assemble(final, shapes)


def sharded(shards, first, second, micro_batches, policy, **options):
    return train(*make(shards, first, second, policy, **options), range(STEPS), micro_batches)


# -- parity ------------------------------------------------------------------------------------------

EXACT = zero.Policy(block=4)
PLACES = {
    "zero3; in the node, across": ((4, 4, 4), (inside, (2, 2, 2)), (across, (2, 2, 2))),
    "zero3; replicas, as zero2 across": ((4, 4, 4), (inside, (1, 1, 1)), (across, (1, 4, 4))),
    "hpz; zero1, mics across": ((2, 4, 4), (inside, (1, 1, 4)), (across, (2, 2, 2))),
    "zeropp; hpz across, zero3": ((2, 2, 4), (across, (2, 4, 4)), (inside, (4, 4, 4))),
    "ddp; zero3, zero3 across": ((1, 1, 1), (inside, (4, 4, 4)), (across, (4, 4, 4))),
    "zero1; P 1, G 2, OS 4 across, as dense": ((1, 1, 4), (across, (1, 2, 4)), None),
    "zero3; experts": ((4, 4, 4), (experts, (2, 2, 2)), (experts, (1, 1, 1))),
    "hpz; experts": ((2, 4, 4), (experts, (1, 2, 2)), (experts, (2, 2, 2))),
    "zero1; experts": ((1, 1, 4), (experts, (1, 1, 2)), (experts, (1, 1, 2))),
}


@pytest.mark.first(4)
@pytest.mark.parametrize("name", PLACES)
def test_units_on_other_axes_equal_bare_torch(name):
    for micro_batches in (1, 3):
        for got in run_ranks(4, sharded, *PLACES[name], micro_batches, EXACT):
            compare(got, reference(4 * micro_batches))


POLICIES = [
    {"whole_gradients": True},
    {"prefetch_bytes": 0, "pending_reductions": 0},
    {"keep_gathered": True},
    {"chunk_numel": 80},
]


@pytest.mark.first(3)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: [*policy][0])
@pytest.mark.parametrize("place", ["zero3; in the node, across", "hpz; experts"])
def test_policies_on_other_axes_equal_bare_torch(place, policy):
    for got in run_ranks(4, sharded, *PLACES[place], 3, zero.Policy(block=4, **policy)):
        compare(got, reference(12))


QUANTISED = zero.Codecs(
    weights=Blockwise(8, 16),
    gradients={INTRA: Blockwise(8, 16), INTER: Blockwise(4, 16)},
    delta=True,
)


@pytest.mark.parametrize("place", ["zero3; in the node, across", "zeropp; hpz across, zero3", "hpz; experts"])
def test_quantised_hops_on_other_axes_stay_near_bare_torch(place):
    want = reference(8)
    policy = zero.Policy(block=16, codecs=QUANTISED, exact_numel=11)
    every = run_ranks(4, sharded, *PLACES[place], 2, policy)
    for losses, _, grads, final in every:
        torch.testing.assert_close(losses, want[0], rtol=0.03, atol=0.03)
        total = torch.cat([g.flatten() for g in want[2].values()]).norm()
        for name, grad in grads.items():
            assert (grad - want[2][name]).norm() < 0.25 * max(want[2][name].norm(), 0.1 * total), name
        assert all(torch.equal(final[n], every[0][3][n]) for n in final), "ranks disagree"


def matrices(name, param):
    return zero.Traits(matrix=param.ndim == 2 and "embed" not in name)


MUON = {
    "optimizer": partial(zero.Muon, lr=1e-2, weight_decay=0.1, precision="high"),
    "traits": matrices,
}


@pytest.mark.parametrize(
    "place", ["zero3; in the node, across", "zeropp; hpz across, zero3", "zero1; experts"]
)
def test_muon_deals_matrices_along_their_own_axes(place):
    """A rank that steps a matrix has all of it: weights are those of one rank that holds every matrix."""
    (want,) = run_ranks(1, sharded, (1, 1, 1), None, None, 4, EXACT, **MUON)
    for got in run_ranks(4, sharded, *PLACES[place], 1, EXACT, **MUON):
        compare(got, want, 1e-9)


def whole_gradients(place):
    """What ``engine.gradients()`` gives in one step."""
    net, engine = make(*place, EXACT)
    engine.begin_step(1, divisor=4 * 12)
    loss_of(net, batches(0, 4)[engine.mesh.dp_rank]).backward()
    found = dict(engine.gradients())
    engine.step()
    return found


@pytest.mark.parametrize("place", ["zeropp; hpz across, zero3", "hpz; experts"])
def test_whole_gradients_of_units_on_other_axes_are_those_of_bare_torch(place):
    """Of experts, each rank has its own."""
    net = Net()
    (sum(loss_of(net, tokens) for tokens in batches(0, 4)) / (4 * 12)).backward()
    for rank, got in enumerate(run_ranks(4, whole_gradients, PLACES[place])):
        held = ["0", "1"] if "experts" not in place else [str(rank % 2)]
        wanted = {
            n: p.grad for n, p in net.named_parameters() if "experts" not in n or n.split(".")[3] in held
        }
        assert got.keys() == wanted.keys()
        for name, grad in got.items():
            torch.testing.assert_close(grad, wanted[name], rtol=1e-10, atol=1e-12, msg=name)


# -- checkpoints -------------------------------------------------------------------------------------


def save_half(root, place):
    net, engine = make(*place, EXACT)
    train(net, engine, range(STEPS // 2), 1)
    state = {"optimizer": engine.optimizer.scalars(), "engine": engine.state()}
    path = store.save(root, store.Snapshot(2, save_records(engine), state=state), group=dist.group.WORLD)
    return str(path)


def resume_half(path, place, micro_batches):
    net, engine = make(*place, EXACT)
    kinds = {"master": "weights", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    loaded = store.load(path, records=load_records(engine), group=dist.group.WORLD, kinds=kinds)
    engine.invalidate()
    engine.optimizer.load_scalars(loaded.state["optimizer"])
    engine.load_state(loaded.state["engine"])
    return train(net, engine, range(STEPS // 2, STEPS), micro_batches)


PLAIN = ((2, 2, 2), None, None)  # on two ranks, with all experts on each


@pytest.mark.first(1)
@pytest.mark.parametrize("saved, resumed", [
    ("zero3; in the node, across", "zeropp; hpz across, zero3"),
    ("hpz; experts", "zero3; experts"),
    ("ddp; zero3, zero3 across", "zero1; experts"),
    ("zero3; experts", ""),
])  # fmt: skip
def test_a_checkpoint_of_units_on_other_axes_goes_on_as_bare_torch(tmp_path, saved, resumed):
    losses, norms, *rest = reference(4)
    path = run_ranks(4, save_half, str(tmp_path), PLACES[saved])[0]
    world, place = (4, PLACES[resumed]) if resumed else (2, PLAIN)
    for got in run_ranks(world, resume_half, path, place, 4 // world):
        compare(got, (losses[2:], norms[2:], *rest))


# -- writes and refusals -----------------------------------------------------------------------------


def written(everywhere):
    """Write a value by expert into the experts, by rank if ``everywhere`` is False; return the weights after."""
    net, engine = make(*PLACES["zero3; experts"], EXACT)
    with engine.gathered(write=True), torch.no_grad():
        for name, expert in net.routed[0].experts.items():
            expert.weight.fill_(float(name) if everywhere else float(dist.get_rank()))
    shapes = {n: p.shape for n, p in Net().named_parameters()}
    final = assemble(local_slices(engine, lambda u, a, b: u.master.value[a:b]), shapes)
    return [final[f"routed.0.experts.{i}.weight"].unique().tolist() for i in range(EXPERTS)]


def test_experts_may_be_written_differently_and_their_copies_alike():
    assert run_ranks(4, written, True) == [[[0.0], [1.0]]] * 4
    answers = run_ranks(4, written, False, return_errors=True)
    for answer in answers:
        names(answer.text, "different values", "'routed.0")


def alike(mesh):
    """The same modules on every rank, on axes that join only the ranks of one place in their nodes."""
    torch.manual_seed(0)
    net = Net()
    return zero.shard(net, mesh=mesh, units=[zero.On(net.routed[0], experts(mesh, (2, 2, 2)))])


def tied():
    """An embedding that the pipeline's ends share, on axes of its own."""
    mesh = create_mesh(pp=2, shards=(2, 2, 2), ends=True)
    net, axes = Net(), zero.DataAxes.over(mesh.data_axes)
    return zero.shard(net, mesh=mesh, units=[zero.On(net.embed, axes)], tied={"embed.weight": "shared"})


def refusals():
    mesh, other = (create_mesh(shards=(4, 4, 4), ranks_per_node=2) for _ in range(2))
    net = Net()

    def on(axes):
        return lambda: zero.shard(net, mesh=mesh, units=[zero.On(net.routed[0], axes)])

    with torch.no_grad():
        net.routed[0].experts["0"].weight.add_(mesh.data_axes[0].index)
    for words, act in (
        (["two axes", "'p_intra'"], on(zero.DataAxes.of(other))),
        (["different values", "'routed.0.experts.0.weight'"], on(inside(mesh, (1, 1, 1)))),
        (["nearest legal: 2,4,4"], lambda: inside(mesh, (2, 3, 4))),
        (["nearest legal: 1,1,2"], lambda: experts(mesh, (1, 1, 3))),
        (["axes", "join"], lambda: alike(mesh)),
        (["embed.weight", "tied", "without zero.On"], tied),
        (["twice"], lambda: zero.DataAxes.over([*mesh.data_axes, mesh.data_axes[0]])),
    ):
        with refused(*words):
            act()


def test_axes_that_do_not_fit_are_refused():
    run_ranks(4, refusals)
