"""Step times that the planner predicts, against measured ones: 2 nodes of 2 ranks, on links of a given rate.

    python -m benchmarks.planning.step_time --keep FOLDER [--rates none 1gbit 200mbit] [--seed 0] [--layouts 12]

First ``megazero calibrate`` measures the first shape on the link. Then layouts are drawn at random over both shapes;
the second one was not calibrated. Everything that was measured is kept in --keep, and a second call measures only
what is missing; --seconds ends a call early, so that it can be taken in pieces. When all is there, every residual is
printed, and the section of docs/guide/planning.md is written (--page: another file).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.planning import shared_processors
from benchmarks.results import data_of
from benchmarks.steps import pipelined
from megazero.config import RunConfig, World, parse
from megazero.config.options.cluster import Cluster, Device, InterNode, IntraNode, load_cluster
from megazero.plan.base_layout import BaseLayout
from megazero.plan.bounds import Shard
from megazero.plan.layout import Layout
from megazero.plan.options import read_values, with_stand_ins
from megazero.plan.report import describe, layout_flags
from megazero.plan.search import Search
from megazero.plan.seconds import Collectives
from megazero.plan.simulate import Timing
from megazero.train.distributed import make_mesh
from tests.netlab.lab import Lab

NODES, RANKS = 2, 2
COMMON = "--model-family llama --num-layers 4 --vocab-size 4096"
SHAPES = {
    "profiled": f"{COMMON} --hidden-size 256 --ffn-hidden-size 688 --num-attention-heads 4 --seq-length 256",
    "other": f"{COMMON} --hidden-size 384 --ffn-hidden-size 1024 --num-attention-heads 6 --seq-length 128",
}
TRAINING = ["--lr", "1e-4", "--train-iters", "1", "--mock-data", "--ranks-per-node", str(RANKS)]
ROUNDS = 5
TITLE = "Step time against measurement"
TEXT = """    python -m benchmarks.planning.step_time --keep FOLDER {command}

2 nodes of 2 ranks on one machine (`tests/netlab`), gloo, fp32, links shaped to the rate. At each rate `megazero
calibrate` measures the first shape. Then {layouts} layouts of each of two shapes are drawn by the seed and measured;
the second shape was not profiled. {batch} samples per step; medians (least to most) of the quietest {rounds} of up
to {most_rounds} rounds. Other programs took {foreign} of the machine's processors (median; at most {most});
predictions are for what they left. *The choice*: the layout that is predicted to be the fastest, as measured; *the
best*: the one that was. [planning_steps.tsv](../../benchmarks/results/planning_steps.tsv) has every layout.

- profiled: `{profiled}`
- other: `{other}`

{setting}.

{verdicts}
"""


class Case(NamedTuple):
    """A layout of a shape. flags: all of a training's. formats: the name of its messages."""

    shape: str
    flags: tuple[str, ...]
    formats: str

    @property
    def key(self) -> str:
        return f"{self.shape}: {' '.join(self.flags)}"


def draw(shape: str, seed: int, number: int, batch: int) -> list[Case]:
    """Draw layouts: the sizes of TP and PP, a base that has them, one of its shards, and one of their messages."""
    device = Device("any", 1000.0, 10.0, 1.0, fp32_tflops=0.1, reserved_gib=0.0)
    anything = Cluster("any", NODES, RANKS, device, IntraNode(1.0), InterNode(1.0))
    words = [*SHAPES[shape].split(), "--global-batch-size", str(batch)]
    values, errors = read_values([*words, "--ranks-per-node", str(RANKS)])
    assert not errors, errors
    search, generator = Search(with_stand_ins(values), anything, "zeropp"), random.Random(f"{shape} {seed}")
    bases: defaultdict[tuple[int, int], list[BaseLayout]] = defaultdict(list)
    for base in search.bases():
        bases[base.tp, base.pp].append(base)
    found = dict[str, Case]()
    while len(found) < number:
        base = generator.choice(bases[generator.choice(sorted(bases))])
        by_shard = defaultdict[Shard, list[tuple[Layout, str]]](list)
        for choice in search.choices(base):
            by_shard[choice.shard] += [(each, choice.formats.name) for each in search.layouts(choice)]
        layout, formats = generator.choice(generator.choice(list(by_shard.values())))
        case = Case(shape, (*words, *TRAINING, *layout_flags(layout.config)), formats)
        found.setdefault(case.key, case)
    return list(found.values())


