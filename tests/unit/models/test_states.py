"""Gated delta net and Mamba-2 against their recurrences, token by token, and what a document sees of another."""

from __future__ import annotations

import pytest
import torch

from megazero.models import Decoder, make_model
from megazero.models.mixers.gated_delta_net import gated_delta_rule, unit
from megazero.models.mixers.mamba import state_space
from megazero.models.positions import Documents
from tests.messages import refused

DELTA = {
    **{"model_family": "qwen3_next", "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4},
    **{"vocab_size": 50, "kv_channels": 8, "max_position_embeddings": 200, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6},
}
MAMBA = {
    **{
        "model_family": "nemotron_h",
        "hybrid_layer_pattern": "M*-M",
        "hidden_size": 32,
        "num_attention_heads": 4,
    },
    **{"vocab_size": 50, "kv_channels": 8, "max_position_embeddings": 200, "mamba_num_heads": 6},
    **{"mamba_head_dim": 6, "mamba_state_dim": 8, "mamba_num_groups": 2},
}


def delta_by_token(q, k, v, decay, beta, starts):
    q, k = (unit(x).repeat_interleave(v.shape[2] // q.shape[2], 2) for x in (q, k))
    state, out = v.new_zeros(*v.shape[1:3], k.shape[-1], v.shape[-1]), []
    for t in range(len(q)):
        state = state * (starts[:, t] < t)[:, None, None, None] * decay[t].exp()[..., None, None]
        update = beta[t][..., None] * (v[t] - torch.einsum("bhkv,bhk->bhv", state, k[t]))
        state = state + k[t][..., None] * update[..., None, :]
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[t] * q.shape[-1] ** -0.5))
    return torch.stack(out)


def mamba_by_token(c, b, x, decay, step, skip, starts):
    c, b = (y.repeat_interleave(x.shape[2] // b.shape[2], 2) for y in (c, b))
    state, out = x.new_zeros(*x.shape[1:3], b.shape[-1], x.shape[-1]), []
    for t in range(len(x)):
        state = state * (starts[:, t] < t)[:, None, None, None] * decay[t].exp()[..., None, None]
        state = state + b[t][..., None] * (step[t][..., None] * x[t])[..., None, :]
        out.append(torch.einsum("bhnp,bhn->bhp", state, c[t]) + skip[:, None] * x[t])
    return torch.stack(out)


@pytest.mark.parametrize("length", [1, 5, 64, 65, 200])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
    "chunks, recurrence", [(gated_delta_rule, delta_by_token), (state_space, mamba_by_token)]
)
def test_chunks_equal_the_recurrence(chunks, recurrence, length, documents):
    """With documents that begin within a chunk, at one, and after one that is a document's alone."""
    torch.manual_seed(length)
    shapes = ((2, 8), (2, 8), (4, 6))
    q, k, v = (torch.randn(length, 2, *shape, dtype=torch.double, requires_grad=True) for shape in shapes)
    decay, beta = (torch.rand(length, 2, 4, dtype=torch.double) for _ in range(2))
    inputs = (q, k, v, (-3 * decay).requires_grad_(), beta.requires_grad_())
    if chunks is state_space:
        inputs += (torch.randn(4, dtype=torch.double, requires_grad=True),)
    starts = torch.zeros(2, length, dtype=torch.long)
    if documents:
        for sample, start in ((0, 3), (0, 4), (1, 62), (1, 128), (1, 192)):
            starts[sample, start:] = start
    ours = chunks(*inputs, starts if documents else None)
    theirs = recurrence(*inputs, starts)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)
    gradient = torch.randn_like(ours)
    for own, other in zip(*(torch.autograd.grad(x, inputs, gradient) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", [DELTA, MAMBA], ids=["gated-delta-net", "mamba"])
def test_packed_documents_equal_documents_by_themselves(sizes):
    decoder = Decoder(make_model(**sizes), dtype=torch.double)
    decoder.initialize(3)
    tokens, cuts = torch.randint(0, 50, (1, 100), generator=torch.Generator().manual_seed(2)), (0, 7, 70, 100)
    spans = [(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
    starts = torch.cat([torch.full((1, b - a), a) for a, b in spans], 1)
    positions = torch.cat([torch.arange(b - a)[None] for a, b in spans], 1)
    packed = decoder(tokens, documents=Documents(positions, starts))
    apart = torch.cat([decoder(tokens[:, a:b]) for a, b in spans], 1)
    torch.testing.assert_close(packed, apart, rtol=0, atol=1e-12)
    assert not torch.allclose(packed, decoder(tokens), atol=1e-6)


def test_initial_decays_and_steps_are_those_of_mamba():
    decoder = Decoder(make_model(**{**DELTA, "linear_num_value_heads": 400, "linear_num_key_heads": 1}))
    decoder.initialize(0)
    values = {name: p.detach() for name, p in decoder.named_parameters()}
    decay = values["layers.0.attention.A_log"].exp()
    step = torch.nn.functional.softplus(values["layers.0.attention.dt_bias"])
    assert 1 <= decay.min() < 1.5 and 15.5 < decay.max() <= 16 and decay.mean() == pytest.approx(8.5, abs=1)
    assert 0.001 <= step.min() < 0.0012 and 0.09 < step.max() <= 0.1001
    assert step.log().mean() == pytest.approx(-4.605, abs=0.2)


def test_what_is_refused():
    with refused("--linear-num-value-heads 5", "--linear-num-key-heads 2", "nearest: 4 or 6"):
        Decoder(make_model(**{**DELTA, "linear_num_value_heads": 5}))
    with refused("--mamba-num-heads 5", "--mamba-num-groups 2", "nearest: 4 or 6"):
        Decoder(make_model(**{**MAMBA, "mamba_num_heads": 5}))
