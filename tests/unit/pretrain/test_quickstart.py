"""The quickstart's decisions; the run itself is `make quickstart`."""

from __future__ import annotations

import pytest

from megazero.config import World, parse
from pretrain import quickstart


def training_flags(monkeypatch, out, ranks, gpus):
    """The flags of every phase, as the commands are given them."""
    seen = []

    def run_shown(command, log, environ):
        seen.append(command)
        return 75 if "--exit-interval" in command else 0  # the phase's planned stop

    monkeypatch.setattr(quickstart, "run_shown", run_shown)
    run = quickstart.Quickstart(out, quickstart.make_plan(ranks, None, gpus))
    for step in run.steps[3:-2]:
        step.act(out / "log")
    return [command[command.index("--model-family") :] for command in seen]


@pytest.mark.parametrize(
    "ranks,gpus,expected", [(4, 0, 4), (4, 8, 4), (4, 3, 2), (4, 1, 1), (2, 0, 2), (1, 4, 1)]
)
def test_every_layout_is_legal(monkeypatch, tmp_path, ranks, gpus, expected):
    plan = quickstart.make_plan(ranks, None, gpus)
    assert (plan.ranks, plan.device) == (expected, "cuda" if gpus else "cpu")
    phases = [parse(flags, World(expected, expected)) for flags in
            training_flags(monkeypatch, tmp_path, ranks, gpus)]  # fmt: skip
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
    with pytest.raises(ValueError, match="other settings.*--fresh"):
        quickstart.claim(out, other, fresh=False)
    quickstart.claim(out, other, fresh=True)
    assert not (out / "corpus.jsonl").exists()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("x")
    for fresh in (False, True):
        with pytest.raises(ValueError, match="no quickstart"):
            quickstart.claim(foreign, plan, fresh=fresh)
    assert (foreign / "thesis.tex").exists()
    for wrong, near in ((0, 3), (7, 6), (8, 9)):
        with pytest.raises(ValueError, match=f"--iterations {wrong} .* nearest: {near}$"):
            quickstart.make_plan(4, wrong, 0)


def test_failed_step_is_named_with_its_log(tmp_path, capfd):
    run = quickstart.Quickstart(tmp_path, quickstart.make_plan(4, 12, 0))
    code = "import sys; print('the cause'); sys.exit(3)"
    run.steps = [
        quickstart.Step("tokens: a test", tmp_path / "absent", lambda log: run._python(["-c", code], log))
    ]
    with pytest.raises(
        quickstart.StepFailed, match=r"step 1 \(tokens: a test\) failed: exit status 3.*1-tokens.log"
    ):
        run.run()
    assert (tmp_path / "steps" / "1-tokens.log").read_text() == "the cause\n"
    assert "the cause" in capfd.readouterr().out


def test_steps_that_are_done_are_left_alone(tmp_path, monkeypatch, capsys):
    run = quickstart.Quickstart(tmp_path, quickstart.make_plan(4, 12, 0))
    monkeypatch.setattr(run, "_summary", lambda: None)
    done, acted = tmp_path / "done", []
    done.touch()
    run.steps = [
        quickstart.Step("a", done, acted.append),
        quickstart.Step("b", tmp_path / "no", acted.append),
    ]
    run.run()
    assert [log.name for log in acted] == ["2-b.log"]
    assert "a (there already)" in capsys.readouterr().out
