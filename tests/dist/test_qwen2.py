"""Qwen2 on tensor-parallel and pipeline ranks trains as transformers' does from the same random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megazero.config import World
from megazero.models import Decoder, from_hf_config
from megazero.models.hf_weights import load_hf_state_dict, to_hf_state_dict
from megazero.train import parallelize
from megazero.train.ranks import make_mesh
from tests.dist import parity
from tests.dist.parity_cases import Case
from tests.dist.pool import run_ranks
from tests.oracle import in_fp64

transformers = pytest.importorskip("transformers")

Arrays = Mapping[str, np.ndarray]  # Hugging Face name -> values
# TP 2 x PP 2, sequence parallel, three micro-batches, key/value heads in groups of two, a padded vocabulary.
UNTIED = Case(2, 1, 4, "zero1", None, True, 3, False, "odd", "none", "fp32", "qwen2", pp=2)
TIED = Case(
    2, 1, 4, "zero1", None, False, 3, True, "odd", "selective", "fp32", "qwen2", pp=2, schedule="zb-h1"
)


@dataclass(frozen=True)
class Theirs:
    """transformers' model and its training in plain torch, on the samples of the ranks."""

    case: Case
    model: torch.nn.Module

    @classmethod
    def random(cls, case: Case) -> Theirs:
        """Every weight is random, so that no bias or norm is checked at its first value alone."""
        m = case.config().model
        config = transformers.Qwen2Config(
            vocab_size=m.vocab_size,
            hidden_size=m.hidden_size,
            intermediate_size=m.ffn_hidden_size,
            num_hidden_layers=m.num_layers,
            num_attention_heads=m.num_attention_heads,
            num_key_value_heads=m.num_query_groups,
            max_position_embeddings=m.max_position_embeddings,
            rms_norm_eps=m.norm_epsilon,
            tie_word_embeddings=case.tied,
            attn_implementation="eager",
        )
        model = transformers.Qwen2ForCausalLM(config).to(parallelize.DTYPES[case.dtype])
        # A seed with margin: a key's bias moves all scores of a query nearly alike, so its gradient is small beside
        # what it is summed from, and with other seeds up to 1.1e-6 from the truth in fp32.
        draw = np.random.default_rng(0)
        with torch.no_grad():
            for name, p in model.named_parameters():
                around = 1.0 if name.endswith("norm.weight") else 0.0
                # fp32 numbers in fp64, too: initial values are handed over in fp32
                p.copy_(torch.from_numpy(draw.normal(around, 0.1, p.shape).astype(np.float32)))
        return cls(case, model)

    def backward(self, step: int) -> float:
        """Mean loss over the tokens of the step that count; gradients in .grad."""
        tokens, labels, mask = parity.samples(self.case.config(), step)
        self.model.zero_grad()
        logits = self.model(tokens).logits.flatten(0, 1)
        losses = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="none")
        loss = (losses * mask.flatten().to(losses.dtype)).sum() / mask.sum().item()
        loss.backward()
        return loss.item()

    def train(self, steps: int) -> list[float]:
        o, named = self.case.config().optimizer, dict(self.model.named_parameters())
        groups = [
            {"params": [p for p in named.values() if p.ndim == dim], "weight_decay": decay}
            for dim, decay in ((1, 0.0), (2, o.weight_decay))
        ]
        adamw = torch.optim.AdamW(groups, lr=o.lr, betas=(o.adam_beta1, o.adam_beta2), eps=o.adam_eps)
        losses = []
        for step in range(steps):
            losses.append(self.backward(step))
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), o.clip_grad)
            adamw.step()
        return losses

    def gradients(self, weights: Arrays, step: int, dtype: torch.dtype) -> Arrays:
        """Of a step at these weights."""
        with in_fp64() if dtype is torch.float64 else nullcontext():
            other = Theirs(self.case, type(self.model)(self.model.config).to(dtype))
            with torch.no_grad():
                for name, p in other.model.named_parameters():
                    p.copy_(torch.from_numpy(weights[name]))
            other.backward(step)
        return {n: p.grad.double().numpy() for n, p in other.model.named_parameters() if p.grad is not None}


