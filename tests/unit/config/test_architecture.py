"""A run that continues a checkpoint takes the architecture from it; what is said otherwise is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from megazero.checkpoint.manifest import Manifest, write_manifest
from megazero.comm.wire import Coding
from megazero.config import ConfigError, RunConfig, World, begun, parse
from megazero.config.model.architecture import from_hf_config, is_architecture
from megazero.config.model.loaded import SHAPELESS
from megazero.config.model.section import ModelConfig
from megazero.config.options.fields import Option, typed
from megazero.config.run import all_options, stored_values
from megazero.families import FAMILIES
from megazero.mesh.levels import INTER
from tests.sizes import CONFIG_JSON

REST = "--seq-length 16 --micro-batch-size 1 --lr 1e-3 --train-iters 4 --mock-data"
MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 51"
# What a Llama-like model says beside its sizes, each other than the default.
CHOICES = (
    "--swiglu --ffn-hidden-size 48 --num-query-groups 2 --kv-channels 4 --normalization RMSNorm --norm-epsilon 1e-6 "
    "--position-embedding-type rope --rotary-base 500000 --rotary-percent 0.5 --use-rope-scaling "
    "--rope-scaling-factor 4 --rotary-low-freq-factor 2 --rotary-high-freq-factor 5 "
    "--rotary-original-max-position 64 --disable-bias-linear --add-qkv-bias "
    "--untie-embeddings-and-output-weights"
)


def run(text: str, ranks: int = 1) -> RunConfig:
    world = World(ranks, min(ranks, 2))
    return begun(parse(f"{REST} {text}".split(), world), world)


def errors(text: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        run(text)
    return caught.value.errors


def save(
    root,
    config: RunConfig,
    step: int = 10,
    drop: tuple[str, ...] = (),
    zero: dict[str, object] | None = None,
) -> None:
    """The description of a checkpoint as a run writes it, without its tensors.

    zero: what it holds of the transform of gradients, if not what this version writes.
    """
    folder = root / f"iter_{step:07d}"
    folder.mkdir(parents=True)
    stored = config.to_dict()
    stored["model"] = {name: value for name, value in stored["model"].items() if name not in drop}
    if zero is not None:
        del stored["zero"]["zero_gradient_transform"]
        stored["zero"] |= zero
    write_manifest(folder, Manifest(step, 0, 1, {}, {}, stored, {}))


def architecture(model: ModelConfig) -> dict[str, object]:
    free = ("attention_dropout", "hidden_dropout", "init_method_std", "seq_length", "max_position_embeddings")
    return {
        o.name: getattr(model, o.name)
        for o in all_options().values()
        if o.section == "model" and o.name not in free
    }


def test_a_folder_of_another_dtype_than_the_run_is_told_of(tmp_path):
    for field in ("dtype", "torch_dtype"):  # today's name and the old one
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG_JSON, field: "bfloat16"}))
        load = f"--load hf:{tmp_path} --seq-length 16"
        (note,) = [note for note in run(load).notes if "bfloat16" in note]
        assert "fp32" in note and "--bf16" in note
        assert not any("bfloat16" in note for note in run(f"{load} --bf16").notes)


def test_what_is_not_said_comes_from_the_checkpoint(tmp_path):
    before = run(f"{MODEL} {CHOICES}")
    save(tmp_path, before)
    bare = run(f"--load {tmp_path} --hidden-dropout 0.3 --seq-length 24")
    assert architecture(bare.model) == architecture(before.model)
    assert (bare.model.hidden_dropout, bare.model.attention_dropout) == (0.3, 0.1)  # dropout is the flags'
    assert (bare.model.seq_length, bare.model.max_position_embeddings) == (24, 24)  # rotary positions go on
    (note,) = [note for note in bare.notes if "from the checkpoint" in note]
    assert "--num-layers 2" in note and re.search(r"and \d+ more$", note) and "--model-family" not in note
    same = run(f"{MODEL} {CHOICES} --load {tmp_path}")
    assert same.model == before.model and not [note for note in same.notes if "from the checkpoint" in note]


@pytest.mark.parametrize(
    ("stored", "text"),
    [
        ({"model": {"num_layers": "x"}}, "model.num_layers takes a whole number, got 'x'"),
        ({"model": []}, "section model holds [], not names and values"),
        (
            {"model": {"position_embedding_type": "alibi"}},
            "position_embedding_type alibi was removed: BLOOM",
        ),
        (
            {"model": {"embed_layernorm": True}},
            "model.embed_layernorm True was removed: BLOOM",
        ),
        (
            {"zero": {"zero_gradient_bits": "x", "zero_preset": "zeropp"}},
            "zero.zero_gradient_bits takes a whole",
        ),
    ],
)
def test_a_stored_configuration_that_is_none_is_an_error(tmp_path, stored, text):
    (tmp_path / "iter_0000001").mkdir()
    write_manifest(tmp_path / "iter_0000001", Manifest(1, 0, 1, {}, {}, stored, {}))
    for words in (f"--load {tmp_path}", f"--load {tmp_path} --save {tmp_path}"):
        (line,) = errors(f"{MODEL} {words} --zero-preset zeropp")
        assert line.startswith(f"--load {tmp_path}: the configuration in") and text in line


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_the_family_and_learned_positions_come_along(tmp_path, family):
    before = run(f"{MODEL} --model-family {family} --max-position-embeddings 40")
    save(tmp_path, before)
    after = run(f"{MODEL} --load {tmp_path}")
    assert after.model.model_family == family and architecture(after.model) == architecture(before.model)
    assert after.model.max_position_embeddings == (40 if family == "gpt" else 16)
    if family == "gpt":
        assert (
            "--max-position-embeddings 20 is not the model"
            in errors(f"--load {tmp_path} --max-position-embeddings 20")[0]
        )


def test_what_is_said_otherwise_is_refused_all_at_once(tmp_path):
    save(tmp_path, run(f"{MODEL} --ffn-hidden-size 48"))
    found = errors(f"--load {tmp_path} --swiglu --num-layers 3 --model-family llama --norm-epsilon 1e-6")
    assert found == tuple(
        f"{wanted} is not the model of the checkpoint in {tmp_path}/iter_0000010, which has {has}; leave it out to "
        "continue that model, or name another folder"
        for wanted, has in (
            ("--model-family llama", "--model-family gpt"),
            ("--num-layers 3", "--num-layers 2"),
            ("--norm-epsilon 1e-06", "--norm-epsilon 1e-05"),
            ("--swiglu", "--no-swiglu"),
        )
    )


def other(option: Option, usual: object) -> object:
    """A value that an option of the model does not have."""
    if option.choices:
        return next((choice for choice in option.choices if choice != usual), None)
    if option.kind in ("ints", "floats"):
        of = int if option.kind == "ints" else float
        return (of(3),) if usual == (of(2),) else (of(2),)
    if option.kind == "str":
        return "**" if usual == "*-" else "*-"
    return {"bool": not usual, "int": (usual or 2) + 1, "float": (usual or 1.5) * 0.5}[option.kind]


@pytest.mark.parametrize("kind", ["resume", "resume, set", "hf:"])
@pytest.mark.parametrize(
    "experts", ["", "--num-experts 4 --moe-ffn-hidden-size 8 --moe-layer-freq 0,1"], ids=["dense", "mixture"]
)
def test_each_option_of_the_model_is_compared_where_it_is_unset_too(experts, kind, tmp_path):
    before, published = run(f"{MODEL} --model-family qwen3_moe {experts}"), kind == "hf:"
    config = FAMILIES["qwen3_moe"].hugging_face.config(before.model)
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = from_hf_config(config) if published else before.model
    for option in all_options().values():
        name, load = option.name, f"hf:{tmp_path}" if published else tmp_path / option.name
        free = option.section != "model" or not is_architecture(name, "rope")
        if free or published and name.startswith(SHAPELESS):  # --load hf: is a new run
            continue
        has = getattr(model, name)
        said = other(option, has)
        if "set" in kind:
            has, said = said, other(option, said) if has is None else has
        if said is None:  # there is one choice, and none cannot be typed
            continue
        if not published:
            save(load, replace(before, model=replace(model, **{name: has})))
        told = errors(f"--load {load} {typed(option, said)}")
        start, end = (
            f"{typed(option, said)} is not the model of the ",
            f", which has {typed(option, has)}; leave",
        )
        assert any(each.startswith(start) and end in each for each in told), (name, told)


def test_what_means_the_same_is_no_other_model(tmp_path):
    """A count of experts that is none, a scale or width that is the default, all groups."""
    save(tmp_path / "dense", run(MODEL))
    run(f"--load {tmp_path / 'dense'} --num-experts 1 --softmax-scale {8**-0.5!r}")
    save(tmp_path / "mixture", run(f"{MODEL} --num-experts 4 --disable-bias-linear"))
    same = "--moe-ffn-hidden-size 128 --moe-router-num-groups 2 --moe-router-group-topk 2"
    loaded = run(f"--load {tmp_path / 'mixture'} {same} --moe-router-topk-scaling-factor 1")
    assert loaded.model.moe_router_num_groups is None and loaded.model.moe_ffn_hidden_size is None


def test_a_resume_tells_of_a_micro_batch_that_changes_the_loss(tmp_path):
    experts = "--num-experts 4 --disable-bias-linear --global-batch-size 4 --moe-aux-loss-coeff"
    for number, (coefficient, kind, said) in enumerate(
        (
            *(("1e-2", "aux_loss", True), ("1e-2", "seq_aux_loss", False), ("0", "aux_loss", False)),
            *(("1e-2", "global_aux_loss", True), ("0", "sinkhorn --moe-router-topk 1", True)),
        )
    ):
        words = f"{experts} {coefficient} --moe-router-load-balancing-type {kind}"
        save(tmp_path / f"{number}", run(f"{MODEL} {words}"))
        notes = run(f"--load {tmp_path / f'{number}'} {words} --micro-batch-size 2").notes
        assert any("the loss" in note and "--micro-batch-size 2 (was 1)" in note for note in notes) == said


def test_a_checkpoint_with_one_loss_of_experts_is_continued(tmp_path):
    """It has a word and a number where a list of each stands now."""
    words = "--num-experts 4 --disable-bias-linear --moe-aux-loss-coeff 0.5 --global-batch-size 4"
    stored = run(f"{MODEL} {words}").to_dict()
    stored["training"] |= {"moe_aux_loss_coeff": 0.5, "moe_router_load_balancing_type": "aux_loss"}
    (tmp_path / "iter_0000010").mkdir()
    write_manifest(tmp_path / "iter_0000010", Manifest(10, 0, 1, {}, {}, stored, {}))
    assert not [note for note in run(f"--load {tmp_path} {words}").notes if "the loss" in note]
    assert [n for n in run(f"--load {tmp_path} {words.replace('0.5', '0.1')}").notes if "0.1 (was 0.5)" in n]


def test_an_error_names_what_was_not_typed_but_loaded(tmp_path):
    save(tmp_path, run(f"{MODEL} --zero-preset zeropp --zero-gradient-bits 8", ranks=2))
    line, *_ = errors(f"--load {tmp_path} --tensor-model-parallel-size 3")
    assert "--num-attention-heads 4 does" in line and line.endswith(
        f" (from --load {tmp_path}: --num-attention-heads 4)"
    )
    line, *_ = errors(f"--load {tmp_path} --tensor-model-parallel-size 3 --num-attention-heads 4")
    assert "--num-attention-heads 4 does" in line and "(from" not in line


def test_finetuning_may_change_what_shapes_do_not_depend_on(tmp_path):
    save(tmp_path, run(f"{MODEL} {CHOICES}"))
    longer = run(f"--load {tmp_path} --finetune --rotary-base 1000000")
    assert longer.model.rotary_base == 1e6
    assert any("--rotary-base 1000000 replaces --rotary-base 500000" in note for note in longer.notes)
    assert "--rotary-base 1000000 is not" in errors(f"--load {tmp_path} --rotary-base 1000000")[0]
    assert "--swiglu" in errors(f"--load {tmp_path} --finetune --no-swiglu")[0]


def test_the_newest_that_can_be_read_counts_and_older_ones_lack_newer_options(tmp_path):
    save(tmp_path, run(f"{MODEL} --normalization RMSNorm"), step=20, drop=("add_qkv_bias", "squared_relu"))
    save(tmp_path, run(MODEL), step=10)
    (tmp_path / "iter_0000030").mkdir()
    (tmp_path / "iter_0000030" / "manifest.json").write_text("{")
    config = run(f"--load {tmp_path}")
    assert config.model.normalization == "RMSNorm" and not config.model.squared_relu
    assert "required" in errors(f"--load {tmp_path / 'nothing'}")[0]


def test_the_vocabulary_is_the_checkpoints_whatever_tokenizer_is_named(tmp_path):
    save(tmp_path, run(MODEL))
    named = "--tokenizer-type SentencePieceTokenizer --tokenizer-model x.model"
    for flags in (named, ""):
        assert run(f"--load {tmp_path} {flags}").model.vocab_size == 51


def test_the_form_of_gelu_is_that_of_the_checkpoint_older_ones_included(tmp_path):
    without = f"{MODEL} --disable-bias-linear"
    for name, text, drop, flags, tanh in (
        ("exact", without, (), "", False),
        ("old", without, ("openai_gelu",), "", True),
        ("old", without, (), "--use-checkpoint-args", True),
        ("old", without, (), "--no-bias-gelu-fusion", True),
        ("unfused", f"{MODEL} --no-bias-gelu-fusion", (), "", False),
        ("unfused", f"{MODEL} --no-bias-gelu-fusion", (), "--no-bias-gelu-fusion", False),
    ):
        if not (tmp_path / name).exists():
            save(tmp_path / name, run(text), drop=drop)
        assert run(f"--load {tmp_path / name} {flags}").model.openai_gelu is tanh, (name, flags)
    stored = run(without).to_dict()
    assert not stored_values(stored)["openai_gelu"]
    del stored["model"]["openai_gelu"]
    assert stored_values(stored)["openai_gelu"]


def test_a_checkpoint_that_is_named_decides_and_is_not_passed_over(tmp_path):
    for step, norm in ((10, "RMSNorm"), (20, "LayerNorm")):
        save(tmp_path, run(f"{MODEL} --normalization {norm}"), step=step)
    for flags in (
        f"{tmp_path}/iter_0000010",
        f"{tmp_path} --ckpt-step 10",
        f"{tmp_path} --load-iteration 10",
        f"{tmp_path} --override-ckpt-iteration 10",
    ):
        assert run(f"--load {flags}").model.normalization == "RMSNorm", flags
    assert run(f"--load {tmp_path}").model.normalization == "LayerNorm"
    assert (
        "holds no checkpoint of step 15; nearest: 10 or 20" in errors(f"--load {tmp_path} --ckpt-step 15")[0]
    )
    assert "of step 10, not of 20" in errors(f"--load {tmp_path}/iter_0000010 --ckpt-step 20")[0]
    (tmp_path / "iter_0000010" / "manifest.json").unlink()
    assert "is no complete checkpoint" in errors(f"--load {tmp_path} --ckpt-step 10")[0]


def test_a_resume_keeps_how_messages_were_coded(tmp_path):
    """Where flags do not say how, and the run codes such messages."""
    said = "--zero-preset zeropp --zero-gradient-bits 8 --zero-gradient-transform hadamard"
    before = run(f"{MODEL} {said}", 4)
    save(tmp_path, before)

    def again(flags: str) -> RunConfig:
        return run(f"--load {tmp_path} --zero-preset {flags}", 4)

    bare = again("zeropp")
    assert bare.zero == before.zero
    assert sum("--zero-gradient-transform hadamard" in note for note in bare.notes) == 1
    named = again("zeropp --zero-gradient-transform none --zero-gradient-bits 4").zero
    assert (named.zero_gradient_transform, named.zero_gradient_bits) == ("none", (4,))
    weights = again("zeropp --no-zero-quantized-gradients").zero
    assert (weights.zero_gradient_transform, weights.zero_gradient_bits) == (None, None)
    for other in ("zero3", "zeropp --finetune"):
        assert again(other).zero.zero_gradient_transform is None, other


# What a checkpoint holds of the transform: as runs wrote it before it was the default, before there was one, and now.
OLD, OLDER, NEW = {"zero_gradient_transform": "none"}, {}, {"zero_gradient_transform": None}
BITS = {"zero_gradient_bits": 8}
PLAIN, MIXED = Coding(4, 64), Coding(4, 64, hadamard=64)
KEPT = "from {}: --zero-gradient-transform none, so gradients are sent as they were"
CHANGED = "the flags decide the format of gradients, which is not that of {}: --zero-gradient-transform"


@pytest.mark.parametrize(
    "before, stored, flags, sent, said",
    [
        ("zeropp", OLD, "zeropp", PLAIN, [KEPT]),
        ("zeropp", OLDER, "zeropp", PLAIN, [KEPT]),
        ("zeropp", NEW, "zeropp", MIXED, []),
        ("zeropp --zero-gradient-transform none", None, "zeropp", PLAIN, [KEPT]),
        (
            "zeropp",
            OLD,
            "zeropp --zero-gradient-transform hadamard",
            MIXED,
            [f"{CHANGED} hadamard (was none)"],
        ),
        (
            "zeropp",
            NEW,
            "zeropp --zero-gradient-transform none",
            PLAIN,
            ["Published", f"{CHANGED} none (was unset)"],
        ),
        ("zeropp", OLD, "zeropp --zero-gradient-transform none", PLAIN, ["Published"]),
        ("zeropp", OLD, "zero1 --zero-quantized-gradients", PLAIN, [KEPT]),
        # No plain gradients were sent: what begins now has today's format.
        ("zero3", OLD, "zeropp", MIXED, []),
        ("zeropp --no-zero-quantized-gradients", OLD, "zeropp", MIXED, []),
        ("zeropp --zero-gradient-bits 8", OLD, "zeropp", Coding(8, 128), ["from {}: --zero-gradient-bits 8"]),
        # A number, as checkpoints had it that were written before there could be several.
        ("zeropp", OLD | BITS, "zeropp", Coding(8, 128), ["from {}: --zero-gradient-bits 8"]),
        ("zeropp", NEW | BITS, "zeropp --zero-gradient-bits 8", Coding(8, 128), []),
        (
            "zeropp --zero-gradient-bits 8",
            OLD,
            "zeropp --zero-gradient-bits 4",
            MIXED,
            ["--zero-gradient-bits 4 (was 8)"],
        ),
        ("zeropp", OLD, "zeropp --finetune", MIXED, []),
    ],
)
def test_a_checkpoint_says_how_gradients_were_sent(tmp_path, before, stored, flags, sent, said):
    """The same words mean what they meant when the run began, until the format is named."""
    save(tmp_path, run(f"{MODEL} --zero-preset {before}", 4), zero=stored)
    config = run(f"--load {tmp_path} --zero-preset {flags}", 4)
    assert config.wire(World(4, 2)).gradients.get(INTER) == sent
    about = [note for note in config.notes if "radient" in note]
    assert len(about) == len(said), about
    for note, words in zip(about, said, strict=True):
        assert words.format(tmp_path / "iter_0000010") in note
        assert words is not KEPT or "--zero-gradient-transform hadamard changes to that" in note
    save(tmp_path, config, step=20)  # and means the same in the run after
    same = run(f"--load {tmp_path} --zero-preset {flags.split(' --zero-gradient')[0]}", 4)
    assert same.wire(World(4, 2)).gradients.get(INTER) == sent


def test_the_planner_keeps_how_gradients_were_sent(tmp_path):
    save(tmp_path, run(f"{MODEL} --zero-shard 2,2,4 --zero-quantized-gradients", 4), zero=OLD)
    planned = f"--load {tmp_path} --zero-preset auto --cluster a100 --loss-policy"
    assert run(f"{planned} zeropp", 4).zero.zero_gradient_transform == "none"
    assert run(f"{planned} exact", 4).zero.zero_gradient_transform is None
