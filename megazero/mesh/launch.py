"""Rank, world and node of this process, from launchers' variables, --local-rank and --nproc-per-node.

The variables of CUDA and of the C library's allocator are read and set here, too. Nothing here needs torch.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST_CONNECTIONS = 32  # that CUDA has
USUAL_CONNECTIONS = 8  # CUDA's default
MODULE_LOADING = "CUDA_MODULE_LOADING"
# NCCL's, with what a run sets where the user has not.
NCCL_SETTINGS = MappingProxyType({"NCCL_RUNTIME_CONNECT": "0", "TORCH_NCCL_HIGH_PRIORITY": "1"})

# From 2.38 on glibc finds freed aligned blocks again (its bug 14581).
TUNABLES, MENDED_GLIBC = "GLIBC_TUNABLES", (2, 38)
NO_SMALL_CACHES = "glibc.malloc.mxfast=0:glibc.malloc.tcache_count=0"
DEVICES = Path("/dev")  # where the driver has a file for each GPU

# Ports at which ranks meet if nobody names one: below 32768, from where Linux gives ports to connections.
FIRST_PORT, PORTS = 20000, 12000
STEPS = 61  # steps of one job, and of jobs submitted one after another, that have ports of their own

# Launcher -> its variables of rank, world size, local rank, and ranks on this node ("": it has none). The first one
# counts of which all but the local rank are set: what torchrun starts inherits the variables of an mpirun around it,
# and what mpirun starts those of the srun by which it reaches its nodes.
MPI = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
LAUNCHERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        "the deepspeed launcher": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"),
        "RANK and WORLD_SIZE": ("RANK", "WORLD_SIZE", "LOCAL_RANK", ""),  # of the user's own script
        "Open MPI": tuple(f"OMPI_COMM_WORLD_{name}" for name in MPI),
        "MVAPICH": tuple(f"MV2_COMM_WORLD_{name}" for name in MPI),
        "hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
        "PALS": ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    }
)
# After SLURM, whose srun may set them, too, and says more.
PMI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "")


@dataclass(frozen=True)
class Launch:
    """The launcher's description of this process. ``local_world_size`` is its number of ranks per node.

    ``attempt`` is how often torchrun has restarted the ranks at the same store. ``agent_store`` says that its agent
    holds the rendezvous store; otherwise rank 0 does. ``hosts`` are the nodes in the order of the ranks, if the
    launcher lists them. ``node`` is SLURM's name of this node, also under another launcher; None outside of SLURM.
    ``job`` is the batch system's name of the job, or torchrun's of the run ('' where there is none). ``restarts`` is
    how often it was started before, by SLURM's count and torchrun's. ``identity`` is what all starts of this job have
    in common, and no other run: cluster or address are part of it ('' if it is unknown). ``local_rank``,
    ``local_world_size`` or ``master_addr`` (the host of rank 0) is None where the launcher does not say it.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = 0
    local_world_size: int | None = 1
    master_addr: str | None = "127.0.0.1"
    master_port: int = 29500
    launcher: str = "single process"
    attempt: int = 0
    agent_store: bool = False
    hosts: tuple[str, ...] = ()
    node: str | None = None
    job: str = ""
    restarts: int = 0
    identity: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank {self.rank} is not in a world of {self.world_size} (from {self.launcher})"
            )

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port at which the ranks meet.

        Raises ValueError if the address of rank 0 is unknown.
        """
        if self.master_addr is None:
            raise ValueError(
                f"{self.launcher} does not say where rank 0 runs: set MASTER_ADDR to its host name on every rank "
                "(mpirun: -x MASTER_ADDR=HOST or -genv MASTER_ADDR HOST)"
            )
        return self.master_addr, self.master_port

    @property
    def host(self) -> str:
        """This node's name for an exclude list: SLURM's, else the host's own."""
        return self.node or socket.gethostname()


def take_launch(argv: Sequence[str]) -> tuple[Launch, int | None, list[str]]:
    """Return how this process was launched, how many ranks it is to start here, and the words that say neither.

    These are --local-rank N, which torch.distributed.launch and deepspeed add to a command line, and --nproc-per-node
    N. Raises ValueError for a value that is no such number, and as ``read_launch`` does.
    """
    local_rank, words = take_number(argv, "local-rank", "the rank on this node, 0 or above", 0)
    takes = "the number of ranks to start on this machine, 1 or above"
    ranks, words = take_number(words, "nproc-per-node", takes, 1)
    return read_launch(local_rank=local_rank, starts=ranks), ranks, words


