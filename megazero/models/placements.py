"""Where the decoder's parameters lie in the Hugging Face tensors of its family.

megazero.config.model.parameters lists the parameters. The family's record (megazero/families) says what the family
calls them and how it stores them.
"""

from __future__ import annotations

from megazero.checkpoint.placement import Placement, RowRange
from megazero.config.model.parameters import ParameterRole, head_copies, parameter_roles
from megazero.config.model.section import ModelConfig
from megazero.families import TensorNames, fused_row
from megazero.tp import TensorParallel, VocabShard


def replicated_names(c: ModelConfig, tp_size: int) -> set[str]:
    """Return the parameters that several of ``tp_size`` ranks hold: the uncut ones, and shared key/value heads."""
    return {r.name for r in parameter_roles(c) if r.split is None or head_copies(c, r.name, tp_size) > 1}


def stored_tensors(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Map the names of a checkpoint's tensors to their shapes, as stored, in the order of ``named_parameters``.

    They are Hugging Face's of ``architecture_of(c)``, if there is one: fused and transposed where the family's are,
    with the true vocabulary. A tied head has none.
    """
    return {p.name: p.shape for p in decoder_placements(c, TensorParallel()).values()}


def decoder_placements(
    c: ModelConfig, tp: TensorParallel, names: TensorNames | None = None
) -> dict[str, Placement]:
    """Map each parameter's name to its placement, for the rank ``tp.rank``.

    names: those of other tensors than a checkpoint's, such as another program's.
    """
    names = names or c.tensor_names
    return {role.name: _placement(c, names, tp, role) for role in parameter_roles(c)}


def _stored_name(names: TensorNames, name: str) -> tuple[str, int | None]:
    """Return the stored tensor's name and, if it is fused, which part of it the parameter is."""
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
        shard = VocabShard.of(c.vocabulary, c.padded_vocab_size(tp.size), tp)
        return Placement.plain(name, role.shape, (shard.rows, c.hidden_size), shard.start)
    local, copies = list(role.shape), head_copies(c, role.name, tp.size)
    if role.split is not None:
        local[role.split] = tp.share(copies * role.shape[role.split], role.name)
    rows = local[0]
    first = tp.rank // copies * rows if role.split == 0 else 0
    offset1 = tp.rank * local[1] if role.split == 1 else 0
    segments: tuple[RowRange, ...] = (RowRange(0, rows, first),)
    shape = role.shape
    if part is not None and ".mlp." in role.name:
        shape = (2 * role.shape[0], *role.shape[1:])
        segments = (RowRange(0, rows, part * role.shape[0] + first),)
    elif part is not None:
        shape = (c.query_projection_size + 2 * c.kv_projection_size, *role.shape[1:])
        segments = _fused_segments(c, names, part, first, rows)
    transposed = names.transposed and len(shape) == 2 and role.name != "embedding.positions"
    return Placement(name, shape[::-1] if transposed else shape, tuple(local), segments, offset1, transposed)


def _fused_segments(
    c: ModelConfig, names: TensorNames, part: int, first: int, rows: int
) -> tuple[RowRange, ...]:
    """Return the segments of rows ``first`` .. of part 0, 1 or 2 (q, k, v) in the family's fused tensor."""
    d, heads, groups = c.kv_channels, c.num_attention_heads, c.num_query_groups
    stored = [d * fused_row(names, part, (first + j) // d, heads, groups) for j in range(0, rows, d)]
    segments = [RowRange(0, d, stored[0])]
    for local, row in zip(range(d, rows, d), stored[1:], strict=True):
        last = segments[-1]
        if row == last.stored + last.length:
            segments[-1] = RowRange(last.local, last.length + d, last.stored)
        else:
            segments.append(RowRange(local, d, row))
    return tuple(segments)
