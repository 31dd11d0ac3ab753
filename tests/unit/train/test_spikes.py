"""What is a spike, and that it is the same over a restart."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from megazero.config import ConfigError, make_config
from megazero.config.options.skipping import SkippingConfig
from megazero.log.metrics import SUPERSEDED_FILE, MetricsWriter, read_metrics
from megazero.train.callbacks.spikes import SpikeMonitor
from megazero.train.outputs import open_outputs
from megazero.train.state import rollback
from megazero.train.state.origin import Origin
from megazero.train.state.progress import LeftOut, Progress
from tests.sizes import TINY
from tests.unit.log.test_metrics import _line

CONFIG = SkippingConfig(
    rollback_on_spike=True, spike_window=4, spike_iterations=3, spike_loss_bound=0.5, spike_norm_bound=10.0
)
SAVES = {"save": "s", "save_interval": 5, "rollback_on_spike": True}


def observed(monitor: SpikeMonitor, figures: list[tuple[float, float]], first: int = 1) -> list[str | None]:
    return [monitor.observe(first + place, *each) for place, each in enumerate(figures)]


def steady() -> SpikeMonitor:
    """Its usual loss is 3 and its usual norm 1."""
    monitor = SpikeMonitor(CONFIG)
    assert observed(monitor, [(9.0, 50.0), (3.1, 1.2), (2.9, 0.8), (3.0, 1.0), (3.0, 1.0)]) == [None] * 5
    return monitor


def test_so_many_in_a_row_beyond_a_bound_are_a_spike() -> None:
    monitor = steady()
    assert observed(monitor, [(3.6, 1.0), (3.0, 11.0), (3.4, 9.0), (3.6, 1.0), (3.0, 10.5)]) == [None] * 5
    assert monitor.beyond == 2 and monitor.losses[-1] == 3.4  # what was beyond is not usual
    said = monitor.observe(11, 3.71, 12.0)
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
        monitor.observe(6, 4.0, 1.0)
    resumed = SpikeMonitor(CONFIG)
    resumed.load_state(json.loads(json.dumps(stopped.state())))
    figures = [(4.0, 1.0), (4.0, 1.0), (3.0, 1.0)]
    assert observed(resumed, figures, 7) == observed(stayed, figures, 7) and resumed.state() == stayed.state()
    assert SpikeMonitor(SkippingConfig()).state() == {}
    resumed.load_state({})
    assert not resumed.losses and resumed.beyond == 0


def test_without_the_option_nothing_is_taken_from_a_checkpoint() -> None:
    """It would stay beyond a bound, and nothing would be saved at intervals any more."""
    monitor = SpikeMonitor(SkippingConfig())
    monitor.load_state({"losses": [3.0], "norms": [1.0], "beyond": 3, "began": 4})
    assert (monitor.beyond, monitor.began, list(monitor.losses)) == (0, 0, [])


def test_where_a_spike_began_is_remembered_over_what_lies_between() -> None:
    monitor = steady()
    assert [monitor.observe(at, 4.0, 1.0) is not None for at in (12, 14, 17)] == [False, False, True]
    assert (monitor.beyond, monitor.began) == (3, 12)


def test_going_back_counts_and_forgets_what_was_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time to a checkpoint from before the last time, which knows of none."""
    monkeypatch.setattr(rollback, "origin_before", lambda *_: Origin(Progress(iteration=5)))
    config = SimpleNamespace(checkpoint=SimpleNamespace(save="s"), skipping=CONFIG)
    spikes = SpikeMonitor(CONFIG)

    def load(origin: Origin) -> None:
        spikes.load_state({"beyond": 1, "began": 4})

    checkpointing: Any = SimpleNamespace(config=config, root="s", mesh=None, spikes=spikes, load=load)
    progress = Progress(iteration=9)
    for time in range(1, CONFIG.max_rollbacks + 1):
        progress = rollback.go_back(checkpointing, progress, 8, "a spike")
        assert (progress.iteration, progress.rollbacks, spikes.beyond, spikes.began) == (5, time, 0, 0)
    with pytest.raises(rollback.LossSpike, match="gone back 3 times"):
        rollback.go_back(checkpointing, progress, 8, "a spike")


def test_evaluations_after_the_way_back_and_after_named_ranges_stay(tmp_path) -> None:
    writer = MetricsWriter(tmp_path, iteration=0)
    for iteration in (1, 2, 5, 8):
        writer.iteration(_line(iteration))
        writer.evaluation(iteration, 8 * iteration, 2.0)
    writer.evaluation(4, 32, 2.0)  # 3 and 4 were named
    writer.evaluation(7, 56, 2.0)  # 6 and 7 were undone, and this is from after that
    writer.close()
    progress = Progress(iteration=8, left_out=(LeftOut(3, 4, 16, 32), LeftOut(6, 7, 40, 56, rollback=True)))
    config = make_config({**TINY, "log_dir": str(tmp_path)})
    start = SimpleNamespace(run_id="a", facts=dict, header=dict, lease="")
    before = (tmp_path / "metrics.jsonl").read_text()
    with ExitStack() as stack:
        open_outputs(config, progress, start, 9, stack, first=True)  # type: ignore[arg-type]
    assert (tmp_path / "metrics.jsonl").read_text() == before
    MetricsWriter(tmp_path, iteration=8, undone=[(7, 8)]).close()
    evaluated = [line["iteration"] for line in read_metrics(tmp_path) if "lm_loss" not in line]
    assert evaluated == [1, 2, 5, 8, 4]


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
        ({**SAVES, "save": None, "save_interval": None}, "without --save and --save-interval above 0"),
        ({**SAVES, "save_interval": None}, "without --save-interval above 0"),
        ({"spike_window": 7}, "--spike-window 7 has no effect without --rollback-on-spike"),
        ({"max_rollbacks": 7}, "--max-rollbacks 7 has no effect without --rollback-on-spike"),
        ({**SAVES, "spike_norm_bound": 1.0}, "--spike-norm-bound 1 must be above 1"),
    ],
)
def test_what_going_back_needs(values: dict, error: str) -> None:
    make_config({**TINY, **SAVES})
    with pytest.raises(ConfigError, match=error):
        make_config({**TINY, **values})