def drawn(keep: Path, seed: int, number: int, batch: int) -> list[Case]:
    """Return the layouts of both shapes; they are kept, since to draw them takes 20 s."""
    file = keep / f"drawn-{seed}-{number}-{batch}.json"
    if not file.exists():
        cases = [case for shape in SHAPES for case in draw(shape, seed, number, batch)]
        file.write_text(json.dumps(cases, indent=1))
    return [Case(shape, tuple(flags), formats) for shape, flags, formats in json.loads(file.read_text())]


def beside(cluster: Cluster, foreign: float) -> Cluster:
    """Return the cluster where other programs take a share of its processors."""
    assert cluster.cores is not None
    return replace(cluster, cores=replace(cluster.cores, others=foreign * cluster.cores.count))


def predict(case: Case, cluster: Cluster) -> tuple[Layout, Timing]:
    world = World(cluster.world_size, cluster.ranks_per_node)
    config = parse(case.flags, world)
    layout = Layout(BaseLayout(config, world, cluster, Collectives(cluster)), config.zero)
    return layout, shared_processors.predict(layout)


def measured(file: Path) -> dict[str, dict[str, Any]]:
    """Return the lines of a file of measurements by their keys."""
    return {line["key"]: line for line in harness.Store(file).records()}


def cluster_file(keep: Path, rate: str) -> Path:
    return keep / f"{rate}.yaml"


def step_file(keep: Path, rate: str) -> Path:
    return keep / f"{rate}.steps.jsonl"


def profile(lab: Lab, keep: Path, rate: str, timeout: float) -> None:
    """Profile the first shape. What does not use the link is taken from another rate's profile, if there is one."""
    progress = keep / f"{rate}.yaml.measured.jsonl"
    for other in keep.glob("*.yaml.measured.jsonl"):
        if not progress.exists():
            lines = other.read_text().splitlines()
            kept = [line for line in lines if not json.loads(line).get("point", "").startswith("collectives")]
            progress.write_text("\n".join(kept) + "\n")
    words = ["--cluster-output", str(cluster_file(keep, rate)), "--cluster-name", f"lab, {rate}"]
    words += ["--calibrate-largest-bytes", str(4 << 20), "--calibrate-rounds", str(ROUNDS)]
    words = ["-m", "megazero", "calibrate", *SHAPES["profiled"].split(), *words]
    environ = {"PYTHONPATH": str(harness.ROOT), "PYTHONWARNINGS": "ignore"}
    done = lab.run(words, ranks_per_node=RANKS, environ=environ, timeout=timeout, echo=True)
    if done.returncode:
        raise RuntimeError(f"at {lab.rate}: return codes {done.returncodes}\n" + "\n".join(done.outputs))


def measure(lab: Lab, keep: Path, rate: str, cases: Sequence[Case], until: float) -> None:
    """Measure the missing cases, as long as there is time."""
    asked = [{"key": case.key, "flags": case.flags} for case in cases]
    harness.run(
        measure_all, asked, str(step_file(keep, rate).resolve()), until,
        ranks=RANKS, lab=lab, world=False, timeout=until - time.time() + 60, echo=True,
    )  # fmt: skip


CPU = torch.device("cpu")
PORT, TIMEOUT = 29600, timedelta(seconds=120)
WARM = 2  # turns that do not count: the first makes connections and optimizer states, the second fills caches
QUIET = 0.06  # of the machine's processors: other programs took no more in a quiet round
LONG_S = 2.0  # of so many seconds is a step in which caches are nothing: its second turn counts


