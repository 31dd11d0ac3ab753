#!/usr/bin/env python
"""Go from nothing to a trained, stopped and resumed language model in a few minutes, on this machine alone.

    python pretrain/quickstart.py --out runs/quickstart

The text is the standard library of the running Python; everything is written under --out, a new folder. It uses the
machine's GPUs if torch sees any, else the CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megazero.data.text import stdlib_sources
from megazero.files import write_text
from megazero.log.exit_status import ExitStatus
from megazero.log.metrics import METRICS_FILE, read_metrics
from megazero.log.safe_stream import guard_streams
from megazero.ops.report import report

ROOT = Path(__file__).resolve().parents[1]
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
class Quickstart:
    """The steps, as commands that a user could type. device: 'cuda' or 'cpu'."""

    out: Path
    device: str
    dtype: str
    ranks: int
    iterations: int

    @property
    def phase_ends(self) -> list[int]:
        """The iterations at which a phase ends."""
        phases = len(LAYOUTS[self.ranks])
        return [self.iterations * phase // phases for phase in range(1, phases + 1)]

    def run(self) -> None:
        """Do all steps. Raises StepFailed."""
        began, (tokenize, preprocess, *phases) = time.monotonic(), self.commands()
        self.out.mkdir(parents=True)
        write_corpus(self.out / "corpus.jsonl")
        for command in (tokenize, preprocess):
            self.megazero(command)
        for layout, end, command in zip(LAYOUTS[self.ranks], self.phase_ends, phases, strict=True):
            print(f"\nto iteration {end} on {layout.describe(self.ranks)}", flush=True)
            stops = end < self.iterations
            self.megazero(command, ExitStatus.STOPPED if stops else ExitStatus.FINISHED)
        sample = ["generate", "--load", self.out / "checkpoint", "--prompt", PROMPT, "--tokens", 120]
        self.megazero([*sample, "--device", self.device])
        self.summarise()
        print(f"done in {time.monotonic() - began:.0f} s")

    def commands(self) -> list[list[object]]:
        """The words of megazero for the tokenizer, the tokens, and each phase of the training."""
        corpus, prefix = self.out / "corpus.jsonl", self.out / "tokenizer"
        tokenizer = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", f"{prefix}.model"]
        data, workers = self.out / "data" / "corpus", min(4, cores())
        return [
            ["tokenizer", "--input", corpus, "--vocab-size", VOCABULARY, "--model-prefix", prefix],
            ["preprocess", "--input", corpus, "--output-prefix", data, *tokenizer, "--append-eod"]
            + ["--workers", workers],
            *([*self.training(number), *tokenizer] for number in range(len(LAYOUTS[self.ranks]))),
        ]

    def training(self, number: int) -> list[object]:
        """The words of one phase. Every phase but the first resumes."""
        layout, whole, end = LAYOUTS[self.ranks][number], self.iterations, self.phase_ends[number]
        samples = GLOBAL_BATCH // (layout.data_parallel(self.ranks) * layout.micro_batches)
        checkpoint, data = self.out / "checkpoint", self.out / "data" / "corpus_text_document"
        return [
            *("train", "--nproc-per-node", self.ranks, *MODEL.split(), "--data-path", data),
            *("--global-batch-size", GLOBAL_BATCH, "--micro-batch-size", samples, "--train-iters", whole),
            *("--zero-preset", layout.preset, f"--{self.dtype}", "--device", self.device),
            *("--tensor-model-parallel-size", layout.tp, *["--sequence-parallel"] * (layout.tp > 1)),
            *(("--pipeline-model-parallel-size", layout.pp) if layout.pp > 1 else ()),
            *(("--ranks-per-node", layout.node) if layout.node else ()),
            *("--eval-interval", max(1, whole // 12), "--log-interval", max(1, whole // 36)),
            *("--save", checkpoint, "--log-dir", self.out / "logs"),
            *(("--load", checkpoint) if number else ()),
            *(("--exit-interval", end) if end < whole else ()),
        ]

    def megazero(self, words: list[object], end: int = 0) -> None:
        """Run a command. Raises StepFailed if it ends with another exit status than ``end``."""
        threads = max(1, cores() // self.ranks)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "megazero", *map(str, words)]
        if (status := subprocess.run(command, env=environment, check=False).returncode) != end:
            raise StepFailed(f"megazero {words[0]} ended with exit status {status}")

    def summarise(self) -> None:
        logs, page = self.out / "logs", self.out / "report.html"
        write_text(page, report([logs])[0])
        lines = read_metrics(logs)
        first = next(line["lm_loss"] for line in lines if "lm_loss" in line)
        evaluations = [(m["iteration"], m["eval_lm_loss"]) for m in lines if "eval_lm_loss" in m]
        print(
            f"\nuntrained: loss {first:.3f} on the first batch (ln {VOCABULARY} = {math.log(VOCABULARY):.3f})\n"
            f"evaluation loss: {', '.join(f'{loss:.3f} at {at}' for at, loss in evaluations)}\n"
            f"  (resumed on another layout after {' and '.join(map(str, self.phase_ends[:-1]))})\n\n"
            f"curves      {page}\nmetrics     {logs / METRICS_FILE}\ncheckpoint  {self.out / 'checkpoint'}\n"
            f"more text   {sys.executable} -m megazero generate --load {self.out / 'checkpoint'} --prompt 'class '\n"
        )


class StepFailed(Exception):
    """A command ended with an error."""


def write_corpus(path: Path) -> None:
    """Write JSON lines in an order without meaning, since the last documents become the validation split."""
    sources = sorted(stdlib_sources(), key=lambda p: hashlib.sha256("/".join(p.parts[-3:]).encode()).digest())
    texts = ({"text": source.read_text("utf-8"), "path": str(source)} for source in sources)
    path.write_text("".join(f"{json.dumps(text)}\n" for text in texts), "utf-8")
    print(f"{len(sources)} files, {path.stat().st_size / 1e6:.1f} MB in {path}", flush=True)


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


# -- the command line ------------------------------------------------------------------------------------


def make_plan(out: Path, ranks: int, iterations: int | None, gpus: int) -> Quickstart:
    """Plan as many ranks as were asked for, or as there are GPUs to hold them. Raises ValueError."""
    if gpus:
        ranks = max(known for known in LAYOUTS if known <= min(ranks, gpus))
    phases = len(LAYOUTS[ranks])
    if iterations is not None and (iterations < phases or iterations % phases):
        raise ValueError(
            f"--iterations {iterations} is not a multiple of the {phases} phases of {ranks} ranks; nearest: "
            f"{max(1, round(iterations / phases)) * phases}"
        )
    if out.exists():
        raise ValueError(f"--out {out} is there already: remove it, or name a new folder")
    dtype = "bf16" if gpus else cpu_dtype()
    default = ITERATIONS["cuda" if gpus else dtype]
    return Quickstart(out, "cuda" if gpus else "cpu", dtype, ranks, iterations or default)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/quickstart"), help="folder of everything that is written")
    ranks = "processes; with GPUs one on each, at most"
    add("--ranks", type=int, choices=sorted(LAYOUTS), default=4, help=ranks)
    add("--iterations", type=int, help=f"optimizer steps, a multiple of the phases (default: {ITERATIONS})")
    options = parser.parse_args()
    try:
        plan = make_plan(options.out, options.ranks, options.iterations, count_gpus())
        where = f"{plan.ranks} GPUs" if plan.device == "cuda" else f"{cores()} CPU cores"
        print(f"megazero quickstart on {where}, {plan.dtype}, {plan.iterations} iterations, in {plan.out}")
        plan.run()
    except (StepFailed, ValueError, OSError) as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    guard_streams()
    sys.exit(main())
