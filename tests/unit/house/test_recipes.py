"""docs/extending.md's recipes, done as they are written: a made-up family, optimizer and learning-rate shape."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

MODEL = (
    "--model-family tiny --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 "
    "--global-batch-size 2 --optimizer rmsprop --rmsprop-decay 0.9 --lr 1e-2 "
    "--lr-decay-style quadratic --train-iters 4"
)


def additions(page: str) -> list[tuple[str, list[str]]]:
    """(file, lines of a diff) of each block of a page, whose first line names the file."""
    blocks = re.findall(r"^```diff\n# (\S+)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    return [(name, text.splitlines()) for name, text in blocks]


def add(tree: Path, name: str, diff: list[str]) -> None:
    """Add a diff's lines behind its context, which stands once in the file. Without a context the file is new."""
    context, added = ([line[1:] for line in diff if line[0] == mark] for mark in " +")
    assert diff == [*(f" {line}" for line in context), *(f"+{line}" for line in added)], diff
    file = tree / name
    if not context:
        assert not file.exists()
        file.write_text("\n".join(added))
        return
    head, tail = file.read_text().split("\n" + "\n".join(context) + "\n")  # it stands there once
    file.write_text("\n".join([head, *context, *added, tail]))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with what the recipes add."""
    copy = tmp_path_factory.mktemp("recipes") / "tree"
    for name in ("megazero", "kernels", "pretrain"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    found = additions((ROOT / "docs" / "extending.md").read_text())
    assert len(found) >= 6
    for name, diff in found:
        add(copy, name, diff)
    return copy


def run(tree: Path, words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words.split()],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_what_the_recipes_add_trains(tree: Path) -> None:
    save, logs = tree / "save", tree / "logs"
    words = (
        f"{MODEL} --micro-batch-size 2 --mock-data --eval-iters 0 --device cpu --save {save} --log-dir {logs}"
    )
    run(tree, f"pretrain/pretrain_gpt.py {words}")
    lines = [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]
    rates = [line["learning_rate"] for line in lines if "learning_rate" in line]
    assert rates == pytest.approx([1e-2 * (1 - i / 4) ** 2 for i in range(4)])
    (manifest,) = save.glob("iter_0000004/*manifest*")
    assert "square_avg" in manifest.read_text() and '"tiny"' in manifest.read_text()


def test_what_the_recipes_add_is_planned(tree: Path) -> None:
    run(tree, f"-m megazero plan {MODEL} --cluster two-nodes-10g --plan-output {tree / 'plan'}")
    (best, *_) = json.loads((tree / "plan" / "plan.json").read_text())["layouts"]
    assert best["memory"]["optimizer"] > 0
