"""Floating-point operations are counted here from the configuration alone."""

from __future__ import annotations

from collections.abc import Iterable

from megazero.config.model.section import ModelConfig


def training_flops(config: ModelConfig, sequence_lengths: Iterable[int], tp_size: int = 1) -> int:
    """Count the operations of forward and backward over sequences of these lengths (T is their sum):

        6 T [L n + h V] + 6 q L sum(length^2)

    Here n is the number of elements of a layer's matrices (``layer_matrix_numel``), q the width of the query linear
    and V the padded vocabulary. A multiply-add counts as 2 operations, and the backward as twice the forward.
    Attention counts the causal half of its score matrix. Recompute, norms, softmax and the optimizer are left out.
    This is Megatron's accounting (Narayanan et al. 2021, section 5.1), with the causal half.
    """
    lengths = list(sequence_lengths)
    h, q, layers = config.hidden_size, config.query_projection_size, config.num_layers
    dense = 6 * sum(lengths) * (layers * config.layer_matrix_numel + h * config.padded_vocab_size(tp_size))
    return dense + 6 * q * layers * sum(length * length for length in lengths)
