"""The report on a GPU, rehearsed: its pieces on the CPU, and the program that runs them one by one."""

from __future__ import annotations

import copy
import importlib
import json
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_report import (
    allocations,
    attention,
    gpu_tests,
    kernels,
    loops,
    loss_chunks,
    memory,
    overhead,
    page,
    products,
    profile_steps,
    race,
    setting,
    training,
    update,
)
from benchmarks.gpu_report.pieces import BY_NAME, PIECES, Piece
from benchmarks.gpu_report.record import REASON, Record, Skip
from benchmarks.gpu_report.setting import ROOT, Setting
from benchmarks.lone_rank import lone_rank
from megazero.config import resolve_shards
from megazero.config.model.spec import training_flops
from tools import gpu_report as tool

CPU = torch.device("cpu")


@pytest.fixture
def rehearsal(tmp_path: Path) -> Setting:
    return Setting(True, tmp_path)


def failed(record: Record) -> list[dict[str, Any]]:
    return [row for row in record.rows if REASON in row]


# -- pieces --------------------------------------------------------------------------------------------


def test_kernels_every_operation_at_every_width(rehearsal: Setting) -> None:
    record = Record()
    kernels.run(rehearsal, record)
    assert not failed(record)
    assert {row["bits"] for row in record.rows} == {32, 16, 8, 4, 2}
    assert {row["operation"] for row in record.rows} == {
        "encode fp32", "encode bf16", "decode bf16", "decode-add bf16", "decode-sum fp32", "decode-sum-encode",
        "sum", "update", "update, copy", "update, difference",
    }  # fmt: skip
    assert all(row["of a copy"] > 0 for row in record.rows)


def test_bytes_of_an_operation_are_what_it_reads_and_writes() -> None:
    """4 rows of 1024 elements at 8 bits: 1024 + 2 * 8 bytes coded each."""
    moved = {name: size for name, _, size, _ in kernels.operations(1024, 8, CPU)}
    coded = 4 * 1040
    assert moved["encode fp32"] == 4 * 4096 + coded
    assert moved["decode-add bf16"] == 2 * 4 * 2048 + coded
    assert moved["decode-sum fp32"] == coded + 2 * 4096
    assert moved["decode-sum-encode"] == coded + 1040


def test_operations_of_a_decoder_are_timed_by_kind(rehearsal: Setting) -> None:
    record = Record()
    products.run(rehearsal, record)
    assert not failed(record)
    assert {row["kind"] for row in record.rows} == {"product", "experts", "attention", "memory"}


def test_an_update_counts_its_bytes_and_apex_says_why_it_is_not_there(rehearsal: Setting) -> None:
    """Of the one pass they are those that the kernels' table counts."""
    record = Record()
    update.run(rehearsal, record)
    assert {(row["implementation"], row["leaves"]) for row in failed(record)} == {
        ("apex", left) for left in update.BYTES
    }
    assert all("it runs on CUDA" in row[REASON] for row in failed(record))
    counted = {
        name: moved / (4 * 256)
        for bits in (32, 16)
        for name, _, moved, _ in kernels.operations(256, bits, CPU)
    }
    assert [counted[n] for n in ("update", "update, copy", "update, difference")] == [
        one for one, _ in update.BYTES.values()
    ]


def test_the_race_is_seen_without_waits(rehearsal: Setting) -> None:
    record = Record()
    race.run(rehearsal, record)
    found = {row["what"]: row for row in record.rows}
    assert found["the engine"]["found"] == found["the engine"]["expected"] == "right"
    assert found["the engine without waits"]["found"] == "wrong"
    assert [row["what"] for row in failed(record)] == ["stock order with a wait", "stock order"]
    assert "throughput, the engine over itself without waits" in found


def test_attention_backends_agree(rehearsal: Setting) -> None:
    record = Record()
    attention.run(rehearsal, record)
    assert not failed(record)
    assert {(row["case"], row["backend"]) for row in record.rows} == {
        (case, backend)
        for case, words in attention.WORDS.items()
        for backend in ("flash", "math")
        if backend == "math" or "capped scores" not in words
    }
    assert all(row["difference"] < 1e-5 and row["of plain"] > 0 for row in record.rows)


def test_overhead_and_memory(rehearsal: Setting) -> None:
    record = Record()
    overhead.run(rehearsal, record)
    memory.run(rehearsal, record)
    assert not failed(record)
    held = {row["preset"]: row["held / formula"] for row in record.rows if "preset" in row}
    # Parameters are whole when the backward ends, and blocks are padded.
    assert set(held) == set(memory.PRESETS) and all(1 <= share < 1.3 for share in held.values()), held


