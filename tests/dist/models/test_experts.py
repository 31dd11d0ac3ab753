"""Mixtures of experts on any layout train as on one rank: gradients, losses, norms and the bits of replicas.

Experts lie on every rank, or ranks of a node share them. Always: a few layouts that have each part once. A pairwise
cover of layouts, ranks that share experts, presets, schedules, recompute and dtypes:

    pytest tests/dist/models/test_experts.py -m slow
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist import parity
from tests.dist.parity_cases import (
    DTYPES,
    EXPERTS,
    LOSS_CHUNKS,
    PRESETS,
    RECOMPUTE,
    Case,
    Model,
    pairwise_cover,
)
from tests.dist.runs import train_each
from tests.sizes import TINY

STEPS = {1: 4, 2: 4, 4: 3}
SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1))


def case(tp: int, dp: int, per_node: int, shards: str, **more: Any) -> Case:
    common: dict[str, Any] = {
        "lifetime": None,
        "sequence_parallel": tp > 1,
        "micro_batches": 3,
        "tied": False,
    }
    common |= {"vocabulary": "odd", "recompute": "none", "dtype": "fp64", "family": "experts"}
    return Case(tp, dp, per_node, shards, **{**common, **more})


CORE = (
    case(2, 2, 4, "zero2", family="shared experts", tied=True, recompute="selective"),
    case(1, 4, 2, "zero2", family="balanced experts", recompute="full", ep=2),
    case(2, 2, 4, "zero3", family="experts of micro-batches", recompute="full"),
    case(1, 4, 4, "zero1", family="balanced experts", cp=4, keys=2),
    case(1, 4, 2, "zero1", family="experts of steps", cp=2, ep=2),
    case(1, 4, 4, "zero1", family="even experts", cp=4, keys=2),
    case(1, 2, 2, "zero3", family="idle experts", recompute="full"),
    case(2, 2, 2, "zero2", family="experts of steps", recompute="full"),
    case(2, 2, 4, "zero1", family="even experts", recompute="full", ep=2),
    # What follows is slow. The pairwise cover below has the rest.
    case(1, 4, 2, "hpz", recompute="full", loss_chunk=3, dtype="fp32", lifetime="gathered", ep=2),
    case(1, 2, 4, "zero3", family="shared experts", pp=2, schedule="zb-h1", recompute="full"),
    case(1, 2, 4, "zero1", family="balanced experts", pp=2, schedule="zb-h1", cp=2),
    case(1, 2, 4, "zero1", family="experts of steps", pp=2, schedule="zb-h1"),
    case(1, 2, 4, "zero2", family="even experts", pp=2),
    case(1, 4, 4, "zero2", family="idle ranks", ep=4),
    case(2, 2, 4, "zero1", tied=True, recompute="full", ep=4),
)
ACROSS = case(1, 4, 2, "zero3", family="experts", recompute="full", ep=4)  # and these ranks are of two nodes


def every() -> Iterator[Case]:
    layouts = [
        (1, 1, 1, 1),
        (1, 2, 2, 1),
        (1, 4, 2, 1),
        (1, 4, 4, 1),
        (2, 2, 4, 1),
        (2, 1, 2, 2),
        (1, 2, 2, 2),
    ]
    model = product(EXPERTS, RECOMPUTE, DTYPES, LOSS_CHUNKS, (False, True))
    for (tp, dp, node, pp), ep, shards, (schedule, virtual), rest in product(
        layouts, (1, 2, 4), PRESETS, SCHEDULES, list(model)
    ):
        family, recompute, dtype, chunk, tied = rest
        many = pp * dp * tp
        if (pp == 1 and schedule != "1f1b") or (shards in ("hpz", "mics") and (dp, node) != (4, 2)):
            continue
        if ep > 1 and (ep % tp or ep > min(tp * dp, node) or EXPERTS[family]["num_experts"] % ep):
            continue
        yield case(
            *(tp, dp, min(node * (1 if tp > 1 or pp == 1 else pp), many), shards),
            **{"family": family, "recompute": recompute, "dtype": dtype, "loss_chunk": chunk, "tied": tied},
            **{
                "pp": pp,
                "schedule": schedule,
                "virtual": virtual,
                "layers": 4 if virtual > 1 else 2,
                "ep": ep,
            },
            micro_batches=6
            if schedule == "interleaved" and dp < 2
            else 2
            if schedule == "interleaved"
            else 3,
        )


def faults(cases: list[Case]) -> list[str]:
    outcomes = parity.run_cases(cases, STEPS)
    return [
        f"{each.id}: {fault}"
        for each, own in zip(cases, outcomes, strict=True)
        for fault in parity.faults(each, own)
    ]


@pytest.mark.first(5)
@pytest.mark.parametrize("each", (*CORE, ACROSS), ids=lambda each: each.id)
def test_experts_train_on_a_layout_as_on_one_rank(each: Case) -> None:
    assert not faults([each])


@pytest.mark.parametrize(("family", "busy"), [("idle experts", None), ("idle ranks", 2)])
def test_some_experts_get_no_token(family: str, busy: int | None) -> None:
    """In these cases some experts have no gradient in all of a step: of idle ranks, all but two."""
    model = Model(family, False, "odd", "fp64", 12)
    weights = parity.reference(model, 1).initial
    gradients = parity.gradients_at(model, weights, 0)
    up = torch.from_numpy(gradients["layers.0.mlp.experts.up_proj.weight"]).flatten(1).norm(dim=1)
    assert (up == 0).any() and (up > 0).any()
    assert busy is None or (up > 0).tolist() == [True] * busy + [False] * (len(up) - busy)


MORE_ACROSS = (
    case(1, 2, 1, "zero2", family="balanced experts", recompute="full", dtype="fp32", ep=2),
    case(2, 2, 2, "zero2", family="idle experts", recompute="selective", ep=4),
    case(1, 4, 1, "zero3", family="idle ranks", recompute="full", ep=4, dtype="fp32"),
    case(1, 4, 1, "zero3", family="shared experts", ep=2),
    case(1, 2, 1, "zero3", family="shared experts", pp=2, schedule="zb-h1", recompute="full", ep=2),
    case(
        1,
        2,
        1,
        "zero1",
        family="balanced experts",
        pp=2,
        schedule="interleaved",
        virtual=2,
        micro_batches=6,
        layers=4,
        ep=2,
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("each", MORE_ACROSS, ids=lambda each: each.id)
def test_experts_of_several_nodes_train_as_on_one_rank(each: Case) -> None:
    assert not faults([each])


@pytest.mark.slow
def test_lion_steps_experts_that_ranks_share_as_one_rank_does(tmp_path: Path) -> None:
    """It steps by signs, so that an element whose gradient is not a rank's own goes another way by a whole step."""
    values = {**TINY, "optimizer": "lion", "params_dtype": "fp64", "lr": 1e-3, "log_dir": str(tmp_path)}
    values |= {"num_experts": 4, "moe_ffn_hidden_size": 12}
    nodes = {"zero_shard": (2, 2, 4), "ranks_per_node": 2}
    tensors = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "zero_preset": "zero2"}
    seen = train_each(
        {
            "one rank": (1, values),
            "nodes": (4, {**values, **nodes, "expert_model_parallel_size": 2}),
            "tensors": (4, {**values, **tensors, "expert_model_parallel_size": 4}),
        }
    )
    one, *others = ([loss for _, loss in ranks[0].losses] for ranks in seen.values())
    assert all(losses == pytest.approx(one, rel=1e-9) for losses in others) and one[0] > one[-1]


@pytest.mark.slow
def test_experts_train_on_every_pair_of_choices_as_on_one_rank() -> None:
    assert not faults(pairwise_cover(list(every()), 7))
