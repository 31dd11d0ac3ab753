"""The README's training loop is run as it stands there."""

from __future__ import annotations

import re

import pytest
import torch

from megazero.config import World, begun, parse
from tests import ROOT
from tests.dist.pool import run_ranks

README = (ROOT / "README.md").read_text("utf-8")


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def run_block(source: str) -> tuple[list[float], dict[str, torch.Tensor], float]:
    space: dict = {}
    exec(compile(source, "README.md", "exec"), space)  # noqa: S102 - our own page
    return space["losses"], space["weights"], space["info"].grad_norm


def test_loop_trains_and_ranks_agree():
    pytest.importorskip("transformers")
    (source,) = code_blocks("python")
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
