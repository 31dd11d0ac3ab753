"""Step times that the planner predicts, against measured ones: 2 nodes of 2 ranks, on links of a given rate.

    python tests/benchmarks/plan_step_time.py --keep FOLDER [--rates none 1gbit 200mbit] [--seed 0] [--layouts 12]

First ``megazero profile`` of the first shape on the link, then layouts that are drawn at random over both shapes, of
which the second was not profiled. Everything that was measured is kept in --keep, and a second call measures only
what is missing; --seconds ends a call early, so that it can be taken in pieces. When all is there, every residual is
printed, and the section of docs/planning.md is written (--page: another file).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megazero.config import World, parse
from megazero.config.options.cluster import Cluster, Device, InterNode, IntraNode, load_cluster
from megazero.plan.base_layout import BaseLayout
from megazero.plan.layout import Layout
from megazero.plan.options import read_values, with_stand_ins
from megazero.plan.report import describe, layout_flags
from megazero.plan.search import Search
from megazero.plan.seconds import Collectives
from megazero.plan.simulate import Timing, simulate
from tests.benchmarks.pipeline_page import setting
from tests.netlab.lab import Lab, LabUnavailable

ROOT = Path(__file__).resolve().parents[2]
NODES, RANKS = 2, 2
COMMON = "--model-family llama --num-layers 4 --vocab-size 4096"
SHAPES = {
    "profiled": f"{COMMON} --hidden-size 256 --ffn-hidden-size 688 --num-attention-heads 4 --seq-length 256",
    "other": f"{COMMON} --hidden-size 384 --ffn-hidden-size 1024 --num-attention-heads 6 --seq-length 128",
}
TRAINING = ["--lr", "1e-4", "--train-iters", "1", "--mock-data", "--ranks-per-node", str(RANKS)]
ROUNDS = 5
TITLE = "Step time against measurement"
TEXT = """    python tests/benchmarks/plan_step_time.py --keep FOLDER {command}

2 nodes of 2 ranks on one machine (`tests/netlab`), gloo, fp32, links shaped to the rate. At each rate `megazero profile`
measures the first shape. Then {layouts} layouts of each of two shapes are drawn by the seed and measured; the second shape
was not profiled. {batch} samples per step; medians (least to most) of the quietest {rounds} of up to {most_rounds} rounds. Other
programs took {foreign} of the machine's processors (median; at most {most}); predictions are for what they left.
[planning_steps.tsv](planning_steps.tsv) has every layout.

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
        families = [family for family, _ in search.families(base)]
        layout, formats = generator.choice(list(search.layouts(generator.choice(families))))
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
    return layout, simulate(layout)


