"""--elastic: on another number of ranks the global batch stays; what changes is the nearest legal choice."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.checkpoint import directory, manifest, store
from megazero.checkpoint.placement import Placement
from megazero.checkpoint.records import SliceRecord
from megazero.config import ConfigError, RunConfig, World, begun, make_config, parse
from megazero.config.read.beginning import Beginning, checkpoint_to_load, read_beginning
from megazero.config.schedule.batch_sizes import BatchSizes, batch_steps
from megazero.train.state import origin
from tests.messages import names, refused
from tests.sizes import TINY, words

FOUR_LAYERS = {**TINY, "num_layers": 4, "elastic": True}


def configured(values: dict[str, Any], ranks: int, per_node: int | None = None) -> RunConfig:
    world = World(ranks, per_node or ranks)
    return begun(make_config({**FOUR_LAYERS, **values}, world), world)


# values over FOUR_LAYERS, ranks, the micro-batch that is taken, what the note says
CASES: list[tuple[dict[str, Any], int, int, str]] = [
    ({"micro_batch_size": 4}, 2, 4, ""),
    ({"micro_batch_size": 4}, 4, 2, "--micro-batch-size 2"),
    ({"micro_batch_size": 3, "global_batch_size": 24}, 4, 3, ""),
    ({"micro_batch_size": 5, "global_batch_size": 24}, 4, 3, "--micro-batch-size 3"),
    ({"micro_batch_size": 8, "tensor_model_parallel_size": 2}, 4, 4, "--micro-batch-size 4"),
    (
        {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2, "micro_batch_size": 2},
        8,
        1,
        "--micro-batch-size 1",
    ),
]


@pytest.mark.parametrize("values, ranks, wanted, said", CASES)
def test_the_nearest_legal_choice_is_taken_and_said(
    values: dict[str, Any], ranks: int, wanted: int, said: str
) -> None:
    config = configured(values, ranks)
    assert config.batch.micro_batch_size == wanted
    batch = {**FOUR_LAYERS, **values}["global_batch_size"]
    assert config.batch.global_batch_size == batch
    notes = [note for note in config.notes if note.startswith("--elastic")]
    assert len(notes) == bool(said)
    if said:
        names(notes[0], f"{batch} on {ranks} ranks", said)
        with refused(f"{batch} on {ranks} ranks", said, "--elastic"):
            configured({**values, "elastic": False}, ranks)


MIXTURE = {"num_experts": 4, "moe_aux_loss_coeff": 0.1, "micro_batch_size": 4}


def test_a_loss_over_micro_batches_keeps_them() -> None:
    """A smaller micro-batch is another loss."""
    for other in ({"moe_router_load_balancing_type": "seq_aux_loss"}, {"moe_aux_loss_coeff": 0.0}):
        assert configured({**MIXTURE, **other}, 4).batch.micro_batch_size == 2
    even = {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0, "moe_router_topk": 1}
    for other in ({}, {"moe_router_load_balancing_type": "global_aux_loss"}, even):
        with refused("--global-batch-size 8", "--micro-batch-size 4 stays", "seq_aux_loss"):
            configured({**MIXTURE, **other}, 4)


def test_only_what_does_not_divide_is_said_to_be_elastics() -> None:
    """Errors of shards and lifetimes name their own nearest choice, whatever --elastic would make of them."""
    shards = {"zero_preset": "mics", "elastic": False}
    with pytest.raises(ConfigError, match="nearest legal preset: zero3$"):
        configured(shards, 2, per_node=1)
    alone = {"pipeline_model_parallel_size": 4, "zero_params_lifetime": "gathered", "zero_preset": "zero3"}
    with pytest.raises(ConfigError, match="nearest legal: resident$"):
        configured({**alone, "elastic": False}, 4)
    with pytest.raises(ConfigError) as error:
        configured({**shards, "micro_batch_size": 8}, 2, per_node=1)
    of_shards, of_batch = error.value.errors
    assert of_shards.endswith("nearest legal preset: zero3")
    assert of_batch.endswith(
        "to keep the global batch of 8 on 2 ranks: --micro-batch-size 4, as --elastic does"
    )


def test_what_no_layout_keeps_stays_an_error() -> None:
    with refused("--global-batch-size 8"):
        configured({}, 11)
    for of_batch in ({}, {"global_batch_size": None}):
        with refused("3 ranks", "tensor-parallel size 2"):
            configured({"tensor_model_parallel_size": 2, **of_batch}, 3)
    with pytest.raises(ConfigError) as error:
        configured({"lr": None, "micro_batch_size": 4}, 4)
    assert "--lr is required" in f"{error.value}" and "as --elastic does" not in f"{error.value}"


def test_a_ramp_up_takes_what_divides_every_size_to_come(tmp_path: Path) -> None:
    def micro(values: dict[str, Any]) -> int | None:
        return configured(values, 2).batch.micro_batch_size

    ramp = {"rampup_batch_size": (8, 4, 32), "global_batch_size": 16, "micro_batch_size": 4}
    assert micro(ramp) == 2  # 8, 12, 16
    assert micro({**ramp, "elastic": False}) == 4  # stops before the 12
    saved(tmp_path, consumed=32, batch=16)
    assert micro({**ramp, "load": str(tmp_path)}) == 4
    # 6, 7, 8, ...: no micro-batch on two ranks has them all, so that of now; the run stops before the 7
    odd = {"rampup_batch_size": (6, 1, 32), "global_batch_size": 8, "micro_batch_size": 4}
    assert micro(odd) == 1
    assert BatchSizes(batch_steps(None, (8, 4, 32), 16, 1), 1, 1).sizes_from(17) == [12, 16]


def test_where_a_ramp_up_goes_on_is_read_from_one_state_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "check_sizes", lambda *_: pytest.fail("it looked at every file"))
    assert directory.latest(tmp_path, look=directory.described) is None
    monkeypatch.undo()
    saved(tmp_path, consumed=0, batch=16, step=120)
    saved(tmp_path, consumed=32, batch=16, step=90)  # since: the run was taken back
    monkeypatch.setattr(manifest, "check_sizes", lambda *_: pytest.fail("it looked at every file"))
    newest = directory.latest(tmp_path, look=directory.described)
    assert newest is not None and directory.stated(newest) == {"consumed_samples": 32}
    (tmp_path / "iter_0000090" / "state.json").write_text("{")
    ramp = {"rampup_batch_size": (8, 4, 32), "global_batch_size": 16, "load": str(tmp_path)}
    with pytest.raises(
        ConfigError, match=r"--load .*iter_0000090/state.json' cannot be read .*load an older"
    ):
        configured(ramp, 2)


def test_the_trial_of_a_killed_start_is_no_checkpoint_that_lies_elsewhere(tmp_path: Path) -> None:
    saved(tmp_path / ".trial", consumed=0, batch=16, step=0)
    assert not list(origin._elsewhere(tmp_path))
    saved(tmp_path / "other", consumed=0, batch=16, step=0)
    assert "name " in next(origin._elsewhere(tmp_path))


@pytest.mark.parametrize("how", [{}, {"ckpt_step": 3}])
def test_a_command_with_another_rate_goes_on_unless_it_names_a_checkpoint(
    tmp_path: Path, how: dict[str, int]
) -> None:
    saved(tmp_path / "a", consumed=0, batch=16)
    command = {"load": str(tmp_path / "a"), "save": str(tmp_path / "b"), **how}
    began = begun(make_config({**TINY, **command}, World(2, 2)))
    record = SliceRecord(Placement.plain("w", (2,)), 0, 2, {"weights": torch.zeros(2)})
    store.save(tmp_path / "b", store.Snapshot(5, [record], {}, configuration=began.to_dict()))
    values = {**began.values(), **command}
    assert checkpoint_to_load(values).again
    assert checkpoint_to_load({**values, "lr": 0.5}).again == (not how)


def test_ranks_that_are_told_read_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank reads each manifest once; the others have its configuration all the same, notes and all."""
    world, sizes = World(2, 2), ("num_layers", "hidden_size", "ffn_hidden_size", "vocab_size")
    began = make_config({**FOUR_LAYERS, "save": str(tmp_path)}, world)
    record = SliceRecord(Placement.plain("w", (2,)), 0, 2, {"weights": torch.zeros(2)})
    for step in (1, 2, 3):
        store.save(tmp_path, store.Snapshot(step, [record], {}, configuration=began.to_dict()))
    given = {name: value for name, value in FOUR_LAYERS.items() if name not in sizes}
    argv = words({**given, "lr": 0.5, "load": str(tmp_path), "save": str(tmp_path)})
    reads, text = list[Path](), manifest.read_bytes
    monkeypatch.setattr(manifest, "read_bytes", lambda file: reads.append(file) or text(file))
    monkeypatch.setattr(manifest, "_SETTLED_S", -1.0)  # these are young
    first, other = parse(argv, world), parse(argv, world)  # enough to meet the other ranks
    assert not reads and first == other
    beginning = read_beginning(first.values())
    config = begun(first, world, beginning)
    assert config.model == began.model and [file.name for file in reads] == [manifest.MANIFEST_FILE] * 3
    assert (other.training, other.checkpoint) == (config.training, config.checkpoint)
    assert beginning.path == tmp_path / "iter_0000003" and begun(config, world) is config
    again = begun(other, world, Beginning.of(beginning.told))
    assert again == config and again.notes == config.notes and any("schedule" in note for note in again.notes)
    assert len(reads) == 3


