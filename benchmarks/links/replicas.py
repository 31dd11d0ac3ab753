"""Replicas of a training in the lab: what faults cost, and what crosses.

    python -m benchmarks.links.replicas --kills 12 --silence-s 4
    python -m benchmarks.links.replicas --undisturbed 10000
    python -m benchmarks.links.replicas --volume

Three launches of `megazero train` of a small model (replica.py), of two ranks, with P, G and OS of its own each,
meet over shaped links and are killed, frozen and cut off, as benchmarks.links.meetings does with bare rooms. Who was
killed starts again from its last checkpoint. All anchors must have the same bits after every meeting, and no sample
may be lost or counted twice. --volume: bytes of a meeting at each interface, over what the counters say.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path

from benchmarks.links.meetings import Fault, Site, Stage, measure, parser
from megazero.data.shares import joined, size
from megazero.log.metrics import read_metrics
from tests.netlab.lab import Lab

TRAINING = (
    "--model-family llama --num-attention-heads 4 --seq-length 64 --mock-data --lr 1e-3 --lr-decay-style constant "
    "--eval-iters 0 --device cpu --log-interval 1000"
)
SMALL = (
    "--num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --vocab-size 512 --micro-batch-size 2 "
    "--global-batch-size 4 --train-samples 1000000 --save-interval 200"
)
PRESETS = {"a": "zero1", "b": "zero3", "c": "ddp"}
# The bytes of a meeting: a model of 5.8 million parameters, in each format.
LARGER = "--num-layers 4 --hidden-size 256 --ffn-hidden-size 1024 --vocab-size 3072 --micro-batch-size 1"
FORMATS = {f"{bits} bits": f"--outer-bits {bits}" for bits in (32, 16, 8, 4, 2)}
FORMATS |= {"topk": "--outer-format topk --outer-optimizer average"}
MEETINGS = 8  # after the first, which deals the samples


class EngineStage(Stage):
    """The same with trainings, which save, and are started again from what they saved last."""

    def __init__(self, lab: Lab, options: argparse.Namespace, folder: Path) -> None:
        self.folder = folder
        super().__init__(lab, options, folder)

    def launch(self, name: str, *flags: str) -> None:
        (self.folder / name / "lease").unlink(missing_ok=True)  # whose holder is known to be dead
        super().launch(name, *flags)

    def program(self, name: str) -> list[str]:
        options, save = self.options, self.folder / name
        meet = (
            f"--outer-meet {self.point.address}:29600 --outer-name {name} --outer-secret-file {self.secret}"
        )
        waits = f"--outer-call {options.call_s} --outer-patience {options.patience_s}"
        waits += f" --outer-silence {options.silence_s} --outer-interval {options.steps}"
        folders = f"--save {save} --log-dir {save} --zero-preset {PRESETS[name]}"
        load = f"--load {save}" if self.saved(name) else ""
        words = f"-m benchmarks.links.replica {SMALL} {TRAINING} {meet} {waits} {folders} {load}"
        return words.split()

    def saved(self, name: str) -> list[int]:
        """Return the iterations of a launch's checkpoints."""
        return sorted(int(each.name[5:]) for each in (self.folder / name).glob("iter_*[0-9]"))

    def old(self) -> tuple[float, float]:
        """Kill a launch, and start it again from its oldest checkpoint, which is of a meeting long ago."""
        moment = self.in_a_meeting("a")
        self.sites["a"].signal("KILL")
        lost, again = self.lost("a", moment), time.time()
        self.launch("a", "--ckpt-step", f"{self.saved('a')[0]}")
        return lost, self.back(again)

    def faults(self, kills: int) -> list[Fault]:
        return [*super().faults(kills), ("SIGKILL, back from its oldest checkpoint", self.old, 1)]

    def check_samples(self) -> int:
        """Return how many samples the meetings counted. Raises AssertionError if any was lost or counted twice."""
        said = [line for site in self.sites.values() for line in list(site.said) if line["event"] == "met"]
        meetings = {line["number"]: line for line in said}
        assert all(line["counted"] == meetings[line["number"]]["counted"] for line in said), "counts differ"
        last = meetings[max(meetings)]["dealt"]
        counted = [tuple(part) for line in meetings.values() for part in line["counted"]]
        open_ones = [tuple(part) for part in (*last["holes"], *chain(*last["shares"].values()))]
        assert sorted(meetings) == [*range(1, max(meetings) + 1)], "a meeting that nobody told of"
        assert joined(tuple(counted + open_ones)) == ((0, last["top"]),), "a sample is lost"
        assert size(tuple(counted + open_ones)) == last["top"], "a sample is counted twice"
        return size(tuple(counted))

    def losses(self, width: int = 2500) -> str:
        """Return the mean losses of all launches' steps, by so many samples."""
        found: dict[int, list[float]] = {}
        for line in chain(*(read_metrics(self.folder / name) for name in self.sites)):
            if "lm_loss" in line:
                found.setdefault(line["consumed_samples"] // width, []).append(line["lm_loss"])
        return ", ".join(f"{each * width}: {statistics.mean(found[each]):.3f}" for each in sorted(found))

    def train(self, samples: int) -> None:
        while self.check_samples() < samples:
            time.sleep(1)
        print(f"anchors had the same bits in {self.check_bits()} meetings")


def volume(replicas: int, flags: str) -> tuple[float, float, float, float]:
    """Return the bytes of a meeting that a replica's counter has, and over these the most that an interface sent and
    received, with the meeting point's.
    """
    with Lab(replicas + 1) as lab, tempfile.TemporaryDirectory() as place:
        folder, point = Path(place), Site(lab, 0)
        point.start("megazero", "meet", "--port", "29600", "--secret-file", f"{folder / 'secret'}")
        sites = [Site(lab, index) for index in range(1, replicas + 1)]
        for name, site in zip("abc", sites, strict=False):
            meet = (
                f"--outer-meet {point.address}:29600 --outer-name {name} --outer-secret-file {folder}/secret"
            )
            length = f"--global-batch-size 1 --train-samples {MEETINGS * replicas} --outer-interval 1"
            words = f"benchmarks.links.replica {LARGER} {TRAINING} {length} {meet} {flags} --outer-least {replicas}"
            site.start(*words.split(), "--log-dir", f"{folder / name}")
        for site in sites:
            if status := site.process.wait():
                raise RuntimeError(f"exit status {status}: {[line.get('words') for line in site.said[-20:]]}")
        lines = [
            line["outer"] for line in read_metrics(folder / "a") if "rank_bytes" in line.get("outer", {})
        ]
        assert [line["replicas"] for line in lines] == MEETINGS * [replicas]
        counted = statistics.mean(line["rank_bytes"] for line in lines)
        whole = counted * (MEETINGS + 1)
        (up, down, _), *others = lab.counts()
        sent, received = (max(each) / whole for each in list(zip(*others, strict=True))[:2])
        return counted, sent, received, max(up, down) / whole


def volumes() -> None:
    print(
        "| | replicas | counted, bytes a meeting | sent / counted | received / counted | meeting point / counted |\n"
        "|---|---|---|---|---|---|"
    )
    for replicas in (2, 3):
        for name, flags in FORMATS.items():
            counted, *over = volume(replicas, flags)
            cells = " | ".join(f"{each:.3f}" for each in over)
            print(f"| {name} | {replicas} | {counted:,.0f} | {cells} |", flush=True)


def main() -> int:
    words = parser()
    words.description = __doc__
    words.add_argument(
        "--undisturbed", type=int, metavar="SAMPLES", help="only train so far, and print the loss"
    )
    words.add_argument("--volume", action="store_true")
    options = words.parse_args()
    if options.volume:
        volumes()
        return 0
    with Lab(4, options.rate) as lab, tempfile.TemporaryDirectory() as folder:
        stage = EngineStage(lab, options, Path(folder))
        if options.undisturbed:
            stage.train(options.undisturbed)
        else:
            measure(stage, options.kills)
        print(f"{stage.check_samples()} samples counted, each once; losses from sample {stage.losses()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
