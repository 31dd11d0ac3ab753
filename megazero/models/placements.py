"""Where the decoder's parameters lie in the Hugging Face tensors of its family.

megazero/config/model/spec.py lists the parameters. The family's record (megazero/families) says what the family calls
them and how it stores them.
"""

from __future__ import annotations

from megazero.checkpoint.placement import Placement, RowRange
from megazero.config.model.section import ModelConfig
from megazero.config.model.spec import ParameterSpec, model_spec
from megazero.families import TensorNames, fused_row
from megazero.tp import TensorParallel, VocabShard


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
    return {name: _placement(c, names, tp, name, p) for name, p in model_spec(c).parameters.items()}


def _placement(
    c: ModelConfig, names: TensorNames, tp: TensorParallel, own: str, p: ParameterSpec
) -> Placement:
    name, part = names.stored(own)
    if p.vocabulary:
        shard = VocabShard.of(c.vocabulary, c.padded_vocab_size(tp.size), tp)
        return Placement.plain(name, p.shape, (shard.rows, c.hidden_size), shard.start)
    local, copies = list(p.shape), p.copies(tp.size)
    if p.cut is not None:
        local[p.cut] = tp.share(copies * p.shape[p.cut], own)
    rows = local[0]
    first = tp.rank // copies * rows if p.cut == 0 else 0
    offset1 = tp.rank * local[1] if p.cut == 1 else 0
    segments: tuple[RowRange, ...] = (RowRange(0, rows, first),)
    shape = p.shape
    if part is not None and p.heads is not None:
        shape = (c.query_projection_size + 2 * c.kv_projection_size, *p.shape[1:])
        segments = _fused_segments(c, names, part, first, rows)
    elif part is not None:  # the gate and the up projection
        shape = (2 * p.shape[0], *p.shape[1:])
        segments = (RowRange(0, rows, part * p.shape[0] + first),)
    transposed = names.transposed and p.multiplies
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
