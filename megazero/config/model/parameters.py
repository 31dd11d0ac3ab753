"""The parameters of a model (names, shapes, what is cut over the tp axis), and the FLOPs of its training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from megazero.config.model.section import LAYER_NORMS, ModelConfig
from megazero.families.layer_kinds import layer_kinds


@dataclass(frozen=True)
class ParameterRole:
    """One parameter of the whole model: it has a name, a full shape, and the dim cut over tp (None if whole)."""

    name: str
    shape: tuple[int, ...]
    split: int | None


def _norm_roles(
    c: ModelConfig, name: str, size: int | None = None, split: int | None = None
) -> Iterator[ParameterRole]:
    shape = (c.hidden_size if size is None else size,)
    yield ParameterRole(f"{name}.weight", shape, split)
    if c.normalization == "LayerNorm":
        yield ParameterRole(f"{name}.bias", shape, split)


def _layer_roles(c: ModelConfig) -> Iterator[ParameterRole]:
    """Yield the parameters of a layer, in the order of ``named_parameters``. A layer has some of the four norms."""
    norms = LAYER_NORMS[c.transformer_block_type]
    parts = (
        ("input_norm", _attention_roles(c)),
        ("attention_output_norm", ()),
        ("mlp_norm", _mlp_roles(c)),
        ("mlp_output_norm", ()),
    )
    for norm, roles in parts:
        if norm in norms:
            yield from _norm_roles(c, norm)
        yield from roles


def _attention_roles(c: ModelConfig) -> Iterator[ParameterRole]:
    h, q, kv = c.hidden_size, c.query_projection_size, c.kv_projection_size
    for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
        yield ParameterRole(f"attention.{name}.weight", (rows, h), 0)
        if c.qkv_bias:
            yield ParameterRole(f"attention.{name}.bias", (rows,), 0)
    yield ParameterRole("attention.o_proj.weight", (h, q), 1)
    if c.add_attention_bias:
        yield ParameterRole("attention.o_proj.bias", (h,), None)
    for name, rows in (("q_norm", q), ("k_norm", kv)):
        if c.qk_norm == "head":
            yield from _norm_roles(c, f"attention.{name}", c.kv_channels)
        elif c.qk_norm == "all-heads":
            yield from _norm_roles(c, f"attention.{name}", rows, 0)


def _mlp_roles(c: ModelConfig) -> Iterator[ParameterRole]:
    h, ffn = c.hidden_size, c.ffn_hidden_size
    for name in ("gate_proj", "up_proj") if c.gated_mlp else ("up_proj",):
        yield ParameterRole(f"mlp.{name}.weight", (ffn, h), 0)
        if c.add_bias_linear:
            yield ParameterRole(f"mlp.{name}.bias", (ffn,), 0)
    yield ParameterRole("mlp.down_proj.weight", (h, ffn), 1)
    if c.add_bias_linear:
        yield ParameterRole("mlp.down_proj.bias", (h,), None)


def parameter_roles(c: ModelConfig) -> Iterator[ParameterRole]:
    """Yield every parameter of the whole model, true vocabulary, in the order of ``named_parameters``."""
    yield from _embedding_roles(c)
    for index in range(c.num_layers):
        for role in _layer_roles(c):
            yield ParameterRole(f"layers.{index}.{role.name}", role.shape, role.split)
    if c.untie_embeddings_and_output_weights:
        yield ParameterRole("head.weight", (c.vocabulary, c.hidden_size), 0)
    yield from _norm_roles(c, "head.norm")


def _embedding_roles(c: ModelConfig) -> Iterator[ParameterRole]:
    if c.position_embedding_type == "learned_absolute":
        yield ParameterRole("embedding.positions", (c.max_position_embeddings, c.hidden_size), None)
    yield ParameterRole("embedding.tokens.weight", (c.vocabulary, c.hidden_size), 0)
    if c.embed_layernorm:
        yield from _norm_roles(c, "embedding.norm")


def parameter_count(config: ModelConfig, vocabulary: int | None = None) -> int:
    """Count the parameters of the whole model, tied weights once.

    The vocabulary is the true one, or ``vocabulary`` rows, such as the padded ones that Megatron counts.
    """
    if vocabulary is not None:
        config = replace(config, vocab_size=vocabulary)
    return sum(math.prod(role.shape) for role in parameter_roles(config))


def of_own_heads(c: ModelConfig, name: str) -> bool:
    """Tell whether ranks hold the same of a parameter that each applies to its own heads alone."""
    return c.qk_norm == "head" and (".q_norm." in name or ".k_norm." in name)


def head_copies(c: ModelConfig, name: str, tp_size: int) -> int:
    """Return how many tensor-parallel ranks in a row hold the same rows of a parameter that is cut.

    With fewer key/value heads than ranks, each rank holds the one that its query heads use.
    """
    cut = (".k_proj.", ".v_proj.", *((".k_norm.",) if c.qk_norm == "all-heads" else ()))
    return max(1, tp_size // c.num_query_groups) if any(module in name for module in cut) else 1


def training_flops(config: ModelConfig, sequence_lengths: Iterable[int], tp_size: int = 1) -> int:
    """Count the operations of forward and backward over sequences of these lengths (T is their sum):

        6 T [L n + h V] + 6 q sum over layers of sum(length^2 - (length - window)^2)

    The last term is 0 in a layer without a window, or with a longer one. Here n is the number of elements of a
    layer's matrices (``layer_matrix_numel``), q the width of the query linear and V the padded vocabulary.
    A multiply-add counts as 2 operations, and the backward as twice the forward.
    Attention counts the causal half of its score matrix. Recompute, norms, softmax and the optimizer are left out.
    This is Megatron's accounting (Narayanan et al. 2021, section 5.1), with the causal half.
    """
    lengths = list(sequence_lengths)
    h, q, layers = config.hidden_size, config.query_projection_size, config.num_layers
    dense = 6 * sum(lengths) * (layers * config.layer_matrix_numel + h * config.padded_vocab_size(tp_size))
    windows = Counter(kind.window for kind in layer_kinds(config))
    pairs = sum(
        count * (length**2 - (max(0, length - window) ** 2 if window else 0))
        for window, count in windows.items()
        for length in lengths
    )
    return dense + 6 * q * pairs
