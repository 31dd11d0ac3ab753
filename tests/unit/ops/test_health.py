"""What the health check makes of what ranks found: which node is named, as a fault or a note, and what follows."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from megazero.config.options.sections import TrainingConfig
from megazero.log.exit_status import ExitStatus
from megazero.mesh.launch import given_gpus, read_launch
from megazero.ops import health, health_probes
from megazero.ops.health import (
    BAD_NODES_FILE,
    GIB,
    Fault,
    Storage,
    Unhealthy,
    check_storage,
    device_faults,
    folder_faults,
    record_bad_nodes,
    refuse_missing_gpus,
    room_faults,
)
from megazero.ops.health_probes import Facts, missing_bytes, multiplies, remembers
from megazero.train.distributed import start_rank
from tests.messages import names, refused

FACTS = Facts("n0", "cuda", (), (70 * GIB, 80 * GIB))
MANY = [replace(FACTS, node=f"n{i // 2}") for i in range(8)]  # 4 nodes of 2 ranks


def changed(rank: int, **values: object) -> list[Facts]:
    return [replace(facts, **values) if i == rank else facts for i, facts in enumerate(MANY)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "values, said",
    [
        ({"wrong": ("its product is wrong",)}, "rank 5: its product is wrong"),
        ({"device": "cpu"}, "rank 5: computes on cpu, most ranks on cuda"),
        ({"device_memory": (30 * GIB, 80 * GIB)}, "rank 5: 30.0 of 80.0 GiB of GPU memory are free"),
    ],
)
def test_a_bad_device_is_the_fault_of_its_node(values, said) -> None:
    (fault,) = device_faults(changed(5, **values))
    assert (fault.node, fault.status) == ("n2", ExitStatus.RANK_LOST) and said in fault.text
    assert not device_faults(MANY)


def test_a_folder_that_few_nodes_do_not_see_is_their_fault_and_else_a_mistake() -> None:
    nodes = ["n0", "n0", "n1", "n1", "n2", "n2"]
    (few,) = folder_faults({3: "does not see it"}, nodes)
    assert (few.node, few.status) == ("n1", ExitStatus.RANK_LOST)
    most = folder_faults({2: "does not see it", 4: "does not see it"}, nodes)
    assert {fault.status for fault in most} == {ExitStatus.MISTAKE}
    for rank, number, status in (
        (3, errno.EACCES, ExitStatus.RANK_LOST),
        (3, errno.ENOSPC, ExitStatus.STORAGE),
        (0, errno.EROFS, ExitStatus.RANK_LOST),
        (0, errno.EACCES, ExitStatus.MISTAKE),
    ):
        (fault,) = folder_faults({rank: OSError(number, "no", "f")}, nodes)
        assert fault.status == status and f"rank {rank} cannot write: [Errno {number}] no: 'f'" == fault.text


def test_nodes_to_leave_out_are_named_for_people_and_for_the_script(tmp_path: Path) -> None:
    lost = [Fault(node, "is bad", ExitStatus.RANK_LOST) for node in ("n7", "n2", "n7")]
    error = Unhealthy(lost)
    assert "n7: is bad; n2: is bad. Leave them out: --exclude=n2,n7" in str(error)
    assert error.exit_status == ExitStatus.RANK_LOST and error.nodes == ("n2", "n7")
    record_bad_nodes(str(tmp_path / "logs"), error.nodes)
    assert (tmp_path / "logs" / BAD_NODES_FILE).read_text() == "n2\nn7\n"
    record_bad_nodes(str(tmp_path / "logs"), ())
    assert not list((tmp_path / "logs").iterdir())
    # Other nodes do not help against what is wrong everywhere, so the script is not to try again.
    assert Unhealthy([*lost, Fault("", "no room", ExitStatus.STORAGE)]).exit_status == ExitStatus.STORAGE


def test_room_is_asked_for_what_a_run_holds_at_one_time(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(health_probes, "free_bytes", lambda folder: 3 * GIB)
    assert missing_bytes(tmp_path, GIB, None) == -2 * GIB
    assert missing_bytes(tmp_path, GIB, 2) == 0
    assert missing_bytes(tmp_path, GIB, 4) == 2 * GIB
    monkeypatch.setattr(health_probes.store, "checkpoints", lambda folder: [folder] * 3)
    assert missing_bytes(tmp_path, GIB, 4) == -GIB  # three of the five are there
    assert missing_bytes(tmp_path, 4 * GIB, 2) == GIB  # the one being written is still to come
    (fault,) = room_faults(Storage(tmp_path, GIB, 4), 2 * GIB, 3 * GIB)
    assert (
        fault.status == ExitStatus.STORAGE and "has 3 GiB free" in fault.text and "2 GiB more" in fault.text
    )
    assert not room_faults(Storage(tmp_path, GIB, 4), 0, 3 * GIB)


def test_what_a_killed_save_left_is_room(tmp_path: Path, monkeypatch) -> None:
    """The next save removes it. A checkpoint moved aside that nothing replaced is none of it."""
    monkeypatch.setattr(health_probes.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(3, 2, 1))
    for state in ("partial", "removed"):
        left = tmp_path / f".iter_0000100.{state}-1a2b3c4d" / "deep"
        left.mkdir(parents=True)
        (left / "file").write_bytes(bytes(range(256)) * 256)
    (tmp_path / "iter_0000100").mkdir()
    (tmp_path / "iter_0000100" / "file").write_bytes(b"a" * 2**16)
    os.sync()
    assert health_probes.free_bytes(tmp_path) == 1 + 2 * 2**16


def test_a_folder_that_cannot_be_asked_for_room_is_a_fault(tmp_path: Path, monkeypatch) -> None:
    def fail(folder: Path) -> int:
        raise OSError(errno.EIO, "no answer")

    monkeypatch.setattr(health, "free_bytes", fail)
    with pytest.raises(Unhealthy) as caught:
        check_storage(Storage(tmp_path, GIB), ["n0"])
    names(f"{caught.value}", "n0", "rank 0", "no answer")
    assert caught.value.exit_status == ExitStatus.RANK_LOST


def test_a_device_that_computes_or_stores_wrongly_is_noticed(monkeypatch) -> None:
    cpu = torch.device("cpu")
    assert multiplies(cpu) and remembers(cpu, 2**21)
    product = torch.Tensor.__matmul__
    monkeypatch.setattr(
        torch.Tensor, "__matmul__", lambda self, other: product(self, other) + self.is_floating_point()
    )
    assert not multiplies(cpu)
    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other: copy(self, other).view(-1)[:-1].fill_(1))
    assert not remembers(cpu, 2**21)


@pytest.mark.parametrize(
    "taken, idle",
    [
        ("", ""),
        ("rocep", "roceP2p1s0f0"),
        ("rocep1s0f0,roceP2p1s0f0:1", ""),
        ("=rocep1s0f0", "roceP2p1s0f0"),
        ("^roceP2", "roceP2p1s0f0"),
        ("^mlx", ""),
    ],
)
def test_a_half_of_a_port_that_nccl_leaves_out_is_a_note(tmp_path: Path, taken, idle) -> None:
    for name, state in (
        ("rocep1s0f0", "4: ACTIVE"),
        ("roceP2p1s0f0", "4: ACTIVE"),
        ("rocep1s0f1", "1: DOWN"),
    ):
        (port := tmp_path / name / "ports" / "1").mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
    said = health_probes.unused_rdma(taken, tmp_path)
    assert (f"leaves {idle} unused" in said) if idle else not said


@pytest.mark.parametrize(
    ("environment", "given"),
    [
        ({}, (0, "")),
        ({"SLURM_GPUS_ON_NODE": "8"}, (8, "SLURM_GPUS_ON_NODE")),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, (4, "SLURM_GPUS_PER_NODE")),
        ({"SLURM_GPUS_PER_NODE": "0"}, (0, "")),
        ({"CUDA_VISIBLE_DEVICES": "2, 5", "SLURM_GPUS_ON_NODE": "8"}, (2, "CUDA_VISIBLE_DEVICES")),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}, (1, "CUDA_VISIBLE_DEVICES")),
        *(({"CUDA_VISIBLE_DEVICES": none, "SLURM_GPUS_ON_NODE": "8"}, (0, "")) for none in ("", "-1", "NoDevFiles")),
    ],
)  # fmt: skip
def test_the_environment_says_how_many_gpus_a_rank_was_given(environment, given) -> None:
    assert given_gpus(environment) == given


@pytest.mark.parametrize(
    ("lacking", "nodes", "built", "status", "left_out"),
    [
        ({"n1"}, 4, True, ExitStatus.RANK_LOST, ("n1",)),
        ({"n0"}, 1, True, ExitStatus.RANK_LOST, ("n0",)),
        ({"n0", "n2"}, 4, True, ExitStatus.MISTAKE, ()),  # the driver or the container is the wrong one
        ({"n3"}, 4, False, ExitStatus.MISTAKE, ()),
    ],
)
def test_a_node_without_the_gpus_that_it_was_given_is_named(
    monkeypatch, lacking, nodes, built, status, left_out
) -> None:
    said = [
        (f"n{n}", "8 GPUs were given, and torch sees 7" if f"n{n}" in lacking else None, built)
        for n in range(nodes)
    ]
    monkeypatch.setattr("megazero.ops.health.gather_objects", lambda _: said)
    with pytest.raises(Unhealthy) as caught:
        refuse_missing_gpus("auto", "n0")
    names(f"{caught.value}", *lacking, "8 GPUs", "--device cpu")
    assert (caught.value.exit_status, caught.value.nodes) == (status, left_out)


def test_a_run_does_not_go_to_the_cpu_unless_it_is_told_to(monkeypatch) -> None:
    lost = f"{torch.cuda.device_count() + 1}"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", lost)
    launch = replace(read_launch({}), node="gpu7")
    for wanted in ("auto", "cuda"):
        with refused("gpu7", f"{lost} GPU", "SLURM_GPUS_ON_NODE", by=Unhealthy):
            start_rank(TrainingConfig(device=wanted), launch, timedelta(seconds=9))
    assert start_rank(TrainingConfig(device="cpu"), launch, timedelta(seconds=9))[0].type == "cpu"
