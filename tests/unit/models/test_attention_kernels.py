"""Which attention kernel torch takes: repeated heads, and what a run says of its backend at the start."""

from __future__ import annotations

import pytest
import torch
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

from megazero.models import Decoder, attention
from megazero.models.attention import attend, attention_note, fused
from megazero.models.masking import AttentionTables, Masking
from megazero.tp import TensorParallel
from tests.unit.models.test_decoder import batch, make


@pytest.fixture
def fused_kernels(monkeypatch):
    """torch's answers on a GPU: flash takes 16 bits without a mask, the memory-efficient kernel no grouped heads."""

    def flash(inputs):
        return cuda.flash_sdp_enabled() and inputs.query.dtype.itemsize == 2 and inputs.attn_mask is None

    def efficient(inputs):
        aligned = inputs.query.shape[-1] * inputs.query.dtype.itemsize % 16 == 0
        allowed = cuda.mem_efficient_sdp_enabled() and not inputs.enable_gqa
        return allowed and inputs.query.dtype != torch.float64 and aligned

    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", flash)
    monkeypatch.setattr(torch.backends.cuda, "can_use_efficient_attention", efficient)
    attention._fused.cache_clear()
    yield
    attention._fused.cache_clear()


@pytest.mark.parametrize(
    ("position", "dtype", "grouped"),
    [
        ("rope", torch.bfloat16, True),
        ("rope", torch.float32, False),
        ("rope", torch.float64, False),
    ],
)
def test_heads_are_repeated_where_no_fused_kernel_takes_groups(
    position, dtype, grouped, fused_kernels, monkeypatch
):
    decoder = Decoder(make("llama", num_query_groups=2, position_embedding_type=position), dtype=dtype)
    decoder.initialize(7)
    seen = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def watched(q, k, v, **options):
        seen.append((k.shape[1], options["enable_gqa"]))
        return attention(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    expected = decoder(*batch())
    assert set(seen) == {(4, False)}  # on a CPU
    seen.clear()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    loss = decoder(*batch())
    monkeypatch.undo()
    assert set(seen) == {(2, True) if grouped else (4, False)}
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(("backend", "heads"), [("torch", 2), ("flash", 2), ("efficient", 4), ("cudnn", 4)])
def test_groups_are_left_to_the_kernel_that_is_asked_for(backend, heads, fused_kernels, monkeypatch):
    seen = []

    def watched(q, k, v, **options):
        seen.append((k.shape[1], options["enable_gqa"]))
        return q

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    q, k, v = (torch.zeros(16, 2, each, 8, dtype=torch.bfloat16) for each in (4, 2, 2))
    attend(q, k, v, AttentionTables(Masking(0.3), backend))
    assert seen == [(heads, heads == 2)]


def test_kernels_are_asked_once_for_all_layers_and_again_under_other_settings(fused_kernels, monkeypatch):
    asked, ask = [], cuda.can_use_efficient_attention
    monkeypatch.setattr(cuda, "can_use_efficient_attention", lambda inputs: asked.append(1) or ask(inputs))
    shape = 4, 2, 8, torch.float32, torch.device("cpu"), 0.0
    assert not any(fused(*shape) for _ in range(24)) and len(asked) == 1
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert not fused(*shape) and len(asked) == 2


WIDE, WINDOW = {"hidden_size": 64}, {"sliding_window": 31}


@pytest.mark.parametrize(
    ("family", "dtype", "changes", "said"),
    [
        ("llama", torch.bfloat16, {"sliding_window": 32}, None),
        ("llama", torch.float64, {}, "2 heads of 12 in float64 on"),
        ("llama", torch.bfloat16, {**WIDE, **WINDOW}, "attention with windows: --attention-backend flash"),
        ("llama", torch.float64, WINDOW, "above 256 and windows in float64"),
        ("gemma2", torch.bfloat16, WIDE, "attention with capped scores: --attention-backend flex"),
        ("gemma2", torch.bfloat16, {**WIDE, "attention_dropout": 0.1}, "(flash-attn: the package"),
    ],
)
def test_a_run_says_which_backend_computes_more_than_plain_attention(
    family, dtype, changes, said, fused_kernels, monkeypatch
):
    absent = {"flash-attn": "the package flash-attn is not installed"}
    monkeypatch.setattr(attention, "missing_backends", lambda: absent)
    of = (TensorParallel(size=2), torch.device("meta"), dtype)
    note = attention_note(make(family, **changes), *of)
    assert note is None if said is None else said in note
    assert attention_note(make("llama"), TensorParallel(), torch.device("cpu"), dtype) is None
