"""Does a change of the code keep the training? Short runs of this working tree and of another commit, bit by bit.

    python benchmarks/compare_commits.py [--against HEAD~1] [--cases NAME ...] [--json FILE]

It compares every tensor of the last checkpoint (master weights, optimizer state, weights, by their checkpoint names),
the loss and gradient norm of every iteration, and the bytes of each hop. Some runs are also resumed: this tree
continues the other commit's checkpoint from half way and must end as its own uninterrupted run does. Exit status: 0
if all is equal, 1 if anything differs or a run fails, 2 if the command line is wrong. Takes about a minute on 2
cores.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from benchmarks.commit_trees import Tree, TreeRanks, two_trees
from megazero.checkpoint import store
from megazero.log.metrics import read_metrics

CURVES = ("lm_loss", "grad_norm")
RESUMED = "resumed: "  # before the name of a case
Job = dict[str, Any]

# -- the runs: few and tiny, together most of what changes the bits of a training --------------------

ITERATIONS, MIDDLE = 8, 4
COMMON = f"""
    --num-layers 2 --hidden-size 64 --num-attention-heads 8 --ffn-hidden-size 96 --seq-length 24
    --vocab-size 203 --make-vocab-size-divisible-by 2 --micro-batch-size 1 --global-batch-size 8
    --lr 1e-2 --lr-decay-style cosine --lr-warmup-iters 2 --train-iters {ITERATIONS}
    --mock-data --eval-iters 0 --device cpu
"""
LLAMA = "--model-family llama --num-query-groups 4"
NODES = "--ranks-per-node 2"
# The norms alone are as small, so that all other messages across nodes are quantised.
ZEROPP = f"--bf16 --zero-preset zeropp --zero-exact-numel 100 {NODES} {LLAMA}"
PLAIN, MIXED = (
    f"--zero-gradient-transform {name}" for name in ("none", "hadamard")
)  # named: the default changed
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"


@dataclass(frozen=True)
class Case:
    """ranks: gloo processes. flags: added to COMMON; both commits must know them. resume: also continue the other
    commit's checkpoint from half way, without the flags that are ``kept``: the checkpoint has them.
    """

    ranks: int
    flags: str
    resume: bool = False
    kept: str = ""

    def words(self, folder: str) -> list[str]:
        """Return the whole run's command line, with checkpoints and metrics in ``folder``."""
        words = f"{COMMON} {self.flags}" + (f" --save-interval {MIDDLE}" if self.resume else "")
        return [*words.split(), "--save", folder, "--log-dir", folder]


CASES = {
    "one rank, fp32": Case(1, f"--model-family gpt --clip-grad 0.5 {DROPOUT}"),
    "zero3, bf16": Case(4, f"--bf16 --zero-preset zero3 --zero-chunk-numel 8192 {LLAMA}"),
    "hpz, bf16": Case(4, f"--bf16 --zero-preset hpz {NODES} {LLAMA}"),
    "zeropp": Case(4, f"{ZEROPP} {MIXED}", resume=True),
    "zeropp, no transform": Case(4, f"{ZEROPP} {PLAIN}", resume=True, kept=PLAIN),
    "zeropp, INT8 weights": Case(4, f"{ZEROPP} {PLAIN} --no-zero-quantized-weights-delta"),
    "mics, ramp-up": Case(4, f"--zero-preset mics --model-family gpt --rampup-batch-size 4 4 16 {NODES}"),
    "zero1 x TP 2, sequence parallel": Case(
        4, f"--bf16 --zero-preset zero1 --tensor-model-parallel-size 2 --sequence-parallel {LLAMA}"
    ),
    # Nodes of one rank: state, activations and the sums of the pipeline's ends cross nodes. zeropp is zero1 there.
    "zeropp's formats x PP 2, 1f1b, tied": Case(
        4,
        f"--bf16 --zero-preset zero1 --zero-quantized-weights-delta --zero-quantized-gradients {PLAIN} "
        f"--zero-exact-numel 100 --ranks-per-node 1 {LLAMA} --pipeline-model-parallel-size 2 "
        "--pipeline-schedule 1f1b --no-untie-embeddings-and-output-weights",
    ),
    "zero2 x TP 2 x PP 2, zb-h1, recompute": Case(
        4,
        "--bf16 --zero-preset zero2 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        f"--pipeline-schedule zb-h1 --recompute-granularity full {DROPOUT} {LLAMA}",
        resume=True,
    ),
}


# -- results ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A tensor that differs: how many elements have other bits, of how many, and the largest absolute difference.

    If only one result has the tensor, or shapes or dtypes differ, all elements count, and most is infinite.
    """

    name: str
    elements: int
    of: int
    most: float


@dataclass(frozen=True)
class Row:
    """A comparison. failed: what a run printed that failed."""

    case: str
    iterations: int
    tensors: int = 0
    differences: tuple[Difference, ...] = ()
    failed: str = ""

    @property
    def equal(self) -> bool:
        return not self.failed and not self.differences


def read_result(folder: Path, after: int = 0) -> dict[str, Tensor]:
    """Return kind/name -> whole tensor of the newest checkpoint, and the curves of iterations past ``after`` and
    the first rank's bytes by hop, in fp64. Bytes are a whole run's sums, because a resume has a first gather of
    its own."""
    path = store.latest(folder)
    assert path is not None, f"nothing complete in {folder}"
    lines = [line for line in read_metrics(folder) if "lm_loss" in line and line["iteration"] > after]
    hops = {hop for line in lines for hop in line["bytes"] if not after}
    curves = {f"curve/{key}": [line[key] for line in lines] for key in CURVES}
    curves |= {f"bytes/{hop}": [sum(line["bytes"].get(hop, 0) for line in lines)] for hop in hops}
    out = {key: torch.tensor(values, dtype=torch.float64) for key, values in curves.items()}
    for kind, tensors in store.load_kinds(path).items():
        out |= {f"{kind}/{name}": tensor for name, tensor in tensors.items()}
    return out


def as_bytes(tensor: Tensor) -> Tensor:
    """Return uint8 [elements, bytes of one]."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).reshape(tensor.numel(), -1)


