#!/usr/bin/env python
"""make test-releases: runs the tests under the oldest and newest releases of what megazero stands on.

Each row of RELEASES gets a virtual environment in --folder, which is kept. Interpreters are python3.11, 3.12 and
so on from the PATH, or what PYTHON_3_11, PYTHON_3_12 and so on say. torch comes from the package index, mostly as a
CUDA build of some 6 GB, which runs on a CPU, too. Every stage that ran appends a line to FOLDER/results.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHOWN = ("torch", "transformers", "megatron-core", "triton", "numpy")
TESTS = {
    "unit": ["tests/unit", "tests/gpu"],
    "dist": ["tests/dist"],
    "megatron": ["tests/megatron", "tests/fsdp2"],
}
STAGES = (*TESTS, "wheel")
Words = list[str | Path]  # of a command


@dataclass(frozen=True)
class Release:
    """An interpreter and what is installed for it: requirements of pip, and megatron-core's version, which comes
    without its own dependencies (the parts compared with need none)."""

    name: str
    python: str
    requirements: tuple[str, ...]
    megatron: str


# The oldest is what setup.cfg's lower bounds say.
RELEASES = (
    Release(
        "oldest",
        "3.11",
        ("torch==2.11.*", "transformers==4.51.*", "tokenizers==0.21.*", "numpy==1.26.*")
        + ("pyyaml==6.*", "rich==13.*", "safetensors==0.4.*", "sentencepiece==0.2.*"),
        "0.16.1",
    ),
    Release("middle", "3.12", ("torch==2.14.1", "transformers==5.23.0"), "0.19.2"),
    Release("newest", "3.13", ("torch==2.15.0", "transformers==5.23.0"), "0.19.2"),
)


def interpreter(version: str) -> str:
    """Return the command of a Python of this version. Raises SystemExit where there is none."""
    variable = f"PYTHON_{version.replace('.', '_')}"
    found = shutil.which(os.environ.get(variable) or f"python{version}")
    # pyenv's commands stand on the PATH also for versions that are not active.
    if found is None or subprocess.run([found, "-c", ""], capture_output=True).returncode:
        sys.exit(
            f"there is no python{version} on the PATH: set {variable} to one, or leave it out with --only"
        )
    return found


def prepare(release: Release, folder: Path) -> Path:
    """Make the release's environment, or bring it up to date, and return its Python."""
    home = folder / release.name
    python = home / "bin" / "python"
    if not python.exists():
        subprocess.run([interpreter(release.python), "-m", "venv", home], check=True)
    pip: Words = [python, "-m", "pip", "install", "--quiet"]
    own = ("--editable", f"{ROOT}[test]", "build")
    subprocess.run([*pip, *release.requirements, *own], check=True, cwd=folder)
    subprocess.run([*pip, "--no-deps", f"megatron-core=={release.megatron}"], check=True, cwd=folder)
    return python


def versions(python: Path) -> dict[str, str]:
    """Return the version of each of SHOWN, and Python's, as the environment has them."""
    code = (
        "import importlib.metadata as m, json, platform; "
        f"print(json.dumps({{'python': platform.python_version(), **{{n: m.version(n) for n in {SHOWN!r}}}}}))"
    )
    return json.loads(subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout)


def run_tests(python: Path, paths: list[str], log: Path, workers: int) -> dict[str, int]:
    """Run the tests of ``paths`` and return how many passed, failed and were skipped."""
    report = log.with_suffix(".xml")
    report.unlink(missing_ok=True)
    command: Words = [python, "-m", "pytest", "-m", "not slow and not gpu", "-p", "no:cacheprovider"]
    if workers > 1:
        command += ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"]
    with log.open("w") as out:
        subprocess.run(
            [*command, f"--junitxml={report}", *paths], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT
        )
    if not report.exists():
        return {"passed": 0, "failed": 1, "skipped": 0}  # it died: the log has its last words
    suite = ElementTree.parse(report).getroot()[0].attrib
    failed, skipped = int(suite["failures"]) + int(suite["errors"]), int(suite["skipped"])
    return {"passed": int(suite["tests"]) - failed - skipped, "failed": failed, "skipped": skipped}


MODEL = ["--model-family", "llama", "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"]
MODEL += ["--seq-length", "16", "--vocab-size", "64", "--global-batch-size", "4"]
# Trains 20 iterations on one rank, and goes on from the checkpoint to 24 on two.
TRAIN = ["--lr", "1e-3", "--data-path", "tokens_text_document", "--split", "90,10,0", "--eval-iters", "1"]
TRAIN += ["--tokenizer-type", "NullTokenizer", "--zero-preset", "zero3", "--micro-batch-size", "1"]
TRAIN += ["--save", "checkpoint", "--load", "checkpoint", "--train-iters"]


