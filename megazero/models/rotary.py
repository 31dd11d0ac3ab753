"""Rotary positions (Su et al. 2021): frequencies, their scalings for longer contexts, and the rotation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.config.model.section import ModelConfig

# Of unscaled frequencies, fp64 [rotary_channels / 2], and the length of the sample.
_Scaling = Callable[[ModelConfig, Tensor, int], Tensor]


def _divided(frequencies: Tensor, kept: Tensor, factor: float) -> Tensor:
    """Divide frequencies by ``factor``, but for the share of each that is ``kept`` (0 to 1)."""
    return frequencies * (kept + (1 - kept) / factor)


def _linear(config: ModelConfig, frequencies: Tensor, _: int) -> Tensor:
    return frequencies / config.rotary_scaling_factor


def _llama3(config: ModelConfig, frequencies: Tensor, _: int) -> Tensor:
    turns = config.rotary_original_max_position * frequencies / (2 * math.pi)  # over the original length
    low, high = config.rotary_low_freq_factor, config.rotary_high_freq_factor
    return _divided(frequencies, ((turns - low) / (high - low)).clamp(0, 1), config.rotary_scaling_factor)


def _yarn(config: ModelConfig, frequencies: Tensor, _: int) -> Tensor:
    def pair_of(turns: float) -> float:
        """Return the number of the pair, as a fraction, that turns so often over the original length."""
        wavelength = config.rotary_original_max_position / (2 * math.pi * turns)
        return config.rotary_channels * math.log(wavelength) / (2 * math.log(config.rotary_base))

    first, last = pair_of(config.yarn_beta_fast), pair_of(config.yarn_beta_slow)
    if config.yarn_correction_range_round_to_int:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.rotary_channels - 1)
    width = last - first or 0.001
    pairs = torch.arange(len(frequencies), dtype=torch.float64)
    return _divided(frequencies, 1 - ((pairs - first) / width).clamp(0, 1), config.rotary_scaling_factor)


def _longrope(config: ModelConfig, frequencies: Tensor, length: int) -> Tensor:
    long = length > config.rotary_original_max_position
    divisors = config.rotary_long_factor if long else config.rotary_short_factor
    return frequencies / torch.tensor(divisors, dtype=torch.float64)


_SCALINGS: Mapping[str, _Scaling] = {
    "none": lambda _, frequencies, __: frequencies,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def rotary_frequencies(config: ModelConfig, length: int) -> Tensor:
    """Return the radians per position of each pair of a head's rotary channels, fp64 [rotary_channels / 2].

    rotary_scaling stretches positions beyond the original length, which was trained before:

    - "linear" divides positions by the factor (Chen et al. 2023).
    - "llama3" (Llama 3.1) divides the frequencies of wavelengths above original length / low_freq_factor by the
      factor, keeps those of wavelengths below original length / high_freq_factor, and interpolates between.
    - "yarn" (Peng et al. 2023) divides the frequencies of pairs that turn less than beta_slow times over the original
      length, keeps those of pairs that turn more than beta_fast times, and interpolates between by their number.
    - "longrope" (Ding et al. 2024) divides each by a number of its own, of the long list if ``length`` is above the
      original length, else of the short list.

    ``length`` is that of the samples, in tokens. It matters to "longrope" alone.
    """
    pairs = torch.arange(0, config.rotary_channels, 2, dtype=torch.float64)
    frequencies = config.rotary_base ** (-pairs / config.rotary_channels)
    return _SCALINGS[config.rotary_scaling](config, frequencies, length)


def attention_factor(config: ModelConfig) -> float:
    """Return the factor of the cosines and sines, so of rotated queries and keys: 1 without yarn and longrope.

    The default is as in Peng et al. (2023), section 3.4, for yarn, and as in Phi-3 for longrope.
    """
    factor, kind = config.rotary_scaling_factor, config.rotary_scaling
    if kind not in ("yarn", "longrope"):  # as in layers with a window and a base of their own
        return 1.0
    if config.rotary_attention_factor is not None:
        return config.rotary_attention_factor
    if factor <= 1:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(config.rotary_original_max_position))
    up, down = (
        0.1 * scale * math.log(factor) + 1 for scale in (config.yarn_mscale, config.yarn_mscale_all_dim)
    )
    return up / down


def rotary_tables(config: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of positions 0 .. length - 1, fp64 [length, rotary_channels / 2]."""
    frequencies = rotary_frequencies(config, length)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    factor = attention_factor(config)
    return angles.cos() * factor, angles.sin() * factor


def channel_cosines(cos: Tensor, channels: int, interleaved: bool) -> Tensor:
    """Return the cosine of each of a head's ``channels``, [..., channels], from those of its pairs. It is 1 for
    channels that do not turn."""
    both = cos.repeat_interleave(2, -1) if interleaved else torch.cat((cos, cos), -1)
    return F.pad(both, (0, channels - both.shape[-1]), value=1.0)


class Rotate(torch.autograd.Function):
    """Rotate pairs of the first r channels of x [s, b, heads, d], where r is twice the width of ``sin``.

    Pairs are (i, i + r/2), or neighbours (2i, 2i + 1) if ``interleaved``. ``cos`` has each channel's own cosine, 1
    for those that pass (``channel_cosines``). The backward is the rotation back, times the tables' factor. It saves
    the tables only.

    Forward and backward of [512, 4, 16, 64] in fp32 on one CPU thread take 10.5 ms, against 15.6 ms for
    x * cos + rotate_half(x) * sin with autograd.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotated(x, cos, sin, interleaved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin, ctx.interleaved), None, None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    if torch.compiler.is_compiling():  # where a product has the strides of x, whatever ``out`` has
        out = x.contiguous() * cos
    else:  # gradients come as attention lays them out: a copy to [s, b, heads, d] would cost 1.4 of 1.2 ms
        out = torch.mul(x, cos, out=torch.empty(x.shape, dtype=x.dtype, device=x.device))
    rotary = 2 * sin.shape[-1]
    (x1, x2), (out1, out2) = (_pairs(each[..., :rotary], interleaved) for each in (x, out))
    out1.addcmul_(x2, -sin)  # not value=-1, of which torch.compile makes a fused multiply-add: other bits
    out2.addcmul_(x1, sin)
    return out


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    return first, second
