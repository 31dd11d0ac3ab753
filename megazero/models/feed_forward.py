"""The MLP of a layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megazero.config.model.section import ModelConfig
from megazero.tp import ColumnParallelLinear, RowParallelLinear, TensorParallel, column_parallel


def activation(config: ModelConfig, x: Tensor) -> Tensor:
    """Return f(x) of the configuration's MLP, or of its gate: SiLU, GELU, x sigmoid(1.702 x) or relu(x)^2."""
    if config.swiglu:
        return F.silu(x)
    if config.quick_geglu:
        return x * (1.702 * x).sigmoid()
    if config.squared_relu:
        return F.relu(x).square()
    return F.gelu(x, approximate="tanh" if config.openai_gelu else "none")


def gated(config: ModelConfig, gate: Tensor, up: Tensor) -> Tensor:
    """Return f(gate) * (up + offset), of a gate that is clamped from above, and of up that is on both sides."""
    if (bound := config.activation_func_clamp_value) is not None:
        gate, up = gate.clamp(max=bound), up.clamp(-bound, bound)
    return activation(config, gate) * (up + config.glu_linear_offset if config.glu_linear_offset else up)


class XIELU(nn.Module):
    """Computes p x^2 + x / 2 above 0, else n (exp(x) - 1 - x) + x / 2 (Huang and Schlag 2024, arXiv 2411.13010), with
    p = softplus(alpha_p) and n = 1/2 + softplus(alpha_n). The parameters are [1], and a rank's channels use them."""

    def __init__(self, **factory: Any) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = (nn.Parameter(torch.empty(1, **factory)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return _XIELU.apply(x, F.softplus(self.alpha_p), 0.5 + F.softplus(self.alpha_n))


class _XIELU(torch.autograd.Function):
    """Keeps x and two numbers, where autograd would keep four tensors of its size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor, n: Tensor) -> Tensor:
        ctx.save_for_backward(x, p, n)
        return torch.where(x > 0, p * x * x + 0.5 * x, (_expm1(x) - x) * n + 0.5 * x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, p, n = ctx.saved_tensors
        above, below = x.clamp(min=0), _expm1(x)
        of_n = torch.where(x > 0, 0.0, below - x)
        return (
            grad * torch.where(x > 0, 2 * p * above + 0.5, n * below + 0.5),
            (grad * above * above).sum().view(1),
            (grad * of_n).sum().view(1),
        )


def _expm1(x: Tensor) -> Tensor:
    """Return exp(x) - 1 of what is below 0, and as transformers -1e-6 of the rest, which is finite."""
    return torch.expm1(x.clamp(max=-1e-6))


class FeedForward(nn.Module):
    """Computes down(f(gate(x)) * up(x)), where f is SiLU or GELU, exact or by tanh or by a sigmoid (SwiGLU and GEGLU,
    Shazeer 2020), or down(f(up(x))), where f is GELU, relu(x)^2 (So et al. 2021) or ``XIELU``."""

    def __init__(
        self, config: ModelConfig, tp: TensorParallel, width: int | None = None, **factory: Any
    ) -> None:
        """width: inside it. The default is the configuration's."""
        super().__init__()
        self.tp, self.config = tp, config
        h, ffn, bias = config.hidden_size, width or config.ffn_hidden_size, config.add_bias_linear
        self.gate_proj = ColumnParallelLinear(h, ffn, tp, bias=bias, **factory) if config.gated_mlp else None
        self.up_proj = ColumnParallelLinear(h, ffn, tp, bias=bias, **factory)
        self.down_proj = RowParallelLinear(ffn, h, tp, bias=bias, **factory)
        self.activation: Callable[[Tensor], Tensor] = (
            XIELU(**factory) if config.xielu else partial(activation, config)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``x`` is [s, b, h], or its slice under sequence parallel. The result has the same shape."""
        if self.gate_proj is None:
            return self.down_proj(self.activation(self.up_proj(x)))
        linears = [(m.weight, m.bias) for m in (self.gate_proj, self.up_proj)]
        gate, up = column_parallel(x, linears, self.tp)
        return self.down_proj(gated(self.config, gate, up))
