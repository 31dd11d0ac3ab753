"""Which of torch's attention kernels runs: a fused one, or "math".

"math" keeps a matrix [s, s] per head and sample. The fused kernels differ in dtypes (flash attention takes 16 bits),
in masks (flash attention takes none) and in grouped key/value heads (whether the memory-efficient kernel, which takes
fp32, allows them depends on the release of torch). So torch is asked.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.backends import cuda

from megazero.config.model.section import ModelConfig
from megazero.models.positions import Documents, Positions
from megazero.tp import TensorParallel


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> bool:
    """Return whether a fused CUDA kernel takes q [b, heads, s, d], k and v [b, kv heads, s, d] as they are.

    Without an additive mask, attention is causal. False for tensors that are not on CUDA. cuDNN's
    kernel is ignored: if the other two refuse, torch prefers math to it.
    """
    inputs = cuda.SDPAParams(q, k, v, mask, dropout, mask is None, q.shape[1] != k.shape[1])
    return cuda.can_use_flash_attention(inputs) or cuda.can_use_efficient_attention(inputs)


def math_note(
    config: ModelConfig, tp: TensorParallel, device: torch.device, dtype: torch.dtype, documents: bool = False
) -> str | None:
    """Return a note for the start of a run whose attention gets no fused kernel on a GPU, or None if it gets one.

    ``documents`` says that attention stays within documents.
    """
    if device.type == "cpu":
        return None
    heads = tp.share(config.num_attention_heads, "num_attention_heads")
    q = torch.zeros(64, 1, heads, config.kv_channels, device=device, dtype=dtype, requires_grad=True)
    packed = Documents(starts=torch.zeros(1, 64, dtype=torch.int64, device=device)) if documents else None
    mask = Positions(config, tp).mask(q, packed)
    q = q.permute(1, 2, 0, 3)
    if fused(q, q, q, mask, config.attention_dropout):
        return None
    biased = " with ALiBi" if config.position_embedding_type == "alibi" else ""
    biased += " within documents" if documents else ""
    return (
        "attention runs in torch's math kernel, which keeps a matrix of length x length per head: no fused one takes "
        f"{heads} heads of {config.kv_channels} in {str(dtype).removeprefix('torch.')}{biased} on this GPU; bf16 and "
        "a head size that is a multiple of 8 get one"
    )
