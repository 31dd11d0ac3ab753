"""Tensor parallelism over gloo ranks equals one rank: losses and gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megazero.comm.hops import Traffic
from megazero.data.gpt import document_fields
from megazero.mesh.grid import INTRA
from megazero.models import Decoder, ModelConfig, make_model
from megazero.models.positions import Documents
from megazero.tp import (
    ColumnParallelLinear,
    DeferredGradients,
    RowParallelLinear,
    TensorParallel,
    VocabShard,
    vocab_parallel_cross_entropy,
)
from tests.dist.pool import RankError, run_ranks
from tests.hugging_face import to_hf_state_dict
from tests.sizes import DECODER

GPT, BLOOM = ({**DECODER, "num_query_groups": 8, "model_family": family} for family in ("gpt", "bloom"))
# What the covers (engine/test_parity.py) and test_families.py do not have: shared heads, and rows that are padding.
CASES: dict[str, ModelConfig] = {
    "llama-squared-relu-partial-rotary": make_model(
        **DECODER, squared_relu=True, rotary_percent=0.5, pad_vocab_size_to=120
    ),
    "llama-one-key-head": make_model(**{**DECODER, "num_query_groups": 1}, add_qkv_bias=True),
    "llama-two-key-heads-selective": make_model(**{**DECODER, "num_query_groups": 2}),
    "bloom-tiny-vocabulary": make_model(**{**BLOOM, "vocab_size": 5, "make_vocab_size_divisible_by": 128}),
}
RECOMPUTE = {"llama-squared-relu-partial-rotary": "full", "llama-two-key-heads-selective": "selective"}
FAMILIES = {"llama": make_model(**DECODER), "gpt": make_model(**GPT), "bloom": make_model(**BLOOM)}
UNTIED = make_model(**{**GPT, "vocab_size": 96}, untie_embeddings_and_output_weights=True)


def context(sequence_parallel: bool) -> TensorParallel:
    world = dist.group.WORLD
    return TensorParallel(world, dist.get_rank(), dist.get_world_size(), sequence_parallel=sequence_parallel)


def batch(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, config.vocab_size, (3, 12), generator=torch.Generator().manual_seed(1))
    return tokens, tokens.roll(-1, 1)


def perturb(decoder: Decoder) -> None:
    """Values that tell norms and biases of different layers and rows apart, the same for any tp."""
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            placement = decoder.placements()[name]
            for s in placement.segments if p.ndim == 1 else ():
                rows = torch.arange(s.stored, s.stored + s.length, dtype=p.dtype)
                p[s.local : s.local + s.length] += 0.1 * torch.sin(rows + len(name))
            if p.ndim == 2:
                p.mul_(4)


def sum_over_holders(gradient: torch.Tensor, tp: TensorParallel, span: int) -> None:
    """As the engine does: over the ranks that hold the same."""
    every = [torch.empty_like(gradient) for _ in range(tp.size)]
    dist.all_gather(every, gradient, group=tp.group)
    span = span or tp.size
    first = tp.rank // span * span
    gradient.copy_(sum(every[first : first + span]))


def run(name: str, tp: TensorParallel):
    """Loss, logits and stored-layout gradients of this rank's slices (partial ones summed); of what several ranks
    hold, the first of them and its gradients."""
    config = CASES[name]
    decoder = Decoder(config, tp, recompute=RECOMPUTE.get(name, "none"), dtype=torch.float64)
    decoder.initialize(3)
    perturb(decoder)
    loss = decoder(*batch(config))
    loss.sum().backward()
    gradients = Decoder(config, tp, dtype=torch.float64)
    with torch.no_grad():
        for (name, p), out in zip(decoder.named_parameters(), gradients.parameters(), strict=True):
            if name in decoder.partial_gradients():
                sum_over_holders(p.grad, tp, decoder.replica_span(name))
            out.copy_(p.grad)
    placements, padding = decoder.placements(), 0.0
    for name, out in gradients.named_parameters():
        valid = sum(s.length for s in placements[name].segments)
        padding += out[valid:].abs().sum().item()
    whole = {placements[n].name: g for n, g in gradients.named_parameters()}
    replicated = {placements[n].name: decoder.replica_span(n) for n in decoder.replicated_parameters()}
    logits = decoder.full_logits(batch(config)[0]).detach()
    kept = {
        name: (tp.rank // (span or tp.size) * (span or tp.size), whole[name].detach().clone())
        for name, span in replicated.items()
    }
    return loss.detach(), logits, to_hf_state_dict(gradients), kept, padding


def on_ranks(names: list[str], sequence_parallel: bool) -> dict:
    torch.set_num_threads(1)
    return {name: run(name, context(sequence_parallel)) for name in names}


@pytest.fixture(scope="module")
def reference() -> dict:
    return {name: run(name, TensorParallel()) for name in CASES}


@pytest.mark.first(2)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("size", [2, 4])
def test_decoder_equals_one_rank(size, sequence_parallel, reference):
    results = run_ranks(size, on_ranks, list(CASES), sequence_parallel)
    for name in CASES:
        loss, logits, expected, _, _ = reference[name]
        floor = 1e-6 * torch.stack([g.norm() for g in expected.values()]).norm()
        merged: dict[str, torch.Tensor] = {}
        for rank in range(size):
            got_loss, got_logits, slices, kept, padding = results[rank][name]
            assert torch.allclose(got_loss, loss, rtol=1e-12, atol=0), name
            assert torch.allclose(got_logits, logits, rtol=0, atol=1e-12), name
            assert torch.equal(got_loss, results[0][name][0])
            assert padding == 0
            for key, (first, value) in kept.items():  # replicas agree to the bit
                assert torch.equal(value, results[first][name][3][key][1]), (name, key)
            for key, value in slices.items():
                if kept.get(key, (rank, None))[0] == rank:
                    merged[key] = merged.get(key, 0) + value
        for key, gradient in expected.items():
            difference = ((merged[key] - gradient).norm() / gradient.norm().clamp(floor)).item()
            assert difference < 1e-10, (name, key, difference)


ENDS = ((3, 4, 9), (), (0, 11))  # the last tokens of documents in each sample of ``batch``


def packed(reset_position_ids: bool = True) -> Documents:
    ends = torch.zeros(3, 12, dtype=torch.bool)
    for sample, at in enumerate(ENDS):
        ends[sample, list(at)] = True
    fields = document_fields(ends.numpy(), reset_position_ids=reset_position_ids, reset_attention_mask=True)
    ids = fields.get("position_ids")
    return Documents(
        None if ids is None else torch.from_numpy(ids), torch.from_numpy(fields["document_starts"])
    )


def losses_apart(decoder: Decoder, config: ModelConfig) -> torch.Tensor:
    """[b, s]: every document is a sample of its own."""
    tokens, labels = batch(config)
    rows = []
    for sample, ends in enumerate(ENDS):
        cuts = [0, *(end + 1 for end in ends), 12]
        parts = [slice(a, b) for a, b in zip(cuts, cuts[1:], strict=False) if a < b]
        rows.append(torch.cat([decoder(tokens[[sample], p], labels[[sample], p])[0] for p in parts]))
    return torch.stack(rows)


def packed_documents(name: str, recompute: str, tp: TensorParallel, apart: bool, dtype: torch.dtype):
    config = FAMILIES[name]
    decoder = Decoder(config, tp, recompute=recompute, dtype=dtype)
    decoder.initialize(3)
    perturb(decoder)
    losses = losses_apart(decoder, config) if apart else decoder(*batch(config), documents=packed())
    losses.sum().backward()
    return losses.detach(), decoder.get_submodule("layers.0.mlp.up_proj").weight.grad


def documents_on_ranks(cases: list[tuple], sequence_parallel: bool) -> list:
    torch.set_num_threads(1)
    return [packed_documents(*case, context(sequence_parallel), False, torch.float32) for case in cases]


@pytest.mark.first(1)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
def test_packed_documents_lose_what_they_lose_apart(sequence_parallel):
    cases = [(name, kind) for name in FAMILIES for kind in ("none", "selective", "full")]
    results = run_ranks(2, documents_on_ranks, cases, sequence_parallel)
    for case, *ranks in zip(cases, *results, strict=True):
        losses, gradient = packed_documents(case[0], "none", TensorParallel(), True, torch.float64)
        for got, _ in ranks:
            torch.testing.assert_close(got.double(), losses, rtol=1e-6, atol=0)
        whole = torch.cat([part for _, part in ranks]).double()
        assert (whole - gradient).norm() / gradient.norm() < 1e-6


def linear_gradients(sequence_parallel: bool):
    """A column-parallel then row-parallel linear against the same weights on one rank."""
    tp = context(sequence_parallel)
    generator = torch.Generator().manual_seed(0)
    w1 = torch.randn(8, 6, generator=generator).double()
    w2 = torch.randn(6, 8, generator=generator).double()
    x = torch.randn(4, 2, 6, generator=generator).double()
    up = ColumnParallelLinear(6, 8, tp, bias=True, dtype=torch.float64)
    down = RowParallelLinear(8, 6, tp, bias=True, dtype=torch.float64)
    part = slice(tp.rank * 8 // tp.size, (tp.rank + 1) * 8 // tp.size)
    positions = slice(tp.rank * 4 // tp.size, (tp.rank + 1) * 4 // tp.size)
    with torch.no_grad():
        up.weight.copy_(w1[part])
        up.bias.fill_(0.5)
        down.weight.copy_(w2[:, part])
        down.bias.fill_(0.25)
    mine = (x[positions] if sequence_parallel else x).clone().requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        y = up(mine)
    assert torch.Size([4, 2, 6]) not in saved or not sequence_parallel  # only the own slice is kept
    y = down(y.tanh())
    y.pow(2).sum().backward()
    whole = x.clone().requires_grad_()
    w1, w2 = w1.requires_grad_(), w2.requires_grad_()
    expected = torch.tanh(whole @ w1.t() + 0.5) @ w2.t() + 0.25
    expected.pow(2).sum().backward()
    pick = positions if sequence_parallel else slice(None)
    assert torch.allclose(y, expected[pick], rtol=1e-13)
    assert torch.allclose(mine.grad, whole.grad[pick], rtol=1e-12)
    assert torch.allclose(up.weight.grad, w1.grad[part], rtol=1e-12)
    assert torch.allclose(down.weight.grad, w2.grad[:, part], rtol=1e-12)
    bias = down.bias.grad.clone()
    if sequence_parallel:
        dist.all_reduce(bias)
    assert torch.allclose(bias, 2 * expected.sum((0, 1)), rtol=1e-12)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_linears_equal_one_rank(sequence_parallel):
    run_ranks(2, linear_gradients, sequence_parallel)


def gradients_put_off(sequence_parallel: bool, dtype: torch.dtype) -> dict[str, list[str]]:
    """Checks I and W against the direct backward, to the bit and byte; the order of W, by case."""
    order = {}
    for case, config in {**CASES, **FAMILIES, "gpt-untied": UNTIED}.items():
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
        partial = decoder.partial_gradients()
        for name, p in decoder.named_parameters():
            if name in partial:
                dist.all_reduce(p.grad)
        norms = {n: p.grad for n, p in decoder.named_parameters() if n in decoder.replicated_parameters()}
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
    with pytest.raises(RankError, match="sequence length 7 does not divide .* pad to 8"):
        run_ranks(2, bad_sequence)
