"""Parameter counts and floating-point operations, from the configuration alone."""

from __future__ import annotations

import math
from collections.abc import Iterable

from megazero.models.decoder_config import DecoderConfig
from megazero.models.placements import parameter_roles
from megazero.tp import padded_vocab_size


def parameter_count(config: DecoderConfig) -> int:
    """Parameters of the whole model: true vocabulary, tied weights once."""
    return sum(math.prod(role.shape) for role in parameter_roles(config))


def training_flops(config: DecoderConfig, sequence_lengths: Iterable[int], tp_size: int = 1) -> int:
    """Operations of forward and backward over sequences of these lengths (T = their sum):

        6 T [L (h ffn m + h (q + 2 kv) + q h) + h V] + 6 q L sum(length^2)

    with m = 3 matrices for swiglu and 2 for gelu, q and kv the widths of the query and key projections,
    V the padded vocabulary. A multiply-add is 2 operations and the backward twice the forward; attention
    counts the causal half of its score matrix; recompute, norms, softmax and the optimizer are left out
    (Megatron's accounting, Narayanan et al. 2021 section 5.1, with the causal half).
    """
    lengths = list(sequence_lengths)
    h, q, kv, layers = config.hidden_size, config.query_size, config.kv_size, config.num_layers
    matrices = 3 if config.activation == "swiglu" else 2
    vocabulary = padded_vocab_size(config.vocab_size, config.make_vocab_size_divisible_by, tp_size)
    per_layer = h * config.ffn_hidden_size * matrices + h * (q + 2 * kv) + q * h
    dense = 6 * sum(lengths) * (layers * per_layer + h * vocabulary)
    return dense + 6 * q * layers * sum(length * length for length in lengths)
