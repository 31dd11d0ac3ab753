"""Samples seen depend on the data, the seed and the count consumed: not on layouts, batches' cut or restarts."""

from __future__ import annotations

from pathlib import Path

from tests.dist.runs import Seen, samples, train_each, write_data

NODES = {"ranks_per_node": 2}
LAYOUTS = {
    "one rank": (1, {}),
    "tp 2": (2, {"tensor_model_parallel_size": 2, "micro_batch_size": 4}),
    "zero3": (2, {"zero_preset": "zero3", "micro_batch_size": 2}),
    "tp 4": (4, {"tensor_model_parallel_size": 4, "micro_batch_size": 2}),
    "tp 2 x zero3": (4, {"tensor_model_parallel_size": 2, "zero_preset": "zero3", "micro_batch_size": 2}),
    "hpz": (4, {"zero_preset": "hpz", **NODES}),
    "ddp": (4, {"zero_preset": "ddp"}),
    "zb-h1": (2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"}),
    "interleaved": (4, {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}),
    "pp 2 outermost dp": (
        4,
        {"pipeline_model_parallel_size": 2, "use_tp_pp_dp_mapping": True, "zero_preset": "zero3", **NODES},
    ),
    "pp 2 x tp 2": (
        4,
        {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2, "micro_batch_size": 4},
    ),
    "pp 4": (4, {"pipeline_model_parallel_size": 4}),
}
STEPS = [4, 4, 4, 4, 8, 8, 12, 12]  # of the ramp-up below, by Megatron's rule
SAMPLES = list(range(sum(STEPS)))


def values(tmp_path: Path) -> dict:
    """Two blended files that are walked through several times, and a batch that grows on the way."""
    one, two = (write_data(tmp_path / f"data{seed}", seed=seed) for seed in (1, 2))
    return {
        "mock_data": None,
        "data_path": ("0.3", one, "0.7", two),
        "split": "90,10,0",
        "rampup_batch_size": (4, 4, 30),
        "global_batch_size": 12,
        "train_iters": len(STEPS),
        "num_layers": 4,
        "log_dir": str(tmp_path / "logs"),
    }


def runs(jobs: list[tuple[int, dict]]) -> list[list[Seen]]:
    """Every rank's view of each job."""
    seen = train_each(dict(enumerate(jobs)))
    return [seen[number] for number in range(len(jobs))]


def test_every_layout_sees_the_same_samples(tmp_path: Path) -> None:
    base = values(tmp_path)
    seen = train_each({name: (ranks, {**base, **v}) for name, (ranks, v) in LAYOUTS.items()})
    first = samples(seen["one rank"])
    assert [sample for sample, _ in first] == SAMPLES
    assert len({text for _, text in first}) > len(SAMPLES) // 2  # samples that differ
    for name, every in seen.items():
        assert samples(every) == first, name
    (reseeded,) = runs([(1, {**base, "seed": 7, "train_iters": 3})])
    assert samples(reseeded) != first[: sum(STEPS[:3])]


def test_no_gap_and_no_repeat_after_resumes_on_other_layouts(tmp_path: Path) -> None:
    """Stopped mid-ramp and again later, each time going on elsewhere; a checkpoint between is not looked at."""
    base = {**values(tmp_path), "save": str(tmp_path / "run")}
    wanted = samples(runs([(1, {**base, "save": None})])[0])
    seen = []
    stops = {"ddp": 3, "pp 2 outermost dp": 4, "tp 4": 5, "interleaved": 7, "zero3": None}
    for layout, exit_at in stops.items():
        ranks, changes = LAYOUTS[layout]
        job = {**base, **changes, "exit_interval": exit_at, "load": str(tmp_path / "run")}
        job |= {"allow_fresh_start": True, "save_interval": 2}
        seen += samples(runs([(ranks, job)])[0])
    assert seen == wanted


def test_a_changed_order_is_told(tmp_path: Path) -> None:
    base = {**values(tmp_path), "save": str(tmp_path / "run"), "exit_interval": 1}
    changed = {**base, "exit_interval": 2, "load": str(tmp_path / "run"), "seed": 7, "split": "80,20,0"}
    first, second = runs([(1, base), (1, changed)])
    assert not first[0].notes
    assert [note.split(" was ")[0] for note in second[0].notes] == ["--seed", "--split"]
    assert "1234 when the checkpoint was written and is 7 now" in second[0].notes[0]
