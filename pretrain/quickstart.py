#!/usr/bin/env python
"""Go from nothing to a trained, stopped and resumed language model in a few minutes, on this machine alone.

    python pretrain/quickstart.py --out runs/quickstart

The text is the standard library of the running Python; everything is written under --out. Run again, it does
only what is missing there (a training phase that was interrupted begins again); --fresh removes what an earlier
quickstart left in --out and begins anew. It uses the machine's GPUs if torch sees any, else the CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from megazero.data.text import stdlib_sources
from megazero.files import replacing
from megazero.log.exit_status import ExitStatus
from megazero.log.metrics import METRICS_FILE, read_metrics
from megazero.log.plot import plot_loss
from megazero.log.safe_stream import guard_streams

ROOT = Path(__file__).resolve().parents[1]
MEGAZERO = ("-m", "megazero")
VOCABULARY = 4096
PROMPT = "import os\n\n\ndef "
# 10.6M parameters and 1024 tokens a step: with so little text to see, many small steps learn more than few large,
# and few wide layers over short sequences are cheap (2 x 512 over 128 tokens against 4 x 384 over 256: the same
# loss of 5.90 after 60 iterations, in 1.3 times less CPU time).
GLOBAL_BATCH = 8
MODEL = """
    --model-family llama --num-layers 2 --hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8
    --seq-length 128 --lr 1.2e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.08 --weight-decay 0.1
    --adam-beta2 0.95 --split 98,2,0 --eval-iters 8 --eval-at-start