def test_a_rank_that_is_not_told_finds_mistakes_of_its_own_words() -> None:
    world = World(2, 2)
    with pytest.raises(ConfigError, match="--hidden-sise does not exist"):
        parse([*words(FOUR_LAYERS), "--load", "x", "--hidden-sise", "3"], world)
    with pytest.raises(ConfigError, match="num-attention-heads"):  # no folder could mend that
        parse([*words(FOUR_LAYERS), "--num-attention-heads", "7"], world)


def test_what_lies_in_the_folder_of_a_run_from_elsewhere_is_left_behind(tmp_path: Path) -> None:
    for root, step in ((tmp_path / "b", 2), (tmp_path / "a", 3), (tmp_path / "b", 4)):
        saved(root, consumed=0, batch=16, step=step)
    gone = directory.supersede(tmp_path / "b", directory.latest(tmp_path / "a") or tmp_path)
    assert sorted(path.name for path in gone) == ["iter_0000002.superseded", "iter_0000004.superseded"]
    assert directory.latest(tmp_path / "b") is None


@pytest.mark.parametrize(
    "change, why",
    [
        ({"iteration": -5}, "iteration is -5, and the checkpoint is of iteration 3"),
        ({"iteration": 4}, "iteration is 4, and the checkpoint is of iteration 3"),
        ({"consumed_samples": -1}, "consumed_samples is -1, and a count is"),
        ({"consumed_samples": "8"}, "consumed_samples is '8'"),
        ({"tokens": math.nan}, "tokens is nan"),
        ({"optimizer": {"step": -3.0}}, "optimizer step is -3.0"),
        ({"loss_scaling": {"scale": 0.0}}, "the loss scale is 0.0"),
        ({"loss_scaling": {"scale": math.inf}}, "the loss scale is inf"),
        ({"loss_scaling": {"growth_tracker": -1}}, "loss_scaling growth_tracker is -1"),
        ({"left_out": [{"first": 1, "last": 2, "begin": -8, "end": 8}]}, "left_out begin is -8"),
    ],
)
def test_numbers_that_no_run_writes_are_refused(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    state = {"iteration": 3, "consumed_samples": 24, "run_id": "", **change}
    record = SliceRecord(Placement.plain("w", (2,)), 0, 2, {"weights": torch.zeros(2)})
    path = store.save(tmp_path, store.Snapshot(3, [record], state))
    with pytest.raises(store.CheckpointError, match=f"in its state {re.escape(why)}.*load an older"):
        origin._opened(path)


def saved(root: Path, consumed: int, batch: int, model: dict[str, Any] | None = None, step: int = 3) -> None:
    """A checkpoint that says no more than this of its run."""
    record = SliceRecord(Placement.plain("w", (2,)), 0, 2, {"weights": torch.zeros(2)})
    state = {"consumed_samples": consumed}
    configuration = {"batch": {"global_batch_size": batch}, "model": model or {}}
    store.save(root, store.Snapshot(step, [record], state, configuration=configuration))


def test_a_batch_that_is_not_said_is_the_checkpoints(tmp_path: Path) -> None:
    saved(tmp_path, 0, batch=8)
    resumed = {"global_batch_size": None, "load": str(tmp_path)}
    config = configured(resumed, 2)
    assert config.batch.global_batch_size == 8
    assert any("the global batch is 8, as in the checkpoint" in note for note in config.notes)
    rigid = {**resumed, "elastic": False}
    assert configured({**rigid, "micro_batch_size": 4}, 2).batch.global_batch_size == 8
    with pytest.raises(
        ConfigError, match="would be 2 = 1 x 2 ranks x 1, but is 8 in the checkpoint"
    ) as error:
        configured(rigid, 2)
    assert "add --global-batch-size 8 to keep it" in f"{error.value}"
    assert configured({**rigid, "finetune": True}, 2).batch.global_batch_size == 2
    assert replace(config.batch, elastic=False) == configured({**rigid, "global_batch_size": 8}, 2).batch


def test_an_option_younger_than_the_checkpoint_is_protected_at_its_default(tmp_path: Path) -> None:
    """Trained before there was --rotary-percent: with another than its default it would be another model."""
    now = make_config(TINY).to_dict()["model"]
    model = {name: value for name, value in now.items() if name not in ("rotary_percent", "qk_norm")}
    saved(tmp_path, 0, batch=8, model=model)
    resumed = {**TINY, "load": str(tmp_path)}
    assert begun(make_config({**resumed, "rotary_percent": 1.0})).model.rotary_percent == 1.0
    with pytest.raises(
        ConfigError, match="--rotary-percent 0.5 is not the model .* which has --rotary-percent 1"
    ):
        begun(make_config({**resumed, "rotary_percent": 0.5}))
