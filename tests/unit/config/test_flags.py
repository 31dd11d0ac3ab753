"""Flags and YAML files: what they mean, what they refuse, who wins."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megazero.checkpoint.manifest import Manifest, write_manifest
from megazero.config import ConfigError, RunConfig, make_config, parse
from megazero.config.__main__ import main as show_config
from megazero.config.foreign.megatron import flags
from megazero.config.model.section import ModelConfig
from megazero.config.model.spec import parameter_count
from megazero.config.options.fields import section_of
from megazero.config.read.sources import all_switches
from megazero.config.run import REMOVED, all_options, stored_values
from megazero.config.summary import describe
from megazero.families import FAMILIES
from megazero.plan.options import with_stand_ins
from megazero.train.data.datasets import tokenizer_info, with_vocabulary
from tests import ROOT, sizes
from tests.messages import names
from tests.unit.config.command_lines import BASE, WORLD, deepspeed, errors, run, write
from tools.flags_page import markdown


def test_values_of_every_kind():
    config = run(
        "--tensor-model-parallel-size=2 --bf16 --adam-beta2 .95 --zero-shard 2,2,4 --wandb-project c"
    )
    assert config.parallel.tensor_model_parallel_size == 2
    assert config.precision.params_dtype == "bf16"
    assert config.optimizer.adam_beta2 == 0.95
    assert config.zero.zero_shard == (2, 2, 4)
    assert run("--rampup-batch-size 16 16 9_600 --global-batch-size 64").batch.rampup_batch_size == (
        16,
        16,
        9600,
    )
    blend = parse(
        [*[w for w in BASE if w != "--mock-data"], "--data-path", "0.3", "a", "0.7", "b"], WORLD
    ).data
    assert blend.data_path == ("0.3", "a", "0.7", "b")


def test_families_and_booleans_both_ways():
    assert run().model.normalization == "RMSNorm" and run().model.swiglu
    gpt = run("--model-family gpt --untie-embeddings-and-output-weights").model
    assert gpt.position_embedding_type == "learned_absolute" and gpt.add_bias_linear
    assert gpt.untie_embeddings_and_output_weights
    assert not run("--model-family gpt --disable-bias-linear").model.add_bias_linear
    qwen = run("--model-family qwen2").model
    assert qwen.qkv_bias and not qwen.add_bias_linear and not run().model.qkv_bias
    assert not run("--model-family qwen2 --no-add-qkv-bias").model.qkv_bias
    assert run("--model-family gpt --disable-bias-linear --add-qkv-bias").model.qkv_bias
    assert run("--model-family gpt").model.qkv_bias and run("--add-qkv-bias").model.qkv_bias
    assert run().model.ffn_hidden_size == 192 and run("--no-swiglu").model.ffn_hidden_size == 256
    assert run("--use-rope-scaling --rope-scaling-factor 4").model.rotary_scaling_factor == 4.0
    config = run("--load x --no-load-optim --no-load-rng")
    assert not config.checkpoint.load_optim and not config.checkpoint.load_rng


def test_a_repeated_flag_wins_and_is_noted():
    config = run("--seed 1 --seed 2")
    assert config.training.seed == 2
    assert "--seed 2 replaces the earlier 1" in config.notes


def test_all_faults_at_once_with_the_nearest_flag():
    found = errors(
        "--num-layrs 3 --nope --lr x --fp16-lm-cross-entropy --swiglu 3 --seed --clip-grad 1 2 --zero-preset zeroo3"
    )
    assert "--num-layrs does not exist; nearest: --num-layers" in found
    assert any(line.startswith("--nope does not exist") for line in found)
    assert "--lr takes a number, got 'x'" in found
    assert any(
        line.startswith("--fp16-lm-cross-entropy is Megatron's flag, not built here:") for line in found
    )
    assert "--swiglu takes no value, got 3" in found
    assert any(line.startswith("--seed takes one value, got none") for line in found)
    assert "--clip-grad takes one value, got 1 2" in found
    assert (
        "--zero-preset zeroo3 is not one of" in found[-1] and "nearest: zero3" in found[-1]
    )  # after the flags
    assert len(found) == 8


@pytest.mark.parametrize(
    "words", [["--lr"], ["--lr", ""], ["--lr="], ["--save", ""], ["--tensorboard-queue-size"]]
)
def test_an_empty_variable_of_a_script_is_looked_for(words):
    with pytest.raises(ConfigError) as caught:
        parse([*BASE, *words, "--bf16"], WORLD)
    flag = words[0].removesuffix("=")
    (line,) = [line for line in caught.value.errors if line.startswith(f"{flag} takes")]
    assert "got none" in line and f"{flag} ${flag.strip('-').replace('-', '_').upper()}" in line


def test_fp16_and_its_loss_scale():
    precision = run("--fp16").precision
    assert precision.params_dtype == "fp16" and precision.loss_scale is None
    assert (precision.initial_loss_scale, precision.min_loss_scale) == (2.0**32, 1.0)
    assert (precision.loss_scale_window, precision.hysteresis) == (1000, 2)  # Megatron's
    given = run(
        "--fp16 --initial-loss-scale 65536 --min-loss-scale .5 --loss-scale-window 200 --hysteresis 1"
    )
    assert given.precision.initial_loss_scale == 65536 and given.precision.min_loss_scale == 0.5
    assert given.precision.loss_scale_window == 200 and given.precision.hysteresis == 1
    assert run("--fp16 --loss-scale 8192").precision.loss_scale == 8192
    assert errors("--fp16 --bf16") == ("--bf16 and --fp16 exclude each other; leave one out",)
    assert errors("--fp16 --min-loss-scale 8 --initial-loss-scale 4") == (
        "--min-loss-scale 8 exceeds --initial-loss-scale 4; nearest: 4",
    )
    assert (
        len(errors("--fp16 --hysteresis 0 --loss-scale-window 0 --loss-scale -1 --initial-loss-scale 1e39"))
        == 4
    )


def test_stray_words_and_single_dashes():
    with pytest.raises(ConfigError, match="'word' does not belong to a flag"):
        parse(["word", *BASE])
    assert "nearest" in errors("-seed 3")[0]


def test_names_do_not_collide():
    own = set(all_switches())
    assert not own & {*flags(), "help", "config", "deepspeed-config"}
    spelled = [opt.key for opt in all_options().values()]
    spelled += [opt.negative_key for opt in all_options().values() if opt.kind == "bool" or opt.may_be_none]
    spelled += [key for opt in all_options().values() for key in (*opt.consts, *opt.aliases)]
    assert sorted(spelled) == sorted(own)


def test_yaml_flat_or_by_section_and_flags_override(tmp_path):
    path = write(
        tmp_path,
        "run.yaml",
        "model: {num-layers: 6, swiglu: false, hidden_size: 128}\nbf16: true\nadam_eps: 1e-6\n"
        "zero-preset: hpz\nno-load-rng: true\nload: x\nsplit: '9,1,0'\noverlap-grad-reduce: true\nsave: null\n",
    )
    config = run(f"--config {path} --zero-shard 2,2,2")
    assert config.model.num_layers == 4 and config.model.hidden_size == 64  # the flags of BASE
    assert config.model.swiglu is False and config.precision.params_dtype == "bf16"
    assert config.optimizer.adam_eps == 1e-6 and not config.checkpoint.load_rng
    assert config.zero.zero_shard == (2, 2, 2) and config.zero.zero_preset is None
    assert f"num-layers 4 from flags overrides num-layers 6 from {path}" in config.notes
    assert f"zero-shard 2,2,2 from flags overrides zero-preset hpz from {path}" in config.notes


def test_yaml_faults(tmp_path):
    path = write(
        tmp_path,
        "bad.yaml",
        "modle: {}\nmodel: {num-layrs: 3, lr: 1}\nseed: yes\nseed: 2\nsplit: 9:1\nbf16: false\nfp8-margin: 1\n",
    )
    found = "\n".join(errors(f"--config {path}"))
    for part in (
        f"{path}: modle does not exist; nearest",
        "model.num-layrs does not exist; nearest: ",
        "model.lr belongs to section optimizer",
        "seed stands there twice",
        "split takes text",
        "bf16 takes only true",
        "fp8-margin is Megatron's flag, not built here",
    ):
        assert part in found, part
    assert "cannot be read" in errors("--config /nowhere.yaml")[0]
    assert "is not YAML" in errors(f"--config {write(tmp_path, 'x.yaml', 'a: [')}")[0]
    assert "not a mapping" in errors(f"--config {write(tmp_path, 'y.yaml', '[1]')}")[0]
    assert "takes one file" in errors("--config")[0]
    assert "stands once" in errors(f"--config {tmp_path / 'x.yaml'} --config {path}")[-1]


def test_yaml_beats_deepspeed_and_says_so(tmp_path):
    yaml = write(tmp_path, "run.yaml", "weight-decay: 2.0\nzero-preset: mics\n")
    config = run(
        deepspeed(tmp_path, {"gradient_clipping": 0.5, "zero_optimization": {"stage": 2}})
        + f" --config {yaml}"
    )
    assert config.optimizer.weight_decay == 2.0 and config.zero.zero_preset == "mics"
    assert any("zero-preset mics" in note and "overrides zero-stage 2" in note for note in config.notes)


def test_round_trip_and_reuse_as_yaml(tmp_path):
    config = run(
        "--model-family gpt --zero-shard 2,2,4 --tensor-model-parallel-size 2 --lr-warmup-fraction 0.1"
    )
    stored = json.loads(json.dumps(config.to_dict()))
    assert RunConfig.of(stored_values(stored)) == config
    path = write(tmp_path, "saved.yaml", json.dumps(stored))  # JSON is YAML
    assert parse(["--config", path], WORLD) == config
    stored["model"]["num_layer"], stored["modle"] = 3, {}
    stored["batch"]["micro_batch_size"] = "two"
    with pytest.raises(ConfigError) as caught:
        stored_values(stored)
    assert len(caught.value.errors) == 3
    del stored["modle"], stored["batch"], stored["model"]["num_layer"]
    stored["model"] |= {"hidden_size": None, "num_layers": None}  # as in a damaged file
    with pytest.raises(ConfigError, match="--num-layers is required\n.*--hidden-size is required"):
        section_of(ModelConfig, stored_values(stored))


def test_stage_0_in_bf16_shards_states_as_deepspeed_does():
    sharded = run("--zero-stage 0 --bf16")
    assert sharded.zero.zero_preset == "zero1" and any("--zero-stage 0" in note for note in sharded.notes)
    assert (
        run("--zero-stage 0").zero.zero_preset
        == run("--zero-stage 0 --bf16 --zero-preset ddp").zero.zero_preset
    )
    assert run("--zero-stage 0 --fp16").zero.zero_preset == "ddp"


def test_what_is_chosen_is_described_alone():
    config = run("--seed 7 --zero-preset hpz --weight-decay 0.01")
    lines = [line for line in describe(config, WORLD) if not line.startswith(("decoder", "note"))]
    shown = {
        word.split("=")[0] for line in lines for word in line.split() if "=" in word and "P,G,OS" not in word
    }
    family = FAMILIES[config.model.model_family].defaults
    assert {"seed", "zero-preset"} <= shown and not {"weight-decay", "swiglu", "adam-beta1"} & shown
    for name in shown & {option.key for option in all_options().values()}:
        option = all_options()[name.replace("-", "_")]
        assert config.get(option.name) != family.get(option.name, option.default), name
    heads = {line.split()[0] for line in lines}
    assert "training" in heads and "profiling" not in heads  # of which nothing was chosen
    assert any("P,G,OS = 4,8,8" in line for line in lines)


def test_the_check_knows_the_ranks_that_are_to_be_started():
    words = [sys.executable, "-m", "megazero.config", "--nproc-per-node", "2", *BASE]
    out = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
    assert "layout     2 ranks, 2 per node" in out.stdout


@pytest.mark.parametrize("flags,status", [(["--help"], 0), (BASE, 0), (["--num-layrs", "2"], 2)])
def test_command_line_status(flags, status):
    begin = time.perf_counter()
    out = subprocess.run(
        [sys.executable, "-m", "megazero.config", *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    print(f"{flags[0]}: {time.perf_counter() - begin:.2f} s including the interpreter's start (aim: 0.5)")
    assert out.returncode == status
    if status:
        assert "nearest: --num-layers" in out.stderr and not out.stdout
    elif flags == ["--help"]:
        assert all(f"--{key}" in out.stdout for key in all_switches())


def test_flags_page_is_current():
    page = (ROOT / "docs" / "reference" / "flags.md").read_text()
    assert page == markdown(), "run: python tools/flags_page.py > docs/reference/flags.md"


def test_saves_that_come_only_at_the_end_are_said():
    for more, said in (({}, False), ({"save": "c"}, True), ({"save": "c", "save_interval": 9}, False)):
        notes = make_config({**sizes.SMALL, **more}).notes
        assert any("saved only at the end and at planned stops" in note for note in notes) == said


@pytest.mark.parametrize("words, vocabulary", [("--tokenizer-type NullTokenizer", 101), ("", 100)])
def test_the_vocabulary_shown_and_planned_is_that_of_the_run(words, vocabulary, monkeypatch, capsys):
    """A null tokenizer has the end of document beyond --vocab-size, as in Megatron."""
    config = run(words)
    trained = with_vocabulary(config, tokenizer_info(config)).model
    assert trained.vocab_size == vocabulary
    monkeypatch.setattr(sys, "argv", ["config", *BASE, *words.split()])
    assert show_config() == 0
    shown = capsys.readouterr().out
    assert f"vocabulary {vocabulary}" in shown and f"{parameter_count(trained):,} parameters" in shown
    said = {"vocab_size": 100, "tokenizer_type": config.data.tokenizer_type}
    assert with_stand_ins(said)["vocab_size"] == vocabulary


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_option_is_refused_with_its_cure_and_off_it_is_nothing(name, tmp_path):
    """Files of earlier versions have every option, on the command line and in a checkpoint."""
    removed, key = REMOVED[name], name.replace("_", "-")
    for words in (f"--{key} on", f"--config {write(tmp_path, 'on.yaml', f'{name}: on-it-was')}"):
        (line,) = errors(words)
        names(line, key, removed.cure)
    off = write(tmp_path, "off.yaml", f"{name}: {removed.off}")
    assert run(f"--config {off}") == run(f"--no-{key}") == run()
    stored = run().to_dict()
    stored["zero"][name] = "on-it-was"
    assert RunConfig.of(stored_values(stored)) == run()
    (folder := Path(tmp_path, "iter_0000001")).mkdir()
    write_manifest(folder, Manifest(1, 0, 1, {}, {}, stored, {}))
    (note,) = [note for note in run(f"--load {folder.parent}").notes if removed.cure in note]
    names(note, f"{name} on-it-was")
