"""A real SLURM on one machine: slurmctld and a slurmd per node, in the namespaces of a lab (tests/netlab/lab.py).

A node is a node of the lab: with its own host name, processes and network link, which can be shaped, and which dies
with all its processes. It needs root, Debian's packages slurm-wlm and munge, and what the lab needs. Nothing of a
SLURM that the machine itself may have is read or changed: configuration, key, sockets, state and logs lie in one
folder, and SLURM_CONF names them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.netlab.lab import SOCKETS, Lab, LabUnavailable

PROGRAMS = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "srun": "slurm-wlm", "munged": "munge"}
HEAD, HEAD_ADDRESS = "switch", "10.0.0.250"
DISK = "16m"  # bytes of each disk that is to be filled
OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "DEADLINE"}  # states of jobs
START = 60.0  # seconds that daemons have to answer
# cred_expire is also how long SLURM holds a requeued job back: 120 s by itself.
CONFIGURATION = """\
ClusterName=lab
SlurmctldHost={head}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdTimeout=10
KillWait={kill_wait}
MinJobAge=3600
JobRequeue=1
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobs.txt
AccountingStorageType=accounting_storage/none
SchedulerParameters=sched_min_interval=200000,batch_sched_delay=0,bf_interval=1
{nodes}
PartitionName=work Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=0 State=UP
PartitionName=graceful Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace} State=UP
PartitionName=urgent Nodes=ALL PriorityTier=9 PreemptMode=OFF State=UP
"""


class Cluster:
    """``nodes`` nodes of 12 CPUs; a context manager. Partitions: work, graceful (preempted with grace), urgent.

    disks: how many small disks all nodes share, to be filled; ``disks`` are their folders.

    Raises LabUnavailable on entry, with what is missing.
    """

    def __init__(
        self, folder: Path, nodes: int = 2, *, grace: int = 60, kill_wait: int = 15, disks: int = 0
    ) -> None:
        self.lab, self.folder = Lab(nodes), folder
        self.grace, self.kill_wait = grace, kill_wait
        self.environ = {**SOCKETS, "SLURM_CONF": f"{folder}/slurm.conf", "OMP_NUM_THREADS": "1"}
        self.environ["SBATCH_OUTPUT"] = (
            f"{folder}/%x-%j.out"  # before the script's own word: never the checkout
        )
        self.daemons: list[subprocess.Popen] = []
        self.disks = [folder / f"disk-{i}" for i in range(disks)]

    def __enter__(self) -> Cluster:
        missing = sorted({package for program, package in PROGRAMS.items() if not shutil.which(program)})
        if missing:
            raise LabUnavailable(f"packages not installed: {', '.join(missing)} (apt-get install)")
        for disk in self.disks:  # before the nodes, which see what is mounted when they begin
            disk.mkdir(parents=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(disk)], check=True)
        self.lab.__enter__()
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self.lab.close()  # all processes of its namespaces die with them
        for daemon in self.daemons:
            daemon.wait()
        for disk in self.disks:
            subprocess.run(["umount", "--lazy", str(disk)], capture_output=True)

    # -- what a user does ----------------------------------------------------------------------------------

    def call(self, *command: str, environ: Mapping[str, str] | None = None) -> str:
        """Run a command of SLURM on the login node; what it printed. Raises RuntimeError if it fails."""
        done = subprocess.run(
            [*self.lab.members[0].inside, "env", f"--chdir={os.getcwd()}", *command],
            env={**_outside(os.environ), **self.environ, **(environ or {})},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def submit(
        self,
        script: Path,
        arguments: Sequence[str] = (),
        *,
        options: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> int:
        """Submit a batch script, with sbatch's own options before it. Returns the job's number."""
        return int(self.call("sbatch", "--parsable", *options, str(script), *arguments, environ=environ))

    def job(self, number: int | str) -> dict[str, str]:
        """What ``scontrol show job`` says of a job, or of a task (12_3): JobState, Restarts and so on."""
        text = self.call("scontrol", "-o", "show", "job", str(number))
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def wait(self, number: int | str, *states: str, timeout: float = 240.0) -> dict[str, str]:
        """Wait until the job is in one of the states (default: any in which it is over), and return ``job``."""
        wanted = states or OVER
        job: dict[str, str] = {}

        def reached() -> bool:
            nonlocal job
            job = self.job(number)
            return job["JobState"] in wanted

        until(
            reached,
            timeout,
            lambda: f"job {number} is {job.get('JobState')}, not {' or '.join(sorted(wanted))}",
        )
        return job

    def wait_for_jobs(self, *chosen: str, timeout: float = 300.0) -> list[str]:
        """Wait until all the jobs that ``squeue`` chooses by these options are over. Returns their states."""
        states: list[str] = []

        def over() -> bool:
            nonlocal states
            states = self.call("squeue", "-h", "-r", "-t", "all", "-o", "%T", *chosen).split()
            return bool(states) and set(states) <= OVER

        until(over, timeout, lambda: f"jobs of {chosen} are {states}")
        return states

    def empty(self) -> None:
        """Cancel all jobs, and wait until all nodes are idle."""
        self.call("scancel", "--user=root")
        until(self._idle, START, lambda: "nodes are not idle again")

    def preempt(self, number: int, folder: Path) -> None:
        """Submit a short job of the urgent partition, whose script lies in ``folder``, for the nodes of another."""
        urgent = folder / f"urgent-{number}.sh"
        urgent.write_text("#!/bin/bash\nsleep 1\n")
        options = ("--partition=urgent", f"--nodelist={self.job(number)['NodeList']}", "--exclusive")
        self.wait(self.submit(urgent, options=(*options, f"--output={folder}/urgent-%j.out")))

    # -- what happens to nodes -----------------------------------------------------------------------------

    def lose(self, node: int) -> None:
        """A node loses power: all its processes die at once, slurmd's too."""
        self.lab.members[node + 1].kill_all()

    def bring_back(self, node: int) -> None:
        member = self.lab.members[node + 1]
        self._daemon(["slurmd", "-D", "-N", member.name], self.lab.members.index(member))

    # -- daemons -------------------------------------------------------------------------------------------

    def _start(self) -> None:
        for name in ("state", *(f"spool-{member.name}" for member in self.lab.members[1:])):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self._write()
        switch = self.lab.members[0]
        switch.call(f"ip address add {HEAD_ADDRESS}/24 dev bridge")
        switch.call("ip link set lo up")
        for member in self.lab.members:
            hosts = ["mount", "--bind", f"{self.folder}/hosts", "/etc/hosts"]
            subprocess.run([*member.inside, *hosts], check=True)
        munge = [f"--key-file={self.folder}/munge.key", f"--socket={self.folder}/munge.socket"]
        logs = [f"--{name}-file={self.folder}/munge.{name}" for name in ("log", "pid", "seed")]
        self._daemon(["munged", "--foreground", "--force", *munge, *logs], 0)
        until((self.folder / "munge.socket").exists, START, lambda: "munged does not answer")
        self._daemon(["slurmctld", "-D"], 0)
        for i in range(self.lab.nodes):
            self.bring_back(i)
        until(self._idle, START, lambda: f"nodes are not ready; see {self.folder}/*.log")

    def _write(self) -> None:
        nodes = [(member.name, self.lab.address(i)) for i, member in enumerate(self.lab.members[1:])]
        hosts = ["127.0.0.1 localhost", f"{HEAD_ADDRESS} {HEAD}", *(f"{at} {name}" for name, at in nodes)]
        (self.folder / "hosts").write_text("\n".join(hosts) + "\n")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o400)
        text = CONFIGURATION.format(
            folder=self.folder,
            head=HEAD,
            address=HEAD_ADDRESS,
            kill_wait=self.kill_wait,
            grace=self.grace,
            nodes="\n".join(
                f"NodeName={name} NodeAddr={at} CPUs=12 Gres=gpu:8 State=UNKNOWN" for name, at in nodes
            ),
        )
        (self.folder / "slurm.conf").write_text(text)
        # GPUs in name only: files where devices would be.
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-7]\n")
        for i in range(8):
            (self.folder / f"gpu{i}").touch()

    def _daemon(self, command: Sequence[str], member: int) -> None:
        log = (self.folder / f"{command[0]}-{member}.out").open("ab")
        self.daemons.append(
            subprocess.Popen(
                [*self.lab.members[member].inside, *command],
                env={**_outside(os.environ), **self.environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )

    def _idle(self) -> bool:
        try:
            states = self.call("sinfo", "-h", "-N", "-p", "work", "-o", "%T").split()
        except RuntimeError:
            return False
        return len(states) == self.lab.nodes and set(states) == {"idle"}


def until(
    condition: Callable[[], bool], timeout: float, failure: Callable[[], str], every: float = 0.2
) -> None:
    """Wait for a condition; TimeoutError with ``failure()`` after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{failure()} after {timeout:g} s")
        time.sleep(every)


def _outside(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what a SLURM around this process has set."""
    return {name: value for name, value in environ.items() if not name.startswith(("SLURM", "SBATCH"))}
