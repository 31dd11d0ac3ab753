"""Two hops, inside the node and across, against one collective over all ranks, on links of a given rate.

    python -m benchmarks.links.hierarchy [--rates 200mbit 1gbit none] [--elements 1 4] [--json FILE]

Gather and reduction of one unit with identity codecs, by the engine's hops in its order; and whole zero3 steps of the
engine, once with its nodes and once told that all ranks share one node, which makes its layout and its collectives
flat. Within a case the contestants take turns; bytes are what the kernel counted at a node's interface.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.links.comparison import shape_of
from benchmarks.steps import Step, ours
from megazero.comm.codec import Identity
from megazero.comm.hops import Traffic, start_exchange, start_gather
from megazero.mesh.mesh import Axis, Mesh, create_mesh, reduce_scatter_flat

BF16, FP32 = Identity(torch.bfloat16), Identity(torch.float32)
Case = dict[str, Callable[[], Any]]  # contestant -> one operation; the first takes two hops


def gathers(n: int, nested: Mesh, flat: Axis) -> Case:
    """Return the ways to gather full parameters [n] bf16 from each rank's slice [n / d]."""
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
    """Return the ways to reduce every rank's gradient [n] bf16 to fp32 sums [n / d].

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
    """Return steps of the comparison's decoder under zero3."""
    shape = shape_of(1)

    def step(node: int) -> Step:
        return ours("zero3", shape, node, torch.device("cpu"))[0]

    made = {"two hops": step(ranks_per_node), "flat": step(dist.get_world_size())}
    harness.require_training({who: harness.learned([each(), each()]) for who, each in made.items()})
    return made


def compare(millions: list[int], rounds: int, repeats: int) -> dict[str, Any]:
    """Return by case and contestant the turns: seconds and bytes of one operation, of the node that sent most."""
    world, node = dist.get_world_size(), harness.ranks_per_node()
    nested = create_mesh(shards=(world,) * 3, ranks_per_node=node)
    (flat,) = create_mesh(shards=(world,) * 3, ranks_per_node=world).data_axes
    cases: dict[str, Callable[[], Case]] = {}
    for count in millions:
        n = count << 20
        cases[f"gather {count}M"] = lambda n=n: gathers(n, nested, flat)
        cases[f"reduce {count}M, fp32 between nodes"] = lambda n=n: reductions(n, nested, flat, FP32)
        cases[f"reduce {count}M, bf16 between nodes"] = lambda n=n: reductions(n, nested, flat, BF16)
    cases["zero3 step"] = lambda: steps(node)
    found = {}
    for name, make in cases.items():
        turns = {who: lambda each=each: harness.measure_most(each, repeats) for who, each in make().items()}
        found[name] = harness.take_turns(turns, rounds)
    return found


def main() -> None:
    parser = harness.parser(
        __doc__,
        rates=["200mbit", "1gbit", "none"],
        elements=([1, 4], "of the unit, in Mi (2^20)"),
        nodes=2,
        ranks_per_node=2,
        rounds=(7, "turns of each contestant that count"),
        repeats=(3, "operations or steps of a turn"),
    )
    parser.add_argument("--json", type=Path, help="a file for the turns, too")
    options = parser.parse_args()
    found = {}
    for lab in harness.labs_at(options.rates, options.nodes):
        asked = (options.elements, options.rounds, options.repeats)
        found[str(lab.rate)] = harness.run(compare, *asked, ranks=options.ranks_per_node, lab=lab)
    header = ["rate", "case", "contestant", "ms (range)", "MB sent by a node", "flat / two hops (range)"]
    every = [
        [rate, name, *row]
        for rate, cases in found.items()
        for name, turns in cases.items()
        for row in harness.turn_rows(turns)
    ]
    print(harness.table(header, every))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    harness.start(main)
