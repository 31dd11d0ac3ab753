"""This module says where the decoder's parameters lie in the Hugging Face tensors of its family.

It says what the parameters are (their shape, and the dim that is cut over the tp axis). What a family calls them, and
how it stores them, is in the family's record (megazero/families).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megazero.checkpoint.placement import Placement, Segment
from megazero.config.model import LAYER_NORMS, ModelConfig
from megazero.families import TensorNames, fused_row
from megazero.tp import TensorParallel, VocabShard


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
    cut = (".k_proj.", ".v_proj.", *((".k_norm.",) if c.qk_norm == "all-heads" else ()))
    return max(1, tp_size // c.num_query_groups) if any(module in name for module in cut) else 1


def of_own_heads(c: ModelConfig, name: str) -> bool:
    """Tell whether ranks hold the same of a parameter that each applies to its own heads alone."""
    return c.qk_norm == "head" and (".q_norm." in name or ".k_norm." in name)


def stored_tensors(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Map the names of a checkpoint's tensors to their shapes, as stored, in the order of ``named_parameters``.

    They are Hugging Face's of ``architecture_of(c)``, if there is one: fused and transposed where the family's are,
    with the true vocabulary. A tied head has none.
    """
    return {p.name: p.shape for p in decoder_placements(c, TensorParallel()).values()}


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
        shape = (c.query_projection_size + 2 * c.kv_projection_size, *role.shape[1:])
        segments = _fused_segments(c, names, part, first, rows)
    transposed = names.transposed and len(shape) == 2 and role.name != "embedding.positions"
    return Placement(name, shape[::-1] if transposed else shape, tuple(local), segments, offset1, transposed)


def _fused_segments(
    c: ModelConfig, names: TensorNames, part: int, first: int, rows: int
) -> tuple[Segment, ...]:
    """Return the segments of rows ``first`` .. of part 0, 1 or 2 (q, k, v) in the family's fused tensor."""
    d, heads, groups = c.kv_channels, c.num_attention_heads, c.num_query_groups
    stored = [d * fused_row(names, part, (first + j) // d, heads, groups) for j in range(0, rows, d)]
    segments = [Segment(0, d, stored[0])]
    for local, row in zip(range(d, rows, d), stored[1:], strict=True):
        last = segments[-1]
        if row == last.stored + last.length:
            segments[-1] = Segment(last.local, last.length + d, last.stored)
        else:
            segments.append(Segment(local, d, row))
    return tuple(segments)