def compare(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> tuple[Difference, ...]:
    """Return the tensors whose bits differ, by name. Zeros of both signs differ; a NaN equals a NaN of its bits."""
    found = []
    for name in sorted(one.keys() | two.keys()):
        a, b = one.get(name), two.get(name)
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            size = max(t.numel() for t in (a, b) if t is not None)
            found.append(Difference(name, size, size, math.inf))
        elif count := int((as_bytes(a) != as_bytes(b)).any(1).sum()):
            most = (a.double() - b.double()).abs().max().item()
            found.append(Difference(name, count, a.numel(), most))
    return tuple(found)


def verdict(row: Row) -> str:
    if row.failed:
        return f"failed: {row.failed.splitlines()[-1]}"
    if row.equal:
        return "equal"
    worst = max(row.differences, key=lambda d: math.inf if math.isnan(d.most) else d.most)
    count, of = (sum(getattr(d, key) for d in row.differences) for key in ("elements", "of"))
    return (
        f"{count:,} of {of:,} elements differ ({len(row.differences)} tensors), by {worst.most:.2g} at most "
        f"({worst.name})"
    )


def table(rows: Sequence[Row]) -> str:
    width = max(len("case"), *(len(row.case) for row in rows))
    head = f"{'case':{width}}  iterations  tensors  result"
    return "\n".join(
        [head, *(f"{r.case:{width}}  {r.iterations:10}  {r.tensors:7}  {verdict(r)}" for r in rows)]
    )


# -- runs ------------------------------------------------------------------------------------------------


def run(tree: Tree, jobs: Sequence[Job]) -> dict[str, str]:
    """Run the jobs and return by name what went wrong, or ''. A run that fails does not end the others: another
    commit may not know a flag."""
    said = {}
    print(f"{tree.name}:", file=sys.stderr)
    with TreeRanks(tree) as ranks:
        for job in jobs:
            began = time.monotonic()
            wrong = said[job["name"]] = ranks.ask(job)
            how = "failed" if wrong else f"{time.monotonic() - began:.1f} s"
            print(f"  {job['name']}: {how}", file=sys.stderr, flush=True)
    return said


def compare_trees(cases: Mapping[str, Case], there: Tree, here: Tree, folder: Path) -> list[Row]:
    """Run every case in both trees, then the resumed ones, and compare. folder: empty, for the runs' files."""
    places = {name: f"{number:02}" for number, name in enumerate(cases)}
    failed = []
    for tree, part in ((there, "there"), (here, "here")):
        jobs = [whole(name, case, folder / part / places[name]) for name, case in cases.items()]
        if tree is here:
            for name, case in cases.items():
                if case.resume and not failed[0][name]:
                    jobs.append(resumed(name, case, folder, places[name]))
        failed.append(run(tree, jobs))
    rows = []
    for name, place in places.items():
        wrong = failed[0][name] or failed[1][name]
        rows.append(row(name, ITERATIONS, folder / "there" / place, folder / "here" / place, wrong))
    for name, wrong in failed[1].items():
        if name not in cases:
            place = places[name.removeprefix(RESUMED)]
            both = folder / "here" / place, folder / "resumed" / place
            if failed[1][name.removeprefix(RESUMED)]:
                wrong = "the uninterrupted run failed"
            rows.append(row(name, ITERATIONS - MIDDLE, *both, wrong))
    return rows


def whole(name: str, case: Case, folder: Path) -> Job:
    folder.mkdir(parents=True)
    return {"name": name, "ranks": case.ranks, "flags": case.words(str(folder)), "log": f"{folder}/said"}


def resumed(name: str, case: Case, folder: Path, place: str) -> Job:
    """Return the job that continues the other tree's checkpoint from half way, and move that out of its folder."""
    target = folder / "resumed" / place
    target.mkdir(parents=True)
    middle = f"iter_{MIDDLE:07}"
    shutil.move(folder / "there" / place / middle, target / middle)
    flags = [
        *replace(case, flags=case.flags.replace(case.kept, "")).words(str(target)),
        "--load",
        str(target),
    ]
    return {"name": f"{RESUMED}{name}", "ranks": case.ranks, "flags": flags, "log": f"{target}/said"}


def row(name: str, iterations: int, one: Path, two: Path, wrong: str) -> Row:
    """Compare both folders' results over the last ``iterations``."""
    if wrong:
        return Row(name, iterations, failed=wrong)
    results = [read_result(folder, ITERATIONS - iterations) for folder in (one, two)]
    return Row(name, iterations, len(results[1]), compare(*results))


def main(words: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--against", default="HEAD~1", metavar="REF", help="a commit of this checkout")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(words)
    cases = {name: CASES[name] for name in options.cases}
    try:
        with two_trees(options.against) as trees, tempfile.TemporaryDirectory() as folder:
            rows = compare_trees(cases, *trees, Path(folder))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(table(rows))
    for each in rows:
        if "\n" in each.failed:
            print(f"\n{each.case}: {each.failed}", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in rows], indent=1))
    return 0 if all(each.equal for each in rows) else 1


if __name__ == "__main__":
    harness.start(main)