"""
ITERATIONS = {"cuda": 600, "bf16": 324, "fp32": 168}  # sized for 5 minutes on 2 cores, everything included


@dataclass(frozen=True)
class Phase:
    """How one phase of the training lays out its ranks. ``node`` is the number of ranks that count as one node."""

    preset: str
    tp: int = 1
    pp: int = 1
    node: int | None = None
    micro_batches: int = 1

    def data_parallel(self, ranks: int) -> int:
        return ranks // (self.tp * self.pp)

    def describe(self, ranks: int) -> str:
        nodes = f", as {ranks // self.node} nodes of {self.node}" if self.node else ""
        sizes = [f"{name} {size} x " for name, size in (("PP", self.pp), ("TP", self.tp)) if size > 1]
        return f"{ranks} ranks{nodes}: {''.join(sizes)}DP {self.data_parallel(ranks)}, {self.preset}"


LAYOUTS = {  # by ranks: one phase each; every phase but the first resumes from the checkpoint of the one before
    4: (Phase("zero3", tp=2), Phase("hpz", node=2), Phase("zero2", pp=2, micro_batches=4)),
    2: (Phase("zero1", tp=2), Phase("zero3"), Phase("zero1", pp=2, micro_batches=4)),
    1: (Phase("ddp"), Phase("ddp")),
}


@dataclass(frozen=True)
class QuickstartPlan:
    """What decides the outcome. An --out folder belongs to one plan. ``device`` is 'cuda' or 'cpu'."""

    python: str
    device: str
    dtype: str
    ranks: int
    iterations: int

    @property
    def phase_ends(self) -> list[int]:
        """The iterations at which a phase ends."""
        phases = len(LAYOUTS[self.ranks])
        return [self.iterations * phase // phases for phase in range(1, phases + 1)]


@dataclass(frozen=True)
class Step:
    """One thing to do. The path ``outcome`` exists when it is done."""

    name: str
    outcome: Path
    act: Callable[[Path], None]


class StepFailed(Exception):
    """A command of a step ended with an error."""


class Quickstart:
    """The steps, as commands that a user could type."""

    def __init__(self, out: Path, plan: QuickstartPlan) -> None:
        self.out, self.plan, self.began = out, plan, time.monotonic()
        self.corpus, self.tokenizer = out / "corpus.jsonl", out / "tokenizer.model"
        self.data = out / "data" / "corpus_text_document"
        self.checkpoint, self.logs = out / "checkpoint", out / "logs"
        self.curve = out / "loss.png"

    @cached_property
    def steps(self) -> list[Step]:
        return [
            Step("corpus: the standard library's sources", self.corpus, self._write_corpus),
            Step(f"tokenizer: {VOCABULARY} SentencePiece pieces", self.tokenizer, self._train_tokenizer),
            Step("tokens: corpus to .bin and .idx", Path(f"{self.data}.idx"), self._preprocess),
            *(self._phase(*phase) for phase in enumerate(LAYOUTS[self.plan.ranks])),
            Step("sample: what the model writes", self.out / "sample.txt", self._sample),
            Step("loss curve", self.curve, self._plot),
        ]

    def _phase(self, number: int, layout: Phase) -> Step:
        end = self.plan.phase_ends[number]
        more = ["--load", self.checkpoint] if number else []
        more += ["--exit-interval", end] if end < self.plan.iterations else []
        return Step(
            f"{'resume' if number else 'train'} to iteration {end} on {layout.describe(self.plan.ranks)}",
            self._saved(end),
            lambda log: self._train(layout, more, log),
        )

    def run(self) -> None:
        """Do what is missing. Raises StepFailed naming the step and its log."""
        (self.out / "steps").mkdir(parents=True, exist_ok=True)
        for number, step in enumerate(self.steps, 1):
            done = step.outcome.exists()
            self._say(f"step {number}/{len(self.steps)}  {step.name}{' (there already)' if done else ''}")
            if done:
                continue
            log = self.out / "steps" / f"{number}-{step.name.split()[0].strip(':')}.log"
            try:
                step.act(log)
            except (StepFailed, ValueError, OSError) as error:
                seen = f"; its output is in {log}" if log.exists() else ""
                raise StepFailed(f"step {number} ({step.name}) failed: {error}{seen}") from error
        self._summary()

    def _say(self, text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self.began), 60)
        print(f"[{minutes}:{seconds:02}] {text}", flush=True)

    def _saved(self, iteration: int) -> Path:
        return self.checkpoint / f"iter_{iteration:07d}" / "manifest.json"

    # -- the steps -------------------------------------------------------------------------------

    def _write_corpus(self, _: Path) -> None:
        """Write JSON lines in an order without meaning, since the last documents become the validation split."""
        sources = sorted(
            stdlib_sources(), key=lambda p: hashlib.sha256("/".join(p.parts[-3:]).encode()).digest()
        )
        with replacing(self.corpus) as file:
            for path in sources:
                line = json.dumps({"text": path.read_text("utf-8"), "path": str(path)})
                file.write(f"{line}\n".encode())
        self._say(f"{len(sources)} files, {self.corpus.stat().st_size / 1e6:.1f} MB in {self.corpus}")

    def _train_tokenizer(self, log: Path) -> None:
        prefix = self.tokenizer.with_suffix("")
        command = [*MEGAZERO, "tokenizer", "--input", self.corpus, "--vocab-size", VOCABULARY]
        self._python([*command, "--model-prefix", prefix], log)

    def _preprocess(self, log: Path) -> None:
        command = [*MEGAZERO, "preprocess", "--input", self.corpus]
        command += ["--output-prefix", self.out / "data/corpus", *self._tokenizer_flags()]
        self._python([*command, "--append-eod", "--workers", min(4, cores())], log)

    def _train(self, layout: Phase, more: Sequence[object], log: Path) -> None:
        ranks, whole = self.plan.ranks, self.plan.iterations
        flags = ["--nproc-per-node", ranks, *MODEL.split(), "--global-batch-size", GLOBAL_BATCH]
        flags += [*self._tokenizer_flags(), "--data-path", self.data, "--train-iters", whole]
        samples = GLOBAL_BATCH // (layout.data_parallel(ranks) * layout.micro_batches)
        flags += ["--micro-batch-size", samples, "--zero-preset", layout.preset]
        flags += [
            "--tensor-model-parallel-size",
            layout.tp,
            f"--{self.plan.dtype}",
            "--device",
            self.plan.device,
        ]
        flags += ["--sequence-parallel"] if layout.tp > 1 else []
        flags += ["--pipeline-model-parallel-size", layout.pp] if layout.pp > 1 else []
        flags += ["--ranks-per-node", layout.node] if layout.node else []
        flags += ["--eval-interval", max(1, whole // 12), "--log-interval", max(1, whole // 36)]
        flags += ["--save", self.checkpoint, "--log-dir", self.logs, *more]
        end = ExitStatus.STOPPED if "--exit-interval" in more else ExitStatus.FINISHED
        self._python([*MEGAZERO, "train", *flags], log, end)

    def _sample(self, log: Path) -> None:
        command = [*MEGAZERO, "generate", "--load", self.checkpoint, "--prompt", PROMPT, "--tokens", 120]
        self._python([*command, "--device", self.plan.device], log)
        with replacing(self.out / "sample.txt") as file:
            file.write(log.read_bytes())

    def _plot(self, _: Path) -> None:
        plot_loss([self.logs], self.curve, title="quickstart: loss")

    def _tokenizer_flags(self) -> list[object]:
        return ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", self.tokenizer]

    def _python(self, command: Sequence[object], log: Path, end: int = 0) -> None:
        """Run a program. Raises StepFailed if it ends with another exit status than ``end``."""
        threads = max(1, cores() // self.plan.ranks)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        status = run_shown([sys.executable, *map(str, command)], log, environment)
        if status != end:
            raise StepFailed(f"exit status {status}")

    def _summary(self) -> None:
        lines = read_metrics(self.logs)
        first = next(line["lm_loss"] for line in lines if "lm_loss" in line)
        evaluations = [(m["iteration"], m["eval_lm_loss"]) for m in lines if "eval_lm_loss" in m]
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(
            f"\nuntrained: loss {first:.3f} on the first batch (ln {VOCABULARY} = {math.log(VOCABULARY):.3f})\n"
            f"evaluation loss: {', '.join(f'{loss:.3f} at {at}' for at, loss in evaluations)}\n"
            f"  (resumed on another layout after {' and '.join(map(str, self.plan.phase_ends[:-1]))})\n\n"
            f"loss curve  {self.curve}\nmetrics     {self.logs / METRICS_FILE}\n"
            f"checkpoint  {self.checkpoint}\n"
            f"more text   {sys.executable} -m megazero generate --load {self.checkpoint} --prompt 'class '\n"
        )
        self._say(f"done; {usage.ru_utime + usage.ru_stime:.0f} s of CPU time in the steps above")


# -- the machine ---------------------------------------------------------------------------------------


def cores() -> int:
    """Return how many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_gpus() -> int:
    """Ask torch for the number of GPUs, in a process of its own, because this one stays without torch."""
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if answer.returncode:
        raise StepFailed(
            f"torch cannot be imported: {answer.stderr.strip().splitlines()[-1]}; run make quickstart"
        )
    return int(answer.stdout.split()[-1])


