"""Trainings of a small model under torch's FSDP2 on four ranks as two nodes of two, with and without the patch."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    reduce_scatter_tensor_autograd,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import fsdp2_patch

RANKS, RANKS_PER_NODE = 4, 2
WIDTH, VOCABULARY, LENGTH = 32, 64, 8


@dataclass(frozen=True)
class Case:
    """A training. ``mesh``: '1d' (4 shards), '2d' (2 replicas x 2 shards) or 'tp' (2 shards x 2 tensor-parallel).

    experts: the ranks that share the experts of a block, whose parameters are in a group of their own on the mesh of
    the ranks that have the same ones: 2, a node's, or 4, whose mesh has one rank in a node and is not shared; 0: no
    experts.
    dtypes: of parameters and of reductions, by MixedPrecisionPolicy. deferring: set_requires_all_reduce is called.
    whole: set_requires_gradient_sync is called instead, so that whole gradients wait for the last micro-batch.
    frozen: the embedding has no gradient. divide: the gradients' divide factor. nudge: numbers the element of the
    embedding whose last bit in bf16 is changed at the start (0: none). device: 'cpu', or 'cuda' for ranks on one
    card.
    """

    mesh: str = "1d"
    micro_batches: int = 1
    dtypes: tuple[torch.dtype | None, torch.dtype | None] = (None, None)
    deferring: bool = True
    whole: bool = False
    reshard: bool | int = True
    checkpointing: bool = False
    compiled: bool = False
    frozen: bool = False
    experts: int = 0
    divide: float | None = None
    steps: int = 5
    seed: int = 1
    nudge: int = 0
    device: str = "cpu"

    @property
    def ranks_per_node(self) -> int:
        return RANKS_PER_NODE


@dataclass(frozen=True)
class Run:
    """What a rank says: losses and norms by step, digests of its shards and of all parameters, bytes, warnings."""

    losses: list[float]
    norms: list[float]
    shards: dict[str, str]
    whole: dict[str, str]
    weights: dict[str, list[float]]
    sent: dict[str, int] = field(default_factory=dict)
    warned: list[str] = field(default_factory=list)


class Block(nn.Module):
    def __init__(self, checkpointing: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointing:
            return torch.utils.checkpoint.checkpoint(self.inside, x, use_reentrant=False)
        return self.inside(x)

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Experts(nn.Module):
    """Eight experts of which each rank has some. Every token goes to all of them; a gate weighs what they return."""

    COUNT = 8

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(self.COUNT, WIDTH, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(self.COUNT, WIDTH, WIDTH) / WIDTH**0.5)

    def share(self, mesh: DeviceMesh) -> None:
        """Keep this rank's experts, of those that the mesh's ranks have together."""
        self.mesh = mesh
        for name, p in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x [tokens, WIDTH], gate [tokens, COUNT] of this rank's tokens; returns [tokens, WIDTH]."""
        x, gate = (all_gather_tensor_autograd(t, 0, self.mesh) for t in (x, gate))
        up, down = self.up.to_local(), self.down.to_local()
        own = gate.view(len(gate), self.mesh.size(), -1)[:, self.mesh.get_local_rank()]
        inside = F.gelu(torch.einsum("tw,ewv->tev", x, up)) * own.unsqueeze(-1)
        return reduce_scatter_tensor_autograd(torch.einsum("tev,evw->tw", inside, down), "sum", 0, self.mesh)


class ExpertBlock(nn.Module):
    def __init__(self, checkpointing: bool) -> None:
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(WIDTH), Block(checkpointing)
        self.gate, self.experts = nn.Linear(WIDTH, Experts.COUNT), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dense(x)
        tokens = self.norm(x).flatten(0, 1)
        return x + self.experts(tokens, self.gate(tokens).softmax(-1)).view_as(x)


