"""Every attention backend equals plain matrix products under a dense mask; kernels for GPUs by stand-ins with their
signatures."""

from __future__ import annotations

import itertools
import sys
import types
import warnings

import pytest
import torch

from megazero.config import World, make_config
from megazero.config.model.attention import BACKENDS, BAND, DROPOUT, ODD_HEADS, TORCH, pick, refusal
from megazero.models import attention
from megazero.models.attention import FLEX_BLOCK, attend, make_tables
from megazero.models.masking import AttentionTables, Masking
from tests.messages import names, refused
from tests.unit.plan.test_plan import MODEL

LENGTH, SAMPLES, HEADS = 2 * BAND + 88, 2, 4
# Short neighbours, a document of several bands, one token at the end; and ends where bands end.
STARTS = torch.tensor(
    [
        [0] * 100 + [100] * 20 + [120] * (LENGTH - 160) + [LENGTH - 40] * 39 + [LENGTH - 1],
        [0] * BAND + [BAND] * BAND + [2 * BAND] * 88,
    ]
)
DOCUMENTS = {"none": None, "packed": STARTS}
AXES = ([None, 5, BAND + 44], list(DOCUMENTS), [0.0, 2.0], [HEADS, 2])
# Always: every second one along each axis, among which are all combinations of any three axes. The others are slow.
CASES = [
    pytest.param(
        *(axis[i] for axis, i in zip(AXES, at, strict=True)), marks=[pytest.mark.slow] * (sum(at) % 2)
    )
    for at in itertools.product(*(range(len(axis)) for axis in AXES))
]


def reference(q, k, v, masking: Masking, sinks=None):
    """Attention by matrix products under the dense mask. Sums of a head have exp(sink), too, if it has one."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * masking.scale
    if masking.cap:
        scores = (scores / masking.cap).tanh() * masking.cap
    scores = scores + masking.dense(k.shape[2], q)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).permute(2, 0, 1, 3)


def inputs(groups: int, dtype=torch.float64, width: int = 8):
    generator = torch.Generator().manual_seed(3)
    shapes = [(LENGTH, SAMPLES, heads, width) for heads in (HEADS, groups, groups)]
    return [torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for shape in shapes]


def difference(found, masking: Masking, tensors, sinks=None) -> float:
    """The largest difference of output and gradients to the reference's."""
    along = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view(found.shape)
    expected = reference(*tensors, masking, sinks)
    tensors = tensors if sinks is None else [*tensors, sinks]
    ours, theirs = (torch.autograd.grad(out, tensors, along) for out in (found, expected))
    pairs = zip((found, *ours), (expected, *theirs), strict=True)
    return max((one - other).abs().max().item() for one, other in pairs)


def case_masking(window, documents, cap) -> Masking:
    return Masking(0.3, cap, window, DOCUMENTS[documents])


@pytest.mark.parametrize(("window", "documents", "cap", "groups"), CASES)
def test_pieces_equal_a_dense_mask(window, documents, cap, groups):
    masking, tensors = case_masking(window, documents, cap), inputs(groups)
    for backend in ("math",) if cap else ("math", "flash"):
        tables = make_tables(masking, backend, LENGTH, tensors[0])
        assert difference(attend(*tensors, tables), masking, tensors) < 1e-10


# As ranks that gather keys have them: before a band's end and after several, in a document's middle, side by side.
CHUNKS = [
    (range(150), range(LENGTH - 150, LENGTH)),
    (range(150, 300), range(300, 450)),
    (range(60, LENGTH - 1),),
]
FEW = [(None, "none", 0.0, HEADS), (None, "packed", 0.0, 2), (BAND + 44, "packed", 0.0, 2)]
FEW += [(5, "none", 2.0, HEADS), (5, "packed", 0.0, HEADS)]


