"""Rules of mixtures of experts: what a router cannot choose, and what is not built with experts."""

from __future__ import annotations

import pytest

from megazero.config.model.architecture import architecture_of
from megazero.models import make_model
from tests.unit.config.command_lines import errors, run

EXPERTS = "--num-experts 12 --disable-bias-linear"
SIGMOID = f"{EXPERTS} --moe-router-score-function sigmoid"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (f"{EXPERTS} --moe-router-topk 13", "exceeds --num-experts 12; nearest: 12"),
        (f"{EXPERTS} --moe-router-topk 1", "needs --moe-router-pre-softmax, or --moe-aux-loss-coeff above 0"),
        (f"{EXPERTS} --moe-router-enable-expert-bias", "needs --moe-router-score-function sigmoid"),
        (f"{EXPERTS} --moe-router-group-topk 2", "needs --moe-router-num-groups"),
        (f"{EXPERTS} --moe-router-num-groups 5 --moe-router-group-topk 1", "nearest groups: 4 or 6"),
        (f"{EXPERTS} --moe-router-num-groups 2 --moe-router-group-topk 4", "nearest: 2"),
        (f"{EXPERTS} --moe-router-num-groups 4 --moe-router-group-topk 3", "exceeds --moe-router-topk 2"),
        (
            f"{EXPERTS} --moe-router-topk 5 --moe-router-num-groups 4 --moe-router-group-topk 1",
            "groups of 3 experts have fewer than --moe-router-topk 5; nearest: 2",
        ),
        (
            f"{EXPERTS} --moe-shared-expert-intermediate-size 33 --tensor-model-parallel-size 2 --sequence-parallel",
            "--moe-shared-expert-intermediate-size 33 does not divide by --tensor-model-parallel-size 2",
        ),
        (f"{EXPERTS} --tensor-model-parallel-size 2", "needs --sequence-parallel"),
        ("--num-experts 4 --add-bias-linear", "nearest: --disable-bias-linear"),
        (f"{SIGMOID} --moe-router-enable-expert-bias --outer-interval 4", "move the bias apart; nearest"),
    ],
)
def test_what_a_router_cannot_do_is_an_error_with_the_nearest_choice(words: str, error: str) -> None:
    (line,) = errors(words)
    assert error in line


@pytest.mark.parametrize(
    ("words", "note"),
    [
        ("--moe-router-score-function sigmoid", "--num-experts"),
        (f"{SIGMOID} --moe-router-pre-softmax", "--moe-router-score-function softmax"),
        (f"{EXPERTS} --moe-router-num-groups 4", "--moe-router-group-topk"),
        (f"{EXPERTS} --moe-router-load-balancing-type seq_aux_loss", "--moe-aux-loss-coeff above 0"),
        ("--moe-aux-loss-coeff 0.01", "--num-experts"),
        ("--moe-per-layer-logging", "--num-experts"),
        (
            f"{EXPERTS} --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.01",
            "--moe-router-load-balancing-type",
        ),
        (f"{SIGMOID} --moe-router-bias-update-rate 0.01", "--moe-router-enable-expert-bias"),
    ],
)
def test_what_changes_nothing_is_a_note(words: str, note: str) -> None:
    (found,) = (line for line in run(words).notes if "--moe" in line)
    assert note in found


def test_a_loss_that_balances_teaches_a_router_of_one_expert() -> None:
    assert run(f"{EXPERTS} --moe-router-topk 1 --moe-aux-loss-coeff 0.01").model.moe_router_topk == 1


def test_one_sigmoid_needs_no_softmax() -> None:
    model = run(f"{SIGMOID} --moe-router-topk 1 --moe-router-enable-expert-bias").model
    assert model.moe_router_topk == 1 and model.moe_router_enable_expert_bias


def test_no_family_of_softmax_takes_another_router() -> None:
    model = make_model(
        model_family="qwen3_moe",
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        vocab_size=8,
        max_position_embeddings=8,
        num_experts=4,
        moe_router_score_function="sigmoid",
        moe_router_topk_scaling_factor=2.5,
        moe_router_enable_expert_bias=True,
    )
    with pytest.raises(ValueError) as caught:
        architecture_of(model)
    for flag in ("score-function sigmoid", "topk-scaling-factor 2.5", "enable-expert-bias"):
        assert f"--moe-router-{flag}" in str(caught.value)