def cpu_dtype() -> str:
    """Return bf16 on a CPU that multiplies it in hardware (3x fp32's rate on AVX512-BF16, measured), else fp32."""
    with suppress(OSError):
        flags = Path("/proc/cpuinfo").read_text()
        if "avx512_bf16" in flags or "amx_bf16" in flags:
            return "bf16"
    return "fp32"


def run_shown(command: Sequence[str], log: Path, environment: dict[str, str]) -> int:
    """Run a command, show its output as it comes, and keep it in ``log``. Returns its exit status.

    Where we write to a terminal the command gets one too, so that its progress bars move.
    """
    ours, theirs = os.openpty() if sys.stdout.isatty() else os.pipe()
    with open(log, "wb") as file:
        with subprocess.Popen(
            command, stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL, env=environment
        ) as job:
            os.close(theirs)
            try:
                while chunk := _read(ours):
                    sys.stdout.buffer.write(chunk)
                    sys.stdout.buffer.flush()
                    file.write(chunk)
            except KeyboardInterrupt:
                job.wait()  # it got it, too; what it says of it is not shown
                raise
        os.close(ours)
    return job.returncode


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # a terminal whose other end is closed
        return b""


# -- the command line ------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/quickstart"), help="folder of everything that is written")
    add(
        "--ranks",
        type=int,
        choices=sorted(LAYOUTS),
        default=4,
        help="processes; with GPUs one on each, at most",
    )
    add("--iterations", type=int, help=f"optimizer steps, a multiple of the phases (default: {ITERATIONS})")
    add(
        "--fresh", action="store_true", help="remove what an earlier quickstart left in --out, and begin anew"
    )
    return parser.parse_args(arguments)


def make_plan(ranks: int, iterations: int | None, gpus: int) -> QuickstartPlan:
    """Plan as many ranks as were asked for, or as there are GPUs to hold them."""
    if gpus:
        ranks = max(known for known in LAYOUTS if known <= min(ranks, gpus))
    phases = len(LAYOUTS[ranks])
    if iterations is not None and (iterations < phases or iterations % phases):
        raise ValueError(
            f"--iterations {iterations} is not a multiple of the {phases} phases of {ranks} ranks; nearest: "
            f"{max(1, round(iterations / phases)) * phases}"
        )
    dtype = "bf16" if gpus else cpu_dtype()
    default = ITERATIONS["cuda" if gpus else dtype]
    return QuickstartPlan(
        platform.python_version(), "cuda" if gpus else "cpu", dtype, ranks, iterations or default
    )


def claim(out: Path, plan: QuickstartPlan, fresh: bool) -> None:
    """Make ``out`` this plan's folder. Raises ValueError if it holds anything else."""
    settings = out / "quickstart.json"
    if not settings.exists():
        if out.exists() and any(out.iterdir()):
            raise ValueError(f"--out {out} holds something that is no quickstart; name a new folder")
    elif fresh:
        shutil.rmtree(out)
    elif json.loads(settings.read_bytes()) != asdict(plan):
        raise ValueError(
            f"--out {out} was begun with other settings ({settings}): --fresh replaces it, or name a new folder"
        )
    out.mkdir(parents=True, exist_ok=True)
    with replacing(settings) as file:
        file.write(json.dumps(asdict(plan), indent=1).encode())


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        plan = make_plan(options.ranks, options.iterations, count_gpus())
        claim(options.out, plan, options.fresh)
        where = f"{plan.ranks} GPUs" if plan.device == "cuda" else f"{cores()} CPU cores"
        print(f"megazero quickstart on {where}, {plan.dtype}, {plan.iterations} iterations, in {options.out}")
        Quickstart(options.out, plan).run()
    except (StepFailed, ValueError, OSError) as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nquickstart: interrupted; the same command goes on with what is missing", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    guard_streams()
    sys.exit(main())
