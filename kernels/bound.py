"""A bound on the difference between a decoded value and the encoded one.

A digit is q = rint(y + draw), where y = x / s is computed in fp32 and clamped to -qmax .. qmax. The decoded value
is q * s, which is exact. Then:

    |x - q s| <= s * (1/2 + |draw|) + max(0, |x| - qmax s) + slack

|draw| is 0 when rounding to nearest and below 1/2 when rounding stochastically. The second term is what a searched
clip (or a scale at the format's upper limit) cuts off. slack is s * qmax * 2 ** -21. It covers the conversion of x
to fp32 (2 ** -24, for fp64), the reciprocal and the product (2 ** -24 each), and the sum with the draw (2 ** -24),
all relative to at most qmax.

The bounds of hops add up. The sum of k decoded messages is within the sum of their bounds (and fp32's own rounding,
which is (k - 1) * 2 ** -24 of the sum of absolute values). If that sum is encoded again for the second hop, the
bound of the sum is added once more.
"""

from __future__ import annotations

import torch
from megazero.kernels.format import Format
from megazero.kernels.quantize import scales_of


def error_bound(x: torch.Tensor, form: Format, stochastic: bool) -> torch.Tensor:
    """Return the largest difference between an element of x and its decoded fp32 value, per block.

    x is [k, n] of any float dtype; the result is fp32 [k, n / block]. It is NaN for blocks that have NaN or Inf. A
    16-bit output adds its own rounding, and it may overflow where a block comes within 0.8% of the dtype's largest
    value, since scales are rounded up.
    """
    blocks = x.float().unflatten(1, (-1, form.block))
    scale = scales_of(blocks.flatten(0, 1), form).view(blocks.shape[:2])
    clipped = (blocks.abs().amax(2) - form.qmax * scale).clamp_(min=0.0)
    return scale * ((1.0 if stochastic else 0.5) + form.qmax * 2.0**-21) + clipped
