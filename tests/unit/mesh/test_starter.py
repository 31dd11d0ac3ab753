"""Local ranks without a launcher: what their ends and signals become. The ranks are programs of a few lines."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Mapping

import pytest

from tests import ROOT

START = """
import sys
from megazero.mesh.starter import start_ranks
sys.exit(start_ranks([sys.executable, "-c", sys.argv[1]], 2, device="cpu", good=(0, 75), grace=0.5))
"""
HEAD = "import os, signal, sys, time; rank = int(os.environ['RANK']); "


def start(code: str, environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Two ranks of HEAD and ``code``, started by a process in a group of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", START, HEAD + code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )


def ended(how: str, rank: int = 1) -> str:
    return rf"rank {rank} \(process \d+\) was ended by {how}\n"


ENDS = {
    "all are well": ("pass", 0, ""),
    "a planned stop, and one rank takes its time": ("time.sleep(1.5 * rank); sys.exit(75)", 75, ""),
    "one fails, and the other says so": ("time.sleep(0.3 * rank); sys.exit([2, 76][rank])", 2, ""),
    "one is killed, and the other says so": (
        "rank and os.kill(os.getpid(), 9); time.sleep(0.3); sys.exit(76)",
        76,
        ended("SIGKILL"),
    ),
    "all are killed": (
        "os.kill(os.getpid(), 9)",
        137,
        f"({ended('SIGKILL', 0)}|{ended('SIGKILL')}){{2}}",
    ),
    "one fails, and the other waits for it": ("rank and time.sleep(99); sys.exit(3)", 3, ended("SIGTERM")),
    "one fails, and the other hears nothing": (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99 if rank else 0.5); sys.exit(3)",
        3,
        ended("SIGKILL"),
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_the_ranks_end_is_the_programs(case: str) -> None:
    code, status, said = ENDS[case]
    process = start(code)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == status, text
    assert re.fullmatch(said, text), text


def test_ranks_know_who_they_are() -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    code = f"os.write(1, (' '.join(os.environ[name] for name in {names}) + chr(10)).encode())"
    text, _ = start(code, {"OMP_NUM_THREADS": "3"}).communicate(timeout=60)
    assert sorted(text.splitlines()) == [f"{rank} {rank} 2 2 127.0.0.1 3" for rank in (0, 1)]


HEARS = """
heard = []
for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM): signal.signal(number, lambda n, _: heard.append(n))
os.write(1, b'ready\\n')
while not heard: time.sleep(0.02)
time.sleep(0.5)
os.write(1, (f'{heard}' + chr(10)).encode())
sys.exit(75)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_the_group_comes_to_each_rank_once(number: signal.Signals) -> None:
    process = start(f"exec({HEARS!r})")
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    os.killpg(process.pid, number)  # as the terminal does with Ctrl-C
    text, _ = process.communicate(timeout=60)
    assert text.splitlines() == [f"[{number:d}]"] * 2
    assert process.returncode == 75


# -- pretrain_gpt.py ---------------------------------------------------------------------------------

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --train-iters 2 "
    "--mock-data --vocab-size 50"
)


def program(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "pretrain" / "pretrain_gpt.py"), *FLAGS.split(), *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_mistake_is_told_once_before_ranks_are_started() -> None:
    done = program("--nproc-per-node", "3", "--lr", "-1", "--tensor-model-parallel-size", "2")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("--lr -1 must be above 0") == 1 and "Traceback" not in done.stderr
    assert "3 ranks" in done.stderr, done.stderr  # the world that is to be started was checked


@pytest.mark.parametrize(
    "words, environ, said",
    [
        (["--nproc-per-node", "none"], {}, "--nproc-per-node takes the number of ranks .* got none"),
        (["--nproc_per_node=0"], {}, "--nproc_per_node takes the number of ranks .* got 0"),
        (
            ["--nproc-per-node", "2"],
            {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            "--nproc-per-node 2 starts ranks, but this process is one, started by torchrun",
        ),
        (["--nproc-per-node", "2", "--local-rank=0"], {}, "started by a launcher"),
    ],
)
def test_ranks_are_started_by_one(words: list[str], environ: dict[str, str], said: str) -> None:
    done = program("--lr", "1", *words, **environ)
    assert done.returncode == 2 and re.search(said, done.stderr), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own ties")
def test_ranks_end_with_a_starter_that_is_killed() -> None:
    process = start(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); os.write(1, b'%d\\n' % os.getpid()); time.sleep(99)"
    )
    assert process.stdout is not None
    ranks = [int(process.stdout.readline()) for _ in range(2)]
    ends = [os.pidfd_open(pid) for pid in ranks]
    process.kill()
    process.wait()
    for end in ends:
        assert select.select([end], [], [], 20)[0], "they would run for 99 s"
        os.close(end)
