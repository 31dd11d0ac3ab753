"""What a calibration measures, keeps and writes; tests/dist/plan/test_calibrate.py runs one."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.calibrate import rates
from megazero.calibrate.command import main
from megazero.calibrate.options import read_request
from megazero.calibrate.points import CollectivePoint, modules, sizes, wires
from megazero.calibrate.record import cluster_text, links, write_cluster
from megazero.calibrate.run import Calibration
from megazero.calibrate.timing import Clock
from megazero.cli import check_nodes
from megazero.config import World, make_config, read_arguments
from megazero.config.options.cluster import load_cluster, parse_cluster
from megazero.mesh.launch import Launch, read_launch
from megazero.plan.compute import Compute
from megazero.plan.seconds import Collectives
from tests.messages import names, refused
from tests.sizes import SMALL, words

SIZES = ("model_family", "num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size")
MODEL = {**SMALL, "num_layers": 2, "vocab_size": 128, "train_iters": 1, "global_batch_size": 8}
WORDS = words({name: MODEL[name] for name in SIZES})
DEVICE = {
    "name": "card",
    "memory_gib": 8,
    "memory_gbytes_per_s": 10,
    "fp32_tflops": 0.1,
    "matmul_efficiency": 1,
    "update_gbytes_per_s": 5,
}
LAYER = {"forward_flops": 1e6, "forward_bytes": 1e5, "forward_seconds": 1e-3, "backward_seconds": 3e-3}


def sections(**more: Any) -> dict[str, Any]:
    rows = [
        {"operation": "gather", "ranks": 2, "nodes": nodes, "bytes": size, "seconds": seconds, "busy": 1e-5}
        for nodes, size, seconds in ((1, 4096, 1e-5), (1, 1 << 20, 1e-3), (2, 4096, 1e-4), (2, 1 << 20, 1e-2))
    ]
    top = {"name": "lab: two # nodes", "source": "a test", "nodes": 2, "ranks_per_node": 2, "device": DEVICE}
    return {**top, **links(rows, 10.0, 2), "collectives": rows, **more}


def test_every_collective_of_a_step_is_asked_for() -> None:
    """Axes inside a node have 2 or 4 ranks, across nodes 3 or 6; tensor parallelism sums inside."""
    found = set(wires(6, 4))
    assert {w for w in found if w.operation == "gather"} == {
        CollectivePoint("gather", 2, 1),
        CollectivePoint("gather", 4, 1),
        *(CollectivePoint("gather", k, k) for k in (2, 3, 6)),
    }
    assert {w.ranks for w in found if w.operation == "sum"} == {2, 4}
    assert {w.nodes for w in found if w.operation == "message"} == {1, 2}
    assert {w.ranks for w in wires(6, 4, widest=True)} == {2, 4, 6}, "2: a message"
    assert {w for w in wires(6, 4, widest=True) if w.operation != "message"} < found
    assert list(wires(1, 1)) == []
    assert [tuple(m) for m in modules(4, (1, 8))] == [(tp, b) for tp in (1, 2, 4) for b in (1, 8)]
    assert sizes(1 << 20) == [4096, 16384, 65536, 262144, 1 << 20]


def test_a_written_cluster_is_read_as_it_was_measured(tmp_path: Path) -> None:
    given = sections(layers=[{**LAYER, "micro_batch": 2}], cores={"count": 2, "ranks": 4})
    write_cluster(tmp_path / "a" / "lab.yaml", given)
    found = load_cluster(str(tmp_path / "a" / "lab.yaml"))
    assert found.name == "lab: two # nodes" and found.world_size == 4 and found.cores is not None
    assert found.cores.count == 2 and found.layers[0].micro_batch == 2
    assert [(r.operation, r.nodes, r.bytes, r.seconds, r.busy) for r in found.collectives] == [
        (r["operation"], r["nodes"], r["bytes"], r["seconds"], r["busy"]) for r in given["collectives"]
    ]
    assert not list(tmp_path.rglob("*.partial"))


def test_links_are_those_of_the_measured_collectives() -> None:
    found = parse_cluster(cluster_text(sections()), "lab")
    assert found.intra_node.gbytes_per_s == pytest.approx((1 << 20) / 1e-3 / 1e9, rel=1e-4)
    assert found.inter_node.gbits_per_s == pytest.approx(2 * (1 << 20) / 1e-2 * 8 / 1e9, rel=1e-4)
    assert found.intra_node.latency_us == 10 and found.inter_node.latency_us == 100
    alone = links([], 10.0, 1)
    assert alone["intra_node"]["gbytes_per_s"] == 10 and alone["inter_node"]["gbits_per_s"] == 80


def test_a_link_without_its_measurements_takes_as_long_as_measured() -> None:
    """--pays and outer steps ask for a rate of a node, at which nothing was measured (Cluster.with_slow_link)."""
    found = parse_cluster(cluster_text(sections()), "lab")
    same = found.with_slow_link(found.inter_node.gbits_per_s, 0.0)
    measured, computed = (Collectives(each).cost("gather", 2, 2, 1 << 20).seconds for each in (found, same))
    assert measured == 1e-2 and computed == pytest.approx(measured, rel=0.02)


def test_what_is_timed_has_random_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU clocks higher on equal values than on a model's."""
    monkeypatch.setitem(rates.MATRIX, "cpu", 16)
    monkeypatch.setitem(rates.ELEMENTS, "cpu", 1024)
    monkeypatch.setattr("megazero.calibrate.timing.ROUND_S", 0)
    operands = dict[int, torch.Tensor]()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            timed = {torch.ops.aten.mm.out: args[:2], torch.ops.aten.copy_.default: args[1:2]}.get(func, ())
            operands.update((each.data_ptr(), each) for each in timed if each.numel() > 16)
            return func(*args, **(kwargs or {}))

    with Watch():
        config = make_config({**MODEL, "lr": 1e-3, "mock_data": True})
        rates.measure_device(config, Clock(torch.device("cpu"), rounds=1))
    assert {each.numel() for each in operands.values()} == {16 * 16, 4 * 1024}
    assert all(each.unique().numel() > 0.9 * each.numel() for each in operands.values())


