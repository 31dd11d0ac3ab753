"""What the first rank says while a run starts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megazero.config import make_config
from megazero.mesh.launch import Launch
from megazero.train import supervisor
from megazero.train.supervisor import Supervisor
from tests import sizes


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_prints_a_step_that_lasts_and_no_other(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "SAID_AFTER", 0.5)
    config = make_config({**sizes.SMALL, "log_dir": str(tmp_path)})
    started = Supervisor(config, Launch(rank, 2))  # waits for the other rank, which comes at once
    started.joining = "making communicators"
    said, until = "", time.monotonic() + (30 if rank == 0 else 1)
    while not said and time.monotonic() < until:
        time.sleep(0.05)
        said += capsys.readouterr().out
    assert ["start after" in said, "making communicators" in said] == 2 * [rank == 0]
    assert "waiting" not in said
