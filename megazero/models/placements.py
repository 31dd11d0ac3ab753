"""Where the decoder's parameters lie in the Hugging Face tensors of its family.

megazero/config/model/spec.py lists the parameters. The family's record (megazero/families) says what the family calls
them and how it stores them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from megazero.checkpoint.placement import Placement, Places, RowRange, Stack
from megazero.config.model.section import ModelConfig
from megazero.config.model.spec import ParameterSpec, model_spec, router_biases
from megazero.families import TensorNames
from megazero.moe import ExpertParallel
from megazero.tp import TensorParallel, VocabShard


def stored_tensors(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Map the names of a checkpoint's tensors to their shapes, as stored, in the order of ``Decoder.stored``.

    They are Hugging Face's of ``architecture_of(c)``, if there is one: fused and transposed where the family's are,
    with the true vocabulary. A tied head has none.
    """
    every = [*decoder_placements(c, TensorParallel()).values(), *bias_placements(c).values()]
    return {p.name: p.shape for places in every for p in places.parts}


def bias_placements(c: ModelConfig) -> dict[str, Placement]:
    """Map the name of each router's bias to its placement. Every tensor-parallel rank holds the whole."""
    return {
        own: Placement.plain(c.tensor_names.stored(own)[0], shape) for own, shape in router_biases(c).items()
    }


def decoder_placements(
    c: ModelConfig,
    tp: TensorParallel,
    names: TensorNames | None = None,
    ep: ExpertParallel | None = None,
) -> dict[str, Places]:
    """Map each parameter's name to its placement, for the rank ``tp.rank``; experts' to one for each expert that
    ``ep.rank`` holds, which is all by default.

    names: those of other tensors than a checkpoint's, such as another program's.
    """
    names, parameters = names or c.tensor_names, model_spec(c).parameters
    parts: defaultdict[str, dict[int, int]] = defaultdict(dict)  # of each tensor: the rows of its parts
    for own, p in parameters.items():
        tensor, part = names.stored(own)
        parts[tensor][part or 0] = p.shape[1] if p.experts else p.shape[0]
    ep = ep or ExpertParallel()
    return {own: _places(c, names, tp, ep, own, p, parts) for own, p in parameters.items()}


def _places(
    c: ModelConfig,
    names: TensorNames,
    tp: TensorParallel,
    ep: ExpertParallel,
    own: str,
    p: ParameterSpec,
    parts: Mapping[str, Mapping[int, int]],
) -> Places:
    name, part = names.stored(own)
    rows = parts[name]
    if not p.experts:
        return _placement(c, names, tp, own, p, name, part, rows)
    held = ep.own(p.experts)
    if "{}" not in name:
        shape, before = (p.experts, sum(rows.values()), *p.shape[2:]), _before(part, rows)
        local, segment = (len(held), *p.shape[1:]), RowRange(0, len(held), held.start)
        return Placement(name, shape, local, (segment,), before)
    each = [name.format(expert) for expert in held]
    return Stack(tuple(_placement(c, names, tp, own, p.of_one, one, part, rows) for one in each))


def _before(part: int | None, rows: Mapping[int, int]) -> int:
    """Return where a part of a tensor begins, of parts with so many rows."""
    return sum(rows[other] for other in range(part or 0))


def _placement(
    c: ModelConfig,
    names: TensorNames,
    tp: TensorParallel,
    own: str,
    p: ParameterSpec,
    name: str,
    part: int | None,
    parts: Mapping[int, int],
) -> Placement:
    """Return the place of parameter ``own``, or of one of its experts, in the tensor ``name``.

    part: which part of that it is, if it is fused. parts: the rows of all of its parts.
    """
    if p.vocabulary:
        shard = VocabShard.of(c.vocabulary, c.padded_vocab_size(tp.size), tp)
        return Placement.plain(name, p.shape, (shard.rows, c.hidden_size), shard.start)
    local, copies = list(p.shape), p.copies(tp.size)
    if p.cut is not None:
        local[p.cut] = tp.share(copies * p.shape[p.cut], own)
    rows = local[0]
    first = tp.rank // copies * rows if p.cut == 0 else 0
    offset1 = tp.rank * local[1] if p.cut == 1 else 0
    if part is not None and (counted := names.grouped_by(own)):
        segments = _grouped_segments(parts, part, getattr(c, counted), first, rows)
    else:
        segments = (RowRange(0, rows, _before(part, parts) + first),)
    shape = (sum(parts.values()), *p.shape[1:])
    transposed = names.transposed and p.multiplies
    return Placement(name, shape[::-1] if transposed else shape, tuple(local), segments, offset1, transposed)


def _grouped_segments(
    parts: Mapping[int, int], part: int, groups: int, first: int, rows: int
) -> tuple[RowRange, ...]:
    """Return the segments of the rows ``first`` .. of a part in a tensor of ``groups``, each with some of all."""
    of_group = {other: count // groups for other, count in parts.items()}
    size, before, whole = of_group[part], _before(part, of_group), sum(of_group.values())
    segments, at = list[RowRange](), first
    while at < first + rows:
        group, inside = divmod(at, size)
        length = min(size - inside, first + rows - at)
        segments.append(RowRange(at - first, length, group * whole + before + inside))
        at += length
    return tuple(segments)