def test_a_file_that_cannot_be_kept_is_every_rank_s_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first rank touches it, and the others wait to be told."""
    (tmp_path / "file").touch()
    told: list[Any] = []
    monkeypatch.setattr("megazero.calibrate.run.gather_objects", lambda value: told.append(value) or told)
    request = read_request([*WORDS, "--cluster-output", f"{tmp_path}/file/lab.yaml"])
    config = make_config({**MODEL, "lr": 1e-3, "mock_data": True})
    with refused("--cluster-output: ", "file"):
        Calibration(request, config, Launch(0, 2, 0, 2), 2, torch.device("cpu"))
    assert len(told) == 1


def test_measured_modules_stretch_what_is_counted() -> None:
    """The measured size itself comes out as measured; TP 2 takes the rows of TP 2, whose collectives are in them."""
    world = World(4, 2)
    plain = parse_cluster(cluster_text(sections()), "lab")

    def compute(tp: int, rows: list[dict[str, Any]]) -> Compute:
        on = parse_cluster(cluster_text(sections(layers=rows)), "lab")
        config = make_config({**MODEL, "micro_batch_size": 2, "tensor_model_parallel_size": tp}, world)
        return Compute(config, on, Collectives(on))

    counted = compute(1, [LAYER]).sizes["layer"]
    row = {**LAYER, "forward_flops": counted.operations, "forward_bytes": counted.moved}
    half = compute(2, [LAYER]).sizes["layer"]
    shared = {"forward_flops": half.operations, "forward_bytes": half.moved, "tp": 2}
    shared = {**row, **shared, "forward_seconds": 5e-3}
    times = compute(1, [row, shared]).times["layer"]
    assert times.forward.compute == pytest.approx(1e-3, rel=1e-3)
    assert sum(times.backward) + times.weight == pytest.approx(3e-3, rel=1e-3)
    both = compute(2, [row, shared]).times["layer"]
    assert both.forward.tensor > 0 and sum(both.forward) == pytest.approx(5e-3, rel=1e-3)
    head = compute(1, [row, {**row, "module": "head", "forward_seconds": 1.0}]).times["head"]
    assert head.forward.compute > 100 * compute(1, [row]).times["head"].forward.compute > 0
    assert compute(1, [row]).times["embedding"] == compute(1, []).times["embedding"]
    update = compute(1, []).update(1e9)
    assert update == pytest.approx(40 / 5) and plain.device.update_gbytes_per_s == 5


def test_what_one_rank_cannot_do_is_said_by_it(capsys, monkeypatch, tmp_path: Path) -> None:
    """The others wait for it and know nothing: a rank other than the first speaks for itself."""
    for name, value in {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 3, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("megazero.train.distributed.prepare_cuda", lambda _: ())
    assert main([*WORDS, "--cluster-output", str(tmp_path / "c.yaml")]) == 2
    assert "rank 3: local rank 3 has no GPU: torch sees 3" in capsys.readouterr().err
    assert check_nodes.report(check_nodes.CheckOptions(), read_launch()) == 2
    assert "rank 3: local rank 3 has no GPU: torch sees 3" in capsys.readouterr().err


def test_nodes_are_waited_for_as_long_as_told(capsys, monkeypatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    there = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    for name, value in {**there, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    options = read_arguments(check_nodes.CheckOptions, ["--timeout", "0.2", "--device", "cpu"])
    assert check_nodes.report(options, read_launch()) == 76
    said = capsys.readouterr().err
    assert "1 of 2 ranks did not come: rank 1" in said and "The limit is 0.2 s (--timeout)" in said


def test_flags_that_the_calibration_chooses_itself_are_named() -> None:
    given = read_request([*WORDS, "--tensor-model-parallel-size", "2", "--sequence-parallel"])
    (note,) = given.notes
    assert "--tensor-model-parallel-size, --sequence-parallel." in note
    assert given.values == read_request(WORDS).values and not read_request(WORDS).notes


def test_mistakes_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--num-layerz", "2", "--calibrate-rounds", "1", "--calibrate-micro-batches", "0", "2"]) == 2
    wrong = ("num-layers", "--calibrate-rounds 1", "--calibrate-micro-batches 0", "--vocab-size")
    names(capsys.readouterr().err, *wrong)
    assert main(["--help"]) == 0
    names(capsys.readouterr().out, "--calibrate-largest-bytes")