def run_wheel(python: Path, log: Path) -> dict[str, int]:
    """Build an sdist, from it a wheel, install that alone in an empty environment, and run from there what a user
    runs first.

    What megazero depends on is taken from the release's environment, as files: its editable install is not.
    """
    probe = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run(
        [python, "-c", probe], check=True, capture_output=True, text=True
    ).stdout.strip()
    passed = 0
    with tempfile.TemporaryDirectory() as name, log.open("w") as out:
        place = Path(name)
        (place / "tokens.jsonl").write_text(
            "".join(json.dumps({"text": " ".join(map(str, range(i % 9, 60)))}) + "\n" for i in range(80))
        )
        own = place / "venv" / "bin"
        doors = f"""
import fsdp2_patch.patch, megatron_core_patch.patch, megazero
for module in (megazero, fsdp2_patch, megatron_core_patch):
    assert module.__file__.startswith({name!r}), module.__file__"""
        train: Words = ["train", *MODEL, *TRAIN]
        torchrun: Words = [own / "python", "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
        environment = {**os.environ, "PYTHONPATH": packages}
        data: Words = ["--input", "tokens.jsonl", "--output-prefix", "tokens", "--vocab-size", "64"]
        commands: list[Words] = [
            [python, "-m", "build", "--outdir", "dist", ROOT],
            [python, "-m", "venv", "venv"],
            ["sh", "-c", "venv/bin/python -m pip install --quiet --no-deps dist/*.whl"],
            [own / "megazero", "--help"],
            [own / "megazero", "plan", *MODEL, "--cluster", "two-nodes-10g"],
            [own / "megazero", "preprocess", "--tokenizer-type", "NullTokenizer", *data],
            [own / "megazero", *train, "20"],
            [*torchrun, "megazero", *train, "24"],
            [own / "megazero", "inspect", "checkpoint"],
            [own / "python", "-c", doors],
        ]
        for command in commands:
            print("$", *command, file=out, flush=True)
            done = subprocess.run(command, cwd=place, env=environment, stdout=out, stderr=subprocess.STDOUT)
            if done.returncode != 0:
                return {"passed": passed, "failed": 1, "skipped": 0}
            passed += 1
    return {"passed": passed, "failed": 0, "skipped": 0}


def table(lines: Iterable[str]) -> str:
    """Return the newest result of every release and stage as Markdown."""
    rows: dict[str, dict[str, dict]] = {}
    for line in lines:
        result = json.loads(line)
        rows.setdefault(result["release"], {})[result["stage"]] = result
    head = ["Python", *SHOWN, *STAGES]
    text = [" | ".join(head), " | ".join(["---"] * len(head))]
    for results in sorted(rows.values(), key=lambda row: list(row.values())[-1]["versions"]["python"]):
        newest = list(results.values())[-1]["versions"]
        cells = [newest["python"], *(newest[name] for name in SHOWN)]
        for stage in STAGES:
            found = results.get(stage)
            cells.append("not run" if found is None else str(found["passed"]))
            if found is not None and found["failed"]:
                cells[-1] += f", {found['failed']} failed"
            if found is not None and found["skipped"]:
                cells[-1] += f", {found['skipped']} skipped"
        text.append(" | ".join(cells))
    return "\n".join(f"| {row} |" for row in text)


def run_stage(release: Release, stage: str, python: Path, folder: Path, workers: int) -> dict[str, Any]:
    """Run a stage and return what ``table`` reads of it."""
    began, log = time.monotonic(), folder / f"{release.name}-{stage}.log"
    counts = run_tests(python, TESTS[stage], log, workers) if stage in TESTS else run_wheel(python, log)
    seconds = round(time.monotonic() - began)
    print(f"{release.name} {stage}: {counts}, {seconds} s, {log}", flush=True)
    return {
        "release": release.name,
        "stage": stage,
        **counts,
        "versions": versions(python),
        "seconds": seconds,
    }


def main() -> int:
    """Run the stages of the releases, print the table, and return 1 where anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    names = [release.name for release in RELEASES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these releases")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), help="these stages")
    parser.add_argument("--folder", type=Path, default=ROOT / ".releases", help="of environments and results")
    parser.add_argument("--workers", type=int, default=1, help="test files at a time")
    parser.add_argument("--table", action="store_true", help="print what ran before, and run nothing")
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    results, failed = folder / "results.jsonl", 0
    for release in [] if args.table else [r for r in RELEASES if r.name in args.only]:
        python = prepare(release, folder)
        for stage in args.stages:
            line = run_stage(release, stage, python, folder, args.workers)
            failed += line["failed"]
            with results.open("a") as file:
                file.write(json.dumps(line) + "\n")
    print(table(results.read_text().splitlines()) if results.exists() else "nothing ran yet")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
