"""One rank of hierarchy.py: contestants of a case take turns; time and bytes of each turn."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megazero.comm.codec import Identity
from megazero.comm.hops import Traffic, start_exchange, start_gather
from megazero.mesh.mesh import Axis, Mesh, create_mesh, reduce_scatter_flat
from tests.benchmarks.comparison_rank import measure
from tests.benchmarks.contestants import Shape, Step, ours

BF16, FP32 = Identity(torch.bfloat16), Identity(torch.float32)
Case = dict[str, Callable[[], Any]]  # contestant -> one operation; the first takes two hops


def gathers(n: int, nested: Mesh, flat: Axis) -> Case:
    """Full parameters [n] bf16 from each rank's slice [n / d]."""
    full = torch.zeros(n, dtype=torch.bfloat16)
    traffic, size = Traffic(), n // nested.world_size

    def two_hops() -> None:
        inner, outer = nested.data_axes
        part = full.view(inner.size, -1)[inner.index]
        own = part.view(outer.size, -1)[outer.index].fill_(nested.rank + 1)
        start_gather(outer, part, own, "gather", traffic).wait()
        start_gather(inner, full, part, "gather", traffic).wait()

    def all_gather() -> None:
        own = full.view(-1, size)[flat.index].fill_(flat.index + 1)
        start_gather(flat, full, own, "gather", traffic).wait()

    def all_to_all() -> None:
        own = full.new_full((size,), flat.index + 1).expand(flat.size, -1).contiguous()
        start_exchange(flat, full.view(flat.size, -1), own, traffic).wait()

    case = {"two hops": two_hops, "flat all-gather": all_gather, "flat all-to-all": all_to_all}
    for name, gather in case.items():
        full.zero_()
        gather()
        values, counts = full.unique(return_counts=True)
        assert values.tolist() == list(range(1, flat.size + 1)) and set(counts.tolist()) == {size}, name
    return case


def reductions(n: int, nested: Mesh, flat: Axis, across: Identity) -> Case:
    """fp32 sums [n / d] of every rank's gradient [n] bf16.

    across: format of two hops' sums between nodes. From a node of r ranks a flat all-to-all sends r times as many
    bytes as two hops with bf16 across, r / 2 times as many as with fp32 (the engine's exact default): with 2 ranks
    per node two hops with fp32 save nothing. With bf16 across a reduce-scatter in bf16 is a match, too.
    """
    gradient = torch.full((n,), nested.rank + 1, dtype=torch.bfloat16)
    sums, traffic = torch.zeros(n // nested.world_size), Traffic()

    def exchange(axis: Axis, codec: Identity, source: torch.Tensor, out: torch.Tensor) -> None:
        messages = codec.encode(source.view(axis.size, -1))
        received = torch.empty_like(messages)
        start_exchange(axis, received, messages, traffic).wait()
        codec.decode_sum(received, out, False)

    def two_hops() -> None:
        inner, outer = nested.data_axes
        node_sums = torch.empty(n // inner.size)
        exchange(inner, BF16, gradient, node_sums)
        exchange(outer, across, node_sums, sums)

    def reduce_scatter() -> None:
        own = gradient.new_empty(sums.shape)
        reduce_scatter_flat(own, gradient, group=flat.reduce_group)
        sums.copy_(own)

    case: Case = {"two hops": two_hops, "flat all-to-all": lambda: exchange(flat, BF16, gradient, sums)}
    if across is BF16:
        case["flat reduce-scatter"] = reduce_scatter
    for name, reduction in case.items():
        sums.zero_()
        reduction()
        assert (sums == flat.size * (flat.size + 1) / 2).all(), name
    return case


def steps(ranks_per_node: int) -> Case:
    """A step of the comparison's decoder under zero3."""
    shape = Shape(sequence=128, micro_batch=1, dtype=torch.bfloat16)

    def step(node: int) -> Step:
        return ours("zero3", shape, node, torch.device("cpu"))[0]

    return {"two hops": step(ranks_per_node), "flat": step(dist.get_world_size())}


def take_turns(case: Case, rounds: int, repeats: int) -> dict[str, Any]:
    """Per contestant and turn: seconds and bytes sent by the node that sent most, per operation."""
    names = list(case)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    sent: dict[str, list[int]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            took, count = measure(case[name], repeats if turn else 1)
            most = torch.tensor(count)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            if turn:  # the first warms up
                seconds[name].append(took)
                sent[name].append(int(most))
    return {"seconds": seconds, "sent": sent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--elements", type=int, nargs="+", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, ranks_per_node = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    nested = create_mesh(shards=(world,) * 3, ranks_per_node=ranks_per_node)
    (flat,) = create_mesh(shards=(world,) * 3, ranks_per_node=world).data_axes
    cases: dict[str, Callable[[], Case]] = {}
    for millions in options.elements:
        n = millions << 20
        cases[f"gather {millions}M"] = lambda n=n: gathers(n, nested, flat)
        cases[f"reduce {millions}M, fp32 between nodes"] = lambda n=n: reductions(n, nested, flat, FP32)
        cases[f"reduce {millions}M, bf16 between nodes"] = lambda n=n: reductions(n, nested, flat, BF16)
    cases["zero3 step"] = lambda: steps(ranks_per_node)
    results = [
        {"case": name, **take_turns(make(), options.rounds, options.repeats)} for name, make in cases.items()
    ]
    if dist.get_rank() == 0:
        options.result.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
