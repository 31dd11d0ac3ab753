"""Which attention kernel torch takes: repeated heads, and what a run without a fused one says."""

from __future__ import annotations

import pytest
import torch

from megazero.models import Decoder
from megazero.models.layer import math_note
from megazero.tp import TensorParallel
from tests.unit.test_models_decoder import batch, make


@pytest.fixture
def fused_kernels(monkeypatch):
    """torch's answers on a GPU: flash takes 16 bits without a mask, the memory-efficient kernel no grouped heads."""

    def flash(inputs):
        return inputs.query.dtype.itemsize == 2 and inputs.attn_mask is None

    def efficient(inputs):
        aligned = inputs.query.shape[-1] * inputs.query.dtype.itemsize % 16 == 0
        return inputs.query.dtype != torch.float64 and not inputs.enable_gqa and aligned

    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", flash)
    monkeypatch.setattr(torch.backends.cuda, "can_use_efficient_attention", efficient)


@pytest.mark.parametrize(
    ("position", "dtype", "grouped"),
    [
        ("rope", torch.bfloat16, True),
        ("rope", torch.float32, False),
        ("rope", torch.float64, False),
        ("alibi", torch.bfloat16, False),
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


@pytest.mark.parametrize(
    ("family", "dtype", "changes", "said"),
    [
        ("llama", torch.bfloat16, {}, None),
        ("llama", torch.float32, {}, None),
        ("bloom", torch.bfloat16, {"hidden_size": 64}, None),
        ("llama", torch.float64, {}, "2 heads of 12 in float64 on"),
        ("bloom", torch.bfloat16, {}, "in bfloat16 with ALiBi on"),
        ("llama", torch.bfloat16, {"sliding_window": 31}, "in bfloat16 within windows on"),
        ("llama", torch.bfloat16, {"sliding_window": 32}, None),
        ("llama", torch.bfloat16, {"hidden_size": 64, "sliding_window": 5}, None),
        (
            "gemma2",
            torch.bfloat16,
            {"hidden_size": 64},
            "no fused kernel of torch caps scores (--attn-logit-",
        ),
    ],
)
def test_a_run_without_a_fused_attention_kernel_says_so(family, dtype, changes, said, fused_kernels):
    note = math_note(make(family, **changes), TensorParallel(size=2), torch.device("meta"), dtype)
    assert note is None if said is None else said in note
    assert math_note(make(family), TensorParallel(), torch.device("cpu"), dtype) is None


def test_a_mask_of_documents_asks_for_the_kernel_that_takes_masks(fused_kernels):
    of = (TensorParallel(size=2), torch.device("meta"))
    assert math_note(make("llama", hidden_size=64), *of, torch.bfloat16, documents=True) is None
    assert "in bfloat16 within documents on" in math_note(make("llama"), *of, torch.bfloat16, documents=True)
    assert math_note(make("llama"), *of, torch.bfloat16) is None
