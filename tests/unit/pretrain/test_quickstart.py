"""The quickstart's decisions; the run itself is `make quickstart`."""

from __future__ import annotations

import pytest

from megazero.config import World, parse
from pretrain import quickstart
from tests.messages import refused


@pytest.mark.parametrize(
    "ranks,gpus,expected", [(4, 0, 4), (4, 8, 4), (4, 3, 2), (4, 1, 1), (2, 0, 2), (1, 4, 1)]
)
def test_every_layout_is_legal(tmp_path, ranks, gpus, expected):
    plan = quickstart.make_plan(tmp_path / "out", ranks, None, gpus)
    assert (plan.ranks, plan.device) == (expected, "cuda" if gpus else "cpu")
    commands = [list(map(str, command)) for command in plan.commands()[2:]]
    flags = [command[command.index("--model-family") :] for command in commands]
    phases = [parse(words, World(expected, expected)) for words in flags]
    assert len(phases) == len(plan.phase_ends) == (3 if expected > 1 else 2)
    assert all(phase.optimizer == phases[0].optimizer for phase in phases)
    assert {phase.training.train_iters for phase in phases} == {plan.iterations}
    assert [phase.training.exit_interval or plan.iterations for phase in phases] == plan.phase_ends
    # every phase evaluates at its end
    assert not any(end % phases[0].training.eval_interval for end in plan.phase_ends)
    assert {phase.checkpoint.load for phase in phases[1:]} == {phases[0].checkpoint.save}
    if expected > 1:
        assert len({(phase.parallel, phase.zero.zero_preset) for phase in phases}) == 3
        assert phases[2].parallel.pipeline_model_parallel_size == 2


@pytest.mark.parametrize(("wrong", "near"), [(0, "3"), (7, "6"), (8, "9")])
def test_iterations_are_whole_phases(tmp_path, wrong, near):
    with refused(f"--iterations {wrong}", f"nearest: {near}"):
        quickstart.make_plan(tmp_path / "out", 4, wrong, 0)


def test_nothing_of_another_folder_is_touched(tmp_path):
    with refused(f"--out {tmp_path}"):
        quickstart.make_plan(tmp_path, 4, None, 0)


def test_a_command_that_fails_ends_it(tmp_path):
    plan = quickstart.make_plan(tmp_path / "out", 4, 12, 0)
    with refused("megazero nope", "2", by=quickstart.StepFailed):
        plan.megazero(["nope"])