def of_chunks(masking: Masking, tensors, chunks):
    """The same of the queries in these chunks alone."""
    masking = masking._replace(queries=chunks)
    at = masking.positions(LENGTH, tensors[0].device)
    starts = None if masking.starts is None else masking.starts[:, at].contiguous()
    return masking._replace(starts=starts), [tensors[0].detach()[at].requires_grad_(), *tensors[1:]]


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize(("window", "documents", "cap", "groups"), FEW)
def test_chunks_of_queries_equal_rows_of_a_dense_mask(window, documents, cap, groups, chunks):
    whole, tensors = case_masking(window, documents, cap), inputs(groups)
    masking, tensors = of_chunks(whole, tensors, chunks)
    rows = masking.positions(LENGTH, tensors[0].device)
    assert torch.equal(masking.dense(LENGTH, tensors[0]), whole.dense(LENGTH, tensors[0])[:, :, rows])
    for backend in ("math",) if cap else ("math", "flash"):
        tables = make_tables(masking, backend, LENGTH, tensors[0])
        assert difference(attend(*tensors, tables), masking, tensors) < 1e-10
    blocks = make_tables(masking, "flex", LENGTH, tensors[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # uncompiled, it holds all scores
        found = attend(*(x.detach() for x in tensors), blocks)
    assert (found - reference(*tensors, masking)).abs().max() < 1e-10
    assert_blocks_are_needed(
        blocks.made, masking.dense(LENGTH, torch.zeros(()))[:, 0].isfinite(), between=True
    )


SINKS = torch.tensor(
    [-3.0, 0.0, 2.0, 30.0], dtype=torch.float64
).requires_grad_()  # nearly none to nearly all


@pytest.mark.parametrize("chunks", [None, CHUNKS[-1]])
@pytest.mark.parametrize(("window", "documents", "cap", "groups"), FEW)
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_sinks_are_in_the_sums_of_their_heads(window, documents, cap, groups, chunks):
    masking, tensors = case_masking(window, documents, cap)._replace(sinks=True), inputs(groups)
    if chunks is not None:
        masking, tensors = of_chunks(masking, tensors, chunks)
    for backend in ("math",) if cap else ("math", "flash"):
        tables = make_tables(masking, backend, LENGTH, tensors[0])
        assert difference(attend(*tensors, tables, sinks=SINKS), masking, tensors, SINKS) < 1e-10
    narrow = [x.detach() for x in (*tensors, SINKS)]  # on CPUs flex attention has no backward
    found = attend(*narrow[:3], make_tables(masking, "flex", LENGTH, narrow[0]), sinks=narrow[3])
    assert (found - reference(*narrow[:3], masking, narrow[3])).abs().max() < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_round_as_much_as_one_kernel_does(dtype):
    exact, masking = inputs(2), case_masking(BAND + 44, "packed", 0.0)
    expected = torch.autograd.grad(reference(*exact, masking).square().sum(), exact)
    narrow = [x.detach().to(dtype).requires_grad_() for x in exact]
    for backend in ("math", "flash"):
        tables = make_tables(masking, backend, LENGTH, narrow[0])
        found = torch.autograd.grad(attend(*narrow, tables).square().sum(), narrow)
        for one, other in zip(found, expected, strict=True):
            assert (one.double() - other).norm() < 4 * torch.finfo(dtype).eps * other.norm()


def test_documents_do_not_change_the_shape_of_the_pieces():
    every = torch.arange(LENGTH).expand(SAMPLES, -1)  # each token is a document
    ends = torch.arange(LENGTH) // (BAND + 2) * (BAND + 2)
    split = torch.where(torch.arange(LENGTH) - ends == BAND + 1, torch.arange(LENGTH), ends).expand(
        SAMPLES, -1
    )
    for backend in ("flash", "math"):
        tables = [
            make_tables(Masking(1.0, starts=s), backend, LENGTH, torch.zeros(())).made[0]
            for s in (STARTS, torch.zeros_like(STARTS), every, split)
        ]
        assert len({table.shape for table in tables}) == 1


def test_dropout_of_bands_is_that_of_its_key_and_its_gradient_has_the_same_mask():
    masking, (q, k, v) = case_masking(None, "packed", 0.0), inputs(2)
    tables = make_tables(masking, "math", LENGTH, q)
    out = attend(q, k, v, tables, 0.3, (1, 2))
    state = torch.get_rng_state()
    assert torch.equal(attend(q, k, v, tables, 0.3, (1, 2)), out)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(attend(q, k, v, tables, 0.3, (1, 3)), out)
    assert torch.equal(attend(q, k, v, tables, 0.3, None), attend(q, k, v, tables))
    # Of ones, the output is the share of the weights that is kept, which is 1 on average.
    kept = attend(q, k, torch.ones_like(v), tables, 0.3, (1, 2))
    assert 0.97 < kept.mean() < 1.03 and kept.std() > 0.05
    # The output is linear in v: the product with its gradient gives it back.
    (gradient,) = torch.autograd.grad(out, v, torch.ones_like(out), retain_graph=True)
    torch.testing.assert_close((gradient * v).sum(), out.sum(), rtol=1e-10, atol=1e-10)
    # Along a small step of q and k the output moves as their gradients say.
    step = 1e-6
    for x in (q, k):
        (gradient,) = torch.autograd.grad(out.sin().sum(), x, retain_graph=True)
        ahead, behind = (
            attend(*(y + sign * step * y.cos() if y is x else y for y in (q, k, v)), tables, 0.3, (1, 2))
            for sign in (1, -1)
        )
        moved = (ahead.sin().sum() - behind.sin().sum()) / (2 * step)
        torch.testing.assert_close(moved, (gradient * x.cos()).sum(), rtol=1e-5, atol=1e-5)


def test_one_operator_is_one_graph_for_any_documents():
    masking, tensors = case_masking(None, "packed", 0.0), inputs(2)
    other = masking._replace(starts=torch.zeros_like(STARTS))
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    def compute(q, k, v, made, masking):
        return attend(q, k, v, AttentionTables(masking, "flash", made))

    torch._dynamo.reset()
    compiled = torch.compile(compute, backend=count, fullgraph=True)
    for each in (masking, other):
        tables = make_tables(each, "flash", LENGTH, tensors[0])
        found = compiled(*tensors, tables.made, each)
        assert torch.equal(found, attend(*tensors, tables))
    assert len(graphs) == 1
    torch.library.opcheck(
        torch.ops.megazero.attention_in_pieces.default,
        (*(x[:, :, :, :4] for x in tensors), SINKS, *make_tables(masking, "math", LENGTH, tensors[0]).made)
        + (0.3, 0.0, None, 0.0, None, True),
    )


# --- kernels for GPUs -----------------------------------------------------------------------------------------------


def by_lengths(q, k, v, ends_q, ends_k, window, cap, scale):
    """What kernels of variable lengths compute, of [tokens, heads, d]: the last query sees the last key."""
    parts = []
    both = (itertools.pairwise(ends.tolist()) for ends in (ends_q, ends_k))
    for (first, end), (start, stop) in zip(*both, strict=True):
        if first < end:
            keys, queries = stop - start, end - first
            at = (range(keys - queries, keys),)
            masking = Masking(scale, cap, None if window < 0 else window + 1, queries=at)
            own = (q[first:end, None], k[start:stop, None], v[start:stop, None])
            parts.append(reference(*own, masking)[:, 0])
    return torch.cat(parts)


@pytest.fixture
def stand_ins(monkeypatch):
    """flash-attn and torch's varlen_attn, with their signatures, in plain torch. Returns what calls gave them."""
    calls = []

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False,
    ):  # fmt: skip
        assert causal and cu_seqlens_k.dtype == cu_seqlens_q.dtype == torch.int32
        assert max_seqlen_q >= cu_seqlens_q.diff().max() and max_seqlen_k >= cu_seqlens_k.diff().max()
        assert q.is_contiguous()
        calls.append(("flash-attn", dropout_p, cu_seqlens_q))
        return by_lengths(q, k, v, cu_seqlens_q, cu_seqlens_k, window_size[0], softcap, softmax_scale)

    def varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
        window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
    ):  # fmt: skip
        assert window_size[1] == 0 and enable_gqa == (query.shape[1] != key.shape[1])
        calls.append(("flash", 0.0, cu_seq_q))
        return by_lengths(query, key, value, cu_seq_q, cu_seq_k, window_size[0], 0.0, scale)

    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr(attention, "_way", lambda masking, backend, device: "lengths")
    return calls


