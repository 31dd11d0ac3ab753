"""A link that is shaped down to nothing under a training: both sides name the other one, and every rank ends."""

from __future__ import annotations

import re
import sys
import threading
import time
from pathlib import Path

import pytest

from megazero.log.exit_status import ExitStatus
from tests import ROOT
from tests.dist.failures.test_failing_ranks import errors, iterations
from tests.sizes import LEAST

LIMIT = 6.0
FLAGS = (
    f"--model-family llama {LEAST} --micro-batch-size 1 --global-batch-size 3 --lr-warmup-iters 0 "
    "--train-iters 20000 --eval-iters 0 --device cpu --log-interval 1000 --zero-preset zero3"
)
NODES = (
    "RANK={node} WORLD_SIZE={nodes} LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR={address} MASTER_PORT={port}"
)


@pytest.mark.slow
def test_a_link_that_is_shaped_down_to_nothing(netlab, tmp_path: Path) -> None:
    """pytest -m slow -s tests/netlab/test_hangs.py prints how long after the limit all had ended."""
    lab, cut = netlab(3), [0.0]
    program = [sys.executable, str(ROOT / "pretrain/pretrain_gpt.py")]
    log = ["--log-dir", str(tmp_path), "--distributed-timeout-minutes", str(LIMIT / 60)]

    def shape() -> None:
        while iterations(tmp_path) < 5:
            time.sleep(0.1)
        cut[0] = time.time()
        lab.members[0].call("tc qdisc replace dev port2 root tbf rate 8bit burst 1b limit 1b")
        lab.members[3].call("tc qdisc replace dev eth0 root tbf rate 8bit burst 1b limit 1b")

    threading.Thread(target=shape, daemon=True).start()
    result = lab.run(
        [*program, *FLAGS.split(), *log],
        launcher=["env", *NODES.split()],
        environ={"PYTHONPATH": str(ROOT)},
        timeout=200,
    )
    ended = time.time()
    assert set(result.returncodes) == {ExitStatus.RANK_LOST}, result.outputs
    near, far = "".join(result.outputs[:2]), result.outputs[2]
    ((_, words),) = errors(near)
    assert f"nothing moved for {LIMIT:g} s" in words and "missing: rank 2 on node2 " in words, words
    assert re.search(r"no answer, so its process is stopped or lost, or the link to it is\. Stacks", words), (
        words
    )
    ((_, words),) = errors(far)
    assert (
        "missing: rank 0 (or its launcher), which holds the store" in words
        and "says rank 2 on node2" in words
    )
    print(f"\n| a link shaped down to nothing | ended {ended - cut[0] - LIMIT:.1f} s after the limit |")
