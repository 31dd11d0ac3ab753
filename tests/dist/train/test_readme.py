"""The loop of docs/guide/own-loop.md, the README's script and the experts' example are run as they stand there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megazero.config import World, begun, parse
from tests import ROOT
from tests.dist.pool import run_ranks


def code_blocks(language: str, page: str = "README.md") -> list[str]:
    text = (ROOT / page).read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run_block(source: str) -> tuple[list[float], dict[str, torch.Tensor], float]:
    space: dict = {}
    exec(compile(source, "own-loop.md", "exec"), space)  # noqa: S102 - our own page
    return space["losses"], space["weights"], space["info"].grad_norm


def test_loop_trains_and_ranks_agree():
    pytest.importorskip("transformers")
    (source,) = code_blocks("python", "docs/guide/own-loop.md")
    first, second = run_ranks(2, run_block, source)
    for losses, _, _ in (first, second):
        assert abs(losses[0] - 5.545) < 0.3  # ln 256
        assert losses[-1] < losses[0] - 1
    assert first[2] == second[2]
    assert first[1].keys() == second[1].keys() and len(first[1]) > 10
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


def test_pretraining_script_is_a_legal_configuration():
    (script,) = [block for block in code_blocks("sh") if block.startswith("#!/bin/bash\ntorchrun")]
    flags = script.split("megazero train")[1].replace("\\\n", " ").split()
    for nodes in (2, 4):
        world = World(8 * nodes, 8)
        config = begun(parse(flags, world), world)
        assert config.shards(world).factors == (4, 4 * nodes, 4 * nodes)


@pytest.mark.slow
def test_a_mixture_goes_from_hugging_face_through_training_and_back(tmp_path: Path) -> None:
    """As a new user would, but what is installed is this checkout."""
    transformers = pytest.importorskip("transformers")
    install, *lines = code_blocks("sh", "docs/guide/experts.md")[0].splitlines()
    assert install.startswith("pip install") and len(lines) <= 10
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, words in (("python", ""), ("megazero", "-m megazero ")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words}"$@"\n')
        (programs / name).chmod(0o755)
    around = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        ["bash", "-ec", "\n".join(lines)],
        cwd=tmp_path,
        env=around,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for what in ("tensors", "logits, relative difference"):
        assert re.search(rf"^{what} .*holds$", ran.stdout, re.MULTILINE), ran.stdout
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        for name in ("published", "trained")
    )
    assert type(after) is transformers.Qwen3MoeForCausalLM
    moved = {
        name: not torch.equal(a, b)
        for (name, a), b in zip(before.named_parameters(), after.parameters(), strict=True)
    }
    assert all(moved.values()), moved
    logged = map(json.loads, (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines())
    losses = [line["lm_loss"] for line in logged if "lm_loss" in line]
    assert len(losses) == 10 and all(abs(loss - 6.9) < 0.4 for loss in losses)  # ln 1000: the data are noise