@pytest.mark.parametrize(("window", "documents", "cap", "groups"), CASES)
def test_kernels_of_variable_lengths_are_given_what_they_need(window, documents, cap, groups, stand_ins):
    masking, tensors = case_masking(window, documents, cap), inputs(groups)
    names = ["flash-attn", *([] if cap else ["flash"])]
    for name in names:
        tables = make_tables(masking, name, LENGTH, tensors[0])
        assert difference(attend(*tensors, tables), masking, tensors) < 1e-10
    assert [call[0] for call in stand_ins] == names
    lengths = stand_ins[0][2].diff()
    assert lengths.sum() == LENGTH * SAMPLES and (len(lengths) & (len(lengths) - 1)) == 0


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize(("documents", "window"), [("none", None), ("packed", None), ("packed", 5)])
def test_kernels_of_variable_lengths_compute_each_chunk(documents, window, chunks, stand_ins):
    """Keys before a chunk's first document are a document without queries."""
    masking, tensors = of_chunks(case_masking(window, documents, 0.0), inputs(2), chunks)
    for name in ("flash", "flash-attn"):
        tables = make_tables(masking, name, LENGTH, tensors[0])
        assert difference(attend(*tensors, tables), masking, tensors) < 1e-10
    assert len(stand_ins) == 2 * len(chunks)