def measure_layout(config: RunConfig, world: World, rounds: int, most: int) -> dict[str, list[float]]:
    """Return the seconds of the quietest rounds, and processor seconds of all ranks and what other programs took of
    the machine in each.

    Rounds are taken until so many were quiet, ``most`` at most.
    """
    mesh = make_mesh(config, world, CPU, TIMEOUT)
    size, count = config.batch.micro_batch_size, config.num_micro_batches(world)
    assert size and config.model.seq_length
    generator = torch.Generator().manual_seed(mesh.dp_rank)
    shape = (count * size, config.model.seq_length)
    tokens = torch.randint(0, config.model.vocab_size or 0, shape, generator=generator)
    step, _ = pipelined(config, mesh, tokens, count)
    taken: list[dict[str, float]] = []
    turn = 0
    while turn < WARM + most and sum(one["foreign"] < QUIET for one in taken) < rounds:
        dist.barrier()
        began, spent, others = time.perf_counter(), time.process_time(), machine_seconds()
        step()
        dist.barrier()
        took = time.perf_counter() - began
        own = torch.tensor(
            [time.process_time() - spent, took, machine_seconds() - others], dtype=torch.float64
        )
        every = [torch.empty_like(own) for _ in range(world.world_size)]
        dist.all_gather(every, own)
        busy, (_, took, machine) = sum(float(row[0]) for row in every), every[0].tolist()
        turn += 1
        if turn > WARM or turn == WARM and took > LONG_S:
            foreign = max(0.0, machine - busy) / (took * (os.cpu_count() or 1))
            taken.append({"seconds": took, "busy": busy, "foreign": foreign})
    quietest = sorted(taken, key=lambda one: one["foreign"])[:rounds]
    return {name: [one[name] for one in quietest] for name in ("seconds", "busy", "foreign")}


def machine_seconds() -> float:
    """Return the processor seconds that all programs of the machine have taken: all but idle, and waits for disks."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    return sum(int(n) for i, n in enumerate(words) if i not in (3, 4)) / os.sysconf("SC_CLK_TCK")


def measure_all(every_asked: list[dict[str, Any]], file: str, until: float) -> None:
    """Measure on each rank, and add a line to the file for each layout. None begins after time.time() ``until``.

    Each has a world of its own, so that no threads of process groups are left over from the one before.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    world = World(size, harness.ranks_per_node())
    store = dist.TCPStore(os.environ["MASTER_ADDR"], PORT, size, rank == 0, TIMEOUT)
    for number, asked in enumerate(every_asked):
        own = dist.PrefixStore(f"layout {number}", store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=TIMEOUT)
        late = torch.tensor(float(time.time() > until))
        dist.broadcast(late, 0)
        if not late:
            found = measure_layout(parse(asked["flags"], world), world, ROUNDS, ROUNDS + 3)
            if rank == 0:
                harness.Store(Path(file)).append({**asked, **found})
                print(asked["key"], f"{statistics.median(found['seconds']):.3f} s", flush=True)
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()  # engines are cycles, and hold process groups
        if late:
            break


