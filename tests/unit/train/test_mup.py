"""--use-mup: Megatron's scales of initial values, rates, logits and scores, and what they are for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from megazero.config import RunConfig, make_config
from megazero.config.model.spec import model_spec
from megazero.models.decoder import Decoder
from megazero.train.parallelize import own_rates, traits_of
from megazero.train.schedule.learning_rate import FACTOR, LearningRate
from tests.sizes import TINY

WIDE = {**TINY, "hidden_size": 64, "use_mup": True, "mup_base_hidden_size": 16, "lr_decay_style": "constant"}


def mup(**changes: Any) -> RunConfig:
    return make_config({**WIDE, "untie_embeddings_and_output_weights": True, **changes})


def test_scales_and_initial_values() -> None:
    """Four times the width: half the deviation in layers; words and head keep theirs (TransformerConfig)."""
    model = mup().model
    assert (model.logits_scaling, model.attention_scale) == (4.0, 1 / 8)
    model = mup(mup_base_head_dim=4.0, mup_attn_scale_power=0.5, logits_scaling=3.0).model
    assert (model.logits_scaling, model.attention_scale) == (3.0, pytest.approx(2 / math.sqrt(8)))
    assert mup(mup_base_hidden_size=None).model.logits_scaling == 1.0
    for name, p in model_spec(model).parameters.items():
        into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
        wanted = 0.02 / (2 * math.sqrt(2 * model.num_layers) if into_stream else 2)
        assert p.std == pytest.approx(0.02 if p.vocabulary else wanted if p.multiplies else 0.0), name


@pytest.mark.parametrize(
    "changes, matrices, words, norms",
    [
        ({"optimizer": "adamw"}, {"lr": 1e-2 / 4, "eps": 1e-8 / 4}, {}, {}),
        ({"optimizer": "lion"}, {"lr": 1e-2 / 4}, {}, {}),
        ({"optimizer": "sgd"}, {}, {"lr": 4e-2}, {"lr": 4e-2}),
        ({"optimizer": "sgd", "decoupled_lr": 1.0}, {}, {"lr": 1.0}, {"lr": 4e-2}),
        ({"optimizer": "muon"}, {}, {}, {}),
        ({"use_mup": False, "mup_base_hidden_size": None}, {}, {}, {}),
    ],
)
def test_rates(
    changes: Mapping[str, Any], matrices: dict[str, float], words: dict[str, float], norms: dict[str, float]
) -> None:
    """By Megatron's get_mup_config_overrides."""
    config = mup(**changes)
    for name, p in model_spec(config.model).parameters.items():
        wanted = words if p.vocabulary else matrices if p.multiplies else norms
        assert own_rates(p, config) == pytest.approx(wanted), name
        options = dict(traits_of(p, config).options)
        assert options.get(FACTOR, 1.0) == (1.0 if wanted.get("lr") == 1.0 else wanted.get("lr", 1e-2) / 1e-2)


@pytest.mark.parametrize("decayed", [False, True])
def test_norms_of_queries_and_keys_decay_where_they_are_asked_to(decayed: bool) -> None:
    config = make_config({**TINY, "qk_norm": "head", "apply_wd_to_qk_layernorm": decayed})
    vectors = [p for p in model_spec(config.model).parameters.values() if p.vector]
    found = {p.name: "weight_decay" not in dict(traits_of(p, config).options) for p in vectors}
    norms = {"attention.q_norm.weight", "attention.k_norm.weight"}
    assert found == {name: decayed and name in norms for name in found} and norms < found.keys()


def test_a_multiple_of_a_rate_has_another_peak_and_minimum() -> None:
    plain = LearningRate(peak=1.0, minimum=0.5, warmup=4, warmup_init=0.25, decay=12)
    times = [plain.times(0.5)(consumed) for consumed in (0, 2, 4, 8, 12, 20)]
    assert times == [0.25, 0.375, 0.5, 0.375, 0.25, 0.25]


def change_of_logits(hidden: int, use_mup: bool) -> float:
    """Return how far three steps move the logits, relative to one another."""
    base = (
        {"mup_base_hidden_size": 16, "mup_base_head_dim": 2.0} if use_mup else {"mup_base_hidden_size": None}
    )
    config = mup(hidden_size=hidden, ffn_hidden_size=2 * hidden, use_mup=use_mup, **base)
    decoder = Decoder(config.model)
    decoder.initialize(1)
    groups = [{"params": [p], **own_rates(decoder.specs[n], config)} for n, p in decoder.named_parameters()]
    optimizer = torch.optim.Adam(groups, lr=config.optimizer.lr)
    tokens = torch.randint(51, (8, 12), generator=torch.Generator().manual_seed(0))
    before = decoder.full_logits(tokens)
    for _ in range(3):
        optimizer.zero_grad()
        decoder(tokens, tokens.roll(-1, 1)).sum().div(96).backward()
        optimizer.step()
    return float((decoder.full_logits(tokens) - before).square().mean().sqrt())


def test_steps_move_logits_alike_at_any_width() -> None:
    """The coordinate check of Yang et al. 2022, appendix D.1."""
    narrow, wide = (change_of_logits(hidden, True) for hidden in (32, 256))
    assert wide < 1.5 * narrow
    assert change_of_logits(256, False) > 2.5 * change_of_logits(32, False)
