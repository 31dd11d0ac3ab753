"""This module says where the decoder's parameters lie in the Hugging Face tensors of its family.

It says what the parameters are (their shape, and the dim that is cut over the tp axis). What a family calls them, and
how it stores them, is in the family's record (megazero/families).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megazero.checkpoint.placement import Placement, Segment
from megazero.config.model import ModelConfig
from megazero.families import TensorNames
from megazero.tp import TensorParallel, VocabShard


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
    yield from (role for role in _embedding_roles(c))
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


def replicated_names(c: ModelConfig, tp_size: int) -> set[str]:
    """Return the parameters that several of ``tp_size`` ranks hold: the uncut ones, and shared key/value heads."""
    return {r.name for r in parameter_roles(c) if r.split is None or head_copies(c, r.name, tp_size) > 1}


def head_copies(c: ModelConfig, name: str, tp_size: int) -> int:
    """Return how many tensor-parallel ranks in a row hold the same rows of a parameter that is cut.

    With fewer key/value heads than ranks, each rank holds the one that its query heads use.
    """
    return max(1, tp_size // c.num_query_groups) if ".k_proj." in name or ".v_proj." in name else 1


def decoder_placements(c: ModelConfig, tp: TensorParallel) -> dict[str, Placement]:
    """Map each parameter's name to its placement, for the rank ``tp.rank``."""
    names = c.tensor_names
    return {role.name: _placement(c, names, tp, role) for role in parameter_roles(c)}


def _stored_name(names: TensorNames, name: str) -> tuple[str, int | None]:
    """Return the stored tensor's name and, if it is fused, which of q, k, v the parameter is within it."""
    if name == "embedding.positions":
        return f"{names.model[name]}.weight", None
    module, kind = name.rsplit(".", 1)
    if not module.startswith("layers."):
        return f"{names.model[module]}.{kind}", None
    _, index, module = module.split(".", 2)
    entry = names.layer[module]
    stored, part = entry if isinstance(entry, tuple) else (entry, None)
    return f"{names.layer_prefix}{index}.{stored}.{kind}", part


def _placement(c: ModelConfig, names: TensorNames, tp: TensorParallel, role: ParameterRole) -> Placement:
    name, part = _stored_name(names, role.name)
    if role.name in ("embedding.tokens.weight", "head.weight"):
        shard = VocabShard.of(c.vocab_size, c.padded_vocab_size(tp.size), tp)
        return Placement.plain(name, role.shape, (shard.rows, c.hidden_size), shard.start)
    local, copies = list(role.shape), head_copies(c, role.name, tp.size)
    if role.split is not None:
        local[role.split] = tp.share(copies * role.shape[role.split], role.name)
    rows = local[0]
    first = tp.rank // copies * rows if role.split == 0 else 0
    offset1 = tp.rank * local[1] if role.split == 1 else 0
    segments: tuple[Segment, ...] = (Segment(0, rows, first),)
    shape = role.shape
    if part is not None:
        shape = (3 * role.shape[0], *role.shape[1:])
        segments = _fused_segments(c, names, part, first, rows)
    transposed = names.transposed and len(shape) == 2 and role.name != "embedding.positions"
    return Placement(name, shape[::-1] if transposed else shape, tuple(local), segments, offset1, transposed)


def _fused_segments(
    c: ModelConfig, names: TensorNames, part: int, first: int, rows: int
) -> tuple[Segment, ...]:
    """Return the segments of rows ``first`` .. of part 0, 1 or 2 (q, k, v) in the family's fused tensor."""
    if names.fused == "sides":
        return (Segment(0, rows, part * c.query_projection_size + first),)
    d = c.kv_channels
    return tuple(Segment(j, d, 3 * (first + j) + part * d) for j in range(0, rows, d))
