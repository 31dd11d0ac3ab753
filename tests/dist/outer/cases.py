"""Outer steps on ranks, and the same in plain torch: whole replicas, torch's AdamW inside and torch's SGD outside.

The replicas of a case lie side by side in each process, with an engine and a mesh each: what replicas are to an
engine is the messages of others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from megazero.config import RunConfig, World, make_config
from megazero.config.layout.outer import averages, local_replicas, outer_rate
from megazero.mesh.mesh import Mesh
from megazero.models import Decoder
from megazero.pp.executor import Pipeline
from megazero.train.distributed import make_mesh
from megazero.train.expert_balance import balance_losses
from megazero.train.parallelize import (
    DTYPES,
    MicroBatch,
    build_decoder,
    build_pipeline,
    make_policy,
    shard_decoder,
)
from megazero.verify.full_tensors import Assembler
from megazero.zero import Engine
from megazero.zero.outer import Packed
from tests.dist.capture import local_slices
from tests.dist.parity import Slices, Tensors, loss_sum, samples
from tests.dist.parity_cases import SIZES

BATCH, SAMPLES = 4, 400  # of a replica's step, and of a run
MODEL = {
    **{name: value for name, value in SIZES.items() if name != "train_iters"},
    **{"model_family": "llama", "num_query_groups": 4, "vocab_size": 33, "make_vocab_size_divisible_by": 32},
    **{"global_batch_size": BATCH, "micro_batch_size": 1, "train_samples": SAMPLES},
}


@dataclass(frozen=True)
class OuterCase:
    """values: options over MODEL. world: ranks of each replica, ``per_node`` to a node. weights: of the replicas, in
    turn."""

    name: str
    values: Mapping[str, Any] = field(hash=False)
    world: int = 2
    per_node: int = 2
    dtype: str = "fp64"
    steps: int = 5
    weights: tuple[int, ...] = (1, 1)

    def config(self) -> RunConfig:
        meets = {"outer_meet": f"local:{len(self.weights)}"}
        values = {**MODEL, **meets, "params_dtype": self.dtype, **self.values}
        return make_config(values, World(self.world, self.per_node))


@dataclass(frozen=True)
class Seen:
    """What a rank has after the last step, of each replica. place: as in ``full_tensors.Piece``. masters, anchors:
    its slices. biases: of experts, by anchor and replica. moved: norm and drift of each meeting. sent: bytes of a
    meeting's message. digests: of the anchor."""

    place: int
    masters: list[Slices]
    anchors: list[Slices]
    biases: list[list[np.ndarray]]
    moved: list[list[tuple[float, float]]]
    sent: int
    digests: list[int]


class Replica:
    """A replica on this rank."""

    def __init__(self, case: OuterCase, config: RunConfig) -> None:
        self.mesh: Mesh = make_mesh(config, World(case.world, case.per_node), torch.device("cpu"))
        self.config, self.decoder = config, build_decoder(config, self.mesh)
        policy = replace(
            make_policy(config, self.mesh), block=8
        )  # small blocks, so that slices cut parameters
        self.engine: Engine = shard_decoder(self.decoder, config, self.mesh, policy=policy)
        self.pipeline: Pipeline = build_pipeline(self.decoder, self.engine, config, self.mesh)

    def step(self, number: int) -> None:
        tokens, labels, mask = samples(self.config, number)
        count, ranks = BATCH // self.mesh.batch_ranks, self.mesh.batch_ranks
        self.engine.begin_step(count, mask.sum().item(), self.pipeline.program(count))
        rows = [
            slice(i * ranks + self.mesh.batch_rank, i * ranks + self.mesh.batch_rank + 1)
            for i in range(count)
        ]
        dtype = DTYPES[self.config.precision.params_dtype]
        self.pipeline.step([MicroBatch(tokens[r], labels[r], mask[r].to(dtype)) for r in rows])
        self.engine.step()


def on_ranks(cases: Sequence[OuterCase]) -> list[Seen]:
    out = []
    for case in cases:
        try:
            out.append(_run(case, case.config()))
        except Exception as error:
            raise RuntimeError(f"case {case.name}: {error}") from error
    return out


def _run(case: OuterCase, config: RunConfig) -> Seen:
    replicas = [Replica(case, config) for _ in case.weights]
    interval, delay = config.outer.outer_interval, config.outer.outer_delay
    packed: list[Packed] = []
    moved: list[list[tuple[float, float]]] = [[] for _ in replicas]
    for step in range(case.steps):
        for number, each in enumerate(replicas):
            each.step(step * len(replicas) + number)
        if (step + 1 + delay) % interval == 0:
            packed = [each.engine.outer.pack() for each in replicas]
        if (step + 1) % interval == 0:
            rate = outer_rate(config.outer, (step + 1) * BATCH * len(replicas), SAMPLES)
            seats = [[*sent.messages] for sent in packed]
            for each, own, told in zip(replicas, packed, moved, strict=True):
                told.append(each.engine.outer.take_up(seats, case.weights, rate, own))
    engines = [each.engine for each in replicas]
    masters = [local_slices(engine, lambda unit, a, b: unit.master.value[a:b]) for engine in engines]
    anchors = [local_slices(e, lambda unit, a, b, e=e: e.outer.anchors[unit].value[a:b]) for e in engines]
    slices = [[[(n, low, v.numpy()) for n, low, v in one] for one in each] for each in (masters, anchors)]
    biases = [[held.numpy().copy() for pair in e.outer.buffers for held in pair] for e in engines]
    digests = [engine.outer.digest(0) for engine in engines]
    sent = engines[0].outer.message_bytes
    mesh = replicas[0].mesh
    place = mesh.rank % max(mesh.tp.size, mesh.grid.ep)
    return Seen(place, *slices, biases, moved, sent, digests)


