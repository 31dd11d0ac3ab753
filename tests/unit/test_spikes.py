"""What is a spike, and that it is the same over a restart."""

from __future__ import annotations

import json
import math

import pytest

from megazero.config import ConfigError, make_config
from megazero.config.skipping import SkippingConfig
from megazero.train.metrics import SUPERSEDED_FILE, MetricsWriter, read_metrics
from megazero.train.spikes import SpikeMonitor
from tests.dist.runs import TINY
from tests.unit.test_train_metrics import _line

CONFIG = SkippingConfig(
    rollback_on_spike=True, spike_window=4, spike_iterations=3, spike_loss_bound=0.5, spike_norm_bound=10.0
)
SAVES = {"save": "s", "save_interval": 5, "rollback_on_spike": True}


def observed(monitor: SpikeMonitor, figures: list[tuple[float, float]]) -> list[str | None]:
    return [monitor.observe(*each) for each in figures]


def steady() -> SpikeMonitor:
    """Its usual loss is 3 and its usual norm 1."""
    monitor = SpikeMonitor(CONFIG)
    assert observed(monitor, [(9.0, 50.0), (3.1, 1.2), (2.9, 0.8), (3.0, 1.0), (3.0, 1.0)]) == [None] * 5
    return monitor


def test_so_many_in_a_row_beyond_a_bound_are_a_spike() -> None:
    monitor = steady()
    assert observed(monitor, [(3.6, 1.0), (3.0, 11.0), (3.4, 9.0), (3.6, 1.0), (3.0, 10.5)]) == [None] * 5
    assert monitor.beyond == 2 and monitor.losses[-1] == 3.4  # what was beyond is not usual
    said = monitor.observe(3.71, 12.0)
    assert said is not None and "loss 3.71 (usual: 3, --spike-loss-bound 0.5)" in said
    assert "gradient norm 12 (usual: 1, --spike-norm-bound 10)" in said
    nan = steady()
    assert observed(nan, [(math.nan, 1.0)] * 3)[-1] is not None


def test_a_run_that_begins_has_no_spikes() -> None:
    monitor = SpikeMonitor(CONFIG)
    assert observed(monitor, [(5.0, 1.0), (50.0, 1.0), (5.0, 1.0), (500.0, 1.0)]) == [None] * 4
    assert monitor.beyond == 0


def test_a_restart_goes_on_with_the_same_figures() -> None:
    stayed, stopped = steady(), steady()
    for monitor in (stayed, stopped):
        monitor.observe(4.0, 1.0)
    resumed = SpikeMonitor(CONFIG)
    resumed.load_state(json.loads(json.dumps(stopped.state())))
    figures = [(4.0, 1.0), (4.0, 1.0), (3.0, 1.0)]
    assert observed(resumed, figures) == observed(stayed, figures) and resumed.state() == stayed.state()
    assert SpikeMonitor(SkippingConfig()).state() == {}
    resumed.load_state({})
    assert not resumed.losses and resumed.beyond == 0


def test_lines_that_were_undone_move_away(tmp_path) -> None:
    writer = MetricsWriter(tmp_path, iteration=0)
    for iteration in range(1, 7):
        writer.iteration(_line(iteration))
    writer.evaluation(5, 40, 2.0)
    writer.undo(4, 6)
    writer.iteration(_line(7))
    writer.close()
    assert [line["iteration"] for line in read_metrics(tmp_path)] == [1, 2, 3, 7]
    moved = [json.loads(line) for line in (tmp_path / SUPERSEDED_FILE).read_text().splitlines()]
    assert [line["iteration"] for line in moved] == [4, 5, 6, 5]
    # Killed before they were moved: the resume that knows of it does.
    MetricsWriter(tmp_path, iteration=7, undone=[(2, 3)]).close()
    assert [line["iteration"] for line in read_metrics(tmp_path)] == [1, 7]


@pytest.mark.parametrize(
    "values, error",
    [
        ({**SAVES, "save": None, "save_interval": None}, "without --save and --save-interval"),
        ({**SAVES, "save_interval": None}, "without --save and --save-interval"),
        ({"spike_window": 7}, "--spike-window 7 has no effect without --rollback-on-spike"),
        ({"max_rollbacks": 7}, "--max-rollbacks 7 has no effect without --rollback-on-spike"),
        ({**SAVES, "spike_norm_bound": 1.0}, "--spike-norm-bound 1 must be above 1"),
    ],
)
def test_what_going_back_needs(values: dict, error: str) -> None:
    make_config({**TINY, **SAVES})
    with pytest.raises(ConfigError, match=error):
        make_config({**TINY, **values})
