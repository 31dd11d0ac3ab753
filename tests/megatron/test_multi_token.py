"""Layers that predict further tokens have megatron-core's gradients, and its checkpoints of them are read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megazero.convert.megatron.weights import MegatronWeights
from megazero.models import Decoder
from megazero.models.hf_weights import load_stored
from megazero.models.multi_token import further_tokens
from tests.dist.pool import run_ranks
from tests.megatron.case import Case
from tests.megatron.model import build_chunks, model_config
from tests.megatron.test_import import ITERATION, train_and_save
from tests.megatron.training import megatron_ranks

pytest.importorskip("megatron.core")

CASES = {
    "tied": Case(further=2, gated=True, steps=1),
    "untied, experts": Case(further=1, gated=True, experts=4, tied=False, steps=1),
}


def their_gradients(case: Case, folder: Path, ids: torch.Tensor) -> dict[str, list]:
    """Load a checkpoint into megatron-core's model on this rank; return the gradients of its mean loss."""
    from megatron.core import dist_checkpointing
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    with megatron_ranks(case):
        (model,) = build_chunks(case, model_config(case))
        model.load_state_dict(
            dist_checkpointing.load({"m": model.sharded_state_dict()}, str(folder / ITERATION))["m"]
        )
        MTPLossAutoScaler.set_loss_scale(torch.ones(()))  # a training leaves that of its micro-batches
        tokens, labels = ids[:, :-1], ids[:, 1:]
        places, length = torch.arange(tokens.shape[1])[None].expand_as(tokens), tokens.shape[1]
        mask = torch.ones(1, 1, length, length).triu(1).bool()
        model.eval()(tokens, places, mask, labels=labels.contiguous()).mean().backward()
        named = ((name.replace(".local_experts.", "."), p.grad) for name, p in model.named_parameters())
        return {name: grad.tolist() for name, grad in named if grad is not None}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_megatron_core(name: str, tmp_path: Path) -> None:
    case, ids = CASES[name], torch.arange(34).view(2, 17) * 7 % 128
    run_ranks(1, train_and_save, case, tmp_path / "m", timeout=120)
    (told,) = run_ranks(1, their_gradients, case, tmp_path / "m", ids, timeout=120)
    weights = MegatronWeights.open(tmp_path / "m" / ITERATION)
    theirs = {own: torch.tensor(gradient) for own, gradient in told.items()}
    stored = SimpleNamespace(
        tensor=theirs.__getitem__, dtypes={name: g.dtype for name, g in theirs.items()}, shapes={}
    )
    ours, wanted = (Decoder(weights.model, mtp_loss_scaling_factor=0.3) for _ in range(2))
    for decoder, source in ((ours, weights), (wanted, replace(weights, stored=stored))):
        load_stored(decoder, {own: source.tensor(own) for own in weights.shapes})
    tokens, labels, mask = ids[:, :-1], ids[:, 1:], torch.ones(2, 16)
    further = further_tokens(labels, mask, case.further)
    (ours(tokens, labels, loss_weights=mask, further=further) / mask.sum()).backward()
    gradients = dict(ours.named_parameters())
    for own, expected in wanted.named_parameters():
        got = gradients[own].grad
        wide = expected.detach()
        assert got is not None and (got - wide).norm() < 1e-5 * wide.norm(), own