class Model(nn.Module):
    def __init__(self, checkpointing: bool = False, experts: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        kind = ExpertBlock if experts else Block
        self.blocks = nn.ModuleList(kind(checkpointing) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.scale = nn.Parameter(torch.ones(3))  # of a length that no rank count divides

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.scale.sum() / 3
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(case: Case) -> nn.Module:
    """The sharded model of a case."""
    torch.manual_seed(case.seed)
    model = Model(case.checkpointing, case.experts > 0)
    model.embedding.weight.requires_grad_(not case.frozen)
    if case.nudge:
        with torch.no_grad():
            model.embedding.weight.view(torch.int32).view(-1)[case.nudge] ^= 1 << 16
    mesh = {
        "1d": lambda: init_device_mesh(case.device, (RANKS,)),
        "2d": lambda: init_device_mesh(case.device, (2, 2), mesh_dim_names=("replicate", "shard")),
        "tp": lambda: init_device_mesh(case.device, (2, 2), mesh_dim_names=("shard", "tp")),
    }[case.mesh]()
    if case.mesh == "tp":
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = mesh["shard"]
    shard = partial(fully_shard, mp_policy=MixedPrecisionPolicy(*case.dtypes))
    shard_block, placed = partial(shard, reshard_after_forward=case.reshard), {}
    if case.experts:
        replicas = 2 if case.mesh == "2d" else 1
        shape = (replicas, RANKS // replicas // case.experts, case.experts)
        every = init_device_mesh(case.device, shape, mesh_dim_names=("replicate", "efsdp", "ep"))
        placed = experts_on_their_mesh(model, every, shard_block)
    for block in model.blocks:
        if case.compiled:
            block.compile(backend="aot_eager")
        shard_block(block, mesh=mesh, **placed)
    shard(model, mesh=mesh)
    if case.divide is not None:
        for module in (module for module in model.modules() if isinstance(module, FSDPModule)):
            module.set_gradient_divide_factor(case.divide)
            module.set_force_sum_reduction_for_comms(True)
    return model


def experts_on_their_mesh(
    model: nn.Module, every: DeviceMesh, shard: Callable[..., Any] = fully_shard
) -> dict[str, Any]:
    """Share a model's experts, and return the words by which ``shard`` puts them on their mesh, as torchtitan does.

    every: a mesh of replicas, of the ranks that shard the same experts, and of those that share a block's. In torch
    2.11 a module has one mesh: there a block's experts are sharded here, before their block.
    """
    for block in model.blocks:
        block.experts.share(every["ep"])
    mesh = every["efsdp"] if every.size(0) == 1 else every["replicate", "efsdp"]
    if not hasattr(_fsdp_common, "ShardPlacementResult"):
        for block in model.blocks:
            shard(block.experts, mesh=mesh)
        return {}
    own = {p for block in model.blocks for p in block.experts.parameters()}
    info = FSDPMeshInfo(mesh, shard_mesh_dim=0) if mesh.ndim == 1 else HSDPMeshInfo(mesh, 1, 0)
    placed = _fsdp_common.ShardPlacementResult(Shard(0), info)
    return {"shard_placement_fn": lambda p: placed if p in own else None}


class Job:
    """A model with its optimizer and the loop that trains it, as a user of FSDP2 writes it."""

    def __init__(self, case: Case) -> None:
        _clear_sharding_prop_cache()  # it holds meshes of worlds that are gone, by shapes that come again
        self.case, self.model = case, build(case)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        meshes = {p.device_mesh: [q for q in trained if q.device_mesh == p.device_mesh] for p in trained}
        self.optimizer = torch.optim.AdamW([{"params": own} for own in meshes.values()], lr=3e-3)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def batch(self, step: int, micro_batch: int) -> torch.Tensor:
        shards = 2 if self.case.mesh == "tp" else RANKS
        rank = dist.get_rank() // (RANKS // shards)
        generator = torch.Generator().manual_seed(
            1000 * self.case.seed + 100 * step + 10 * micro_batch + rank
        )
        tokens = [torch.randint(VOCABULARY, (4,), generator=generator)]
        for _ in range(LENGTH):  # each of 8 that follow from the one before: a model can learn down to log 8
            tokens.append((3 * tokens[-1] + torch.randint(8, (4,), generator=generator)) % VOCABULARY)
        return torch.stack(tokens, dim=1).to(self.case.device)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    @torch.no_grad()
    def look(self) -> float:
        """Evaluate; the root's parameters are sharded again behind it, as FSDP2 does behind a backward alone."""
        loss = self.loss(self.batch(0, 0)).item()
        self.model.reshard()
        return loss

    def step(self, step: int) -> None:
        total, count = 0.0, self.case.micro_batches
        for i in range(count):
            if self.case.whole:
                self.model.set_requires_gradient_sync(i == count - 1)
            elif self.case.deferring:
                self.model.set_requires_all_reduce(i == count - 1)
            loss = self.loss(self.batch(step, i)) / count
            loss.backward()
            total += loss.item()
        self.norms.append(clip(list(self.model.parameters())))
        self.optimizer.step()
        self.optimizer.zero_grad()
        every = torch.tensor(total, device=self.case.device)
        dist.all_reduce(every)
        self.losses.append(every.item() / RANKS)

    def run(self) -> Run:
        """What this rank says by now."""
        whole = {name: p.detach().full_tensor() for name, p in self.model.named_parameters()}
        return Run(
            self.losses,
            self.norms,
            {name: digest(p.to_local()) for name, p in self.model.named_parameters()},
            {name: digest(p) for name, p in whole.items()},
            {name: p.flatten().tolist() for name, p in whole.items()},
        )


def clip(parameters: list[nn.Parameter]) -> float:
    """Clip to a norm of 1, over parameters on several meshes, and return what it was."""
    meshes: dict[Any, list[nn.Parameter]] = {}
    for p in parameters:
        if p.grad is not None:
            meshes.setdefault(p.device_mesh, []).append(p)
    norms = [nn.utils.get_total_norm([p.grad for p in own]).full_tensor() for own in meshes.values()]
    total = torch.stack(norms).norm()
    for own in meshes.values():
        nn.utils.clip_grads_with_norm_(own, 1.0, total)
    return total.item()


def digest(tensor: torch.Tensor) -> str:
    held = tensor.detach().contiguous().view(torch.uint8).cpu()
    return hashlib.sha256(held.numpy().tobytes()).hexdigest()[:16]


@contextmanager
def patched(model: nn.Module, words: Mapping[str, Any] | None, ranks_per_node: int) -> Iterator[None]:
    if words is None:
        yield
        return
    fsdp2_patch.enable(model, **{"ranks_per_node": ranks_per_node, **words})
    try:
        yield
    finally:
        fsdp2_patch.disable()


def train(case: Case, words: Mapping[str, Any] | None = None) -> Run:
    """Train a case from its start. To be called on every rank; words: what enable takes, None: without the patch."""
    job = Job(case)
    with warnings.catch_warnings(record=True) as caught, patched(job.model, words, case.ranks_per_node):
        warnings.simplefilter("always")
        for step in range(case.steps):
            job.step(step)
        sent = fsdp2_patch.counters().take() if words is not None else {}
        run = job.run()
    said = [str(w.message) for w in caught if "fsdp2_patch" in str(w.message)]
    return Run(run.losses, run.norms, run.shards, run.whole, run.weights, sent, said)


def train_all(cases: Sequence[tuple[Case, Mapping[str, Any] | None]]) -> list[Run]:
    return [train(case, words) for case, words in cases]
