"""How far a decoded value may be from what was encoded.

With digits q = rint(y + draw), y = x / s computed in fp32 and clamped to -qmax .. qmax, and value q * s (exact):

    |x - q s| <= s * (1/2 + |draw|) + max(0, |x| - qmax s) + slack

|draw| is 0 to nearest and below 1/2 stochastically. The second term is what a searched clip (or a scale at the
format's upper limit) cuts off. slack = s * qmax * 2 ** -21: x to fp32 (2 ** -24, for fp64), the reciprocal
and the product (2 ** -24 each), the sum with the draw (2 ** -24), relative to at most qmax.

A hop's bound adds: the sum of k decoded messages is within the sum of their bounds (and fp32's own rounding,
(k - 1) * 2 ** -24 of the sum of absolute values); encoded again for the second hop, the bound of the sum is
added once more.
"""

from __future__ import annotations

import torch
from megazero.kernels.format import Format
from megazero.kernels.quantize import scales_of


def error_bound(x: torch.Tensor, form: Format, stochastic: bool) -> torch.Tensor:
    """fp32 [k, n / block]: most by which an element of x [k, n], any float dtype, and its decoded fp32 value
    differ. NaN for blocks with NaN or Inf. A 16-bit output adds its own rounding, and may overflow where a block
    comes within 0.8% of the dtype's largest value (scales are rounded up)."""
    blocks = x.float().unflatten(1, (-1, form.block))
    scale = scales_of(blocks.flatten(0, 1), form).view(blocks.shape[:2])
    clipped = (blocks.abs().amax(2) - form.qmax * scale).clamp_(min=0.0)
    return scale * ((1.0 if stochastic else 0.5) + form.qmax * 2.0**-21) + clipped
