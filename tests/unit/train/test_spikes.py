"""What is a spike, and what its error says."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from megazero.config import ConfigError, make_config, parse
from megazero.config.options.skipping import SkippingConfig
from megazero.ops.failures import NonFiniteLoss
from megazero.train.callbacks import spikes
from megazero.train.callbacks.spikes import LossSpike, SpikeWatch
from tests.messages import refused
from tests.sizes import TINY


def see(watch: SpikeWatch, figures: list[tuple[float, float | None]]) -> None:
    for loss, norm in figures:
        watch.at += 1  # type: ignore[attr-defined]
        step: Any = SimpleNamespace(iteration=watch.at, loss=loss, info=SimpleNamespace(updated_norm=norm))  # type: ignore[attr-defined]
        watch.after_step(step)


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its usual loss is 3 and its usual norm 1, after five iterations."""
    monkeypatch.setattr(spikes, "USUAL", 4)
    monkeypatch.setattr(spikes, "IN_A_ROW", 3)
    watch: Any = SpikeWatch(SkippingConfig(stop_on_spike=True))
    watch.at, watch.run = 0, SimpleNamespace(config=SimpleNamespace(checkpoint=SimpleNamespace(save=None)))
    see(watch, [(9.0, 50.0), (3.1, 1.2), (2.9, 0.8), (3.0, 1.0), (3.0, 1.0)])
    return watch


def test_so_many_in_a_row_beyond_a_bound_are_a_spike(steady: Any) -> None:
    see(steady, [(3.6, 1.0), (3.0, 11.0), (3.4, 9.0), (3.6, 1.0), (9.0, None), (3.0, 10.5)])
    assert steady.beyond == [9, 11] and steady.losses[-1] == 3.4  # what was beyond is not usual
    with pytest.raises(
        LossSpike, match="iteration 12: loss 3.71 .*--spike-loss-bound 0.5.*norm 12 "
    ) as found:
        see(steady, [(3.71, 12.0)])
    assert isinstance(found.value, NonFiniteLoss) and "before iteration 9" in str(found.value)


def test_nan_is_beyond_a_bound(steady: Any) -> None:
    with pytest.raises(LossSpike):
        see(steady, [(math.nan, 1.0)] * 3)


def test_checkpoints_of_before_a_spike_must_stay() -> None:
    saves = {**TINY, "save": "s", "save_interval": 4, "stop_on_spike": True}
    make_config({**saves, "save_keep_last": 4})
    with refused("--save-keep-last 3", "--stop-on-spike", "nearest: 4", by=ConfigError):
        make_config({**saves, "save_keep_last": 3})
    with refused("--stop-on-spike", "--save", by=ConfigError):
        make_config({**TINY, "stop_on_spike": True})
    with refused("--rollback-on-spike", "--stop-on-spike", by=ConfigError):
        parse(["--rollback-on-spike"])
