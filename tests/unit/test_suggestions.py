"""What is suggested for a name that does not exist: in a script it is mostly a letter, a dash or a word off."""

import pytest

from megazero.config.foreign.typos import suggestion


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
            "fp8-fromat",
            "; nearest: --fp8-format (Megatron's, not built here: fp8 and fp4 are not built; train in --bf16)",
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
        ("frobnicate", ""),
        ("qwertyuiop-asdf", ""),
    ],
)
def test_what_a_name_probably_meant(key, text):
    assert suggestion(key) == text


def test_other_legal_names_of_the_place_are_known():
    assert suggestion("hepl", others=("help",)) == "; nearest: --help"
