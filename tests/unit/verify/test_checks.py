"""Limits of gradients: a parameter whose parts nearly cancel may be as far off as on one rank, and no further."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megazero.config import World, make_config
from megazero.verify.checks import gradients_check
from megazero.verify.reference import Reference, global_norm, relative_errors

# Without rotary positions a key bias shifts all scores of a query alike: its exact gradient is zero.
GPT = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 64}
GPT |= {"micro_batch_size": 2, "global_batch_size": 4, "lr": 1e-3, "train_iters": 2, "mock_data": True}
GPT |= {"attention_dropout": 0.0, "hidden_dropout": 0.0, "model_family": "gpt"}
BIAS = "layers.1.attention.k_proj.bias"


def test_a_fault_is_seen_among_parts_that_cancel() -> None:
    config = make_config(GPT, World(1, 1))
    exact, run = Reference(config, 1), Reference(config, 1, dtype=torch.float32)
    weights = run.weights
    want, got = exact.gradients(weights, 0), run.gradients(weights, 0)

    def judged(got: dict[str, np.ndarray]) -> tuple[bool, str]:
        check = gradients_check([relative_errors(got, want)], 1e-6, lambda: exact.rounding([weights]))
        return check.good, check.where

    assert relative_errors(got, want)[BIAS] > 1e-5 and judged(got)[0]
    got[BIAS][0] += 1e-9 * global_norm(want)
    good, where = judged(got)
    assert not good and where.startswith(f"{BIAS}, step 1; ")


def test_what_one_rank_has_is_asked_for_only_where_it_decides() -> None:
    def check(error: float, own: float) -> tuple[bool, str, str]:
        found = gradients_check(
            [{"a": 4e-7, "b": 9e-7}, {"a": error, "b": 1e-8}], 1e-6, lambda: {"a": own, "b": 1.0}
        )
        return found.good, found.limit, found.where

    own = "; with limits of their own: a"
    assert check(1.3e-6, 1.1e-6) == (True, "1e-06", f"b, step 1{own}")
    assert check(2.1e-6, 1.1e-6) == (True, "2.2e-06", f"a, step 2{own}")
    assert check(1.3e-6, 1e-7) == check(1.3e-6, math.nan) == (False, "1e-06", f"a, step 2{own}")
    assert check(math.nan, 1.1e-6) == (False, "2.2e-06", f"a, step 2{own}")
    assert not gradients_check([{"a": 1.1e-10}], 1e-10, None).good
    assert gradients_check([{"a": 9e-7}], 1e-6, lambda: pytest.fail("asked")).good
