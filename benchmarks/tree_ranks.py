"""Training runs of one checkout, by its pretrain_gpt.py alone: ``python tree_ranks.py CHECKOUT``.

This file belongs to the tree that compares and runs in either, so it imports nothing of megazero. Ranks are forked
from this process, which loads torch once. A line of standard input is a job, in JSON, and a line of standard output
its answer:

    {"ranks": 4, "flags": ["--num-layers", ...], "log": PREFIX}    "" or what a rank said that did not end well
    {..., "steps": 2}                                              starts a run that pauses after every optimizer step
    "turn"                                                         takes so many steps: [seconds, CPU seconds] of one
    "end"                                                          ends it
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

TIMEOUT_S, GRACE_S = 300.0, 5.0  # of a run; for its other ranks to speak when one has failed
PROBES = 10_000  # elements: an optimizer of fewer is none of a model


class Ranks:
    """The processes of one run. gates: a socket to each, where a run pauses."""

    def __init__(self, script: Path, job: dict[str, Any]) -> None:
        self.logs = [Path(f"{job['log']}.{rank}") for rank in range(job["ranks"])]
        self.gates: list[socket.socket] = []
        self.pids: list[int] = []
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        for rank, log in enumerate(self.logs):
            ours, theirs = socket.socketpair()
            self.gates.append(ours)
            if not (pid := os.fork()):
                launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["ranks"], "MASTER_PORT": port}
                launch |= {"LOCAL_WORLD_SIZE": job["ranks"], "MASTER_ADDR": "127.0.0.1"}
                os.environ.update({name: str(value) for name, value in launch.items()})
                for gate in self.gates:
                    gate.close()
                run_rank(script, job, log, theirs)
            self.pids.append(pid)
            theirs.close()

    def turn(self) -> list[float]:
        """Take a turn. Return of one step the slowest rank's seconds, and the CPU seconds of all ranks."""
        for gate in self.gates:
            gate.sendall(b"\n")
        answers = [gate.recv(100).split() for gate in self.gates]
        if not all(answers):
            raise RuntimeError(self.wait())
        return [max(float(wall) for wall, _ in answers), sum(float(cpu) for _, cpu in answers)]

    def wait(self) -> str:
        """Return '' when all ranks have ended well; else end the others, and return what the first that failed
        printed."""
        left, deadline, failed = dict(zip(self.pids, self.logs, strict=True)), TIMEOUT_S, ""
        began = time.monotonic()
        while left and time.monotonic() - began < deadline:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if log := left.pop(pid, None):
                if status and not failed:
                    failed = f"{log.suffix[1:]}: {log.read_text(errors='replace').strip()}"
                    deadline = time.monotonic() - began + GRACE_S
            else:
                time.sleep(0.01)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return f"rank {failed}" if failed else f"not done in {TIMEOUT_S:.0f} s" if left else ""

    def end(self) -> None:
        for gate in self.gates:
            gate.close()  # a rank that waits there leaves
        self.wait()


def run_rank(script: Path, job: dict[str, Any], log: Path, gate: socket.socket) -> None:
    """Run the program as a forked rank. Does not return."""
    status: Any = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(said, 1)
        os.dup2(said, 2)
        if "steps" in job:
            pause(gate, job["steps"])
        sys.argv = [str(script), *job["flags"]]
        runpy.run_path(str(script), run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
    if wrong := [
        f"{name} from {file}" for name, file in loaded() if not file.is_relative_to(script.parents[1])
    ]:
        print(f"not of the checkout {script.parents[1]}: {', '.join(wrong)}")
        status = 1
    gate.sendall(" ".join(name for name, _ in loaded()).encode())
    sys.stdout.flush()
    os._exit(int(status or 0))


def pause(gate: socket.socket, steps: int) -> None:
    """Make the model's optimizer, after every ``steps`` steps, send their times and wait for a byte."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    left, wall, cpu = 0, time.perf_counter(), time.process_time()

    def taken(optimizer: Any, *_: Any) -> None:
        nonlocal left, wall, cpu
        if sum(p.numel() for group in optimizer.param_groups for p in group["params"]) < PROBES:
            return
        left -= 1
        if left > 0:
            return
        if not left:
            times = (time.perf_counter() - wall, time.process_time() - cpu)
            gate.sendall(" ".join(str(each / steps) for each in times).encode())
        if not gate.recv(1):
            os._exit(0)
        left, wall, cpu = steps, time.perf_counter(), time.process_time()

    register_optimizer_step_post_hook(taken)


def loaded() -> list[tuple[str, Path]]:
    """Return the loaded modules of megazero, and their files."""
    files = [(name, getattr(module, "__file__", None)) for name, module in sys.modules.items()]
    return [(name, Path(file)) for name, file in files if file and name.split(".")[0] == "megazero"]


def main() -> None:
    import torch._dynamo
    import torch.distributed  # noqa: F401

    script = Path(sys.argv[1]) / "pretrain" / "pretrain_gpt.py"
    ranks = None
    for line in sys.stdin:
        job, answer = json.loads(line), ""
        if isinstance(job, dict):
            ranks = Ranks(script, job)
            answer = "" if "steps" in job else ranks.wait()
            if "steps" not in job and not answer:
                # The next runs' ranks are forked with what this one's loaded: seconds of CPU of each.
                for name in ranks.gates[0].recv(1 << 16).decode().split():
                    importlib.import_module(name)
        elif ranks is not None:
            answer = getattr(ranks, job)()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
