"""fp16 with loss scaling on 4 ranks as 2 nodes of 2: overflows, resuming, quantised messages."""

from __future__ import annotations

import io
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megazero.config import World, make_config
from megazero.log.metrics import read_metrics
from megazero.mesh.launch import Launch
from megazero.train import setup
from tests.dist.pool import run_ranks
from tests.dist.runs import checkpoint_of, differences, train_all
from tests.sizes import TINY

RANKS = 4
FP16 = {
    "params_dtype": "fp16",
    "ranks_per_node": 2,
    "initial_loss_scale": 2.0**10,
    "hysteresis": 1,
    "loss_scale_window": 2,
    "lr_warmup_iters": 0,
    "global_batch_size": 4,
    "train_iters": 4,
}
ZEROPP = {"zero_preset": "zeropp", "zero_exact_numel": 40}
INT8 = {**ZEROPP, "zero_quantized_weights_delta": False}
TIED_PIPELINE = {
    "pipeline_model_parallel_size": 2,
    "pipeline_schedule": "zb-h1",
    "untie_embeddings_and_output_weights": False,
}
TENSORS = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
# name: (values, largest relative difference from zero3's losses)
LAYOUTS: dict[str, tuple[dict[str, Any], float]] = {
    "zero3": ({"zero_preset": "zero3"}, 0.0),
    "zeropp": (ZEROPP, 2e-2),
    "zeropp, INT8, inside too": ({**INT8, "zero_gradient_bits_intra_node": 8}, 2e-2),
    "hpz": ({"zero_preset": "hpz"}, 0.0),
    "mics": ({"zero_preset": "mics"}, 2e-3),
    "ddp": ({"zero_preset": "ddp"}, 2e-3),
    "tensor parallel": ({**TENSORS, "recompute_granularity": "full"}, 2e-3),
    "tied pipeline of tensor parallel ranks": ({**TIED_PIPELINE, **TENSORS}, torch.inf),  # another model
    "tied pipeline, zeropp": ({**TIED_PIPELINE, **ZEROPP}, torch.inf),
}
FEW = ("zero3", "zeropp, INT8, inside too", "tied pipeline of tensor parallel ranks")


def overflowing(values: dict[str, Any], culprit: int) -> list[tuple[float | None, bool]]:
    """A run in this rank, whose gradients are infinite on rank ``culprit`` alone in iteration 2: after each
    iteration its scale, and whether its own masters have changed."""
    config = make_config({**TINY, **FP16, **values}, World(RANKS, RANKS))
    seen: list[tuple[float | None, bool]] = []
    with ExitStack() as stack, redirect_stdout(io.StringIO()):
        launch = Launch(dist.get_rank(), RANKS, local_world_size=RANKS)
        run = setup.prepare(config, launch, stack)
        forward, log, leaves = run.pipeline.forward, run._log, [r.leaf for r in run.engine.optimizer.runs]
        before = [leaf.detach().clone() for leaf in leaves]

        def spoiled(*args: Any) -> torch.Tensor:
            y = forward(*args)
            if run.progress.iteration == 1 and dist.get_rank() == culprit:
                y.register_hook(lambda grad: grad * torch.inf)
            return y

        def note(*args: Any) -> None:
            changed = not all(map(torch.equal, before, leaves))
            before[:] = [leaf.detach().clone() for leaf in leaves]
            seen.append((run.scaling.scale, changed))
            log(*args)

        run.pipeline.forward, run._log = spoiled, note  # type: ignore[method-assign]
        run.run()
    return seen


def overflow_each(jobs: list[dict[str, Any]], culprit: int) -> list[list[tuple[float | None, bool]]]:
    return [overflowing(job, culprit) for job in jobs]


@pytest.mark.parametrize(
    "names", [FEW, pytest.param(tuple(LAYOUTS), marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_an_overflow_on_one_rank_skips_on_every_rank_and_lowers_the_scale(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    jobs = [{**LAYOUTS[name][0], "log_dir": str(tmp_path / name)} for name in names]
    every = run_ranks(RANKS, overflow_each, jobs, 1, timeout=300)
    reference = [line["lm_loss"] for line in read_metrics(tmp_path / "zero3")]
    for place, name in enumerate(names):
        for rank in every:
            assert [scale for scale, _ in rank[place]] == [1024, 512, 512, 1024], name
            assert [changed for _, changed in rank[place]] == [True, False, True, True], name
        lines = read_metrics(tmp_path / name)
        assert [line["loss_scale"] for line in lines] == [1024, 512, 512, 1024], name
        assert [line.get("skipped", 0) for line in lines] == [0, 1, 0, 0], name
        assert all(0.1 < line["grad_norm"] < 10 for line in lines if "skipped" not in line), name
        for line, loss in zip(lines, reference, strict=True):
            assert abs(line["lm_loss"] - loss) <= LAYOUTS[name][1] * loss, (name, line)


@pytest.mark.slow
@pytest.mark.parametrize("preset", [INT8, pytest.param({"zero_preset": "zero3"}, marks=pytest.mark.slow)])
def test_resume_equals_the_uninterrupted_run_bit_for_bit(tmp_path: Path, preset: dict[str, Any]) -> None:
    """Stopped while the scale falls, so that one that began anew would skip other steps."""
    values = {**FP16, **preset, "initial_loss_scale": 2.0**22, "train_iters": 8, "log_dir": str(tmp_path)}
    folders = {"save": str(tmp_path / "second"), "log_dir": str(tmp_path / "logs")}
    straight, first, second = run_ranks(
        RANKS,
        train_all,
        [
            {**values, "save": str(tmp_path / "straight")},
            {**values, **folders, "save": str(tmp_path / "first"), "exit_interval": 3},
            {**values, **folders, "load": str(tmp_path / "first")},
        ],
        timeout=300,
    )[0]
    assert first.losses + second.losses == straight.losses and second.start == 3
    assert not differences(checkpoint_of(tmp_path / "straight"), checkpoint_of(tmp_path / "second"))
    keys = ("loss_scale", "skipped", "learning_rate", "grad_norm")
    one, two = (
        [[repr(line.get(key)) for key in keys] for line in read_metrics(folder)]
        for folder in (tmp_path, tmp_path / "logs")
    )
    assert one == two
    skips = [line.get("skipped", 0) for line in read_metrics(tmp_path)]
    assert skips[:4] == [1, 1, 1, 1] and 0 in skips