def test_flash_attn_has_dropout_of_a_key(stand_ins):
    tensors = inputs(2)
    tables = make_tables(Masking(0.3, starts=STARTS), "flash-attn", LENGTH, tensors[0])
    attend(*tensors, tables, 0.2, (1,))
    attend(*tensors, tables, 0.2, None)
    assert [call[1] for call in stand_ins] == [0.2, 0.0]


@pytest.mark.parametrize("backend", ["flash", "flash-attn"])
def test_kernels_of_variable_lengths_are_in_one_graph(backend, stand_ins, monkeypatch):
    """As for ``fullgraph``: finding the kernel is traced, too."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda q, *_, **__: q.sin())
    monkeypatch.setattr("flash_attn.flash_attn_varlen_func", lambda q, *_, **__: q.sin())
    masking, tensors = Masking(0.3, starts=STARTS), inputs(2)
    tables = make_tables(masking, backend, LENGTH, tensors[0])
    found = torch.compile(attend, backend="eager", fullgraph=True)(*tensors, tables)
    assert torch.equal(found, tensors[0].sin())


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=8)
@pytest.mark.long
def test_flex_attention_may_have_graphs_of_many_lengths(monkeypatch):
    """Beyond torch's limit of 8 it would hold all scores."""
    graphs, compiled = [], torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda *a, **k: compiled(*a, **{**k, "backend": lambda g, _: graphs.append(g) or g})
    )
    attention._compiled_flex.cache_clear()
    torch._dynamo.reset()
    function, tensors = attention._compiled_flex(True), [x.detach() for x in inputs(2)]
    for length in range(100, 112):
        q, k, v = (x[:length].permute(1, 2, 0, 3) for x in tensors)
        mask = attention.block_mask(Masking(0.3), "flex", length, q)
        function(q, k, v, block_mask=mask, enable_gqa=True)
    attention._compiled_flex.cache_clear()
    assert len(graphs) == 12


@pytest.mark.parametrize(("window", "documents", "cap", "groups"), CASES)
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_equals_a_dense_mask(window, documents, cap, groups):
    masking = case_masking(window, documents, cap)
    tensors = [x.detach() for x in inputs(groups)]  # on CPUs it has no backward
    tables = make_tables(masking, "flex", LENGTH, tensors[0])
    found, expected = attend(*tensors, tables), reference(*tensors, masking)
    assert (found - expected).abs().max() < 1e-10


@pytest.mark.parametrize("window", [None, 5, FLEX_BLOCK, BAND + 44])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_blocks_of_flex_attention_are_those_that_the_mask_needs(window, documents):
    """Uncompiled flex attention does not read them."""
    masking = case_masking(window, documents, 0.0)
    blocks = attention.block_mask(masking, "flex", LENGTH, torch.zeros(()))
    assert_blocks_are_needed(blocks, masking.dense(LENGTH, torch.zeros(()))[:, 0].isfinite())