def take_number(argv: Sequence[str], key: str, takes: str, least: int) -> tuple[int | None, list[str]]:
    """Return the number of the flag ``key``, at least ``least``, and the other words. takes: what it is, in words."""
    number, rest, words = None, list[str](), iter(argv)
    for word in words:
        name, has_value, value = word.partition("=")
        if not name.startswith("--") or name[2:].replace("_", "-") != key:
            rest.append(word)
            continue
        value = value if has_value else next(words, "none")
        if not value.isdecimal() or int(value) < least:
            raise ValueError(f"{name} takes {takes}, got {value}")
        number = int(value)
    return number, rest


def rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables by which a process is one of the ``ranks`` of this machine alone: torchrun's."""
    here = zip(LAUNCHERS["torchrun"], (rank, ranks, rank, ranks), strict=True)
    return {name: f"{value}" for name, value in here} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}


def torchrun_error_file() -> str | None:
    """Return the file from which torchrun reads why a rank failed; None under other launchers."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE")


def read_launch(
    environ: Mapping[str, str] | None = None, local_rank: int | None = None, starts: int | None = None
) -> Launch:
    """Return the description by the launcher whose variables are set. Without a launcher, it is one process.

    ``local_rank`` is the value of --local-rank, ``starts`` that of --nproc-per-node. Raises ValueError for variables
    that are no numbers, that contradict each other or a flag, or that belong to a launcher which did not start this
    process.
    """
    env = os.environ if environ is None else environ
    try:
        launch = _read(env)
        requeued = _number(env, "SLURM_RESTART_COUNT", 0) or 0
    except ValueError as error:
        raise ValueError(f"launcher environment: {error}") from None
    launch = replace(launch, job=_job(env), restarts=requeued + launch.attempt)
    launch = replace(launch, identity=_identity(env, launch))
    if starts is not None and (launch.launcher != "single process" or local_rank is not None):
        raise ValueError(
            f"--nproc-per-node {starts} starts ranks, but this process is one, started by "
            f"{launch.launcher if local_rank is None else 'a launcher'}: leave the flag or the launcher out"
        )
    if local_rank is not None and launch.local_rank not in (None, local_rank):
        raise ValueError(
            f"--local-rank {local_rank}, but {launch.launcher} says {launch.local_rank}; leave the flag out"
        )
    if launch.local_rank is None and launch.local_world_size:
        launch = replace(launch, local_rank=launch.rank % launch.local_world_size)
    launch = replace(launch, node=env.get("SLURMD_NODENAME"))
    return launch if local_rank is None else replace(launch, local_rank=local_rank)


def is_first(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether this process is the first of its job, even if ``read_launch`` refuses the variables.

    It reports mistakes that all processes make.
    """
    env = os.environ if environ is None else environ
    ranks = [names[0] for names in (*LAUNCHERS.values(), PMI)] + ["SLURM_PROCID"]
    return next((env[name] for name in ranks if name in env), "0") == "0"


def _job(env: Mapping[str, str]) -> str:
    array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"{array}_{task}"
    named = (env.get(name) for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "TORCHELASTIC_RUN_ID"))
    return next((name for name in named if name and name != "none"), "")


def _identity(env: Mapping[str, str], launch: Launch) -> str:
    if env.get("SLURM_JOB_ID"):
        return f"{env.get('SLURM_CLUSTER_NAME', '')} {launch.job}"
    # Users give many runs of torchrun one id. Two that live at once do not have one store.
    if launch.job and launch.agent_store and launch.master_addr not in (None, "localhost", "127.0.0.1"):
        return f"{launch.job} at {launch.master_addr}:{launch.master_port}"
    return ""


