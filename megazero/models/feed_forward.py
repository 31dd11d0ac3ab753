"""The MLP of a layer."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

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


class FeedForward(nn.Module):
    """Computes down(f(gate(x)) * up(x)), where f is SiLU or GELU, exact or by tanh or by a sigmoid (SwiGLU and GEGLU,
    Shazeer 2020), or down(f(up(x))), where f is GELU or relu(x)^2 (So et al. 2021)."""

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

    def forward(self, x: Tensor) -> Tensor:
        """``x`` is [s, b, h], or its slice under sequence parallel. The result has the same shape."""
        if self.gate_proj is None:
            return self.down_proj(activation(self.config, self.up_proj(x)))
        linears = [(m.weight, m.bias) for m in (self.gate_proj, self.up_proj)]
        gate, up = column_parallel(x, linears, self.tp)
        return self.down_proj(gated(self.config, gate, up))
