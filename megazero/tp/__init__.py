"""Tensor parallelism on plain tensors: linears, vocabulary, cross-entropy, sequence parallelism."""

from megazero.tp.chunked_loss import chunked_loss
from megazero.tp.context import TensorParallel, reduce_output, sequence_slice, whole
from megazero.tp.cross_entropy import IGNORED_LABEL, PIECES, LossPieces, vocab_parallel_cross_entropy
from megazero.tp.deferred import DeferredGradients
from megazero.tp.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from megazero.tp.vocabulary import VocabParallelEmbedding, VocabShard, vocab_parallel_argmax

__all__ = [
    "IGNORED_LABEL",
    "PIECES",
    "ColumnParallelLinear",
    "DeferredGradients",
    "LossPieces",
    "RowParallelLinear",
    "TensorParallel",
    "VocabParallelEmbedding",
    "VocabShard",
    "chunked_loss",
    "column_parallel",
    "reduce_output",
    "sequence_slice",
    "vocab_parallel_argmax",
    "vocab_parallel_cross_entropy",
    "whole",
]
