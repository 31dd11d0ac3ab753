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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megazero.data.text import stdlib_sources
from megazero.files import replacing
from megazero.log.exit_status import ExitStatus
from megazero.log.metrics import METRICS_FILE, read_metrics
from megazero.log.plot import plot_loss
from megazero.log.safe_stream import guard_streams

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 4096
PROMPT = "import os\n\n\ndef "
# 10.6M parameters and 1024 tokens a step: with so little text to see, many small steps learn more than few large,
# and few wide layers over short sequences are cheap (2 x 512 over 128 tokens against 4 x 384 over 256: the same
# loss of 5.90 after 60 iterations, in 1.3 times less CPU time).
MODEL = """
    --model-family llama --num-layers 2 --hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8
    --seq-length 128 --global-batch-size 8 --lr 1.2e-3 --min-lr 1e-4 --lr-decay-style cosine
    --lr-warmup-fraction 0.08 --weight-decay 0.1 --adam-beta2 0.95 --split 98,2,0 --eval-iters 8 --eval-at-start
"""
ITERATIONS = {"cuda": 600, "bf16": 324, "fp32": 168}  # sized for 5 minutes on 2 cores, everything included
LAYOUTS = {  # by ranks: the flags of each phase; every phase but the first resumes from the checkpoint before it
    4: (
        "--tensor-model-parallel-size 2 --sequence-parallel --zero-preset zero3 --micro-batch-size 4",
        "--ranks-per-node 2 --zero-preset hpz --micro-batch-size 2",
        "--pipeline-model-parallel-size 2 --zero-preset zero2 --micro-batch-size 1",
    ),
    2: (
        "--tensor-model-parallel-size 2 --sequence-parallel --zero-preset zero1 --micro-batch-size 8",
        "--zero-preset zero3 --micro-batch-size 4",
        "--pipeline-model-parallel-size 2 --zero-preset zero1 --micro-batch-size 2",
    ),
    1: ("--zero-preset ddp --micro-batch-size 8",) * 2,
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
    """One thing to do: the words of a command, or a function. The path ``outcome`` exists when it is done.

    end: the exit status of a command that has done it. printed: the outcome is what the command prints.
    """

    name: str
    outcome: Path
    act: Sequence[object] | Callable[[], None]
    end: int = 0
    printed: bool = False


class StepFailed(Exception):
    """A command of a step ended with an error."""


class Quickstart:
    """The steps. All but the first and the last are commands that a user could type."""

    def __init__(self, out: Path, plan: QuickstartPlan) -> None:
        self.out, self.plan, self.began = out, plan, time.monotonic()
        self.corpus, self.checkpoint, self.logs = out / "corpus.jsonl", out / "checkpoint", out / "logs"
        self.steps = [*self._steps()]

    def _steps(self) -> Iterator[Step]:
        model, data, threads = self.out / "tokenizer.model", self.out / "data/corpus", min(4, cores())
        text, device = ["--input", self.corpus], ["--device", self.plan.device]
        tokenizer = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model]
        pieces = ["--vocab-size", VOCABULARY, "--model-prefix", model.with_suffix("")]
        tokens = ["--output-prefix", data, *tokenizer, "--append-eod", "--workers", threads]
        sample = ["--load", self.checkpoint, "--prompt", PROMPT, "--tokens", 120, *device]
        yield Step("corpus: the standard library's sources", self.corpus, self._write_corpus)
        yield Step(f"tokenizer: {VOCABULARY} SentencePiece pieces", model, ["tokenizer", *text, *pieces])
        indices = Path(f"{data}_text_document.idx")
        yield Step("tokens: corpus to .bin and .idx", indices, ["preprocess", *text, *tokens])
        whole = self.plan.iterations
        training = ["train", "--nproc-per-node", self.plan.ranks, *MODEL.split(), *tokenizer, *device]
        training += ["--data-path", indices.with_suffix(""), f"--{self.plan.dtype}", "--train-iters", whole]
        training += ["--eval-interval", max(1, whole // 12), "--log-interval", max(1, whole // 36)]
        training += ["--save", self.checkpoint, "--log-dir", self.logs]
        for layout, end in zip(LAYOUTS[self.plan.ranks], self.plan.phase_ends, strict=True):
            name, more = f"to iteration {end} on {self.plan.ranks} ranks: {layout}", layout.split()
            resumes, stops = end > self.plan.phase_ends[0], end < whole
            more += ["--load", f"{self.checkpoint}"] if resumes else []
            more += ["--exit-interval", f"{end}"] if stops else []
            saved = self.checkpoint / f"iter_{end:07d}" / "manifest.json"
            status = ExitStatus.STOPPED if stops else ExitStatus.FINISHED
            yield Step(f"{'resume' if resumes else 'train'} {name}", saved, [*training, *more], status)
        written = self.out / "sample.txt"
        yield Step("sample: what the model writes", written, ["generate", *sample], printed=True)
        yield Step("loss curve", self.out / "loss.png", self._plot)

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
                if callable(step.act):
                    step.act()
                else:
                    self._command(step, log)
            except (StepFailed, ValueError, OSError) as error:
                seen = f"; its output is in {log}" if log.exists() else ""
                raise StepFailed(f"step {number} ({step.name}) failed: {error}{seen}") from error
        self._summary()

    def _command(self, step: Step, log: Path) -> None:
        """Run a command of megazero. Raises StepFailed if it ends with another exit status than the step's."""
        assert not callable(step.act)
        threads = max(1, cores() // self.plan.ranks)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        status = run_shown([sys.executable, "-m", "megazero", *map(str, step.act)], log, environment)
        if status != step.end:
            raise StepFailed(f"exit status {status}")
        if step.printed:
            with replacing(step.outcome) as file:
                file.write(log.read_bytes())

    def _say(self, text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self.began), 60)
        print(f"[{minutes}:{seconds:02}] {text}", flush=True)

    def _write_corpus(self) -> None:
        """Write JSON lines in an order without meaning, since the last documents become the validation split."""
        sources = sorted(
            stdlib_sources(), key=lambda p: hashlib.sha256("/".join(p.parts[-3:]).encode()).digest()
        )
        with replacing(self.corpus) as file:
            for path in sources:
                line = json.dumps({"text": path.read_text("utf-8"), "path": str(path)})
                file.write(f"{line}\n".encode())
        self._say(f"{len(sources)} files, {self.corpus.stat().st_size / 1e6:.1f} MB in {self.corpus}")

    def _plot(self) -> None:
        plot_loss([self.logs], self.out / "loss.png", title="quickstart: loss")

    def _summary(self) -> None:
        lines = read_metrics(self.logs)
        first = next(line["lm_loss"] for line in lines if "lm_loss" in line)
        evaluations = [(m["iteration"], m["eval_lm_loss"]) for m in lines if "eval_lm_loss" in m]
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(
            f"\nuntrained: loss {first:.3f} on the first batch (ln {VOCABULARY} = {math.log(VOCABULARY):.3f})\n"
            f"evaluation loss: {', '.join(f'{loss:.3f} at {at}' for at, loss in evaluations)}\n"
            f"  (resumed on another layout after {' and '.join(map(str, self.plan.phase_ends[:-1]))})\n\n"
            f"loss curve  {self.out / 'loss.png'}\nmetrics     {self.logs / METRICS_FILE}\n"
            f"checkpoint  {self.checkpoint}\n"
            f"more text   {sys.executable} -m megazero generate --load {self.checkpoint} --prompt 'class '\n"
        )
        self._say(f"done; {usage.ru_utime + usage.ru_stime:.0f} s of CPU time in the steps above")


def cores() -> int:
    """Return how many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_gpus() -> int:
    import torch  # whose absence is a message of this program, not a trace

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def cpu_dtype() -> str:
    """Return bf16 on a CPU that multiplies it in hardware (3x fp32's rate on AVX512-BF16, measured), else fp32."""
    with suppress(OSError):
        flags = Path("/proc/cpuinfo").read_text()
        if "avx512_bf16" in flags or "amx_bf16" in flags:
            return "bf16"
    return "fp32"


def run_shown(command: Sequence[str], log: Path, environment: dict[str, str]) -> int:
    """Run a command, show its output as it comes, and keep it in ``log``. Returns its exit status."""
    job = subprocess.Popen(
        command,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    with open(log, "w") as file, job:
        assert job.stdout is not None
        try:
            for line in job.stdout:
                print(line, end="", flush=True)
                file.write(line)
        except KeyboardInterrupt:
            job.wait()  # it got it, too
            raise
    return job.returncode


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/quickstart"), help="folder of everything that is written")
    of_ranks = "processes; with GPUs one on each, at most"
    add("--ranks", type=int, choices=sorted(LAYOUTS), default=4, help=of_ranks)
    add("--iterations", type=int, help=f"optimizer steps (default: {ITERATIONS})")
    add(
        "--fresh", action="store_true", help="remove what an earlier quickstart left in --out, and begin anew"
    )
    return parser.parse_args(arguments)


def make_plan(ranks: int, iterations: int | None, gpus: int) -> QuickstartPlan:
    """Plan as many ranks as were asked for, or as there are GPUs to hold them."""
    if gpus:
        ranks = max(known for known in LAYOUTS if known <= min(ranks, gpus))
    phases, device, dtype = len(LAYOUTS[ranks]), "cuda" if gpus else "cpu", "bf16" if gpus else cpu_dtype()
    if iterations is not None and iterations < phases:
        raise ValueError(f"--iterations {iterations} is too few for {phases} phases; nearest: {phases}")
    default = ITERATIONS["cuda" if gpus else dtype]
    return QuickstartPlan(platform.python_version(), device, dtype, ranks, iterations or default)


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
    except (StepFailed, ImportError, ValueError, OSError) as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nquickstart: interrupted; the same command goes on with what is missing", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    guard_streams()
    sys.exit(main())
