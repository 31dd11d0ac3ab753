"""Maps world ranks to named axes. Pure arithmetic: no torch, no environment.

The world is a grid, and its axes are named from the outermost on. They are pp, then the data-parallel sub-axes,
then tp, which is innermost so that a tensor-parallel group never leaves its node. The other order is data-parallel,
pp, tp (Megatron's tp-pp-dp mapping), which keeps a pipeline inside a node and lets data parallelism cross. The d
data-parallel ranks are cut at every shard factor and at the boundary of every level (levels.py: nodes, racks), so a
sub-axis has one role (p, g, os or replica) and one link class. Cuts between 1 and d, in ascending order, name the
sub-axes from the innermost out.

Context parallelism is no axis of the grid but a view: neighbours among the data-parallel ranks share their samples.
Innermost are those that swap heads for sequence, outside of them those that gather keys and values. So is expert
parallelism: neighbours in the world, tensor-parallel groups and then data-parallel neighbours, share the experts.
Experts have data-parallel axes of their own, those of the smaller world in which such a group is one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from math import gcd, log, prod
from operator import mul

from megazero.mesh.levels import BETWEEN, NODE, Level, link_along, link_between, make_levels, short


@dataclass(frozen=True)
class AxisSpec:
    """One mesh axis: ``size`` ranks that are ``stride`` world ranks apart.

    ``role`` is 'pp', 'tp', 'rows' (``Grid.row_axes``), 'cp' (``Grid.cp_axes``), 'ep' (``Grid.ep_axis``),
    'round' (``Grid.round_axes``), or the shard level that the sub-axis belongs to: 'p', 'g', 'os', 'replica'.
    ``link`` is the slowest that its groups use, that of the lowest level that holds each of them (levels.py).
    """

    name: str
    role: str
    size: int
    stride: int
    link: str

    def index(self, rank: int) -> int:
        return rank // self.stride % self.size

    def ranks(self, rank: int) -> tuple[int, ...]:
        """Return the world ranks of the group of this axis that ``rank`` is in, by index along the axis."""
        base = rank - self.index(rank) * self.stride
        return tuple(base + i * self.stride for i in range(self.size))


@dataclass(frozen=True)
class Grid:
    """The whole grid. ``axes`` is outermost first; ``data_axes`` and ``levels`` are innermost first.

    With ``dp_outermost``, the data-parallel axes lie outside of pp, not inside. ``cp`` is how many data-parallel
    ranks, in a row, share samples, ``cp_keys`` how many groups of these gather each other's keys and values, and
    ``ep`` how many ranks, in a row, share the experts.
    """

    levels: tuple[Level, ...]
    tp: int
    pp: int
    shards: tuple[int, int, int]
    axes: tuple[AxisSpec, ...]
    dp_outermost: bool = False
    cp: int = 1
    cp_keys: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        return self.levels[-1].size

    @property
    def ranks_per_node(self) -> int:
        return self.levels[0].size

    @property
    def dp(self) -> int:
        return self.world_size // (self.tp * self.pp)

    @property
    def data_axes(self) -> tuple[AxisSpec, ...]:
        return tuple(a for a in reversed(self.axes) if a.role not in ("pp", "tp"))

    def axis(self, name: str) -> AxisSpec:
        return next(a for a in self.axes if a.name == name)

    @property
    def dp_stride(self) -> int:
        """Return how many world ranks apart two neighbours of a data-parallel group are."""
        return self.tp * (self.pp if self.dp_outermost else 1)

    def dp_index(self, rank: int) -> int:
        return rank // self.dp_stride % self.dp

    @property
    def batch_ranks(self) -> int:
        """Return how many shares a global batch has: one for each context-parallel group."""
        return self.dp // self.cp

    @property
    def cp_axes(self) -> tuple[AxisSpec, AxisSpec, AxisSpec]:
        """Return the ranks that share samples, innermost first: those that swap heads, then those that gather keys
        inside a node, then across nodes. They lie in the data-parallel axes, from the innermost on. Only the first
        axis may have ranks on a node and others beyond (``others``).
        """
        heads, near = self.cp // self.cp_keys, min(self.cp, max(1, self.ranks_per_node // self.dp_stride))
        inside = max(1, near // heads)
        spec, stride, across = partial(_spec, self.levels), self.dp_stride, self.cp_keys // inside
        return (
            spec("cp_heads", "cp", heads, stride),
            spec("cp_keys_intra", "cp", inside, stride * heads),
            spec("cp_keys_inter", "cp", across, stride * heads * inside),
        )

    @property
    def ep_axis(self) -> AxisSpec:
        """Return the ranks that share the experts: each has some of every layer's. Rows go along ``ep_axes``."""
        return _spec(self.levels, "ep", "ep", self.ep, 1)

    @property
    def ep_axes(self) -> tuple[AxisSpec, AxisSpec]:
        """Return the ranks that share the experts inside a node, and those with the same place at other nodes."""
        inside = min(self.ep, self.tp * self._data_ranks[0])
        return (
            _spec(self.levels, "ep_intra", "ep", inside, 1),
            _spec(self.levels, "ep_inter", "ep", self.ep // inside, inside),
        )

    @property
    def round_axes(self) -> tuple[AxisSpec, AxisSpec]:
        """Return the ranks whose micro-batches are a round, inside a node and across: those with the same part of
        other samples, at the same stage."""
        inside, stride = max(1, self._data_ranks[0] // self.cp), self.dp_stride * self.cp
        return (
            _spec(self.levels, "round_intra", "round", inside, stride),
            _spec(self.levels, "round_inter", "round", self.dp // self.cp // inside, stride * inside),
        )

    @property
    def ep_data(self) -> int:
        """Return how many of these are data-parallel neighbours; the tensor-parallel ranks of each are the others."""
        return max(1, self.ep // self.tp)

    @property
    def expert_shards(self) -> tuple[int, int, int]:
        """Return (P, G, OS) of experts: among so many ranks that hold the same ones, each state is shared."""
        return expert_shards(self.shards, self.ep_data)

    @cached_property
    def expert_axes(self) -> tuple[AxisSpec, ...]:
        """Return the data-parallel sub-axes of experts, innermost first. Those that other parameters have, too, are
        the same; the names of the others begin with x.
        """
        together = self.ep_data
        if together == 1:
            return self.data_axes
        near = [max(1, ranks // together) for ranks in self._data_ranks]
        cuts = data_cuts(self.dp // together, near, self.expert_shards)
        own = _sub_axes(self.levels, cuts, self.expert_shards, self.dp_stride * together)
        shared = set(self.data_axes)
        return tuple(axis if axis in shared else replace(axis, name=f"x{axis.name}") for axis in own)

    @property
    def _data_ranks(self) -> tuple[int, ...]:
        return data_ranks(self.levels, self.tp, self.pp, self.dp_outermost)

    @property
    def row_axes(self) -> tuple[AxisSpec, ...]:
        """Return the axes by which every rank's row of scalars comes to all, outermost first: one for each level."""
        names = (self.levels[0].name, *(f"{level.name}s" for level in self.levels))
        sizes = (1, *(level.size for level in self.levels))
        return tuple(
            AxisSpec(name, "rows", level.size // below, below, level.link)
            for name, level, below in reversed([*zip(names, self.levels, sizes, strict=False)])
        )

    @property
    def rows_sent(self) -> dict[str, int]:
        """Return how many rows a rank sends in such an exchange, by link."""
        held = accumulate((axis.size for axis in self.row_axes), mul, initial=1)
        return {axis.link: (axis.size - 1) * rows for axis, rows in zip(self.row_axes, held, strict=False)}

    def added_up(self, nbytes: int) -> dict[str, int]:
        """Return the bytes that a rank sends where all ranks add up ``nbytes``, by link: of rings (Mesh.combine)."""
        return {axis.link: 2 * (axis.size - 1) * nbytes // axis.size for axis in self.row_axes}

    def rank_of(self, pp: int, dp: int, tp: int) -> int:
        """Return the world rank with these indices."""
        return pp * self.axis("pp").stride + dp * self.dp_stride + tp

    def link(self, a: int, b: int) -> str:
        """Return the link class between two world ranks."""
        return link_between(self.levels, a, b)

    def others(self, axis: AxisSpec) -> dict[str, int]:
        """Return how many of the other ranks along an axis lie beyond each link."""
        near = [min(axis.size, max(1, level.size // axis.stride)) for level in self.levels]
        beyond = zip(self.levels, [1, *near], near, strict=False)
        return {level.link: ranks - nearer for level, nearer, ranks in beyond}


def data_ranks(levels: Sequence[Level], tp: int, pp: int = 1, dp_outermost: bool = False) -> tuple[int, ...]:
    """Return how many ranks of one data-parallel group share each level below the whole: first h, those of a node.

    tp is innermost, and pp is outermost or in between. Raises ValueError, which names the nearest legal sizes, if
    groups would straddle nodes, or a higher level's parts, unevenly.
    """
    problems, world_size, ranks_per_node = [], levels[-1].size, levels[0].size
    if world_size % (tp * pp):
        problems.append(
            f"{world_size} ranks do not divide by tensor-parallel size {tp} x pipeline size {pp}; nearest "
            f"world size: {nearest_multiple(world_size, tp * pp)}"
        )
    if world_size % ranks_per_node:
        problems.append(
            f"{world_size} ranks do not divide by {ranks_per_node} ranks per node; nearest ranks per node: "
            f"{nearest_divisor(world_size, ranks_per_node)}"
        )
    if ranks_per_node % tp:
        problems.append(
            f"a node of {ranks_per_node} ranks does not hold whole groups of "
            f"--tensor-model-parallel-size {tp}; nearest: {nearest_divisor(ranks_per_node, tp)}"
        )
    if problems:
        raise ValueError("; ".join(problems))
    return tuple(_data_ranks(level, world_size // (tp * pp), tp, pp, dp_outermost) for level in levels[:-1])


def _data_ranks(level: Level, d: int, tp: int, pp: int, dp_outermost: bool) -> int:
    inner = tp * pp if dp_outermost else tp  # ranks between neighbours of a data-parallel group
    if dp_outermost and level.size % inner and inner % level.size:
        room = level.size // tp
        raise ValueError(
            f"pipelines of {pp} stages inside nodes (tp, pp, dp order) straddle {level.name}s that hold {room} "
            f"stages each unevenly; nearest pipeline sizes: {nearest_divisor(room, pp)} or a multiple of {room}"
        )
    room = max(level.size // inner, 1)
    if d % min(d, room) or room % min(d, room):
        raise ValueError(
            f"data-parallel groups of {d} ranks straddle {level.name}s that hold {room} each unevenly; nearest "
            f"data-parallel sizes: {gcd(d, room)} or a multiple of {room}"
        )
    return min(d, room)


def data_cuts(d: int, near: Sequence[int], shards: tuple[int, int, int]) -> list[int]:
    """Return the ascending cut points 1 = c0 < c1 < ... <= d of the data-parallel ranks.

    They are the shard factors and the boundaries of levels (``near``: data_ranks). Each divides the next, if the
    factors are legal (shard_problem).
    """
    return sorted({1, *shards, *near, d})


def shard_problem(shards: tuple[int, int, int], d: int, near: Sequence[int]) -> str:
    """Say what is illegal about (P, G, OS) over d data-parallel ranks, with the nearest legal choice.

    Returns '' if nothing is illegal. near: how many of the ranks share each level below the whole (data_ranks). P
    must divide G, G must divide OS and OS must divide d, and each must divide, or be a multiple of, every one of
    ``near``: every transition between them is then one collective on one mesh axis.
    """
    faults = _shard_faults(shards, d, near)
    if not faults:
        return ""
    return (
        f"shard factors P,G,OS = {','.join(map(str, shards))} over {d} data-parallel ranks: {', '.join(faults)}; "
        f"nearest legal: {','.join(map(str, nearest_shards(shards, d, near)))}"
    )


def whole_parts(d: int, near: Sequence[int]) -> list[int]:
    """Return the divisors of d that divide each of ``near``, the data-parallel ranks of a level, or are multiples."""
    return [k for k in range(1, d + 1) if d % k == 0 and all(n % k == 0 or k % n == 0 for n in near)]


def context_problem(cp: int, d: int, near: Sequence[int], keys: int = 1) -> str:
    """Say what is illegal about ``cp`` of d data-parallel ranks that share samples, with the nearest legal choice.

    Returns '' if nothing is illegal. near: as in ``shard_problem``. keys: groups of them that gather each other's
    keys and values. cp must divide d, so that groups are equal, and divide each of ``near`` or be a multiple of it,
    so that none straddles a node, nor a higher level. Those of a group must lie on one node, if there are several:
    keys and values are fewer bytes to cross with.
    """
    legal, h = whole_parts(d, near), near[0]
    if cp in legal:
        held = min(cp, h)
        if keys == 1 or held % (cp // keys) == 0:
            return ""
        heads = nearest_divisor(held, cp // keys)
        return (
            f"--hierarchical-context-parallel-sizes {cp // keys} {keys}: of the ranks that swap heads a node holds "
            f"{held}; nearest: {heads} {cp // heads}"
        )
    why = f"{h} of them per node" if d % cp == 0 else "which it does not divide"
    nearest = min(legal, key=lambda k: (abs(log(k / cp)), k))
    return f"--context-parallel-size {cp} over {d} data-parallel ranks, {why}; nearest: {nearest}"


def expert_shards(shards: tuple[int, int, int], together: int) -> tuple[int, int, int]:
    """Return (P, G, OS) of experts, of which ``together`` data-parallel ranks hold different ones."""
    p, g, o = shards
    return max(1, p // together), max(1, g // together), max(1, o // together)


def expert_problem(
    ep: int,
    experts: int,
    tp: int,
    shards: tuple[int, int, int],
    d: int,
    near: Sequence[int],
    dp_outermost: bool = False,
    across: bool = False,
) -> str:
    """Say what is illegal about ``ep`` ranks that share ``experts``, with the nearest legal choice.

    Returns '' if nothing is illegal. shards, d and near: as in ``shard_problem``. ep must divide the experts, be
    1 or a multiple of tp, and lie inside a node or, with ``across``, be the ranks of whole nodes. Of its d' = ep / tp
    data-parallel ranks, P, G and OS must each be a divisor or a multiple: what is left of every factor is then a
    factor among the ranks that hold the same experts.
    """
    rest = experts, tp, shards, d, near, dp_outermost, across
    faults = _expert_faults(ep, *rest)
    if not faults:
        return ""
    legal = [k for k in range(1, experts + 1) if not _expert_faults(k, *rest)]
    nearest = min(
        legal, key=lambda k: (round(abs(log(k / max(ep, 1))), 9), -k)
    )  # of two, that of less memory
    return f"--expert-model-parallel-size {ep}: {', '.join(faults)}; nearest: {nearest}"


def _expert_faults(
    ep: int,
    experts: int,
    tp: int,
    shards: tuple[int, int, int],
    d: int,
    near: Sequence[int],
    dp_outermost: bool,
    across: bool,
) -> list[str]:
    faults = [f"it does not divide {experts} experts"] if experts % ep else []
    if ep == 1:
        return faults
    if ep % tp:
        return [*faults, f"it is not a multiple of --tensor-model-parallel-size {tp}"]
    together, h = ep // tp, near[0]
    with_tp = f" x {tp} tensor-parallel ranks" if tp > 1 else ""
    if h % together and (together % h or d % together):
        of_all = f" of {d}" if across else ""
        faults.append(f"its ranks straddle a node, which has {h}{of_all} data-parallel ranks{with_tp}")
    elif h % together and not across:
        faults.append(
            f"its ranks leave the node, which has {h} data-parallel ranks{with_tp}, without "
            "--moe-dispatch-across-nodes exact"
        )
    faults += [
        f"its ranks straddle a {part}, which has {n} data-parallel ranks{with_tp}"
        for part, n in zip(BETWEEN, near[1:], strict=False)
        if n % together and together % n
    ]
    if dp_outermost and together > 1:
        faults.append("--use-tp-pp-dp-mapping puts pipelines between data-parallel neighbours")
    faults += [
        f"its {together} data-parallel ranks neither divide {name} = {k} nor are a multiple of it"
        for k, name in {k: name for name, k in zip(("OS", "G", "P"), shards[::-1], strict=True)}.items()
        if k % together and together % k
    ]
    return faults


def own_spans(length: int, rank: int, heads: int, keys: int) -> list[range]:
    """Return the positions in a sequence of ``length`` tokens of one of ``heads`` x ``keys`` ranks that share it.

    With ``keys`` groups of ranks a sequence has 2 x keys chunks, and a group has one from the beginning and its
    mirror image from the end: causal attention is the same work for each. The ranks of a group cut its chunks,
    joined, in their order.
    """
    group, place = divmod(rank, heads)
    chunk, share = length // (2 * keys), length // (heads * keys)
    chunks = (
        [range(length)]
        if keys == 1
        else [range(i * chunk, (i + 1) * chunk) for i in (group, 2 * keys - 1 - group)]
    )
    own, before = list[range](), 0
    for each in chunks:
        part = each[max(0, place * share - before) : max(0, (place + 1) * share - before)]
        own += [part] if part else []
        before += len(each)
    assert sum(map(len, own)) * heads * keys == length, (
        f"{length} tokens: config/layout/context_rules.py refuses"
    )
    return own


def _shard_faults(shards: tuple[int, int, int], d: int, near: Sequence[int]) -> list[str]:
    if min(shards) < 1:
        return ["factors are at least 1"]
    chain = list(zip(("P", "G", "OS", "d"), (*shards, d), strict=True))
    faults = [f"{low} = {a} does not divide {high} = {b}" for (low, a), (high, b) in pairwise(chain) if b % a]
    faults += [
        f"{name} = {k} neither divides nor is a multiple of the {n} data-parallel ranks per {part}"
        for part, n in zip((NODE, *BETWEEN), near, strict=False)
        for name, k in {k: (name, k) for name, k in chain[:3]}.values()
        if n % k and k % n
    ]
    return faults


def nearest_shards(wanted: tuple[int, int, int], d: int, near: Sequence[int]) -> tuple[int, int, int]:
    """Return the legal (P, G, OS) with the smallest sum of |log ratio| to ``wanted``. A tie goes to less memory."""
    return nearest_chain(wanted, whole_parts(d, near))


def nearest_chain(wanted: tuple[int, int, int], legal: Sequence[int]) -> tuple[int, int, int]:
    """Return the (P, G, OS) of these factors, each dividing the next, that is nearest (``nearest_shards``)."""
    candidates = [(p, g, o) for o in legal for g in legal if o % g == 0 for p in legal if g % p == 0]

    def distance(triple: tuple[int, int, int]) -> tuple[float, tuple[int, ...]]:
        gap = sum(abs(log(a / max(b, 1))) for a, b in zip(triple, wanted, strict=True))
        return round(gap, 9), tuple(-k for k in triple)

    return min(candidates, key=distance)


def copy_lifetime(p: int, os: int, wanted: str | None, delta: bool = False) -> str:
    """Return how long the P copy lives: 'use', 'step' or 'resident'.

    With ``delta``, differences are added to the last step's copy. Raises ValueError for a copy that would be
    dropped after each use although it is not the optimizer's own slice.
    """
    if p == os:
        return "use"
    if wanted == "use":
        raise ValueError(
            f"parameter lifetime 'use' needs P = OS, but P = {p} and OS = {os} (a dropped copy would cross nodes "
            "again at every use); nearest legal: step"
        )
    return wanted or ("resident" if p == 1 or delta else "step")


def make_grid(
    world_size: int,
    ranks_per_node: int,
    tp: int = 1,
    pp: int = 1,
    shards: tuple[int, int, int] = (1, 1, 1),
    dp_outermost: bool = False,
    cp: int = 1,
    cp_keys: int = 1,
    ep: int = 1,
    level_sizes: tuple[int, ...] = (),
) -> Grid:
    """Cut the world into named axes.

    ``shards`` is (P, G, OS), which is how many data-parallel ranks share one copy of parameters, gradients, optimizer
    states. With ``dp_outermost`` the order is dp, pp, tp instead of pp, dp, tp. Sub-axes are named by role and link,
    e.g. 'os_inter', and at most one of each exists. ``cp`` data-parallel ranks in a row share samples, ``cp_keys``
    groups of which gather keys. ``ep`` ranks in a row share experts, inside a node or of whole nodes. ``level_sizes``
    are the nodes in each level between node and cluster (levels.py). Raises ValueError for sizes that do not divide
    and for factors that are illegal.
    """
    levels = make_levels(world_size, ranks_per_node, level_sizes)
    d, near = world_size // (tp * pp), data_ranks(levels, tp, pp, dp_outermost)
    problem = shard_problem(shards, d, near) or context_problem(cp, d, near, cp_keys)
    if problem := problem or expert_problem(ep, ep, tp, shards, d, near, dp_outermost, True):
        raise ValueError(problem)
    data = _sub_axes(levels, data_cuts(d, near, shards), shards, tp * pp if dp_outermost else tp)
    pipeline = _spec(levels, "pp", "pp", pp, tp if dp_outermost else tp * d)
    tensor = _spec(levels, "tp", "tp", tp, 1)
    axes = [*data[::-1], pipeline, tensor] if dp_outermost else [pipeline, *data[::-1], tensor]
    assert prod(a.size for a in axes) == world_size
    return Grid(levels, tp, pp, shards, tuple(axes), dp_outermost, cp, cp_keys, ep)


def _sub_axes(
    levels: Sequence[Level], cuts: Sequence[int], shards: tuple[int, int, int], stride: int
) -> list[AxisSpec]:
    """Return the axes between these cuts of data-parallel ranks, whose neighbours are ``stride`` apart, innermost
    first."""
    p, g, o = shards
    out = []
    for low, high in pairwise(cuts):
        role = "p" if high <= p else "g" if high <= g else "os" if high <= o else "replica"
        axis = _spec(levels, role, role, high // low, stride * low)
        out.append(replace(axis, name=f"{role}_{short(axis.link)}"))
    return out


def _spec(levels: Sequence[Level], name: str, role: str, size: int, stride: int) -> AxisSpec:
    return AxisSpec(name, role, size, stride, link_along(levels, size, stride))


def nearest_divisor(n: int, wanted: int) -> int:
    """Return the divisor of n that is nearest to ``wanted`` (the smaller one on a tie)."""
    return min((k for k in range(1, n + 1) if n % k == 0), key=lambda k: (abs(k - wanted), k))


def nearest_multiple(n: int, base: int) -> int:
    """Return the positive multiple of ``base`` that is nearest to n."""
    return max(1, round(n / base)) * base
