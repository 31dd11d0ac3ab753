"""Tensor parallelism over gloo ranks equals one rank: losses and gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megazero.comm.hops import Traffic
from megazero.mesh.levels import INTRA
from megazero.models import Decoder, ModelConfig, make_model
from megazero.tp import (
    DeferredGradients,
    TensorParallel,
    VocabShard,
    vocab_parallel_cross_entropy,
)
from tests.dist.engine.test_parity import check
from tests.dist.parity_cases import FEW_STEPS, TWO_KEY_HEADS, Case
from tests.dist.pool import RankError, run_ranks
from tests.messages import refused
from tests.sizes import DECODER

GPT = {**DECODER, "num_query_groups": 8, "model_family": "gpt"}
FAMILIES = {
    "llama": make_model(**DECODER),
    "llama-two-key-heads": make_model(**{**DECODER, "num_query_groups": 2}, add_qkv_bias=True),
    "gpt": make_model(**GPT),
    "gpt-untied": make_model(**{**GPT, "vocab_size": 96}, untie_embeddings_and_output_weights=True),
}
RECOMPUTE = {"llama-two-key-heads": "selective", "gpt": "full"}


def context(sequence_parallel: bool) -> TensorParallel:
    world = dist.group.WORLD
    return TensorParallel(world, dist.get_rank(), dist.get_world_size(), sequence_parallel=sequence_parallel)


def batch(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, config.vocab_size, (3, 12), generator=torch.Generator().manual_seed(1))
    return tokens, tokens.roll(-1, 1)


# What the cover (engine/test_parity.py) does not have: heads that two of four ranks share.
SHARED = Case(2, 1, 2, "zero1", None, False, 1, False, "odd", "full", "fp64", TWO_KEY_HEADS)


@pytest.mark.first(2)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("size", [2, 4])
def test_decoder_equals_one_rank(size, sequence_parallel):
    check([replace(SHARED, tp=size, per_node=size, sequence_parallel=sequence_parallel)], FEW_STEPS)


def gradients_put_off(sequence_parallel: bool, dtype: torch.dtype) -> dict[str, list[str]]:
    """Checks I and W against the direct backward, to the bit and byte; the order of W, by case."""
    order = {}
    for case, config in FAMILIES.items():
        deferred, traffic = DeferredGradients(), Traffic()
        plain = replace(context(sequence_parallel), traffic=traffic)
        decoders, sent = [], []
        for tp in (plain, replace(plain, deferred=deferred)):
            decoder = Decoder(config, tp, recompute=RECOMPUTE.get(case, "none"), dtype=dtype)
            decoder.initialize(3)
            loss = decoder(*batch(config)).sum()
            traffic.bytes.clear()
            with deferred.recording(0):  # without it in the context it changes nothing
                loss.backward()
            decoders.append(decoder)
            sent.append(traffic.total(INTRA))
        reference, decoder = decoders
        expected = {name: p.grad for name, p in reference.named_parameters()}
        names = {p: name for name, p in decoder.named_parameters()}
        traffic.bytes.clear()
        pairs = list(deferred.compute(0))
        order[case] = [names[p] for p, _ in pairs]
        got = {names[p]: g for p, g in pairs}
        assert len(got) == len(pairs)
        for name, p in decoder.named_parameters():
            matrix = p.ndim == 2 and name != "embedding.positions"
            assert (p.grad is None) == (name in got), (case, name)
            assert matrix <= (name in got), (case, name)
            assert torch.equal(p.grad if p.grad is not None else got[name], expected[name]), (case, name)
        # Under sequence parallel W has the gathers of the columns' inputs, each once; otherwise no traffic.
        assert traffic.total(INTRA) + sent[1] == sent[0], case
        assert (traffic.total(INTRA) > 0) == sequence_parallel, case
    return order


@pytest.mark.first(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
def test_gradients_put_off_equal_the_direct_backward(sequence_parallel, dtype):
    first, second = run_ranks(2, gradients_put_off, sequence_parallel, dtype)
    assert first == second
    assert "layers.0.attention.q_proj.bias" in first["gpt"]  # columns' biases wait with their weights;
    assert "layers.0.attention.o_proj.bias" not in first["gpt"]  # rows' are added after the reduction
    assert first["gpt"][-1] == "embedding.tokens.weight"  # tied: at the place of its last use
    assert first["gpt-untied"][0] == "head.weight"


def cross_entropy_of_a_shard(dtype: torch.dtype):
    tp = context(False)
    shard = VocabShard.of(10, 12, tp)  # 12 rows over 2 or 4 ranks, 2 of padding
    full = 5 * torch.randn(7, 2, 12, generator=torch.Generator().manual_seed(0))
    logits = full[..., shard.start : shard.start + shard.rows].to(dtype).contiguous().requires_grad_()
    labels = torch.randint(0, 10, (7, 2), generator=torch.Generator().manual_seed(1))
    labels[3, 0] = -100
    loss = vocab_parallel_cross_entropy(logits * 1, labels, shard, tp)
    (loss * torch.arange(14).view(7, 2)).sum().backward()
    return loss.detach(), logits.grad


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_cross_entropy_equals_torch(size, dtype):
    results = run_ranks(size, cross_entropy_of_a_shard, dtype)
    full = (5 * torch.randn(7, 2, 12, generator=torch.Generator().manual_seed(0))).to(dtype).double()
    full.requires_grad_()
    labels = torch.randint(0, 10, (7, 2), generator=torch.Generator().manual_seed(1))
    labels[3, 0] = -100
    losses = torch.nn.functional.cross_entropy(
        full[..., :10].flatten(0, 1), labels.flatten(), reduction="none"
    )
    losses = losses.view(7, 2)
    (losses * torch.arange(14).view(7, 2)).sum().backward()
    gradient = torch.cat([g for _, g in results], -1)
    bound = 4 * torch.finfo(dtype).eps
    for loss, _ in results:
        assert torch.equal(loss, results[0][0])
        assert torch.allclose(
            loss.double(), losses, rtol=1e-6 if dtype != torch.float64 else 1e-14, atol=1e-6
        )
    assert torch.allclose(gradient.double(), full.grad, rtol=bound, atol=13 * bound)
    assert torch.all(gradient[..., 10:] == 0)


def dropout_masks(sequence_parallel: bool):
    """Loss under dropout twice, with and without recompute; the gradients of the replicated parameters."""
    out = []
    for recompute in ("none", "full", "selective"):
        config = make_model(**{**DECODER, "hidden_dropout": 0.3, "attention_dropout": 0.2})
        decoder = Decoder(config, context(sequence_parallel), recompute=recompute, dtype=torch.float64)
        decoder.initialize(3)
        loss = decoder(*batch(config), dropout_key=5)
        loss.sum().backward()
        specs = decoder.specs
        for name, p in decoder.named_parameters():
            if specs[name].partial(decoder.tp.size, sequence_parallel):
                dist.all_reduce(p.grad)
        norms = {n: p.grad for n, p in decoder.named_parameters() if specs[n].replicated(decoder.tp.size)}
        out.append((loss.detach(), norms, decoder.get_submodule("layers.0.mlp.up_proj").weight.grad))
    return out


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_agrees_between_ranks_and_on_recompute(sequence_parallel):
    results = run_ranks(2, dropout_masks, sequence_parallel)
    for kept, full, selective in results:
        for other in (full, selective):
            assert torch.equal(kept[0], other[0])
            assert torch.equal(kept[2], other[2])
    first, second = (r[0] for r in results)
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


def bad_sequence():
    decoder = Decoder(FAMILIES["llama"], context(True))
    decoder.initialize(0)
    decoder(torch.zeros(1, 7, dtype=torch.long))


def test_sequence_that_does_not_divide_is_refused():
    with refused("length 7", "pad to 8", by=RankError):
        run_ranks(2, bad_sequence)
