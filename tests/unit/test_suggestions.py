"""What is suggested for a flag that does not exist. tests/unit/wrong_flags.py makes wrong flags by seeded edits."""

import pytest

from megazero.config.foreign.suggest import cost, nearest, suggestion
from tests.unit.wrong_flags import mistakes, wrong_flags


@pytest.mark.parametrize("seed, count", [(1, 60), pytest.param(2, 300, marks=pytest.mark.slow)])
def test_the_suggestion_is_right_for_nine_in_ten(seed, count):
    """More seeds: python -m tests.unit.wrong_flags --seed N --show 10."""
    wrong = wrong_flags(seed, count)
    bad = mistakes(wrong)
    assert len(bad) <= 0.1 * count, [(each.key, each.name, text) for each, text in bad]
    assert len({each.edit for each in wrong}) >= 8


@pytest.mark.parametrize(
    "key, text",
    [
        ("num-layrs", "; nearest: --num-layers"),
        ("nmu-workers", "; nearest: --num-workers (Megatron's, changes nothing here)"),
        ("chekpoint-activations", "--checkpoint-activations (Megatron's, here --recompute-granularity full)"),
        (
            "fp8-fromat",
            "--fp8-format (Megatron's, not built here: fp8 and fp4 are not built; train in --bf16)",
        ),
        (
            "training.local-batch-size",
            "; nearest: --micro-batch-size (torchtitan's training.local_batch_size)",
        ),
        (
            "training.local-batchsize",
            "; nearest: --micro-batch-size (torchtitan's training.local_batch_size)",
        ),
        ("compile.components", "; nearest: torchtitan's compile.components (nothing here is like it)"),
        ("train-micro-batch-size-per-gpu", "--micro-batch-size (DeepSpeed's train_micro_batch_size_per_gpu)"),
        ("stage3-max-live-parametrs", "DeepSpeed's stage3_max_live_parameters (a key of --deepspeed-config)"),
        ("learning-rate", "; nearest: --lr (Hugging Face's learning_rate)"),
        ("dropout", "; nearest: --attention-dropout or --hidden-dropout"),
        ("frobnicate", ""),
        ("qwertyuiop-asdf", ""),
    ],
)
def test_what_a_name_probably_meant(key, text):
    said = suggestion(key)
    assert text in said if text else said == ""


def test_costs_count_letters_and_words():
    assert cost("abc", "abc") == 0 and cost("acb", "abc") == 1 and cost("ab", "abc") == 1
    assert cost("lr-style", "lr-decay-style") == pytest.approx(1.6)
    assert cost("decay-lr", "lr-decay") == pytest.approx(3.2)
    assert nearest("seed", ["seed", "speed"]) == ["seed"] and nearest("sped", ["speed", "spread"]) == [
        "speed"
    ]
