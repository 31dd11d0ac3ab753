"""megazero, FSDP2, HSDP, DDP and DeepSpeed on nodes joined by a link of a given rate.

    python -m benchmarks.links.comparison --rates 200mbit 1gbit none --micro-batches 1 4 8 --out docs/results
    python -m benchmarks.links.comparison --rates 1gbit 1gbit+20ms 1gbit+100ms --micro-batches 4 --out /tmp/long

    python -m benchmarks.links.comparison --heats experts --rates 200mbit 1gbit --micro-batches 1 --out runs/experts
    python -m benchmarks.links.comparison --heats "latent experts" --rates 200mbit --micro-batches 1 --out runs/latent
    python -m benchmarks.links.comparison --heats pipelines --micro-batches 4 --out runs/pipelines

Everyone trains the same Llama (8 layers, hidden 256, ffn 688, vocabulary 4096, sequence 128, micro-batch 1) with bf16
parameters and an fp32 master. Within a heat the contestants take turns; bytes are what the kernel counted
at the interface of a node around a contestant's steps, everything included. A turn of those that meet every few steps
has whole intervals; one more interval, whose steps are measured one by one, has the most bytes of a step. The results
are kept in comparison.json in --out, or for docs/results in benchmarks/results: a run replaces its rates,
micro-batches and heats there and leaves the others. Prints the tables of docs/results/comparison.md.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import time
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.links import pipelines
from benchmarks.links.comparison_report import byte_lines, tables
from benchmarks.links.contestants import CONTESTANTS, EXPERTS, HEATS, LATENT, PAGE_HEATS, Running, absent
from benchmarks.links.volume import Case
from benchmarks.results import data_of
from benchmarks.steps import Shape, decoder
from megazero.config.layout.wire import EXACT_NUMEL
from megazero.mesh.levels import INTER
from tests.bytes_across import Llama
from tests.netlab.lab import parse_link


@dataclass
class Record:
    """One contestant's measurements. seconds: per step, one per turn. sent, counted: bytes per step, per turn and
    node, at the interface and by the engine's counters (0 for peers). taken: every step, of this rank."""

    running: Running
    interval: int  # a turn begins with one and has whole ones
    steps: int = 1  # of a turn
    seconds: list[float] = field(default_factory=list)
    sent: list[list[int]] = field(default_factory=list)
    counted: list[list[int]] = field(default_factory=list)
    taken: list[harness.Taken] = field(default_factory=list)

    def turn(self, ranks_per_node: int) -> None:
        traffic = self.running.traffic
        # A short step's first repetition pays for what others left in the caches.
        if self.steps > self.interval == 1:
            self.step()
        before = traffic.total(INTER) if traffic else 0
        seconds, sent = harness.measure(self.step, self.steps)
        counted = (traffic.total(INTER) - before) // self.steps if traffic else 0
        rows = torch.zeros(dist.get_world_size(), 2, dtype=torch.int64)
        rows[dist.get_rank()] = torch.tensor([sent, counted])
        dist.all_reduce(rows)
        nodes = rows.view(-1, ranks_per_node, 2)
        self.seconds.append(seconds)
        self.sent.append(nodes[:, 0, 0].tolist())
        self.counted.append(nodes[:, :, 1].sum(1).tolist())

    def settle(self, steps: int) -> None:
        """Forget the turns so far, which warmed up; from now on a turn has so many steps."""
        self.steps = steps
        for each in (self.seconds, self.sent, self.counted):
            each.clear()

    def step(self) -> None:
        self.taken.append(self.running.step())

    def most(self, steps: int) -> int:
        """Return the most bytes that a node sent in one of so many steps. Nobody begins a step before all have
        ended."""
        return max(harness.measure_most(self.step)[1] for _ in range(steps))


