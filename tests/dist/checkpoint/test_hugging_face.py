"""A run starts from a Hugging Face folder on any layout, and writes one when it is over."""

from __future__ import annotations

import io
from contextlib import ExitStack, redirect_stdout
from functools import cache

import pytest
import torch
import torch.distributed as dist

from benchmarks.steps import held_bytes
from megazero.checkpoint import store
from megazero.config import ConfigError, World, begun, make_config
from megazero.convert.export import finish, write_folder
from megazero.convert.importing import Published, write_checkpoint
from megazero.convert.source import Source
from megazero.mesh.launch import Launch
from megazero.train import setup
from tests.dist.pool import run_ranks
from tests.dist.runs import refusals
from tests.family_models import save
from tests.hugging_face import save_model, weights_digest
from tests.messages import refused
from tests.sizes import TINY

# What a folder decides is not said; the order of samples and the length of the run are the run's own.
RUN = {
    name: TINY[name] for name in ("seq_length", "micro_batch_size", "global_batch_size", "lr", "mock_data")
}
RUN |= {"train_iters": 2, "eval_iters": 1, "device": "cpu", "make_vocab_size_divisible_by": 2}
ZERO3 = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "zero_preset": "zero3"}
SMALL = {"zero_exact_numel": 64, "zero_block_size": 8}  # else nothing of so small a model is quantised
FUSED, EXPERTS = "falcon-40b", "qwen3_moe"
LAYOUTS = {
    "one rank": ("llama", 1, {}),
    "TP 2 x DP 2, zero3": ("llama", 4, ZERO3),
    "DP 4, hpz": ("llama", 4, {"zero_preset": "hpz", "ranks_per_node": 2}),
    "DP 4, zeropp": ("llama", 4, {"zero_preset": "zeropp", "ranks_per_node": 2, **SMALL}),
    "one rank, tied": ("gpt2", 1, {}),
    "PP 2 x DP 2, tied": ("gpt2", 4, {"pipeline_model_parallel_size": 2, "zero_preset": "zero2"}),
    "one rank, fused rows": (FUSED, 1, {}),
    "TP 2 x DP 2, fused rows": (FUSED, 4, ZERO3),
    "one rank, experts": (EXPERTS, 1, {}),
    "TP 2 x DP 2, experts over TP": (EXPERTS, 4, {**ZERO3, "expert_model_parallel_size": 2}),
    "EP 2, zeropp": (
        EXPERTS,
        4,
        {"expert_model_parallel_size": 2, "zero_preset": "zeropp", "ranks_per_node": 2, **SMALL},
    ),
}
ALWAYS = ("one rank", "TP 2 x DP 2, zero3", "EP 2, zeropp")
EVERY = [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.slow) for name in LAYOUTS]


def begin(values):
    """Load, save and evaluate before any training: (loss, bytes held, notes)."""
    world = dist.get_world_size()
    config = make_config({**RUN, **values}, World(world, world))
    with ExitStack() as stack, redirect_stdout(io.StringIO()):
        run = setup.prepare(config, Launch(dist.get_rank(), world, local_world_size=world), stack)
        run.engine.optimizer.ensure_state()  # which a run from random weights makes in its first step
        held = held_bytes(run.engine)
        if config.checkpoint.save:
            run.checkpointing.save(run.progress)
        run._evaluate("valid")
    return run.progress.losses["eval_lm_loss"], held, run.config.notes


def train(values):
    """A whole run."""
    world = dist.get_world_size()
    config = make_config({**RUN, **values}, World(world, world))
    with ExitStack() as stack, redirect_stdout(io.StringIO()):
        setup.prepare(config, Launch(dist.get_rank(), world, local_world_size=world), stack).run()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("published")
    made = {kind: save_model(root / kind, kind) for kind in ("llama", "gpt2")}
    return {**made, **{kind: save(kind, root / kind) for kind in (FUSED, EXPERTS)}}