def test_the_loss_in_chunks_beside_the_formula(rehearsal: Setting) -> None:
    record = Record()
    loss_chunks.run(rehearsal, record)
    measured = {row["logits"]: row.get("formula GB") for row in record.rows if REASON not in row}
    assert measured["32 tokens"] > measured["16 tokens"] > 0 and len(record.rows) == 4


@pytest.mark.parametrize(
    "name", [training.AS_A_RUN, training.TORCHS, "plain torch", "megazero, compiled", "FSDP2, compiled"]
)
def test_training_contestants_step(rehearsal: Setting, name: str) -> None:
    every = (*training.contestants(loops.TINY), *training.compiled_contestants(loops.TINY))
    build = next(build for who, _, build in every if who == name)
    found = training.measure(lambda: build(CPU), loops.TINY, rehearsal, ours="megazero" in name)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    operations = training_flops(loops.TINY.config, [16])
    assert found["TFLOP/s"] / found["tokens/s"] == pytest.approx(operations / 16 / 1e12)


@pytest.mark.parametrize("dtype, most", [(torch.float32, 1e-3), (torch.bfloat16, 0.1)])
def test_the_plain_loop_trains_as_the_engine_does(dtype: torch.dtype, most: float) -> None:
    """From the same weights the same updates, up to rounding: what is compared is the same work."""
    step, engine = loops.ours(loops.TINY, CPU, dtype=dtype)
    model = loops.decoder(loops.TINY, CPU, dtype=dtype)
    before = copy.deepcopy(model)
    with engine.gathered(write=True):  # its masters are then these values, as the plain loop's are
        engine.module.load_state_dict(model.state_dict())
    theirs = loops.plain(loops.TINY, CPU, model, lambda tokens: model(tokens, tokens).sum())
    for _ in range(10):
        step(), theirs()
    with engine.gathered(), torch.no_grad():
        matrices = [
            (p, before.get_parameter(n), engine.module.get_parameter(n)) for n, p in model.named_parameters()
        ]
        matrices = [each for each in matrices if each[0].ndim > 1]  # vectors: the engine's do not decay
        moved = torch.stack([(after - start).float().norm() for after, start, _ in matrices]).norm()
        apart = torch.stack([(after - own).float().norm() for after, _, own in matrices]).norm()
    assert moved > 0 and apart <= most * moved, (float(apart), float(moved))


@pytest.mark.parametrize("preset", ["zero3", "zeropp"])
def test_a_lone_rank_sends_and_updates(preset: str) -> None:
    name, policy = loops.policies()[preset]
    with lone_rank(4, 2, resolve_shards(name, 4, 2).factors, CPU) as mesh:
        step, engine = loops.ours(loops.TINY, CPU, mesh=mesh, policy=policy)
        before = [unit.master.value.clone() for unit in engine.units]
        step()
        assert all(
            not torch.equal(a, unit.master.value) for a, unit in zip(before, engine.units, strict=True)
        )
        assert engine.traffic.bytes["reduce", "inter_node"] > 0


def test_allocations_are_counted_by_package(rehearsal: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocations, "cases", lambda: {"zero3": ("zero3", 1)})
    record = Record()
    allocations.run(rehearsal, record)
    (row,) = record.rows
    assert row["preset"] == "zero3" and {"comm", "zero", "codecs", "host waits"} <= set(row), row


def test_an_allocation_is_seen_and_a_view_is_not() -> None:
    """Results of any size, what an operation needs inside, storages; not views, and not numbers in passing."""
    x, small, whole = torch.zeros(1000), torch.zeros(4), torch.zeros(100)
    storage = whole.untyped_storage()
    inside = {"x": x, "small": small, "storage": storage, "torch": torch}
    path = f"{ROOT}/megazero/zero/unit.py"

    def found(*lines: str) -> dict[str, tuple[int, int]]:
        code = "def act():\n" + "".join(f" {line}\n" for line in lines)
        exec(compile(code, path, "exec"), inside)
        by_place = allocations.by_profiler(inside["act"], 2)
        return {package: figures for (package, _), figures in by_place.items()}

    assert found("x.view(10, 100).mul_(2.0)", "x[3:].fill_(1.5)", "torch.add(x, 1.0, out=x)") == {}
    assert found("y = torch.mul(x, 2.0)") == {"zero": (2, 8000)}
    assert found("y = small.sum()") == {"zero": (2, 8)}
    assert found("storage.resize_(0)", "storage.resize_(400)") == {"zero": (2, 800)}


@pytest.mark.parametrize(
    "file, package",
    [
        ("megazero/comm/lane.py", "comm"),
        ("megazero/comm/codec.py", "codecs"),
        ("megazero/kernels/quantize.py", "codecs"),
        ("megazero/models/layer.py", None),
        ("tests/unit/benchmarks/test_gpu_report.py", None),
    ],
)
def test_the_innermost_function_of_megazero_has_an_allocation(file: str, package: str | None) -> None:
    frames = [(f"{ROOT}/{file}", 1, "f"), (f"{ROOT}/megazero/models/decoder.py", 2, "g")]
    found = allocations.innermost(frames)
    assert (found and found[0]) == package


