"""Outer steps on ranks, and the same in plain torch: whole replicas, torch's AdamW inside and torch's SGD outside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from megazero.config import RunConfig, World, make_config
from megazero.models import Decoder
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
from tests.dist.capture import local_slices
from tests.dist.parity import Slices, Tensors, loss_sum, samples
from tests.dist.parity_cases import SIZES

BATCH = 8
MODEL = {
    **SIZES,
    **{"model_family": "llama", "num_query_groups": 4, "vocab_size": 33, "make_vocab_size_divisible_by": 32},
    **{"global_batch_size": BATCH, "micro_batch_size": 1},
}


@dataclass(frozen=True)
class OuterCase:
    """values: options over MODEL. replicas: what they mean on ``world`` ranks, ``per_node`` to a node."""

    name: str
    replicas: int
    values: Mapping[str, Any] = field(hash=False)
    world: int = 4
    per_node: int = 2
    dtype: str = "fp64"
    steps: int = 5
    skips: tuple[int, int] | None = None  # a step in which the gradients of a replica are not finite

    def config(self, **others: Any) -> RunConfig:
        values = {**MODEL, "params_dtype": self.dtype, **self.values, **others}
        return make_config(values, World(self.world, self.per_node))


@dataclass(frozen=True)
class Seen:
    """What a rank has after the last step. masters, anchors: its slices. told: losses and norms of the steps."""

    replica: int
    tp_rank: int
    masters: Slices
    anchors: Slices
    losses: list[float]
    norms: list[tuple[float, ...]]
    drifts: list[tuple[float, float] | None]
    sent: list[dict[str, int]]


def on_ranks(cases: Sequence[OuterCase]) -> list[Seen]:
    out = []
    for case in cases:
        try:
            out.append(_run(case, case.config()))
        except Exception as error:
            raise RuntimeError(f"case {case.name}: {error}") from error
    return out


def _run(case: OuterCase, config: RunConfig) -> Seen:
    mesh = make_mesh(config, World(case.world, case.per_node), torch.device("cpu"))
    decoder = build_decoder(config, mesh)
    policy = replace(make_policy(config, mesh), block=8)  # small blocks, so that slices cut parameters
    engine = shard_decoder(decoder, config, mesh, policy=policy)
    pipeline = build_pipeline(decoder, engine, config, mesh)
    count = BATCH // mesh.batch_ranks
    losses, norms, drifts, sent = [], [], [], []
    for step in range(case.steps):
        tokens, labels, mask = samples(config, step)
        divisor = sum(mask[rows].sum().item() for rows in _rows(mesh.grid.outer, mesh.replica, mesh.dp_size))
        engine.begin_step(count, divisor, pipeline.program(count))
        own = [
            slice(i * mesh.batch_ranks + mesh.batch_rank, i * mesh.batch_ranks + mesh.batch_rank + 1)
            for i in range(count)
        ]
        if case.skips == (step, mesh.replica):
            mask = mask * float("inf")
        batches = [MicroBatch(tokens[r], labels[r], mask[r].to(DTYPES[case.dtype])) for r in own]
        losses.append(pipeline.step(batches).item())
        info = engine.step()
        norms.append(info.replica_norms)
        drifts.append(None if info.outer_norm is None else (info.outer_norm, info.outer_drift))
        sent.append(engine.traffic.take())
    engine.settle()
    masters = local_slices(engine, lambda unit, a, b: unit.master.value[a:b])
    anchors = local_slices(engine, lambda unit, a, b: engine.outer.anchors[unit].value[a:b])
    slices = [[(n, low, v.numpy()) for n, low, v in each] for each in (masters, anchors)]
    mesh.release()
    return Seen(mesh.replica, mesh.tp.index, *slices, losses, norms, drifts, sent)


def _rows(replicas: int, replica: int, inner: int) -> Iterator[slice]:
    """Samples of a replica of ``inner`` data-parallel ranks: its share of each round of micro-batches."""
    stride = replicas * inner
    for begin in range(0, BATCH, stride):
        yield slice(begin + replica * inner, begin + (replica + 1) * inner)


def whole(case: OuterCase, seen: Sequence[Seen], replica: int, what: str) -> Tensors:
    """A replica's whole masters or anchors, from its ranks' slices."""
    pieces = ((s.tp_rank, *piece) for s in seen if s.replica == replica for piece in getattr(s, what))
    found = Assembler(case.config()).assemble(pieces)
    assert not found.differing and not found.faults, (case.name, found.differing, found.faults[:3])
    return found.whole


# -- plain torch -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plain:
    """masters: of each replica. norms: of each step, of each replica. drifts: of each step that met."""

    anchor: Tensors
    masters: list[Tensors]
    norms: list[list[float]]
    drifts: list[tuple[float, float] | None]


def plain(case: OuterCase) -> Plain:
    """DiLoCo as the paper has it (arXiv 2311.08105, algorithm 1), in one process; differences may arrive later."""
    config = case.config()
    replicas = [_Replica(config, DTYPES[case.dtype]) for _ in range(case.replicas)]
    anchor = [p.detach().clone().requires_grad_() for p in replicas[0].params]
    outer, tp = config.outer, config.parallel.tensor_model_parallel_size
    rule = {
        "lr": outer.outer_lr,
        "momentum": outer.outer_momentum,
        "nesterov": outer.outer_optimizer == "nesterov",
    }
    if outer.outer_optimizer == "average":
        rule = {"lr": 1.0}
    optimizer = torch.optim.SGD(anchor, **rule)
    under_way: dict[int, _Sent] = {}
    inner = case.world // (case.replicas * tp * config.parallel.pipeline_model_parallel_size)
    norms: list[list[float]] = []
    drifts: list[tuple[float, float] | None] = [None]
    for step in range(case.steps):
        batch = samples(config, step)
        norms.append(
            [
                each.step(config, batch, list(_rows(case.replicas, i, inner)), case.skips == (step, i))
                for i, each in enumerate(replicas)
            ]
        )
        drifts.append(None)
        if (step + 1) % outer.outer_interval == 0:
            under_way[step + outer.outer_delay] = _send(anchor, replicas)
        if step in under_way:
            drifts[-1] = under_way[step].moved, under_way[step].apart
            _take_up(anchor, replicas, under_way[step], optimizer)
    return Plain(_named(replicas[0], anchor), [_named(r, r.params) for r in replicas], norms, drifts[:-1])


@dataclass(frozen=True)
class _Sent:
    gradients: list[torch.Tensor]
    moved: float
    apart: float


def _send(anchor: list[torch.Tensor], replicas: list[_Replica]) -> _Sent:
    gradients, apart = [], 0.0
    for i, theta in enumerate(anchor):
        every = torch.stack([each.params[i].detach() for each in replicas])
        gradients.append(theta.detach() - every.mean(0))
        apart += (every - every.mean(0)).square().sum().item() / len(replicas)
    moved = sum(gradient.square().sum().item() for gradient in gradients)
    return _Sent(gradients, moved**0.5, apart**0.5)


def _take_up(
    anchor: list[torch.Tensor], replicas: list[_Replica], sent: _Sent, sgd: torch.optim.Optimizer
) -> None:
    for theta, gradient in zip(anchor, sent.gradients, strict=True):
        theta.grad = gradient
    sgd.step()
    with torch.no_grad():
        for param, theta in ((p, a) for each in replicas for p, a in zip(each.params, anchor, strict=True)):
            param.copy_(theta)


class _Replica:
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

    def step(
        self, config: RunConfig, batch: Sequence[torch.Tensor], rows: Sequence[slice], skipped: bool
    ) -> float:
        if skipped:
            return float("nan")
        self.optimizer.zero_grad()
        own = [torch.cat([each[r] for r in rows]) for each in batch]
        (loss_sum(self.decoder, config, own) / own[2].sum().item()).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(self.params, self.clip or float("inf")))
        self.optimizer.step()
        return norm


def _named(replica: _Replica, values: Sequence[torch.Tensor]) -> Tensors:
    return {n: v.detach().double().numpy().copy() for n, v in zip(replica.names, values, strict=True)}


def error(got: Tensors, want: Tensors) -> tuple[float, str]:
    """The largest relative error of a parameter, and its name."""
    return max((float(np.linalg.norm(got[n] - w) / np.linalg.norm(w)), n) for n, w in want.items())
