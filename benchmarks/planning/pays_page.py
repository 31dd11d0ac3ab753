"""Write docs/results/pays.md: what ``megazero plan --pays`` prints for four models, and what a sceptic would check.

    python -m benchmarks.planning.pays_page                  # every case: some minutes on one core
    python -m benchmarks.planning.pays_page --only 70B       # the others stay as they are

Each case has its processor seconds, start included.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import harness
from benchmarks.results import PAGES

PAGE = PAGES / "pays.md"
WIDTH = 118  # of a line with words of the command


@dataclass(frozen=True)
class Case:
    """A model on a cluster. doubts: what a sceptic would check."""

    name: str
    words: str
    doubts: str


LLAMA = "--model-family llama --num-query-groups 8 --seq-length 8192 --vocab-size 128256 --bf16"
LLAMA_8B = f"{LLAMA} --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32"
CASES: Sequence[Case] = (
    Case(
        "8B on 4 nodes of 8 H100",
        f"{LLAMA_8B} --global-batch-size 128 --cluster h100 --nodes 4 --price 2.5 --link-rates 10,25,100,400,3200",
        "the tokens are those of a 1.3B model by Chinchilla's data term; the best exact layouts below 100 "
        "Gb/s are pipelines, whose bubbles a smaller batch makes larger; from 400 Gb/s on differences are "
        "within the planner's error.",
    ),
    Case(
        "70B on 16 nodes of 8 H100",
        f"{LLAMA} --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
        "--global-batch-size 512 --cluster h100 --nodes 16 --link-rates 100",
        "exact and quantised are 3% apart, less than the planner's error of 5% at the median; the tensor-"
        "parallel pipeline sends little across nodes, so there is little to save.",
    ),
    Case(
        "Qwen3-30B-A3B on 8 nodes of 8 H100",
        "--model-family qwen3_moe --num-layers 48 --hidden-size 2048 --num-attention-heads 32 --num-query-groups 4 "
        "--kv-channels 128 --ffn-hidden-size 6144 --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 "
        "--seq-length 4096 --vocab-size 151936 --bf16 --global-batch-size 512 --cluster h100 --nodes 8 "
        "--link-rates 100",
        "routing is taken as even, while a run waits for the fullest rank; no run of a mixture is among those "
        "that set the rates; exact and quantised are 4% apart, less than the planner's error of 5% at the median.",
    ),
    Case(
        "8B on two DGX Sparks",
        f"{LLAMA_8B} --global-batch-size 16 --cluster two-sparks --link-rates 10,100,200",
        "the peak and the 0.44 of it are not measured on a GB10; with 2 samples instead of 16, messages weigh "
        "eight times as much; the memory that the host keeps decides whether anything fits.",
    ),
)
TEXT = """\
# Does it pay? Four models

    python -m benchmarks.planning.pays_page

What `megazero plan --pays` prints; [planning](../guide/planning.md#does-it-pay) explains the columns. Nothing here is
measured: [published.md](published.md) says how far the planner is from runs that others measured."""


def wrapped(words: str) -> str:
    """Return a command in lines that a shell joins."""
    lines, line = [], "$ megazero plan"
    for word in words.replace(" --", "\n--").split("\n"):
        if len(line) + len(word) > WIDTH:
            lines.append(line + " \\")
            line = "   "
        line += f" {word}"
    return "\n".join([*lines, line])


def transcript(case: Case) -> str:
    """Return the command and what it prints, with the processor seconds that it takes."""
    with tempfile.TemporaryDirectory() as folder:
        before = os.times()
        words = f"{case.words} --pays --plan-output {folder}"
        command = [sys.executable, "-m", "megazero", "plan", *shlex.split(words)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    whole = f"{wrapped(f'{case.words} --pays')}\n{said.partition(f'{os.linesep}{folder}')[0].strip()}"
    return f"```\n{whole}\n```\n\n{seconds:.0f} s of one core."


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--only", default="", help="cases whose names have this word")
    only = parser.parse_args().only
    if not PAGE.exists():
        PAGE.write_text(
            "\n\n".join([TEXT, *(f"## {case.name}\n\nto come" for case in CASES)]) + "\n", encoding="utf-8"
        )
    for case in CASES:
        if only in case.name:
            text = f"{transcript(case)}\n\nWhat a sceptic would check: {case.doubts}"
            harness.write_section(PAGE, case.name, text)


if __name__ == "__main__":
    harness.start(main)
