"""What is suggested for a name that does not exist: in a script it is mostly a letter, a dash or a word off."""

import subprocess
import sys

import pytest

from megazero.config import ConfigError, begun, parse
from megazero.config.foreign.typos import suggestion
from megazero.config.nearest import misspelt
from megazero.config.options.data_inputs import TOKENIZERS
from megazero.config.options.skipping import due
from megazero.config.run import all_options
from tests import ROOT
from tests.unit.config.command_lines import base_without, run, write


@pytest.mark.parametrize(
    "key, text",
    [
        ("num-layrs", "; nearest: --num-layers"),
        ("numlayers", "; nearest: --num-layers"),
        ("warmup-iters", "; nearest: --lr-warmup-iters"),
        ("nmu-workers", "; nearest: --num-workers (Megatron's, changes nothing here)"),
        (
            "chekpoint-activations",
            "; nearest: --checkpoint-activations (Megatron's, here --recompute-granularity full)",
        ),
        (
            "sawp-optimizer",
            "; nearest: --swap-optimizer (Megatron's, not built here: the optimizer is on the device; offload is not "
            "built: shard further (--zero-preset zero3), or keep moments in fewer bits (--exp-avg-dtype, "
            "--exp-avg-sq-dtype))",
        ),
        (
            "no-bias-gelu-fusio",
            "; nearest: --no-bias-gelu-fusion (Megatron's, here --no-openai-gelu, where the MLP has GELU and "
            "--openai-gelu is not given)",
        ),
        (
            "train-micro-batch-size-per-gpu",
            "; nearest: train_micro_batch_size_per_gpu (DeepSpeed's, here --micro-batch-size)",
        ),
        (
            "stage3-max-live-parametrs",
            "; nearest: zero_optimization.stage3_max_live_parameters (DeepSpeed's, a key of --deepspeed-config)",
        ),
        ("ep-size", "; nearest: --expert-model-parallel-size"),
        ("expert-parallel-size", "; nearest: --expert-model-parallel-size"),
        ("cp-size", "; nearest: --context-parallel-size"),
        ("tp", "; nearest: --tensor-model-parallel-size"),
        ("frobnicate", ""),
        ("qwertyuiop-asdf", ""),
        ("use-lora", ""),  # a little like --use-normhead, one of 2,000 names of others
        ("debug-level", ""),
    ],
)
def test_what_a_name_probably_meant(key, text):
    assert suggestion(key) == text


@pytest.mark.parametrize(
    "word, legal, near",
    [
        ("Llama3Tokenizer", TOKENIZERS, ""),
        ("BertWordPieceTokenizer", TOKENIZERS, ""),
        ("GPT4BPETokenizer", TOKENIZERS, ""),  # digits mean something
        ("NulTokenizer", TOKENIZERS, "NullTokenizer"),
        ("sentencepiece", TOKENIZERS, "SentencePieceTokenizer"),
        ("adagrad", ("adamw", "sgd", "lion"), ""),
        ("L2Norm", ("RMSNorm", "LayerNorm"), ""),
        ("rmsnrom", ("RMSNorm", "LayerNorm"), "RMSNorm"),
        ("foo", ("olmo2", "gpt"), ""),
        ("cosin", ("linear", "cosine"), "cosine"),
    ],
)
def test_a_value_that_means_something_else_is_no_suggestion(word, legal, near):
    assert misspelt(word, legal) == (near and f"; nearest: {near}")


def test_one_fault_is_one_error():
    """Of every option: a value of another kind, a word too many, a number below the legal ones."""
    wrong = {"int": ("1e5", "1 stray", "-7"), "float": ("x", "1 stray"), "bool": ("stray",), "ints": ("x",)}
    for option in all_options().values():
        for value in ("nonsense", "a b") if option.choices else wrong.get(option.kind, ()):
            if (option.name, value) == ("zero_block_size", "-7"):  # two faults
                continue
            with pytest.raises(ConfigError) as caught:
                parse([*base_without(option.name), option.flag, *value.split()])
            assert len(caught.value.errors) == 1, caught.value.errors


def test_zero_is_off_as_in_megatron():
    config = run("--exit-interval 0 --exit-duration-in-mins 0 --save-interval 0 --eval-interval 0 --save c")
    assert config.training.exit_interval is config.training.exit_duration_in_mins is None
    assert config.checkpoint.save_interval is None and not due(config.training.eval_interval, 0, 10)


def test_a_family_that_is_not_known_is_the_only_error(tmp_path):
    write(tmp_path, "config.json", '{"model_type": "deepseek_v3"}')
    with pytest.raises(ConfigError) as caught:
        begun(parse(f"--load hf:{tmp_path} --train-iters 1 --lr 1 --micro-batch-size 1 --mock-data".split()))
    (line,) = caught.value.errors
    assert "deepseek_v3" in line


def test_nothing_is_written_before_the_data_are_found(tmp_path):
    (tmp_path / "there.idx").touch()
    (tmp_path / "there.bin").touch()
    made = f"--save {tmp_path}/c --log-dir {tmp_path}/l --data-cache-path {tmp_path}/d --vocab-size 9 --device cpu"
    data = (
        f"--train-data-path {tmp_path}/there {tmp_path}/no --valid-data-path {tmp_path}/none --train-iters 1"
    )
    sizes = (
        "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --lr 1"
    )
    program = ROOT / "pretrain" / "pretrain_gpt.py"
    done = subprocess.run(
        [sys.executable, str(program), *f"{made} {data} {sizes}".split()], capture_output=True, text=True
    )
    assert done.returncode == 2 and "2 configuration errors" in done.stderr, done.stderr
    assert "no.idx does not exist" in done.stderr and "none.idx does not exist" in done.stderr
    assert sorted(each.name for each in tmp_path.iterdir()) == ["there.bin", "there.idx"]
