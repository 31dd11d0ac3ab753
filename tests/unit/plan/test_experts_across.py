"""Experts that ranks of several nodes share: to how many nodes tokens go, and the memory of their rows there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megazero.comm.codec import Blockwise
from megazero.comm.peers import Peers
from megazero.config import World, make_config
from megazero.config.model.spec import model_spec
from megazero.models import Decoder
from megazero.models.experts import router_of
from megazero.moe import ExpertParallel
from megazero.plan.activations import layer_activations
from megazero.plan.communication import nodes_of_token
from tests.unit.plan.test_plan import MODEL

EXPERTS = {"num_experts": 48, "moe_router_topk": 6, "moe_ffn_hidden_size": 32}


@pytest.mark.parametrize("nodes", [2, 4, 8])
@pytest.mark.parametrize("groups", [None, (8, 3), (4, 2), (6, 1), (3, 2)])
def test_nodes_that_a_token_goes_to(groups: tuple[int, int] | None, nodes: int) -> None:
    """As many as a router sends it to whose experts are all as likely."""
    limits = dict(
        zip(("moe_router_num_groups", "moe_router_group_topk"), groups or (None, None), strict=True)
    )
    model = make_config({**MODEL, **EXPERTS, **limits}, World(1, 1)).model
    router = router_of(model)
    likelihoods = torch.rand(4096, 48, generator=torch.Generator().manual_seed(3))
    at = router.best(router.ranks(likelihoods)) // (48 // nodes)
    visited = sum(int((at == node).any(1).sum()) for node in range(nodes)) / len(at)
    assert nodes_of_token(model, nodes) == pytest.approx(visited, rel=0.04)


@dataclass(frozen=True)
class Mirrored(Peers):
    """So many ranks that all have the same tokens: what this one sends to its own place comes from each."""

    def route(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int], codec: Blockwise | None = None
    ) -> Tensor:
        if list(received) == [sent[0]] * self.size:
            return torch.cat([rows[: sent[0]]] * self.size)
        return rows.new_zeros(sum(received), *rows.shape[1:])


def peak_bytes(values: dict[str, Any], ep: ExpertParallel, seed: int) -> int:
    """Return the most bytes that a forward and a backward of a layer take beside its input."""
    torch.manual_seed(seed)
    config = make_config(values, World(1, 1))
    layers = Decoder(config.model, ep=ep)
    for parameter in layers.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(config.model.seq_length, 1, config.model.hidden_size, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        layers.run_layers([0], x).sum().backward()
    assert found.profiler is not None and found.profiler.kineto_results is not None
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    return max(itertools.accumulate(e.nbytes() for e in events))


@pytest.mark.parametrize("nodes", [2, 4])
def test_rows_come_together_at_the_nodes_between(nodes: int) -> None:
    long = {"num_layers": 1, "seq_length": 1024, "max_position_embeddings": 1024, "hidden_size": 128}
    values = {**MODEL, **EXPERTS, **long, "params_dtype": "fp32", "micro_batch_size": 1}
    ep = ExpertParallel(0, 2 * nodes, Mirrored(size=2), Mirrored(size=nodes))
    # One draw's rows are up to 6% off their mean.
    measured = fmean(peak_bytes(values, ep, seed) for seed in range(3))
    shared = {
        "expert_model_parallel_size": 2 * nodes,
        "moe_dispatch_across_nodes": "exact",
        "ranks_per_node": 2,
    }
    config = make_config({**values, **shared}, World(2 * nodes, 2))
    (layer,) = model_spec(config.model).layers
    planned = layer_activations(config, layer, 4, True, World(2 * nodes, 2))
    assert planned.kept + planned.working == pytest.approx(measured, rel=0.1)
    near = layer_activations(config, layer, 4, True)  # nodes are not known
    assert near.kept + near.working < 0.9 * measured
