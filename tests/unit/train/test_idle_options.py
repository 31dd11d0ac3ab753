"""Options that the configuration notes as without effect do not end the run: a start with all of them at once."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from megazero.config import ConfigError, RunConfig, World, make_config
from megazero.config.options.fields import Option
from megazero.config.options.needs import lacks
from megazero.config.run import all_options
from megazero.config.validate import facts
from megazero.mesh.launch import Launch
from megazero.train import setup
from tests.sizes import TINY

WORLD = World(1, 1)
BASE = {**TINY, "num_query_groups": 8, "global_batch_size": 2, "train_iters": 1, "lr_warmup_iters": 0}


def others(option: Option, usual: Any) -> Iterator[Any]:
    """Yield values of an option that it does not have."""
    if option.kind == "bool":
        yield not usual
    elif option.choices:
        yield from (choice for choice in option.choices if choice != usual)
    elif option.kind == "int":
        yield from ((usual or 0) + 1, 2, 4)
    elif option.kind == "float":
        yield from ((usual or 0) * 0.5, (usual or 0) + 0.5, (usual or 0) + 2.0)
    elif option.kind in ("ints", "floats"):
        yield (2,)
    else:
        yield ("a",) if option.kind == "strs" else "a"


def idle(base: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each option that has no effect beside ``base`` and is noted, with a value that is not its own."""
    config = make_config(base, WORLD)
    known = {**config.values(), **facts(config)}
    for name, option in all_options().items():
        for value in others(option, config.get(name)) if lacks(option, known) else ():
            if notes_it(option, {**base, name: value}):
                yield name, value
                break


def notes_it(option: Option, values: dict[str, Any]) -> bool:
    try:
        config = make_config(values, WORLD)
    except ConfigError:
        return False
    flags = (f"{option.flag} ", f"--{option.negative_key} ")
    return any(note.startswith(flags) and " has no effect without " in note for note in config.notes)


def start(config: RunConfig) -> float:
    with redirect_stdout(io.StringIO()), ExitStack() as stack:
        trainer = setup.prepare(config, Launch(0, 1, local_world_size=1), stack)
        trainer.run()
        return trainer.progress.losses["lm_loss"]


@pytest.mark.parametrize("family", ["gpt", "llama"])  # learned positions, rotary ones
def test_options_without_an_effect_start_and_change_nothing(tmp_path: Path, family: str) -> None:
    base = {**BASE, "model_family": family}
    noted = dict(idle(base))
    assert len(noted) > 50
    run = make_config({**base, **noted, "log_dir": str(tmp_path / "noted")}, WORLD)
    plain = make_config({**base, "log_dir": str(tmp_path / "plain")}, WORLD)
    assert start(run) == start(plain)
