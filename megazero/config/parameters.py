"""This module says what the parameters of a model are: names, shapes, and what is cut over the tp axis."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megazero.config.model import ModelConfig


@dataclass(frozen=True)
class ParameterRole:
    """One parameter of the whole model: it has a name, a full shape, and the dim cut over tp (None if whole)."""

    name: str
    shape: tuple[int, ...]
    split: int | None


def _norm_roles(c: ModelConfig, name: str) -> Iterator[ParameterRole]:
    yield ParameterRole(f"{name}.weight", (c.hidden_size,), None)
    if c.normalization == "LayerNorm":
        yield ParameterRole(f"{name}.bias", (c.hidden_size,), None)


def _layer_roles(c: ModelConfig) -> Iterator[ParameterRole]:
    h, q, kv, ffn = c.hidden_size, c.query_projection_size, c.kv_projection_size, c.ffn_hidden_size
    yield from _norm_roles(c, "input_norm")
    for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
        yield ParameterRole(f"attention.{name}.weight", (rows, h), 0)
        if c.qkv_bias:
            yield ParameterRole(f"attention.{name}.bias", (rows,), 0)
    yield ParameterRole("attention.o_proj.weight", (h, q), 1)
    if c.add_bias_linear:
        yield ParameterRole("attention.o_proj.bias", (h,), None)
    yield from _norm_roles(c, "mlp_norm")
    for name in ("gate_proj", "up_proj") if c.swiglu else ("up_proj",):
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
        yield ParameterRole("head.weight", (c.vocab_size, c.hidden_size), 0)
    yield from _norm_roles(c, "head.norm")


def _embedding_roles(c: ModelConfig) -> Iterator[ParameterRole]:
    if c.position_embedding_type == "learned_absolute":
        yield ParameterRole("embedding.positions", (c.max_position_embeddings, c.hidden_size), None)
    yield ParameterRole("embedding.tokens.weight", (c.vocab_size, c.hidden_size), 0)
    if c.embed_layernorm:
        yield from _norm_roles(c, "embedding.norm")


def parameter_count(config: ModelConfig, vocabulary: int | None = None) -> int:
    """Count the parameters of the whole model, tied weights once.

    The vocabulary is the true one, or ``vocabulary`` rows, such as the padded ones that Megatron counts.
    """
    if vocabulary is not None:
        config = replace(config, vocab_size=vocabulary)
    return sum(math.prod(role.shape) for role in parameter_roles(config))