def test_a_profile_tells_operations_labels_and_idle_time(rehearsal: Setting) -> None:
    record = Record()
    profile_steps.run(rehearsal, record)
    found = {row["name"] for row in record.rows}
    assert found >= {"aten::mm", "gather_intra layers.1", "reduce_inter head"}
    assert (rehearsal.folder / "profile.json.gz").exists()
    events = [
        {"cat": "kernel", "name": "k", "ts": 0, "dur": 30},
        {"cat": "kernel", "name": "k", "ts": 70, "dur": 30},
        {"cat": "user_annotation", "name": "gather layer 1", "ts": 0, "dur": 3},
    ]
    record = Record()
    profile_steps.tell(events, record, on_device=True)
    assert [row["kind"] for row in record.rows] == ["kernel", "label, host"]
    assert record.rows[0]["us per step"] == 60 / profile_steps.STEPS
    assert record.notes == ["the device was busy for 60.0% of the profiled steps"]


@pytest.mark.parametrize("many", [False, True])
def test_outcomes_of_tests_are_counted_however_far_they_came(many: bool) -> None:
    """As pytest -v prints them, alone and with -n: a test that is stopped has no summary."""
    ids = {"test_a.py::x[4 bits, fp16]": "PASSED", "test_a.py::y": "FAILED", "test_a.py::z": "SKIPPED"}
    lines = [
        f"[gw1] [ 33%] {word} tests/gpu/{name} " if many else f"tests/gpu/{name} {word}   [ 33%]"
        for name, word in ids.items()
    ]
    record = Record()
    gpu_tests.tell(Path("tests/gpu/test_a.py"), "\n".join(lines), record, {REASON: "not done"})
    assert record.rows == [
        {"file": "tests/gpu/test_a.py", "passed": 1, "failed": 1, "skipped": 1, REASON: "not done"}
    ]
    gpu_tests.tell(Path("tests/gpu/test_a.py"), "FAILED tests/gpu/test_a.py::y - 1 | 2", record, {})
    assert record.notes == ["FAILED tests/gpu/test_a.py::y - 1 / 2"]
    assert record.rows[1][REASON].startswith("pytest ended before any test")


def test_peaks_are_of_the_longest_name() -> None:
    assert setting.peak_tflops("NVIDIA H100 80GB HBM3") == 989.4
    assert setting.peak_tflops("NVIDIA H100 PCIe") == 756.0
    assert setting.peak_tflops("NVIDIA GH200 480GB") == 989.4
    assert setting.peak_tflops("NVIDIA H20") == 148.0
    assert setting.peak_tflops("NVIDIA A100-SXM4-80GB") == 312.0
    assert setting.peak_tflops("Some other card") is None


def test_every_piece_is_importable_and_described() -> None:
    for piece in PIECES:
        module = importlib.import_module(f"benchmarks.gpu_report.{piece.module}")
        assert module.__doc__ and callable(getattr(module, piece.run.partition(".")[2]))


# -- the program ---------------------------------------------------------------------------------------


def test_a_failing_row_is_a_row(tmp_path: Path) -> None:
    record = Record(tmp_path / "rows.json")
    with record.attempt(a=1) as row:
        row["b"] = 2
        raise ValueError("what | is\nwrong")
    with record.attempt(a=2):
        raise Skip("no card")
    kept = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert kept == [{"a": 1, REASON: "ValueError: what / is wrong"}, {"a": 2, REASON: "no card"}]