def residuals(keep: Path, rates: Sequence[str], cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Return a row for each measured layout."""
    rows = []
    for rate in rates:
        cluster, found = load_cluster(str(cluster_file(keep, rate))), measured(step_file(keep, rate))
        for case in cases:
            line = found.get(case.key)
            if line is None:
                continue
            foreign = statistics.median(line["foreign"])
            layout, timing = predict(case, beside(cluster, foreign))
            seconds = statistics.median(line["seconds"])
            row = {"rate": rate, "shape": case.shape, "layout": f"{describe(layout)}; {case.formats}"}
            row |= {"measured": seconds, "least": min(line["seconds"]), "most": max(line["seconds"])}
            row |= {"foreign": foreign, "predicted": timing.seconds}
            rows.append({**row, "residual": timing.seconds / seconds - 1})
    return rows


def verdicts(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with the errors of each rate and shape, and the choice beside the best measured."""
    out = []
    for rate, shape in dict.fromkeys((row["rate"], row["shape"]) for row in rows):
        own = [row for row in rows if (row["rate"], row["shape"]) == (rate, shape)]
        errors = sorted(abs(row["residual"]) for row in own)
        choice = min(own, key=lambda row: row["predicted"])
        best = min(own, key=lambda row: row["measured"])
        line = [rate, shape, str(len(own)), f"{statistics.median(errors):.1%}", f"{errors[-1]:.1%}"]
        out.append([*line, f"{choice['measured']:.3f}", spread(best)])
    every = [abs(row["residual"]) for row in rows]
    out.append(["all", "", str(len(every)), f"{statistics.median(every):.1%}", f"{max(every):.1%}", "", ""])
    header = [
        "rate",
        "shape",
        "layouts",
        "median error",
        "worst",
        "the choice, s",
        "the best, s (its rounds)",
    ]
    return harness.table(header, out)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [["rate", "shape", "layout; messages", "measured s (rounds)", "predicted", "residual"]]
    for row in rows:
        figures = (spread(row), f"{row['predicted']:.3f}", f"{row['residual']:+.0%}")
        lines.append([row["rate"], row["shape"], row["layout"], *figures])
    return "".join("\t".join(line) + "\n" for line in lines)


def spread(row: Mapping[str, Any]) -> str:
    return harness.spread([row[name] for name in ("least", "measured", "most")])


def write_section(rows: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> None:
    """Put the errors into docs/guide/planning.md, and every layout into planning_steps.tsv."""
    (data_of(options.page.parent) / "planning_steps.tsv").write_text(table(rows), encoding="utf-8")
    foreign = [row["foreign"] for row in rows]
    text = TEXT.format(
        command=f"--rates {' '.join(options.rates)} --seed {options.seed} --batch {options.batch}",
        **SHAPES,
        layouts=options.layouts,
        batch=options.batch,
        rounds=ROUNDS,
        most_rounds=ROUNDS + 3,
        foreign=f"{statistics.median(foreign):.0%}",
        most=f"{max(foreign):.0%}",
        setting=harness.setting(),
        verdicts=verdicts(rows),
    )
    harness.write_section(options.page, TITLE, text)


def main() -> int:
    options = harness.parser(
        __doc__,
        keep=Path,
        rates=["none", "1gbit", "200mbit"],
        seed=0,
        layouts=(12, "of each of the two shapes"),
        batch=(8, "samples of a step"),
        seconds=(1e9, "of this call"),
        page=harness.DOCS / "guide" / "planning.md",
        predict_only=(False, "measure nothing"),
    ).parse_args()
    until = time.time() + options.seconds
    options.keep.mkdir(parents=True, exist_ok=True)
    cases = drawn(options.keep, options.seed, options.layouts, options.batch)
    for rate in () if options.predict_only else options.rates:
        missing = [c for c in cases if c.key not in measured(step_file(options.keep, rate))]
        profiled = cluster_file(options.keep, rate).exists()
        if time.time() > until or profiled and not missing:
            continue
        with Lab(NODES, rate) as lab:
            if not profiled:
                profile(lab, options.keep, rate, until - time.time() + 60)
            if missing:
                measure(lab, options.keep, rate, missing, until)
    rates = [rate for rate in options.rates if cluster_file(options.keep, rate).exists()]
    rows = residuals(options.keep, rates, cases)
    if rows:
        print(f"{verdicts(rows)}\n\n{table(rows)}")
    if len(rows) < len(options.rates) * len(cases):
        return 1
    write_section(rows, options)
    return 0


if __name__ == "__main__":
    harness.start(main)
