"""Loss scaling: Megatron's rule step by step, state, and a whole fp16 run beside torch.amp.GradScaler on one rank."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
import random
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megazero.config import World, make_config
from megazero.config.options.sections import PrecisionConfig
from megazero.log.metrics import read_metrics
from megazero.mesh.launch import Launch
from megazero.models import Decoder
from megazero.ops.failures import NonFiniteLoss
from megazero.train import setup
from megazero.train.schedule.loss_scaling import LossScaling
from megazero.train.trainer import Trainer
from tests.messages import refused
from tests.sizes import TINY


def fp16(**options: Any) -> LossScaling:
    return LossScaling.of(PrecisionConfig(params_dtype="fp16", **options))


def megatron() -> ModuleType:
    """megatron-core's grad_scaler.py by itself (its package needs more than is installed), on the CPU."""
    try:
        files = importlib.metadata.files("megatron-core") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("megatron-core is not installed")
    path = next(f.locate() for f in files if f.match("megatron/core/optimizer/grad_scaler.py"))
    spec = importlib.util.spec_from_file_location("grad_scaler", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    class Torch:
        float = torch.float
        max = staticmethod(torch.max)
        Tensor = torch.Tensor

        @staticmethod
        def tensor(*args: Any, device: str, **options: Any) -> torch.Tensor:
            return torch.tensor(*args, **options)

    module.torch = Torch  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("seed", range(8))
def test_the_rule_is_megatrons(seed: int) -> None:
    draw = random.Random(seed)
    initial, least = 2.0 ** draw.randint(3, 32), 2.0 ** draw.randint(-2, 2) * draw.choice((1, 1.5))
    window, hysteresis = draw.randint(1, 6), draw.randint(1, 4)
    theirs = megatron().DynamicGradScaler(initial, least, 2.0, 0.5, window, hysteresis)
    ours = fp16(
        initial_loss_scale=initial, min_loss_scale=least, loss_scale_window=window, hysteresis=hysteresis
    )
    scales = set()
    for _ in range(400):
        assert ours.scale is not None
        overflow = draw.random() < (0.2 if ours.scale < 64 else 0.5 if ours.scale < 2.0**40 else 1.0)
        theirs.update(overflow)
        ours.update(overflow, samples=3)
        assert ours.scale == theirs.scale.item()
        assert ours.growth_tracker == theirs._growth_tracker
        assert ours.hysteresis_tracker == theirs._hysteresis_tracker
        assert ours.can_fall == (theirs.scale.item() > least)
        scales.add(ours.scale)
    assert len(scales) > 3 and ours.skipped_samples == 3 * ours.skipped_iterations > 0


def test_a_static_scale_stays_and_none_is_none() -> None:
    fixed = fp16(loss_scale=64.0)
    for overflow in (True, True, False):
        fixed.update(overflow, samples=8)
    assert fixed.scale == 64 and not fixed.can_fall
    assert (fixed.skipped(by_samples=False), fixed.skipped(by_samples=True)) == (2, 16)
    none = LossScaling.of(PrecisionConfig(params_dtype="bf16"))
    none.update(True, samples=8)
    assert none.factors(100, 4) == (1.0, 100) and none.skipped(by_samples=True) == 0
    assert none.state() == none.metrics() == {} and not none.can_fall
    assert fp16(loss_scale=0.0).scale == 2**32  # 0 is dynamic, as in Megatron


def test_a_scale_grows_on_after_a_resume_with_a_shorter_window() -> None:
    saved = {**fp16(initial_loss_scale=8.0).state(), "growth_tracker": 500}
    shorter = fp16(loss_scale_window=100)
    shorter.load_state(saved)
    shorter.update(False, samples=8)
    assert (shorter.scale, shorter.growth_tracker) == (16.0, 0)


def test_state_goes_through_json_and_old_checkpoints_have_none() -> None:
    one, two, fixed = fp16(hysteresis=3), fp16(hysteresis=3), fp16(loss_scale=2.0)
    for overflow in (True, False, True, True):
        one.update(overflow, samples=8)
    saved = json.loads(json.dumps(one.state()))
    two.load_state({})
    assert two == fp16(hysteresis=3)
    two.load_state(saved)
    assert two == one and isinstance(two.scale, float)
    fixed.load_state(saved)
    assert fixed.scale == 2 and fixed.skipped_samples == 24
    none = LossScaling()
    none.load_state(saved)
    assert none == LossScaling()


# -- runs on one rank --------------------------------------------------------------------------------

RUN = {**TINY, "params_dtype": "fp16", "num_layers": 1, "global_batch_size": 2, "log_interval": 3}


def trainer_of(values: dict[str, Any], folder: Path, stack: ExitStack) -> Trainer:
    config = make_config({**RUN, "log_dir": str(folder), **values}, World(1, 1))
    run = setup.prepare(config, Launch(0, 1, local_world_size=1), stack)
    stack.enter_context(run.outputs.console)
    return run


def train(
    values: dict[str, Any], folder: Path, before: Callable[[Trainer], None] = lambda _: None
) -> tuple[list[dict[str, Any]], str]:
    """The run's metrics, and what it printed."""
    with redirect_stdout(io.StringIO()) as text, ExitStack() as stack:
        run = trainer_of(values, folder, stack)
        before(run)
        run.run()
    return read_metrics(folder), text.getvalue()


def test_parity_with_torchs_grad_scaler(tmp_path: Path) -> None:
    """Losses, skipped steps and scales of a run that overflows at its start and whenever the scale has grown."""
    values = {"train_iters": 14, "initial_loss_scale": 2.0**24, "loss_scale_window": 3, "hysteresis": 1}
    values |= {"clip_grad": 0.0, "lr_decay_style": "constant", "lr_warmup_iters": 0}
    steps: list[Any] = []

    def note(run: Trainer) -> None:
        step = run.pipeline.step
        run.pipeline.step = lambda batches, factor: (steps.append(batches), step(batches, factor))[1]  # type: ignore[method-assign]

    lines, _ = train(values, tmp_path, note)
    config = make_config({**RUN, **values}, World(1, 1))
    model, master = Decoder(config.model, dtype=torch.float16), Decoder(config.model, dtype=torch.float32)
    master.initialize(config.training.seed)
    pairs = list(zip(model.parameters(), master.parameters(), strict=True))
    plain = master.no_weight_decay()
    groups = [
        {"params": [p for n, p in master.named_parameters() if (n in plain) == vector], "weight_decay": decay}
        for vector, decay in ((False, config.optimizer.weight_decay), (True, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, fused=True)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**24, growth_factor=2.0, backoff_factor=0.5, growth_interval=3
    )
    tokens = 2 * TINY["seq_length"]
    for line, batches in zip(lines, steps, strict=True):
        loss = 0.0
        for half, wide in pairs:
            half.data.copy_(wide.data)
            wide.grad = torch.zeros_like(wide)
        for batch in batches:
            mean = (model(batch.tokens, batch.labels) * batch.loss_mask).sum() / tokens
            scaler.scale(mean).backward()
            loss += mean.item()
            for half, wide in pairs:
                assert half.grad is not None and wide.grad is not None
                wide.grad += half.grad
                half.grad = None
        scaler.unscale_(optimizer)
        norm = torch.stack([p.grad.double().norm() for _, p in pairs if p.grad is not None]).norm().item()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        assert line["loss_scale"] == scaler.get_scale()
        assert line.get("skipped", 0) == (scaler.get_scale() < before)
        assert line["lm_loss"] == pytest.approx(loss, rel=1e-6)
        assert "skipped" in line or line["grad_norm"] == pytest.approx(norm, rel=1e-5)
    skips = [line["iteration"] for line in lines if "skipped" in line]
    grown = [a for a, b in pairwise(lines) if b["loss_scale"] > a["loss_scale"]]
    assert len(skips) > 3 and skips[-1] > skips[0] + len(skips) and grown
    assert lines[-1]["lm_loss"] < lines[0]["lm_loss"]


def test_skipped_steps_do_not_move_the_learning_rate_and_are_told(tmp_path: Path) -> None:
    """As Megatron's scheduler, which is told of updates alone."""
    lines, text = train(
        {"initial_loss_scale": 2.0**24, "loss_scale_window": 100, "hysteresis": 1, "train_iters": 9}, tmp_path
    )
    skips = sum("skipped" in line for line in lines)
    assert 2 < skips < 8 and all("skipped" in line for line in lines[:skips])
    rates = [line["learning_rate"] for line in lines]
    assert rates[: skips + 1] == [rates[0]] * (skips + 1) and rates[skips] < rates[skips + 1]
    assert [line["loss_scale"] for line in lines] == [2.0 ** (24 - min(i, skips)) for i in range(1, 10)]
    assert "loss scale 2.09715e+06 | skipped 2" in text and f"loss scale {2.0 ** (24 - skips):g}" in text


def spoil(run: Trainer, first: int, last: int) -> None:
    """Make the loss infinite, iterations [first, last]."""
    forward = run.pipeline.forward

    def spoiled(*args: Any) -> torch.Tensor:
        bad = first <= run.progress.iteration + 1 <= last
        return forward(*args) * (torch.inf if bad else 1.0)

    run.pipeline.forward = spoiled


def test_non_finite_losses_are_skipped_while_the_scale_is_dynamic(tmp_path: Path) -> None:
    values = {"initial_loss_scale": 2.0**12, "hysteresis": 2, "train_iters": 6}
    lines, text = train(values, tmp_path, lambda run: spoil(run, 3, 5))
    assert [line["loss_scale"] for line in lines] == [4096, 4096, 4096, 2048, 1024, 1024]
    assert [line.get("skipped", 0) for line in lines] == [0, 0, 1, 1, 1, 0]
    assert "loss nan" not in text and "loss inf" not in text
    with refused("iteration 2", "inf", by=NonFiniteLoss):
        train({"loss_scale": 2.0**12}, tmp_path, lambda run: spoil(run, 2, 4))


def test_a_run_ends_when_the_lowest_scale_overflows_ten_times(tmp_path: Path) -> None:
    """12 skips on the way from 4096 to 1 do not count."""
    values = {"initial_loss_scale": 2.0**12, "hysteresis": 1, "train_iters": 30}
    with refused("iteration 22", "10 steps", by=NonFiniteLoss):
        train(values, tmp_path, lambda run: spoil(run, 1, 30))
    lines = read_metrics(tmp_path)
    assert len(lines) == 21 and lines[11]["loss_scale"] == lines[-1]["loss_scale"] == 1
