"""Tensor-parallel pieces on one rank: the loss, the vocabulary, the context."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megazero.config.model.section import make_model
from megazero.tp import (
    IGNORED_LABEL,
    ColumnParallelLinear,
    TensorParallel,
    VocabShard,
    cross_entropy,
    vocab_parallel_cross_entropy,
)
from tests.messages import refused

ONE = TensorParallel()
LAYER = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 8}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("padding", [0, 27])
@pytest.mark.parametrize("chunk, z_loss", [(1, 0.0), (300, 0.1), (1 << 20, 0.0)])
def test_cross_entropy_equals_torch(dtype, padding, chunk, z_loss, monkeypatch):
    monkeypatch.setattr(cross_entropy, "_CPU_CHUNK", chunk)
    torch.manual_seed(0)
    shard = VocabShard(0, 101 + padding, 101)
    logits = (4 * torch.randn(6, 3, 101 + padding)).to(dtype).requires_grad_()
    labels = torch.randint(0, 101, (6, 3))
    labels[2, 1] = IGNORED_LABEL
    scale = torch.rand(6, 3, dtype=torch.float64)
    exact = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(exact[..., :101].flatten(0, 1), labels.flatten(), reduction="none").view(6, 3)
    squares = exact[..., :101].logsumexp(-1) ** 2
    expected = expected + (z_loss * squares).masked_fill(labels == IGNORED_LABEL, 0)
    (expected * scale).sum().backward()

    loss = vocab_parallel_cross_entropy(logits * 1, labels, shard, ONE, z_loss)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert loss[2, 1] == 0
    (loss * scale).sum().backward()
    # exp's argument, of less than 32, is rounded to 8 eps in what computes, here and (fp64) in the reference.
    bound = 4 * torch.finfo(dtype).eps + 16 * torch.finfo(loss.dtype).eps
    assert torch.allclose(loss.double(), expected, rtol=16 * torch.finfo(loss.dtype).eps, atol=0)
    assert torch.allclose(logits.grad.double(), exact.grad, rtol=bound, atol=bound * 0.1)
    assert torch.all(logits.grad[..., 101:] == 0)
    assert torch.all(logits.grad[2, 1] == 0)


def test_cross_entropy_backward_runs_once_and_keeps_non_finite_values():
    logits = torch.randn(4, 1, 8, requires_grad=True)
    labels = torch.zeros(4, 1, dtype=torch.long)
    loss = vocab_parallel_cross_entropy(logits * 1, labels, VocabShard(0, 8, 8), ONE)
    loss.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()
    bad = torch.randn(4, 1, 8)
    bad[1, 0, 3] = torch.nan
    bad[2, 0, 3] = torch.inf
    loss = vocab_parallel_cross_entropy(bad, labels, VocabShard(0, 8, 8), ONE).flatten()
    assert loss.isfinite().tolist() == [True, False, False, True]


def test_vocabulary_padding_and_shards():
    def padded(vocab: int, divisor: int, size: int, exactly: int | None = None) -> int:
        sizes = {"vocab_size": vocab, "make_vocab_size_divisible_by": divisor, "pad_vocab_size_to": exactly}
        return make_model(**LAYER, **sizes).padded_vocab_size(size)

    assert padded(50257, 128, 1) == 50304
    assert padded(50257, 128, 8) == 51200  # as Megatron's GPT-3
    assert padded(50257, 100, 8) == 50400
    assert padded(256, 128, 2) == 256
    assert padded(250680, 128, 4, 250880) == 250880
    for vocab, rows, size in ((5, 128, 4), (101, 104, 4), (256, 256, 2), (130, 256, 4)):
        shards = [VocabShard.of(vocab, rows, TensorParallel(None, r, size)) for r in range(size)]
        assert sum(s.valid for s in shards) == vocab
        tokens = torch.arange(vocab)
        owned = torch.stack([~s.localise(tokens)[1] for s in shards])
        assert torch.all(owned.sum(0) == 1)
        for shard, mine in zip(shards, owned, strict=True):
            assert torch.equal(shard.localise(tokens)[0][mine] + shard.start, tokens[mine])


def test_context_and_division_errors():
    with refused("rank 2", "[0, 2)"):
        TensorParallel(None, 2, 2)
    with refused("= 10", "size 4", "8"):
        ColumnParallelLinear(4, 10, TensorParallel(None, 0, 4), bias=False)
    assert not TensorParallel(sequence_parallel=True).sharded_sequence