def assert_blocks_are_needed(blocks, seen, between=False):
    """seen: [b or 1, queries, keys]. between: what lies between two chunks of one block of queries may be there."""
    for sample, row in itertools.product(range(len(seen)), range(-(-seen.shape[1] // FLEX_BLOCK))):
        of_row = seen[sample, row * FLEX_BLOCK : (row + 1) * FLEX_BLOCK].split(FLEX_BLOCK, dim=1)
        partial = blocks.kv_indices[sample, 0, row, : blocks.kv_num_blocks[sample, 0, row]].tolist()
        full = blocks.full_kv_indices[sample, 0, row, : blocks.full_kv_num_blocks[sample, 0, row]].tolist()
        assert len({*partial, *full}) == len(partial) + len(full)
        needed = {i for i, each in enumerate(of_row) if each.any()}
        assert needed == {*partial, *full} or between and needed < {*partial, *full}
        assert all(of_row[i].all() for i in full)


# --- which of them runs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wants", "bits", "device", "missing", "picked"),
    [
        ((), 16, "cuda", (), TORCH),
        ((DROPOUT,), 64, "cpu", (), TORCH),
        (("documents",), 16, "cuda", (), "flash"),
        ((ODD_HEADS,), 16, "cuda", (), TORCH),
        (("documents", ODD_HEADS), 16, "cuda", (), "flex"),
        (("documents", "windows"), 32, "cpu", (), "flash"),
        (("documents",), 16, "cuda", ("flash",), "flash-attn"),
        (("windows", "documents"), 16, "cuda", ("flash", "flash-attn", "flex"), "efficient"),
        (("capped scores",), 16, "cuda", ("flash-attn",), "flex"),
        (("capped scores", "windows"), 16, "cuda", (), "flash-attn"),
        (("capped scores", DROPOUT), 16, "cuda", (), "math"),
        (("documents",), 32, "cuda", (), "flex"),
        (("documents",), 64, "cuda", (), "math"),
        (("capped scores",), 16, "cpu", (), "math"),
        (("documents", DROPOUT), 32, "cpu", (), "math"),
    ],
)
def test_auto_picks(wants, bits, device, missing, picked):
    assert pick("auto", frozenset(wants), bits, 2048, device, missing) == picked


LONG = {"seq_length": 4096, "max_position_embeddings": 4096, "sliding_window": 64}
LLAMA = {**MODEL, "model_family": "llama", "attention_dropout": 0.0, "params_dtype": "bf16"}


@pytest.mark.parametrize(
    ("backend", "values", "lacks", "nearest"),
    [
        ("flash", {"attn_logit_softcapping": 50.0}, "--attn-logit-softcapping", "math, flash-attn, flex"),
        ("efficient", {"softmax_type": "learnable"}, "--softmax-type", "flash, math, flex"),
        ("cudnn", {"reset_attention_mask": True}, "--reset-attention-mask", ""),
        ("flex", {"device": "cpu"}, "CPUs", "flash, math"),
        ("flash-attn", {"params_dtype": "fp32"}, "--params-dtype", ""),
        ("efficient", LONG, "2,048", "flash"),
    ],
)
def test_what_a_backend_lacks_is_refused_by_name(backend, values, lacks, nearest):
    with refused(backend, lacks, nearest):
        make_config({**LLAMA, "attention_backend": backend, **values}, World(1, 1))
    make_config({**LLAMA, **LONG, "attention_backend": "flash"}, World(1, 1))
    names(refusal("flash", frozenset(), 32, 64, "cuda") or "", "nearest: flex, efficient, math")


def test_a_package_that_is_not_there_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setattr(attention, "missing_backends", lambda: {"flash-attn": "the package is not installed"})
    of = (frozenset({"capped scores"}), torch.bfloat16, 4096, torch.device("meta"))
    with refused("flash-attn", "package", "nearest: flex, math"):
        attention.choose("flash-attn", *of)
    assert attention.choose("auto", *of) == "flex"


def test_every_want_has_a_backend_on_every_device():
    wants = {want for each in BACKENDS for some in each.takes for want in some}
    for device, bits in itertools.product(("cpu", "cuda"), (16, 32, 64)):
        for size in range(len(wants) + 1):
            for some in itertools.combinations(sorted(wants), size):
                assert pick("auto", frozenset(some), bits, 8192, device)