@pytest.fixture(scope="module")
def began(folders, tmp_path_factory):
    """What a layout began with, by its name: the folder of its checkpoints, and what its ranks saw."""
    root = tmp_path_factory.mktemp("runs")

    @cache
    def begin_on(name):
        kind, world, layout = LAYOUTS[name]
        values = {"load": f"hf:{folders[kind]}", **layout, "log_dir": str(root / "logs")}
        return root / name, run_ranks(world, begin, {**values, "save": str(root / name)}, timeout=120)

    return begin_on


@pytest.mark.parametrize("name", EVERY)
def test_every_layout_begins_with_the_folders_weights(name, folders, began):
    root, seen = began(name)
    kind = LAYOUTS[name][0]
    published = Published.open(folders[kind])
    loaded = store.load_full(store.latest(root))
    assert loaded.keys() == published.names.keys()
    for stored in published.names:
        assert torch.equal(loaded[stored], published.tensor(stored)), stored
    alone = next(each for each, (of, world, _) in LAYOUTS.items() if (of, world) == (kind, 1))
    (reference, _, notes), *_ = began(alone)[1]
    assert all(loss == pytest.approx(reference, rel=1e-6) for loss, _, _ in seen)
    assert any("optimizer states" in note and "start fresh" in note for note in notes)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["TP 2 x DP 2, zero3", "DP 4, zeropp"])
def test_a_rank_holds_no_more_than_a_run_from_random_weights(name, began, tmp_path):
    kind, world, layout = LAYOUTS[name]
    sizes = {"model_family": "llama", "num_layers": 2, "hidden_size": 32, "num_attention_heads": 8}
    sizes |= {"num_query_groups": 4, "ffn_hidden_size": 48, "vocab_size": 51}
    fresh = run_ranks(world, begin, {**sizes, **layout, "log_dir": str(tmp_path)})
    assert [held for _, held, _ in began(name)[1]] == [held for _, held, _ in fresh]


@pytest.mark.parametrize("name", EVERY)
def test_exports_of_every_layout_are_the_same_bytes(name, folders, began, tmp_path):
    published = Published.open(folders[LAYOUTS[name][0]])
    imported = write_checkpoint(published, tmp_path / "imported", published.of_model)
    wanted = export(imported, tmp_path / "out of imported")
    assert export(store.latest(began(name)[0]), tmp_path / "out") == wanted


def export(path, folder):
    return weights_digest(finish(write_folder(Source(path), folder, shard_bytes=20_000)))


def model_of(folders):
    """The model's flags, for a run that continues the checkpoint."""
    from megazero.convert.card import run_options

    options = run_options(folders["llama"])
    return {name: value for name, value in options.items() if value is not None and name != "seq_length"}


def test_what_cannot_be_loaded_is_one_error_on_every_rank(folders, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in folders["llama"].iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    first = sorted(broken.glob("*.safetensors"))[0]
    first.write_bytes(first.read_bytes()[:-5])
    values = {"load": f"hf:{broken}", **model_of(folders)}
    for (said,) in run_ranks(2, refusals, [values]):
        assert "CheckpointError" in said and "no whole safetensors file" in said


def test_flags_that_are_another_model_are_errors_at_once(folders):
    with pytest.raises(ConfigError) as caught:
        begun(make_config({**RUN, "load": f"hf:{folders['llama']}", "hidden_size": 64, "num_layers": 3}))
    text = str(caught.value)
    assert "--hidden-size 64 is not the model" in text and "--num-layers 3 is not the model" in text
    config = begun(make_config({**RUN, "load": f"hf:{folders['llama']}", "load_optim": False}))
    assert any("--no-load-optim has no effect" in note for note in config.notes), config.notes
    longer = begun(
        make_config({**RUN, "load": f"hf:{folders['llama']}", "rotary_base": 5e5})
    )  # as with --finetune
    assert longer.model.rotary_base == 5e5
    assert any("--rotary-base 500000 replaces --rotary-base 10000" in note for note in longer.notes)
    with refused("/nowhere/config.json", by=ConfigError):
        begun(make_config({**RUN, "load": "hf:/nowhere"}))
