"""The quickstart's decisions; the run itself is `make quickstart`."""

from __future__ import annotations

import pytest

from megazero.config import World, parse
from pretrain import quickstart
from tests.messages import names, refused


def training_flags(out, ranks, gpus):
    """The flags of every phase, as the commands are given them."""
    run = quickstart.Quickstart(out, quickstart.make_plan(ranks, None, gpus))
    phases = run.steps[3:-2]
    assert [step.end for step in phases] == [75] * (len(phases) - 1) + [0]  # the planned stops
    return [[*map(str, step.act[step.act.index("--model-family") :])] for step in phases]


@pytest.mark.parametrize(
    "ranks,gpus,expected", [(4, 0, 4), (4, 8, 4), (4, 3, 2), (4, 1, 1), (2, 0, 2), (1, 4, 1)]
)
def test_every_layout_is_legal(tmp_path, ranks, gpus, expected):
    plan = quickstart.make_plan(ranks, None, gpus)
    assert (plan.ranks, plan.device) == (expected, "cuda" if gpus else "cpu")
    phases = [parse(flags, World(expected, expected)) for flags in training_flags(tmp_path, ranks, gpus)]
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


def test_out_folder_belongs_to_one_plan(tmp_path):
    plan, other = (quickstart.make_plan(4, n, 0) for n in (12, 21))
    out = tmp_path / "out"
    quickstart.claim(out, plan, fresh=False)
    (out / "corpus.jsonl").write_text("x")
    quickstart.claim(out, plan, fresh=False)
    assert (out / "corpus.jsonl").exists()
    with refused("other settings", "--fresh"):
        quickstart.claim(out, other, fresh=False)
    quickstart.claim(out, other, fresh=True)
    assert not (out / "corpus.jsonl").exists()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("x")
    for fresh in (False, True):
        with refused(f"--out {foreign}", "no quickstart"):
            quickstart.claim(foreign, plan, fresh=fresh)
    assert (foreign / "thesis.tex").exists()
    with refused("--iterations 2", "nearest: 3"):
        quickstart.make_plan(4, 2, 0)


def test_failed_step_is_named_with_its_log(tmp_path, capfd):
    run = quickstart.Quickstart(tmp_path, quickstart.make_plan(4, 12, 0))
    run.steps = [quickstart.Step("tokens: a test", tmp_path / "absent", ["trian"])]
    with pytest.raises(quickstart.StepFailed) as failed:
        run.run()
    names(f"{failed.value}", "step 1 (tokens: a test)", "exit status 2", "1-tokens.log")
    assert "nearest: megazero train" in (tmp_path / "steps" / "1-tokens.log").read_text()
    assert "nearest: megazero train" in capfd.readouterr().out


def test_steps_that_are_done_are_left_alone(tmp_path, monkeypatch, capsys):
    run = quickstart.Quickstart(tmp_path, quickstart.make_plan(4, 12, 0))
    monkeypatch.setattr(run, "_summary", lambda: None)
    done, acted = tmp_path / "done", []
    done.touch()
    run.steps = [
        quickstart.Step("a", done, lambda: acted.append("a")),
        quickstart.Step("b", tmp_path / "no", lambda: acted.append("b")),
    ]
    run.run()
    assert acted == ["b"]
    assert "a (there already)" in capsys.readouterr().out
