"""Layers that predict further tokens: what they are trained on, what is told of it, and what is counted of them."""

from __future__ import annotations

import pytest
import torch

from megazero.config.model.section import make_model
from megazero.config.model.spec import model_spec, parameter_count, training_flops
from megazero.models import Decoder
from megazero.models.multi_token import Further, further_tokens
from megazero.pp.partition import Costs, partition

SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32}
SIZES |= {"model_family": "llama", "max_position_embeddings": 8}


def decoder(**options) -> Decoder:
    made = Decoder(
        make_model(**SIZES, mtp_num_layers=2), dtype=torch.float64, mtp_loss_scaling_factor=0.5, **options
    )
    made.initialize(0)
    return made


def batch(length: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Further]:
    ids = torch.arange(2 * (length + 1)).view(2, -1) * 5 % 32
    weights = torch.ones(2, length, dtype=torch.float64)
    return ids[:, :-1], ids[:, 1:], weights, further_tokens(ids[:, 1:], weights, 2)


def test_labels_and_their_weights_by_hand():
    """A sample's last tokens predict nothing, and what is left of each sample counts as much as the whole."""
    labels, weights = (
        torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]),
        torch.tensor([[1.0, 0, 1, 1], [1, 1, 1, 1]]),
    )
    ahead = further_tokens(labels, weights, 2)
    assert ahead.labels.unbind(-1)[0].tolist() == [[2, 3, 4, 0], [6, 7, 8, 0]]
    assert ahead.labels.unbind(-1)[1].tolist() == [[3, 4, 0, 0], [7, 8, 0, 0]]
    third = 4 / 3
    assert torch.allclose(ahead.weights[..., 0], torch.tensor([[0, 1.5, 1.5, 0], [third, third, third, 0]]))
    assert ahead.weights[..., 1].tolist() == [[1.5, 1.5, 0, 0], [2, 2, 0, 0]]
    assert further_tokens(labels, torch.zeros(2, 4), 2).weights.sum() == 0


def test_the_loss_that_is_told_is_the_next_tokens_and_the_gradient_of_all():
    whole, (tokens, labels, weights, further) = decoder(), batch()
    alone = whole(tokens, labels, loss_weights=weights)
    (main,) = torch.autograd.grad(alone, [whole.layers["0"].mlp.up_proj.weight])
    assert torch.equal(whole.further.take(), torch.zeros(2, dtype=torch.float64))
    loss = whole(tokens, labels, loss_weights=weights, further=further)
    assert torch.equal(loss, alone)
    loss.backward()
    assert not torch.allclose(whole.layers["0"].mlp.up_proj.weight.grad, main)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in whole.parameters())
    total, count = whole.further.take().tolist()
    assert count == pytest.approx(2 * 16) and 0.5 < total / count / torch.tensor(32.0).log() < 2
    evaluated = whole.eval()(tokens, labels, loss_weights=weights, further=further)
    assert torch.equal(evaluated, alone) and whole.further.take()[1] == 0


def test_a_token_is_predicted_of_what_comes_before_it():
    """Labels of layer k at i are predicted of tokens up to i + k: a later one changes nothing of it."""
    whole, (tokens, labels, weights, further) = decoder(), batch()
    only = further._replace(weights=torch.zeros_like(further.weights).index_fill_(1, torch.tensor([3]), 1.0))
    changed = labels.clone()
    changed[:, 6:] += 1  # beyond the labels of layer 2 at 3
    told = []
    for given in (labels, changed):
        ahead = only._replace(labels=further_tokens(given, weights, 2).labels)
        whole(tokens, given, loss_weights=weights, further=ahead)
        told.append(whole.further.take()[0].item())
    assert told[0] == told[1]


def test_counts_include_them():
    config, plain = make_model(**SIZES, mtp_num_layers=2), make_model(**SIZES)
    h, spec = 16, model_spec(config)
    layer = model_spec(plain).layers[0].numel
    assert parameter_count(config) == parameter_count(plain) + 2 * (layer + 2 * h * h + 3 * h)
    assert [kind.places for kind in spec.layers] == [(0, 1), (2, 3)]
    once = training_flops(config, [8]) - training_flops(plain, [8])
    head, pairs = 6 * 8 * h * 128, 3 * spec.layers[0].mixer.work.pair * 64
    assert once == 2 * (6 * 8 * spec.layers[1].multiply_adds + head + pairs)


def test_they_lie_with_the_head_and_weigh_as_layers():
    (first, last) = partition(8, 2, further=2)
    assert (list(first.layers), list(last.main), list(last.layers)) == (
        [*range(5)],
        [5, 6, 7],
        [*range(5, 10)],
    )
    assert (first.embeds, last.embeds, last.embedding, first.further) == (True, True, False, 0)
    assert [len(s.main) for s in partition(8, 2, method="uniform", further=2)] == [4, 4]
    assert [len(s.main) for s in partition(8, 2, costs=Costs(head=2.0), further=2)] == [6, 2]
