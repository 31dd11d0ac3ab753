"""What every launcher's environment means: rank, world, node, where the ranks meet."""

from __future__ import annotations

import pytest

from megazero.config import World, parse
from megazero.config.summary import describe
from megazero.log.exit_status import ExitStatus, process_status, report_to_torchrun
from megazero.mesh.launch import expand_hosts, read_launch, take_number
from megazero.mesh.levels import INTER
from tests.messages import refused
from tests.sizes import LEAST

MASTER = {"MASTER_ADDR": "gpu1", "MASTER_PORT": "7777"}
TORCHRUN = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", **MASTER}
DEEPSPEED = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_SIZE": "8", **MASTER}
DEEPSPEED |= {"CROSS_RANK": "1", "CROSS_SIZE": "2"}
BARE = {"RANK": "9", "WORLD_SIZE": "16"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[03-04]"}
OMPI = {"OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
OMPI |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "8", "PMIX_RANK": "9"}
MV2 = {name.replace("OMPI", "MV2"): value for name, value in OMPI.items() if name != "PMIX_RANK"}
PMI = {"PMI_RANK": "9", "PMI_SIZE": "16"}
HYDRA = {**PMI, "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "8"}
PALS = {**PMI, "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "8"}
# What srun leaves in the daemon by which mpirun starts ranks on another node.
DAEMON = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_TASKS_PER_NODE": "1(x2)"}
DAEMON |= {"SLURM_JOB_NODELIST": "gpu[03-04]", "SLURM_JOB_ID": "7"}
STEP_SLURM = 20000 + 7 * 61

# environment -> (rank, world, local rank, ranks per node, host of rank 0, port, launcher)
CASES: dict[str, tuple[dict[str, str], tuple]] = {
    "torchrun": (TORCHRUN, (9, 16, 1, 8, "gpu1", 7777, "torchrun")),
    "torchrun under srun": ({**DAEMON, **TORCHRUN}, (9, 16, 1, 8, "gpu1", 7777, "torchrun")),
    "torchrun under mpirun": ({**OMPI, **TORCHRUN}, (9, 16, 1, 8, "gpu1", 7777, "torchrun")),
    "deepspeed": (DEEPSPEED, (9, 16, 1, 8, "gpu1", 7777, "the deepspeed launcher")),
    "a script that exports ranks": (
        {**BARE, **MASTER},
        (9, 16, None, None, "gpu1", 7777, "RANK and WORLD_SIZE"),
    ),
    "the same with a local rank, under SLURM": (
        {**SLURM, **BARE, "LOCAL_RANK": "1"},
        (9, 16, 1, None, "gpu03", 29500, "RANK and WORLD_SIZE"),
    ),
    "one rank of a script": ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1, 0, 1, "127.0.0.1", 29500)),
    "srun": (SLURM, (5, 8, 1, 4, "gpu03", STEP_SLURM, "SLURM")),
    "srun, a later step": ({**SLURM, "SLURM_STEP_ID": "2"}, (5, 8, 1, 4, "gpu03", STEP_SLURM + 2, "SLURM")),
    "srun of fewer tasks than the job has": (
        {**SLURM, "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "3(x2)"},
        (5, 6, 1, 3, "gpu03", STEP_SLURM, "SLURM"),
    ),
    "srun that does not say the tasks of a node": (
        {name: value for name, value in SLURM.items() if name != "SLURM_TASKS_PER_NODE"},
        (5, 8, 1, None, "gpu03", STEP_SLURM, "SLURM"),
    ),
    "srun --mpi=pmi2": (
        {**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8"},
        (5, 8, 1, 4, "gpu03", STEP_SLURM, "SLURM"),
    ),
    "srun --mpi=pmix": (
        {**SLURM, "PMIX_RANK": "5", "PMIX_NAMESPACE": "slurm.pmix.7.0"},
        (5, 8, 1, 4, "gpu03", STEP_SLURM, "SLURM"),
    ),
    "srun --ntasks=1 in a job of more": (
        {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        (0, 1, 0, 1),
    ),
    "a batch script with one task": ({**BATCH, "SLURM_NTASKS": "1"}, (0, 1, 0, 1)),
    "Open MPI": ({**OMPI, **MASTER}, (9, 16, 1, 8, "gpu1", 7777, "Open MPI")),
    "Open MPI on one node": (
        {**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "16", "OMPI_COMM_WORLD_LOCAL_RANK": "9"},
        (9, 16, 9, 16, "127.0.0.1", 29500, "Open MPI"),
    ),
    "Open MPI that reached the node by srun": ({**OMPI, **DAEMON}, (9, 16, 1, 8, "gpu03", 29500, "Open MPI")),
    "Open MPI in the batch script": ({**OMPI, **BATCH}, (9, 16, 1, 8, "gpu03", 29500, "Open MPI")),
    "MVAPICH": ({**MV2, **MASTER}, (9, 16, 1, 8, "gpu1", 7777, "MVAPICH")),
    "MPICH, Intel MPI": ({**HYDRA, **MASTER}, (9, 16, 1, 8, "gpu1", 7777, "hydra")),
    "Intel MPI that reached the node by srun": ({**HYDRA, **DAEMON}, (9, 16, 1, 8, "gpu03", 29500, "hydra")),
    "PALS": ({**PALS, **MASTER}, (9, 16, 1, 8, "gpu1", 7777, "PALS")),
    "PMI alone": ({**PMI, **MASTER}, (9, 16, None, None, "gpu1", 7777, "PMI")),
    "nobody": ({}, (0, 1, 0, 1, "127.0.0.1", 29500, "single process")),
}


@pytest.mark.parametrize("case", CASES)
def test_what_each_launcher_says(case: str) -> None:
    environ, wanted = CASES[case]
    launch = read_launch(environ)
    found = (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size, launch.master_addr)
    assert (*found, launch.master_port, launch.launcher)[: len(wanted)] == wanted


FAULTS = {
    "a batch script without srun": (BATCH, "4 tasks.*SLURM_STEP_ID is not set.*srun, torchrun or mpirun"),
    "nodes of different size": ({**SLURM, "SLURM_TASKS_PER_NODE": "4,3"}, "different numbers of tasks"),
    "a size that is no number": ({**BARE, "WORLD_SIZE": "two"}, "WORLD_SIZE='two' is no whole number"),
    "a rank that is empty": ({**BARE, "RANK": ""}, "RANK=''"),
    "a rank beyond the world": ({**BARE, "RANK": "16"}, "rank 16 is not in a world of 16"),
    "a local rank beyond its node": (
        {**BARE, "LOCAL_RANK": "8", "LOCAL_WORLD_SIZE": "8"},
        "LOCAL_RANK=8 is not one of the ranks of LOCAL_WORLD_SIZE=8",
    ),
    "a port of a high job number": (
        {**BARE, "MASTER_PORT": "81234"},
        "MASTER_PORT=81234.*1 to 65535.* 29234",
    ),
    "a negative port under SLURM": ({**SLURM, "MASTER_PORT": "-1"}, "MASTER_PORT=-1.*1 to 65535"),
    "PMIx without a size": ({"PMIX_RANK": "3"}, "PMIX_RANK=3.*mpirun.*RANK, WORLD_SIZE"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_an_environment_that_cannot_be_right_is_refused_with_the_cure(case: str) -> None:
    environ, message = FAULTS[case]
    with pytest.raises(ValueError, match=message):
        read_launch(environ)


def test_steps_and_jobs_have_ports_of_their_own() -> None:
    def port(job: int, step: int) -> int:
        return read_launch({**SLURM, "SLURM_JOB_ID": f"{job}", "SLURM_STEP_ID": f"{step}"}).master_port

    ports = [port(job, step) for job in range(700, 720) for step in range(61)]
    assert len(set(ports)) == len(ports) and all(20000 <= each < 32000 for each in ports)
    first, second = (read_launch({**OMPI, "PMIX_NAMESPACE": name}) for name in ("2104295425", "2104295426"))
    assert first.master_port != second.master_port != 29500
    assert read_launch({**OMPI, "PMIX_NAMESPACE": "2104295425", **MASTER}).master_port == 7777


def test_local_rank_of_the_command_line() -> None:
    def take_local_rank(argv: list[str]) -> tuple[int | None, list[str]]:
        return take_number(argv, "local-rank", "the rank on this node", 0)

    for typed in (["--local-rank=3"], ["--local_rank", "3"], ["--local_rank=3"], ["--local-rank", "3"]):
        assert take_local_rank(["--lr", "1", *typed, "--bf16"]) == (3, ["--lr", "1", "--bf16"])
    assert take_local_rank(["--lr", "1"]) == (None, ["--lr", "1"])
    for typed in (["--local-rank=x"], ["--local_rank"], ["--local_rank", "--bf16"]):
        with pytest.raises(ValueError, match="takes the rank on this node"):
            take_local_rank(typed)
    assert read_launch(DEEPSPEED, 1).local_rank == 1
    assert read_launch({**BARE, **MASTER}, 3).local_rank == 3
    assert read_launch({**BARE, "LOCAL_WORLD_SIZE": "8"}).local_rank == 1  # ranks of a node are consecutive
    with refused("--local-rank 3", "torchrun says 1"):
        read_launch(TORCHRUN, 3)


def test_ranks_meet_where_rank_0_is_or_are_told_how_to_say_it() -> None:
    assert read_launch(TORCHRUN).address == ("gpu1", 7777)
    assert not read_launch(TORCHRUN).agent_store
    assert read_launch({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}).agent_store
    with refused("Open MPI", "MASTER_ADDR"):
        _ = read_launch(OMPI).address


def test_a_node_size_that_nobody_says_is_not_taken_for_one_node() -> None:
    flags = f"--model-family llama {LEAST} --micro-batch-size 1 --train-iters 1 --zero-preset zeropp "
    flags += "--zero-quantized-gradients"
    launch = read_launch(BARE)
    world = World(launch.world_size, launch.local_world_size or 0)
    config = parse(flags.split(), world)
    assert not config.knows_nodes(world) and config.batch.global_batch_size == 16
    assert not any(line.startswith("layout") for line in describe(config, world))
    assert parse([*flags.split(), "--ranks-per-node", "8"], world).wire(world).gradients.get(INTER)
    with pytest.raises(ValueError, match="--tensor-model-parallel-size"):
        parse([*flags.split(), "--tensor-model-parallel-size", "3"], world)


def test_host_lists() -> None:
    assert expand_hosts("n1,n2") == ["n1", "n2"]
    assert expand_hosts("gpu[03-05,11],login1") == ["gpu03", "gpu04", "gpu05", "gpu11", "login1"]
    assert expand_hosts("rack[0-1]n[9-10]x") == ["rack0n9x", "rack0n10x", "rack1n9x", "rack1n10x"]
    assert read_launch(SLURM).hosts == ("gpu03", "gpu04")
    assert read_launch({**SLURM, "SLURMD_NODENAME": "gpu04"}).host == "gpu04"
    for wrong in ("gpu[", "gpu[a-b]", "]"):
        with pytest.raises(ValueError, match="SLURM node list"):
            expand_hosts(wrong)


# -- what torchrun is told ---------------------------------------------------------------------------


def test_torchruns_report_ends_with_the_ranks_own_words(tmp_path, monkeypatch) -> None:
    errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    report_to_torchrun("2 configuration errors:\n  - --lr -1 must be above 0")
    failure = errors.ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    *_, first, second, _ = f"{errors.ChildFailedError('pretrain_gpt.py', {0: failure})}".splitlines()
    assert "traceback : 2 configuration errors:" in first and second.endswith("--lr -1 must be above 0")


def test_others_are_told_nothing(monkeypatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    report_to_torchrun("an error")  # there is no file to write to


@pytest.mark.parametrize("status", ExitStatus)
def test_a_planned_stop_is_no_failure_to_torchrun_alone(status, monkeypatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert process_status(status) == status
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "error.json")
    assert process_status(status) == (0 if status == ExitStatus.STOPPED else status)


@pytest.mark.parametrize(
    "environ, identity",
    [
        ({"SLURM_JOB_ID": "7"}, " 7"),
        (
            {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "c"},
            "c 7",
        ),  # another cluster's job 7 may share the disk
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}, " 7_2"),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "gpu01"}, "x at gpu01:29500"),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1"}, ""),  # any host's
        ({"MASTER_ADDR": "gpu01"}, ""),
    ],
)
def test_starts_of_one_job_share_an_identity_that_no_other_run_has(environ, identity) -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    assert read_launch({**torchrun, "TORCHELASTIC_RUN_ID": "x", **environ}).identity == identity
    assert read_launch({}).identity == ""