def _read(env: Mapping[str, str]) -> Launch:
    for launcher, names in LAUNCHERS.items():
        if _is_set(env, names):
            return _read_variables(env, launcher, names)
    tasks = _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 1))
    assert tasks is not None
    if "SLURM_PROCID" in env and "SLURM_STEP_ID" in env:
        return _read_slurm(env, tasks) if tasks > 1 else Launch()
    if _is_set(env, PMI):
        return _read_variables(env, "PMI", PMI)
    if "SLURM_PROCID" in env and tasks > 1:  # a batch script itself, with its first task's variables
        raise ValueError(
            f"SLURM gives this job {tasks} tasks, and this process is none of them (SLURM_STEP_ID is not set): start "
            "it with srun, torchrun or mpirun, or with srun --ntasks=1 for one process alone"
        )
    if "PMIX_RANK" in env:
        raise ValueError(
            f"PMIX_RANK={env['PMIX_RANK']}, and nothing says of how many: start with srun, mpirun or torchrun, or "
            "set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    return Launch()


def _is_set(env: Mapping[str, str], names: tuple[str, ...]) -> bool:
    rank, world_size, _, ranks_here = names
    return rank in env and world_size in env and (not ranks_here or ranks_here in env)


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int | None:
    if not env.get(name):
        return default
    try:
        return int(env[name])
    except ValueError:
        raise ValueError(f"{name}={env[name]!r} is no whole number") from None


def _read_variables(env: Mapping[str, str], launcher: str, names: tuple[str, ...]) -> Launch:
    rank, world, local_rank, ranks_here = (_number(env, name) for name in names)
    if rank is None or world is None:
        raise ValueError(
            f"{names[0]}={env[names[0]]!r} and {names[1]}={env[names[1]]!r} are not both numbers"
        )
    if local_rank is not None and ranks_here is not None and not 0 <= local_rank < ranks_here:
        raise ValueError(f"{names[2]}={local_rank} is not one of the ranks of {names[3]}={ranks_here}")
    ranks_here = 1 if world == 1 else ranks_here
    hosts = _hosts(env)
    local = "127.0.0.1" if ranks_here == world else None
    identity = env.get("PMIX_NAMESPACE")  # the same for all ranks of one mpirun, another one for each
    port = FIRST_PORT + zlib.crc32(identity.encode()) % PORTS if identity else 29500
    return Launch(
        rank=rank,
        world_size=world,
        local_rank=local_rank,
        local_world_size=ranks_here,
        master_addr=env.get("MASTER_ADDR") or local or next(iter(hosts), None),
        master_port=_port(env, port),
        launcher=launcher,
        attempt=_number(env, "TORCHELASTIC_RESTART_COUNT", 0) or 0,
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _read_slurm(env: Mapping[str, str], world: int) -> Launch:
    said = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    tasks = expand_tasks_per_node(said) if said else None
    if tasks and len(set(tasks)) > 1:
        raise ValueError(
            f"SLURM gives nodes different numbers of tasks ({said}); ask for --ntasks-per-node={max(tasks)}"
        )
    hosts = _hosts(env)
    job, step = _number(env, "SLURM_JOB_ID", 0) or 0, _number(env, "SLURM_STEP_ID", 0) or 0
    return Launch(
        rank=_number(env, "SLURM_PROCID") or 0,
        world_size=world,
        local_rank=_number(env, "SLURM_LOCALID"),
        local_world_size=tasks[0] if tasks else None,
        master_addr=env.get("MASTER_ADDR") or next(iter(hosts), None),
        master_port=_port(env, FIRST_PORT + (job * STEPS + step) % PORTS),
        launcher="SLURM",
        hosts=hosts,
    )


def _port(env: Mapping[str, str], usual: int) -> int:
    """Return the port at which ranks meet. Raises ValueError for a number that is none, such as 10000 + a job's."""
    port = _number(env, "MASTER_PORT") or usual
    if not 0 < port < 1 << 16:
        near = FIRST_PORT + port % PORTS
        raise ValueError(f"MASTER_PORT={port} is not from 1 to 65535; nearest: leave it out, or {near}")
    return port


def expand_tasks_per_node(text: str) -> list[int]:
    """Expand SLURM_TASKS_PER_NODE: '4(x2),3' becomes [4, 4, 3]."""
    out: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"SLURM_TASKS_PER_NODE={text!r}")
        out += [int(match[1])] * int(match[2] or 1)
    return out


def _hosts(env: Mapping[str, str]) -> tuple[str, ...]:
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    return tuple(expand_hosts(nodes)) if nodes else ()


def expand_hosts(nodelist: str) -> list[str]:
    """Expand a SLURM node list: 'gpu[03-05,11],login1' becomes ['gpu03', 'gpu04', 'gpu05', 'gpu11', 'login1'].

    Raises ValueError if it is none.
    """
    out: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+|.", nodelist):
        if item == ",":
            continue
        hosts = [""]
        for text, inside in re.findall(r"([^\[\]]+)|\[([^\[\]]+)\]", item):
            hosts = [host + each for host in hosts for each in ([text] if text else _expand_numbers(inside))]
        if "" in hosts:
            raise ValueError(f"SLURM node list {nodelist!r}")
        out += hosts
    return out


def _expand_numbers(text: str) -> list[str]:
    """Expand '03-05,11' to ['03', '04', '05', '11']."""
    out: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            raise ValueError(f"SLURM node list with {part!r} in brackets")
        out += [f"{n:0{len(first)}}" for n in range(int(first), int(last or first) + 1)]
    return out


def given_gpus(environ: Mapping[str, str]) -> tuple[int, str]:
    """Return how many GPUs this rank was given, and the variable that says so; (0, '') if nothing does.

    CUDA_VISIBLE_DEVICES counts first: SLURM sets it for each task, and users narrow it. An empty one, -1 and SLURM's
    NoDevFiles hide all GPUs. CUDA shows a process one MIG slice at most.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        devices = [device.strip() for device in visible.split(",")]
        shown = [device for device in devices if device and device not in ("-1", "NoDevFiles")]
        count = min(len(shown), 1) if visible.startswith("MIG-") else len(shown)
        return (count, "CUDA_VISIBLE_DEVICES") if count else (0, "")
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        number = environ.get(name, "").rpartition(":")[2]  # --gpus-per-node=a100:4
        if number.isdecimal() and int(number):
            return int(number), name
    return 0, ""


def cuda_settings(environ: Mapping[str, str], world_size: int) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return what to set in this environment before CUDA starts, and notes on values of its own that are replaced.

    - Streams that share a hardware connection run their kernels in the order of launch, so a receive that waits
      holds up what was launched after it on another stream. There are some 20 streams: one to compute, two to
      gather and two to reduce, and one for each communicator (two per data-parallel axis, tensor parallel, the
      pipeline's pairs, its ends, all ranks). So all connections that CUDA has are used. A number that the user sets
      is kept if it is CUDA's default or more.

    The rest is for a world of several ranks:

    - Kernels are loaded at the start. The first launch of a kernel that is loaded lazily waits for all kernels
      under way, and a collective or a receive among them may be waiting for just that launch on another rank.
    - NCCL connects all its algorithms when it makes a communicator, and not each at the first message of a size that
      takes it: that waits for the other ranks and allocates memory, in the middle of a step. Buffers of algorithms
      that are never taken are the price; they are there when the run's memory is checked. A value of the user's is
      kept, as is that of the next.
    - NCCL's kernels come before those of matrix products that are queued, as the lanes' do (comm/lane.py).
    """
    settings, notes = {CONNECTIONS: f"{MOST_CONNECTIONS}"}, []
    loading, connections = environ.get(MODULE_LOADING), environ.get(CONNECTIONS)
    if connections is not None and connections.strip().isdecimal() and int(connections) >= USUAL_CONNECTIONS:
        settings[CONNECTIONS] = connections
    elif connections is not None:
        notes.append(
            f"{CONNECTIONS}={connections} of the environment is replaced by {MOST_CONNECTIONS}: with fewer than "
            f"{USUAL_CONNECTIONS}, what a rank computes stands behind messages that wait for other ranks"
        )
    if world_size == 1:
        return settings, tuple(notes)
    settings[MODULE_LOADING] = "EAGER"
    settings |= {name: environ.get(name, value) for name, value in NCCL_SETTINGS.items()}
    if loading not in (None, "EAGER"):
        notes.append(
            f"{MODULE_LOADING}={loading} of the environment is replaced by EAGER: a kernel that is loaded at its "
            "first launch waits for collectives that wait for other ranks"
        )
    return settings, tuple(notes)


def prepare_cuda(world_size: int) -> tuple[str, ...]:
    """Put ``cuda_settings`` into this process's environment, before CUDA starts (asking for devices starts it).

    Returns the notes.
    """
    settings, notes = cuda_settings(os.environ, world_size)
    os.environ.update(settings)
    return notes


def allocator_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what to set in this environment before ranks start whose tensors lie in host memory.

    torch aligns every tensor. glibc before 2.38 cuts the ends off an aligned block; freed, they go to a cache, and
    from there to small objects. These keep freed blocks apart, and none is large enough to be aligned again. So the
    heap grows with every step whose allocations come in another order, and messages change the order. Without the
    caches the ends rejoin their blocks: 2 ranks of 8M parameters stay at 609 MB for 60 steps, where they reached 1466
    MB. The variable counts when a process starts: no rank can set it for itself. A value of the user's is kept.

    Ranks on GPUs do without: small operations of torch take a tenth more of the host, which launches their kernels.
    """
    library, version = platform.libc_ver()
    old = library == "glibc" and tuple(int(n) for n in version.split(".")[:2]) < MENDED_GLIBC
    return {TUNABLES: NO_SMALL_CACHES} if old and TUNABLES not in environ else {}


def computes_on_host(device: str) -> bool:
    """Tell, without torch, whether ranks of this --device on this node will compute in host memory."""
    return device == "cpu" or device == "auto" and not any(DEVICES.glob("nvidia[0-9]*"))