def stored(case: Case, whole: Mapping[str, np.ndarray]) -> Arrays:
    """Whole parameters of ours, through the tables of names."""
    decoder = Decoder(case.model.config().model, dtype=torch.float64)
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            p.copy_(torch.from_numpy(whole[name]))
    return {name: t.numpy() for name, t in to_hf_state_dict(decoder).items()}


def loaded(state: Arrays, decoder: Decoder, _: int) -> Callable[[str], torch.Tensor]:
    """In place of random initial weights: this tensor-parallel rank's part of ``state``."""
    whole = Decoder(decoder.config, decoder.tp)
    load_hf_state_dict(whole, {name: torch.from_numpy(values) for name, values in state.items()})
    held = dict(whole.named_parameters())
    return lambda name: held[decoder.tied_ends().get(name, name)].detach()


def on_rank(case: Case, state: Arrays, steps: int) -> parity.Outcome:
    config = case.config()
    mesh = make_mesh(config, World(case.world, case.per_node), torch.device("cpu"))
    with patch.object(parallelize, "initializer", partial(loaded, state)):
        return parity._run(case, config, mesh, steps)


def differences(got: Arrays, want: Arrays) -> dict[str, float]:
    """By parameter, as parity.gradient_errors."""
    total = np.sqrt(sum(np.sum(g**2) for g in want.values()))
    return {
        name: float(np.linalg.norm(got[name] - g) / max(np.linalg.norm(g), parity.FLOOR * total))
        for name, g in want.items()
    }


def faults(case: Case, steps: int) -> Iterator[str]:
    """What differs in weights, losses and gradients, in the same dtype on both sides."""
    with in_fp64() if case.dtype == "fp64" else nullcontext():
        yield from _faults(case, steps)


def _faults(case: Case, steps: int) -> Iterator[str]:
    theirs = Theirs.random(case)
    state = {name: p.detach().numpy().copy() for name, p in theirs.model.named_parameters()}
    assert from_hf_config(theirs.model.config.to_dict()).qkv_bias
    outcomes = run_ranks(case.world, on_rank, case, state, steps, timeout=120)
    whole = {event: stored(case, parity.assemble(case, outcomes, event)) for event in outcomes[0].slices}
    yield from (f"initial {name} differs" for name, w in state.items() if (whole["initial"][name] != w).any())
    assert whole["initial"].keys() == state.keys() and any(name.endswith("k_proj.bias") for name in state)
    losses = [o.losses for o in outcomes if o.last and o.tp_rank == 0][0]
    for step, want in enumerate(theirs.train(steps)):
        got = losses[step] / parity.samples(case.config(), step)[2].sum().item()
        if not abs(got - want) / want <= parity.LOSS[case.dtype]:
            yield f"loss of step {step + 1}: {got} is not {want}"
    for event, weights, step in (("first", "initial", 0), ("last", "before last", steps - 1)):
        found = [  # the nearer counts, as in parity.nearest_errors
            differences(whole[event], theirs.gradients(whole[weights], step, dtype))
            for dtype in {parallelize.DTYPES[case.dtype], torch.float64}
        ]
        for name in state:
            error = min(errors[name] for errors in found)
            if not error <= parity.GRADIENT[case.dtype]:
                yield f"{event} gradient of {name}: {error:.3g}"


@pytest.mark.parametrize(
    "case, steps",
    [
        (UNTIED, 3),
        pytest.param(UNTIED, 20, marks=pytest.mark.slow),
        pytest.param(TIED, 20, marks=pytest.mark.slow),
        pytest.param(replace(UNTIED, dtype="fp64"), 20, marks=pytest.mark.slow),
    ],
    ids=["3-steps", "20-steps", "20-steps-tied", "20-steps-fp64"],
)
def test_trains_as_transformers_does(case: Case, steps: int) -> None:
    assert not list(faults(case, steps))
