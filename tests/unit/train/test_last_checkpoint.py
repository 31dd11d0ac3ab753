"""What a start finds as its last checkpoint, where nothing is left to train."""

from __future__ import annotations

import io
import os
from contextlib import ExitStack, redirect_stdout
from pathlib import Path

from megazero.checkpoint import store
from megazero.config import World, make_config
from megazero.log.exit_status import ExitStatus
from megazero.mesh.launch import Launch
from megazero.train import setup
from tests.sizes import TINY


def train(folder: Path, **values: str) -> str:
    """Train, or find that nothing is left to do, in this process. Return the path of the last checkpoint."""
    sizes = {**TINY, "train_iters": 1, "lr_warmup_iters": 0, "global_batch_size": 1}
    config = make_config({**sizes, "log_dir": f"{folder / 'logs'}", **values}, World(1, 1))
    with ExitStack() as stack, redirect_stdout(io.StringIO()):
        run = setup.prepare(config, Launch(0, 1, local_world_size=1), stack)
        stack.enter_context(run.outputs.console)
        assert run.run() == ExitStatus.FINISHED
        run.outputs.event("end", status=0, why="")
    return run.progress.checkpoint


def test_one_that_a_killed_save_moved_aside_has_its_name_again(tmp_path: Path) -> None:
    save = f"{tmp_path / 'a'}"
    last = train(tmp_path, save=save)
    os.rename(last, tmp_path / "a" / ".iter_0000001.replaced-1a2b3c4d")
    assert train(tmp_path, save=save, load=save) == last
    assert [path.name for path in store.checkpoints(save)] == ["iter_0000001"]