def compare(heat: str, names: list[str], micro_batches: int, asked: dict[str, Any]) -> dict[str, Any]:
    """Measure contestants of a heat. asked: least and most rounds, seconds of them all and of a turn."""
    node = harness.ranks_per_node()
    shape = shape_of(micro_batches, heat)
    chosen = {name: CONTESTANTS[name] for name in names}
    records = {
        name: Record(each.build(shape, node), each.interval, each.interval) for name, each in chosen.items()
    }
    for name, each in chosen.items():
        for _ in range(each.lead):
            records[name].step()
    turns = {name: lambda record=record: record.turn(node) for name, record in records.items()}
    harness.take_turns(
        turns, 2, warm_up=0
    )  # the first step has start-up costs; the last tells how long steps take
    own = {name: harness.learned(record.taken) for name, record in records.items()}
    intervals = {each.interval for each in chosen.values()}
    for interval in intervals:  # a replica's gradients are of its own samples
        harness.require_training({name: own[name] for name in own if chosen[name].interval == interval})
    took = torch.tensor([record.seconds[-1] for record in records.values()])
    dist.broadcast(took, 0)
    whole = 0.0
    for (name, record), seconds in zip(records.items(), took.tolist(), strict=True):
        interval = chosen[name].interval
        record.settle(interval * max(1, round(asked["turn_seconds"] / (interval * seconds))))
        whole += record.steps * seconds
    gc.collect()
    gc.freeze()  # a collection would walk the models of all contestants in one's turn
    harness.take_turns(
        turns, max(asked["rounds"], min(asked["most_rounds"], round(asked["seconds"] / whole))), 0
    )
    most = {name: records[name].most(each.interval) for name, each in chosen.items() if each.most}
    case = case_of(shape, dist.get_world_size() // node, node)
    facts: dict[str, Any] = {"elements": case.elements, "most": most}
    facts["formula"] = {name: each.sent(case) for name, each in chosen.items() if each.sent}
    facts["most_formula"] = {name: each.most(case) for name, each in chosen.items() if each.most}
    for what in ("steps", "seconds", "sent", "counted"):
        facts[what] = {name: getattr(record, what) for name, record in records.items()}
    return facts


def shape_of(micro_batches: int, heat: str = "") -> Shape:
    """Return what a heat trains: that of EXPERTS a mixture of 16 experts of which a token takes two, 31M parameters,
    5M of them for a token; that of LATENT the same as DeepSeek-V3 is built, behind a dense layer."""
    if heat == "pipelines":
        return replace(pipelines.SHAPE, micro_batches=micro_batches)
    one = Shape(sequence=128, micro_batch=1, micro_batches=micro_batches, dtype=torch.bfloat16)
    mixture = {"layers": 6, "hidden": 192, "ffn": 512, "vocabulary": 2048, "experts": 16}
    latent = {"model_family": "deepseek_v3", "q_lora_rank": 96, "kv_lora_rank": 64, "qk_head_dim": 32}
    latent |= {"qk_pos_emb_head_dim": 16, "v_head_dim": 32, "moe_shared_expert_intermediate_size": 512}
    latent |= {"moe_layer_freq": (0, 1, 1, 1, 1, 1), "moe_router_num_groups": 4, "moe_router_group_topk": 2}
    more = {EXPERTS: mixture, LATENT: {**mixture, "more": latent}}
    return replace(one, **more.get(heat, {}))


def case_of(shape: Shape, nodes: int, ranks_per_node: int) -> Case:
    model = decoder(shape, "meta")
    sizes = [sum(p.numel() for module in unit for p in module.parameters()) for unit in model.units()]
    small = sum(p.numel() for p in model.parameters() if p.numel() <= EXACT_NUMEL)
    experts = sum(p.numel() for each in model.experts_of(model.layers.values()) for p in each.parameters())
    s = shape
    sizes_of = Llama(s.layers, s.hidden, s.ffn, s.heads, s.heads, s.vocabulary, s.experts)
    return Case(tuple(sizes), s.micro_batches, nodes, ranks_per_node, small, experts, sizes_of)


def refuse_others(stored: dict[str, Any], facts: dict[str, Any]) -> None:
    """Raise ValueError if ``stored`` is of other facts (another lab): they would not be one comparison."""
    differ = [key for key in facts if key in stored and stored[key] != facts[key]]
    if differ:
        key = differ[0]
        raise ValueError(
            f"the stored results have {key} {stored[key]!r}, this run has {facts[key]!r}: give another --out"
        )


def merge(stored: dict[str, Any], facts: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Return ``stored`` with one more result, which replaces the one of its rate, micro-batches and heat."""

    def slow_first(one: dict[str, Any]) -> tuple[float, float, int, int]:
        bits, delay_ms = parse_link(one["rate"])
        return bits or math.inf, delay_ms, one["micro_batches"], [*HEATS].index(one["heat"])

    kept = [r for r in stored.get("results", ()) if slow_first(r) != slow_first(result)]

    return {**facts, "results": sorted([*kept, result], key=slow_first)}


def main() -> int:
    parser = harness.parser(
        __doc__,
        out=Path,
        rates=["200mbit", "1gbit", "none"],
        micro_batches=[1, 4, 8],
        nodes=2,
        ranks_per_node=2,
        rounds=(3, "least turns of each contestant that count"),
        most_rounds=7,
        seconds=(90.0, "per rate and micro-batches, if --rounds fit into it"),
        turn_seconds=(1.0, "a turn has as many steps, at least one"),
        verbose=(False, "show what the ranks print"),
    )
    parser.add_argument("--heats", nargs="+", choices=HEATS, default=list(PAGE_HEATS))
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    options = parser.parse_args()
    if not 1 <= options.rounds <= options.most_rounds:
        parser.error(
            f"--rounds {options.rounds}: at least 1, and at most --most-rounds {options.most_rounds}"
        )
    missing = {name: reason for name in options.contestants if (reason := absent(name))}
    for name, reason in missing.items():
        print(f"{name} does not take part: {reason}")
    asked_for = set(options.contestants) - set(missing)
    drawn = {heat: [name for name in HEATS[heat] if name in asked_for] for heat in options.heats}
    heats = {heat: names for heat, names in drawn.items() if names}
    if not heats:
        parser.error(f"none of --contestants is in --heats {' '.join(options.heats)}")
    options.out.mkdir(parents=True, exist_ok=True)
    file = data_of(options.out) / "comparison.json"
    facts = {"nodes": options.nodes, "ranks_per_node": options.ranks_per_node, "cores": os.cpu_count()}
    facts |= {"torch": harness.installed("torch"), "deepspeed": harness.installed("deepspeed")}
    stored = json.loads(file.read_text()) if file.exists() else {}
    asked = {name: getattr(options, name) for name in ("rounds", "most_rounds", "seconds", "turn_seconds")}
    how = {"ranks": options.ranks_per_node, "echo": options.verbose, "environ": {"DS_ACCELERATOR": "cpu"}}
    try:
        refuse_others(stored, facts)
        for lab in harness.labs_at(options.rates, options.nodes):
            for micro_batches, (heat, names) in product(options.micro_batches, heats.items()):
                began = time.monotonic()
                found = harness.run(compare, heat, names, micro_batches, asked, lab=lab, **how)
                key = {"rate": lab.rate, "micro_batches": micro_batches, "heat": heat}
                stored = merge(stored, facts, {**key, **found})
                file.write_text(json.dumps(stored, indent=1) + "\n")
                print(f"{', '.join(map(str, key.values()))}: {time.monotonic() - began:.0f} s", flush=True)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for heat_of, text in tables(stored["results"]).items():
        print(f"\n## {heat_of}\n\n{text}")
    print("", *byte_lines(stored["results"]), sep="\n")
    return 0


if __name__ == "__main__":
    harness.start(main)