def test_the_program_keeps_results_and_does_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real piece in its own process; then nothing, since it is there; then the one that is missing, too short."""
    docs = (ROOT / "docs" / "gpu.md").stat().st_mtime_ns if (ROOT / "docs" / "gpu.md").exists() else None
    ask = ["--rehearsal", "--out", str(tmp_path)]
    assert tool.main([*ask, "--pieces", "deepspeed"]) == 0, capsys.readouterr().out
    text = (tmp_path / "gpu.md").read_text()
    assert "This is a rehearsal, not a measurement" in text and "not run" in text
    assert "deepspeed is not installed" in text or "no CUDA device" in text
    process = tool._process
    monkeypatch.setattr(tool, "_process", lambda *_: pytest.fail("it was there"))
    assert tool.main([*ask, "--pieces", "deepspeed"]) == 0
    monkeypatch.setattr(tool, "_process", process)
    monkeypatch.setattr(tool, "LEAST", 0.0)
    assert tool.main([*ask, "--pieces", "deepspeed,overhead", "--minutes", "0.01"]) == 1
    stored = json.loads((tmp_path / "gpu.json").read_text())["pieces"]
    assert stored["deepspeed"][REASON] == "" and stored["overhead"][REASON].startswith("stopped after")
    now = (ROOT / "docs" / "gpu.md").stat().st_mtime_ns if docs is not None else None
    assert now == docs, "a rehearsal leaves docs/gpu.md alone"


def test_pieces_run_in_the_order_asked_and_results_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def run(piece: Piece, *_: Any) -> dict[str, Any]:
        asked.append(piece.name)
        return {"rows": [], "notes": [], "seconds": 1.0, REASON: "", "device": "", "torch": "", "commit": ""}

    monkeypatch.setattr(tool, "run", run)
    monkeypatch.setenv("OUT", str(tmp_path))
    assert tool.main(["--rehearsal", "--out", str(tmp_path / "out"), "--pieces", "race,kernels,update"]) == 0
    assert asked == ["race", "kernels", "update"]
    with tarfile.open(tmp_path / "gpu-report.tgz") as packed:
        assert {"gpu-report/gpu.md", "gpu-report/update.result.json"} <= set(packed.getnames())


def test_a_piece_that_ends_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that it started, and did not wait for, would be on the card beside the next piece."""
    package = tmp_path / "benchmarks" / "gpu_report"
    package.mkdir(parents=True)
    started = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid)"
    (package / "pieces.py").write_text(started)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    log = tmp_path / "log"
    assert tool._process(BY_NAME["race"], tmp_path / "rows", log, True, 60.0) == 0
    left = Path("/proc", log.read_text().strip(), "stat")
    for _ in range(100):
        if not left.exists() or left.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("it runs on")


def test_a_place_in_a_package_is_told_without_the_machines_folders() -> None:
    assert allocations._relative(f"{ROOT}/megazero/zero/unit.py") == "megazero/zero/unit.py"
    assert allocations._relative("/x/.venv/lib/python3.12/site-packages/torch/a.py") == "torch/a.py"
    assert allocations._relative("/usr/lib/python3/dist-packages/torch/a.py") == "torch/a.py"


def test_a_piece_that_dies_has_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    facts = {"device": "d", "torch": "t", "commit": "c"}
    monkeypatch.setattr(tool, "ROOT", tmp_path)  # where there are no pieces
    found = tool.run(BY_NAME["race"], tmp_path, True, 60.0, facts)
    assert "ended with status 1" in found[REASON] and "No module named" in found[REASON], found


def test_time_that_is_over_is_told(tmp_path: Path) -> None:
    facts = {"device": "d", "torch": "t", "commit": "c"}
    assert "--minutes" in tool.run(BY_NAME["race"], tmp_path, True, 1.0, facts)[REASON]


@pytest.mark.parametrize(
    "changed, good",
    [({}, True), ({REASON: "x"}, False), ({"device": "other"}, False), ({"commit": "other"}, True)],
)
def test_which_results_stand(changed: dict[str, str], good: bool) -> None:
    facts = {"device": "d", "torch": "t", "commit": "c"}
    assert tool.still_good({**facts, REASON: "", **changed}, facts) is good
    assert not tool.still_good(None, facts)


def test_wrong_options_name_the_cure(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, said in (
        (["--pieces", "kernel"], "there are tests, nccl"),
        (["--minutes", "0"], "default is 8"),
    ):
        with pytest.raises(SystemExit):
            tool.main(argv)
        assert said in capsys.readouterr().err


def test_the_page_tells_reasons_and_other_commits() -> None:
    result = {"commit": "old", "seconds": 2.0, "notes": ["n"], REASON: "it broke"}
    result["rows"] = [{"a": 0.5, "of a copy": 0.925}, {"a": None, REASON: "why"}]
    stored = {"rehearsal": False, "machine": {"commit": "new"}, "pieces": {"kernels": result}}
    text = page.page(stored)
    assert "This is a rehearsal" not in text and "Measured at commit old." in text
    assert "| 0.5 | 92.5% |  |" in text and "|  |  | why |" in text and "it broke" in text


@pytest.mark.slow
def test_the_whole_rehearsal(tmp_path: Path) -> None:
    """Every piece in its own process; what has no figures on a CPU is only what needs a card or a package."""
    assert tool.main(["--rehearsal", "--out", str(tmp_path), "--minutes", "30"]) == 0
    stored = json.loads((tmp_path / "gpu.json").read_text())["pieces"]
    reasons = {row[REASON] for result in stored.values() for row in result["rows"] if REASON in row}
    allowed = ("a race needs CUDA streams", "is not installed", "there is no CUDA device", "runs on CUDA")
    assert all(any(word in reason for word in allowed) for reason in reasons), reasons
    assert set(stored) == {piece.name for piece in PIECES} and (tmp_path / "gpu-kernels.png").exists()
