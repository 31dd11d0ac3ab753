"""docs/develop/extending.md's recipes, done as written: a family, a router, an optimizer, a learning-rate shape."""

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
    "--num-experts 4 --moe-router-score-function sqrtsoftplus --global-batch-size 2 "
    "--optimizer rmsprop --rmsprop-decay 0.9 --lr 1e-2 --lr-decay-style quadratic --train-iters 4"
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
    found = additions((ROOT / "docs" / "develop" / "extending.md").read_text())
    assert len(found) >= 8
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


@pytest.mark.slow
def test_what_the_recipes_add_is_planned(tree: Path) -> None:
    run(tree, f"-m megazero plan {MODEL} --cluster two-nodes-10g --plan-output {tree / 'plan'}")
    (best, *_) = json.loads((tree / "plan" / "plan.json").read_text())["layouts"]
    assert best["memory"]["optimizer"] > 0


@pytest.mark.slow
def test_the_pages_callbacks_watch_a_run(tmp_path: Path) -> None:
    """A metric, an evaluation, a check that stops, and its state after a resume, from a module of one's own."""
    page = (ROOT / "docs" / "develop" / "extending.md").read_text()
    (module,) = re.findall(r"^```python\n# watch.py\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    (listed,) = re.findall(r"^```yaml\n(callbacks:\n.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "watch.py").write_text(module)
    limit = listed.replace("9.0", "0.0, steps: 4")
    assert limit != listed
    (tmp_path / "run.yaml").write_text(limit + "exit_interval: 2\n")
    words = (
        "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 32 --micro-batch-size 2 "
        "--global-batch-size 2 --lr 1e-2 --train-iters 9 --eval-interval 2 --eval-iters 1 --mock-data --device cpu "
        "--config run.yaml --save save --load save --log-dir logs"
    )
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    for _ in range(2):  # the second start ends after the fourth step above the limit, of both starts
        program = [sys.executable, str(ROOT / "pretrain" / "pretrain_gpt.py"), *words.split()]
        done = subprocess.run(program, cwd=tmp_path, env=path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 75, done.stdout[-2000:] + done.stderr[-4000:]
        words += " --exit-interval 100"
    assert "the loss was above 0.0 in 4 steps" in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines if line.get("least_free_bytes", 0) > 0][-1] in (4, 5)
    assert [line["iteration"] for line in lines if "repetition_loss" in line] == [2, 4]
    assert all(line["repetition_loss"] > 0 for line in lines if "repetition_loss" in line)