def whole(case: OuterCase, seen: Sequence[Seen], replica: int, what: str) -> Tensors:
    """A replica's whole masters or anchors, from its ranks' slices."""
    pieces = ((s.place, *piece) for s in seen for piece in getattr(s, what)[replica])
    found = Assembler(case.config()).assemble(pieces)
    assert not found.differing and not found.faults, (case.name, found.differing, found.faults[:3])
    return found.whole


# -- plain torch -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plain:
    """masters: of each replica. moved: norm of each meeting, and drift of each replica."""

    anchor: Tensors
    masters: list[Tensors]
    moved: list[tuple[float, list[float]]]


def plain(case: OuterCase) -> Plain:
    """DiLoCo as the paper has it (arXiv 2311.08105, algorithm 1), in one process; differences may arrive later."""
    config = case.config()
    assert local_replicas(config.outer) == len(case.weights)
    replicas = [_Plain(config, DTYPES[case.dtype]) for _ in case.weights]
    anchor = [p.detach().clone().requires_grad_() for p in replicas[0].params]
    outer = config.outer
    rule = {"momentum": outer.outer_momentum, "nesterov": outer.outer_optimizer == "nesterov"}
    optimizer = torch.optim.SGD(anchor, lr=1.0, **({} if averages(outer) else rule))
    sent: list[list[torch.Tensor]] = []
    moved = []
    for step in range(case.steps):
        for number, each in enumerate(replicas):
            each.step(config, samples(config, step * len(replicas) + number))
        if (step + 1 + outer.outer_delay) % outer.outer_interval == 0:
            sent = [
                [a.detach() - p.detach() for a, p in zip(anchor, each.params, strict=True)]
                for each in replicas
            ]
        if (step + 1) % outer.outer_interval:
            continue
        total = sum(case.weights)
        means = [
            sum(w * each[i] for w, each in zip(case.weights, sent, strict=True)) / total
            for i in range(len(anchor))
        ]
        drifts = [
            _norm([a.detach() - p.detach() - m for a, p, m in zip(anchor, each.params, means, strict=True)])
            for each in replicas
        ]
        moved.append((_norm(means), drifts))
        optimizer.param_groups[0]["lr"] = outer_rate(outer, (step + 1) * BATCH * len(replicas), SAMPLES)
        for theta, mean in zip(anchor, means, strict=True):
            theta.grad = mean
        optimizer.step()
        with torch.no_grad():
            for param, theta in (
                (p, a) for each in replicas for p, a in zip(each.params, anchor, strict=True)
            ):
                param.copy_(theta)
    return Plain(_named(replicas[0], anchor), [_named(r, r.params) for r in replicas], moved)


def _norm(tensors: Sequence[torch.Tensor]) -> float:
    return sum(each.square().sum().item() for each in tensors) ** 0.5


class _Plain:
    def __init__(self, config: RunConfig, dtype: torch.dtype) -> None:
        self.decoder = Decoder(config.model, balance=balance_losses(config), dtype=dtype)
        self.decoder.initialize(config.training.seed)
        self.names, self.params = map(list, zip(*self.decoder.named_parameters(), strict=True))
        o, undecayed = config.optimizer, self.decoder.no_weight_decay()
        groups = [
            {"params": [p], "weight_decay": 0.0 if n in undecayed else o.weight_decay}
            for n, p in self.decoder.named_parameters()
        ]
        if o.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(groups, lr=o.lr, momentum=o.sgd_momentum)
        else:
            self.optimizer = torch.optim.AdamW(
                groups, lr=o.lr, betas=(o.adam_beta1, o.adam_beta2), eps=o.adam_eps
            )
        self.clip = o.clip_grad

    def step(self, config: RunConfig, batch: Sequence[torch.Tensor]) -> None:
        self.optimizer.zero_grad()
        for balance in self.decoder.balances().values():
            balance.clear()
        (loss_sum(self.decoder, config, batch) / batch[2].sum().item()).backward()
        torch.nn.utils.clip_grad_norm_(self.params, self.clip or float("inf"))
        self.optimizer.step()


def _named(replica: _Plain, values: Sequence[torch.Tensor]) -> Tensors:
    return {n: v.detach().double().numpy().copy() for n, v in zip(replica.names, values, strict=True)}


def error(got: Tensors, want: Tensors) -> tuple[float, str]:
    """The largest relative error of a parameter, and its name."""
    return max((float(np.linalg.norm(got[n] - w) / np.linalg.norm(w)), n) for n, w in want.items())