def measured(file: Path) -> dict[str, dict[str, Any]]:
    """Return the lines of a file of measurements by their keys."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {line["key"]: line for line in map(json.loads, lines)}


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
    words += ["--profile-largest-bytes", str(4 << 20), "--profile-rounds", str(ROUNDS)]
    _run(lab, ["-m", "megazero", "profile", *SHAPES["profiled"].split(), *words], timeout)


def measure(lab: Lab, keep: Path, rate: str, cases: Sequence[Case], until: float) -> None:
    """Measure the cases that are missing, as far as the time goes."""
    asked = keep / f"{rate}.asked.json"
    asked.write_text(json.dumps([{"key": case.key, "flags": case.flags} for case in cases]))
    words = ["--asked", str(asked), "--result", str(step_file(keep, rate))]
    words += ["--rounds", str(ROUNDS), "--until", str(until)]
    _run(lab, [str(ROOT / "tests/benchmarks/plan_step_time_rank.py"), *words], until - time.time() + 60)


def _run(lab: Lab, command: Sequence[str], timeout: float) -> None:
    environ = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = lab.run(command, ranks_per_node=RANKS, environ=environ, timeout=timeout, echo=True)
    if done.returncode:
        raise RuntimeError(f"at {lab.rate}: return codes {done.returncodes}\n" + "\n".join(done.outputs))


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
            row |= {"foreign": foreign, "busy": statistics.median(line["busy"])}
            row |= {"predicted": timing.seconds, "residual": timing.seconds / seconds - 1}
            rows.append({**row, "bill": timing.bill, "bills": line.get("bills")})
    return rows


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line of errors for each rate and shape, and whether the choice is among the best measured."""
    out = ["| rate | shape | layouts | median error | worst | the choice, s | the best, s (its rounds) |"]
    out.append("|---|---|---|---|---|---|---|")
    for rate, shape in dict.fromkeys((row["rate"], row["shape"]) for row in rows):
        own = [row for row in rows if (row["rate"], row["shape"]) == (rate, shape)]
        errors = sorted(abs(row["residual"]) for row in own)
        choice = min(own, key=lambda row: row["predicted"])
        best = min(own, key=lambda row: row["measured"])
        out.append(
            f"| {rate} | {shape} | {len(own)} | {statistics.median(errors):.1%} | {errors[-1]:.1%} | "
            f"{choice['measured']:.3f} | {best['measured']:.3f} ({best['least']:.3f} to {best['most']:.3f}) |"
        )
    every = [abs(row["residual"]) for row in rows]
    out.append(f"| all | | {len(every)} | {statistics.median(every):.1%} | {max(every):.1%} | | |")
    return out


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    out = ["rate\tshape\tlayout; messages\tmeasured s (rounds)\tpredicted\tresidual"]
    for row in rows:
        spread = f"{row['measured']:.3f} ({row['least']:.3f} to {row['most']:.3f})"
        cells = (row["rate"], row["shape"], row["layout"], spread, f"{row['predicted']:.3f}")
        out.append("\t".join([*cells, f"{row['residual']:+.0%}"]))
    return out


def write_section(rows: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> None:
    """Put the errors into docs/planning.md, and every layout into planning_steps.tsv beside it."""
    options.page.with_name("planning_steps.tsv").write_text("\n".join(table(rows)) + "\n", encoding="utf-8")
    text = TEXT.format(
        command=f"--rates {' '.join(options.rates)} --seed {options.seed} --batch {options.batch}",
        profiled=SHAPES["profiled"],
        other=SHAPES["other"],
        layouts=options.layouts,
        batch=options.batch,
        rounds=ROUNDS,
        most_rounds=ROUNDS + 3,
        foreign=f"{statistics.median(row['foreign'] for row in rows):.0%}",
        most=f"{max(row['foreign'] for row in rows):.0%}",
        setting=setting(),
        verdicts="\n".join(verdicts(rows)),
    )
    body = text.strip("\n")
    page = options.page.read_text(encoding="utf-8")
    before, heading, rest = page.partition(f"## {TITLE}\n")
    assert heading, f"{options.page} has no section {TITLE}"
    after = rest[rest.index("\n## ") :]
    options.page.write_text(f"{before}{heading}\n{body}\n{after}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--rates", nargs="+", default=["none", "1gbit", "200mbit"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layouts", type=int, default=12, help="of each of the two shapes")
    parser.add_argument("--batch", type=int, default=8, help="samples of a step")
    parser.add_argument("--seconds", type=float, default=1e9, help="of this call")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "planning.md")
    parser.add_argument("--predict-only", action="store_true", help="measure nothing")
    options = parser.parse_args()
    until = time.time() + options.seconds
    options.keep.mkdir(parents=True, exist_ok=True)
    cases = drawn(options.keep, options.seed, options.layouts, options.batch)
    try:
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
    except LabUnavailable as error:
        print(error, file=sys.stderr)
        return 2
    rates = [rate for rate in options.rates if cluster_file(options.keep, rate).exists()]
    rows = residuals(options.keep, rates, cases)
    if rows:
        print("\n".join([*verdicts(rows), "", *table(rows)]))
    if len(rows) < len(options.rates) * len(cases):
        return 1
    write_section(rows, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
