"""A node behind a slow link is named in a run of four: link."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.netlab.test_hangs import FLAGS, NODES

LARGER = ["--vocab-size", "4096", "--hidden-size", "64", "--global-batch-size", "4", "--train-iters", "40"]


@pytest.mark.slow
def test_the_node_behind_a_slow_link_is_named(netlab, tmp_path: Path) -> None:
    """pytest -m slow tests/netlab/test_stragglers.py"""
    lab = netlab(4)
    for member, interface in ((lab.members[0], "port2"), (lab.members[3], "eth0")):
        member.call(f"tc qdisc replace dev {interface} root tbf rate 20mbit burst 128kb limit 64mb")
    program = [sys.executable, str(ROOT / "pretrain/pretrain_gpt.py"), *FLAGS.split(), *LARGER]
    result = lab.run(
        [*program, "--log-dir", str(tmp_path)],
        launcher=["env", *NODES.split()],
        environ={"PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    assert result.returncode == 0, result.outputs
    warnings = [line for line in result.outputs[0].splitlines() if "is slower than its peers" in line]
    print("\n".join(warnings))
    assert any("rank 2 on node2 " in line and "iterations: link takes it" in line for line in warnings), (
        result.outputs
    )
