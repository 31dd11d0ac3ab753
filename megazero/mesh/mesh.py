"""Process groups. There is one frozen Mesh, which is passed as an argument and never a module global.

Every axis with more than one rank has two communicators, so that gathers and reductions in flight do not queue
behind each other (NCCL serialises per communicator; gloo has threads per group).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from megazero.mesh.grid import AxisSpec, Grid, make_grid
from megazero.mesh.launch import Launch
from megazero.mesh.levels import Level
from megazero.mesh.objects import gather_objects
from megazero.mesh.waiting import waiting

# torch's flat collectives: 2.13 renames *_tensor to *_single and warns of the old names.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Axis:
    """An axis as this rank sees it. Its groups are None when ``size`` is 1.

    In the pp axis, gather_group carries what goes to higher ranks and reduce_group what goes to lower ones. In
    each, the messages of one pair have one direction, so sender and receiver agree on their order (NCCL matches by
    order alone).
    """

    spec: AxisSpec
    index: int
    ranks: tuple[int, ...]
    gather_group: dist.ProcessGroup | None
    reduce_group: dist.ProcessGroup | None

    @cached_property
    def name(self) -> str:
        return self.spec.name

    @cached_property
    def size(self) -> int:
        return self.spec.size

    @cached_property
    def link(self) -> str:
        return self.spec.link


@dataclass(frozen=True)
class Mesh:
    """The axes by name, this rank's place in them, and the device that ranks compute on.

    ``ends`` is the axis of the first and the last stage of a pipeline, on these two ranks, where ``create_mesh``
    was asked for it; tied embeddings meet there. Otherwise it is None. ``row_axes`` are those of
    ``gather_rows`` (``Grid.row_axes``).
    """

    grid: Grid
    rank: int
    device: torch.device
    axes: dict[str, Axis] = field(repr=False)
    ends: Axis | None = None
    row_axes: tuple[Axis, ...] = field(default=(), repr=False)
    _claims: list[str] = field(default_factory=list, repr=False, compare=False)

    def claim(self) -> None:
        """Take the axes' communicators for one engine: two would issue collectives on them in no common order."""
        if self._claims:
            raise RuntimeError("this mesh already serves an engine: call create_mesh() again for another one")
        self._claims.append("engine")

    def release(self) -> None:
        """Free the mesh for another engine, at the end of the one that holds it. Every rank does this alike."""
        self._claims.clear()

    @property
    def world_size(self) -> int:
        return self.grid.world_size

    @property
    def levels(self) -> tuple[Level, ...]:
        """Return node, ..., cluster (levels.py)."""
        return self.grid.levels

    @property
    def links(self) -> tuple[str, ...]:
        """Return the classes of links, that inside a node first."""
        return tuple(level.link for level in self.levels)

    @property
    def tp(self) -> Axis:
        return self.axes["tp"]

    @property
    def pp(self) -> Axis:
        return self.axes["pp"]

    @property
    def cp_axes(self) -> tuple[Axis, ...]:
        """Return the axes of the ranks that share this rank's samples (``Grid.cp_axes``)."""
        return tuple(self.axes[a.name] for a in self.grid.cp_axes)

    @property
    def ep_axes(self) -> tuple[Axis, Axis]:
        """Return the axes of the ranks that share the experts, inside a node and across (``Grid.ep_axes``)."""
        inside, across = self.grid.ep_axes
        return self.axes[inside.name], self.axes[across.name]

    @property
    def round_axes(self) -> tuple[Axis, ...]:
        """Return the axes of the ranks whose micro-batches are a round (``Grid.round_axes``), where it has them."""
        return tuple(self.axes[a.name] for a in self.grid.round_axes if a.name in self.axes)

    @property
    def data_axes(self) -> tuple[Axis, ...]:
        """Return the data-parallel sub-axes, innermost first. Each has more than one rank."""
        return tuple(self.axes[a.name] for a in self.grid.data_axes)

    @property
    def expert_axes(self) -> tuple[Axis, ...]:
        """Return the data-parallel sub-axes of experts (``Grid.expert_axes``)."""
        return tuple(self.axes[a.name] for a in self.grid.expert_axes)

    @property
    def dp_size(self) -> int:
        return self.grid.dp

    @property
    def dp_rank(self) -> int:
        return self.grid.dp_index(self.rank)

    @property
    def batch_ranks(self) -> int:
        """Return how many shares a global batch has (``Grid.batch_ranks``)."""
        return self.grid.batch_ranks

    @property
    def batch_rank(self) -> int:
        return self.dp_rank // self.grid.cp

    @waiting
    def gather_rows(self, row: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the rows [world, k] of all ranks by rank, with the dtype of ``row``, for ordered sums of scalars.

        ``row`` is 1-D, [k], on ``device`` or the CPU, and k is the same on all ranks. The rows are
        written to ``out`` if it is given, which is contiguous; else they are a new tensor.

        A slow link is crossed once, in one round of messages: each row by itself, to one rank of every other part of
        its level. An all-gather of all ranks is a ring in gloo, with one round after the other for each rank.
        """
        out = row.new_empty(self.world_size, row.numel()) if out is None else out
        if self.world_size == 1:
            return out.copy_(row[None])
        *across, node = self.row_axes
        rows = row
        for axis in (axis for axis in across if axis.size > 1):
            column = rows.repeat(axis.size)
            rows = torch.empty_like(column)
            dist.all_to_all_single(rows, column, group=axis.reduce_group)
        if node.size > 1:
            column, rows = rows, row.new_empty(node.size * rows.numel())
            all_gather_flat(rows, column, group=node.gather_group)
        sizes = [axis.size for axis in self.row_axes]
        inwards = rows.view(*reversed(sizes), row.numel())  # the axis of the last exchange is the outermost
        out.view(*sizes, row.numel()).copy_(inwards.permute(*reversed(range(len(sizes))), len(sizes)))
        return out

    @waiting
    def combine(self, x: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Add up integers of any shape over all ranks, or take the largest of numbers (MAX), in place: inside each
        node, then across nodes, and so on."""
        for axis in reversed(self.row_axes):
            if axis.size > 1:
                dist.all_reduce(x, op, group=axis.reduce_group)
        return x

    @waiting
    def gather_along(self, axes: Sequence[Axis], row: torch.Tensor) -> torch.Tensor:
        """Return the rows [ranks, k] of the ranks along these axes, innermost first, with the dtype of ``row``.

        ``row`` is [k]; k may differ between groups.
        """
        rows = row.reshape(1, -1)
        for axis in axes:
            out = rows.new_empty(axis.size * rows.numel())
            all_gather_flat(out, rows.contiguous().view(-1), group=axis.gather_group)
            rows = out.view(-1, rows.shape[1])
        return rows

    def stage_rows(self, rows: torch.Tensor, stage: int) -> torch.Tensor:
        """Return, of all rows [world, k], those of ``stage_ranks``. The dtype is that of ``rows``."""
        return rows[self.stage_ranks(stage)]

    def stage_ranks(self, stage: int) -> list[int]:
        """Return a pipeline rank's data-parallel ranks; of each index this is the first tp rank."""
        return [self.grid.rank_of(stage, i, 0) for i in range(self.dp_size)]


@waiting
def create_mesh(
    *,
    tp: int = 1,
    pp: int = 1,
    shards: tuple[int, int, int] = (1, 1, 1),
    dp_outermost: bool = False,
    ends: bool = False,
    cp: int = 1,
    cp_keys: int = 1,
    ep: int = 1,
    rounds: bool = False,
    ranks_per_node: int | None = None,
    level_sizes: tuple[int, ...] = (),
    device: torch.device | str = "cpu",
    timeout: timedelta | None = None,
) -> Mesh:
    """Build the mesh over the initialised default process group (or over one process without one).

    ``shards`` is (P, G, OS). With ``dp_outermost``, ranks lie in the order dp, pp, tp instead of pp, dp, tp
    (outermost first). With ``ends``, the first and the last stage of each pipeline are joined by an axis of their
    own (``Mesh.ends``). ``cp`` data-parallel ranks in a row share samples, ``cp_keys``
    groups of which gather keys, and have axes of their own (``Mesh.cp_axes``). ``ep`` ranks in a row share experts,
    which have data-parallel axes of their own (``Mesh.ep_axes``, ``Mesh.expert_axes``). With ``rounds``, the ranks
    that have a round's micro-batches have axes, too (``Mesh.round_axes``). ``ranks_per_node`` is the whole world by
    default, i.e. one node, and ``level_sizes`` are the nodes in each level between node and cluster
    (``Mesh.levels``): of a rack, or of a rack and of a site. The communicators of ``device`` are made here, too. This
    is collective: every rank calls it with the same arguments.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    node = ranks_per_node or world_size
    grid = make_grid(world_size, node, tp, pp, shards, dp_outermost, cp, cp_keys, ep, level_sizes)
    device = torch.device(device)
    if world_size > 1:
        _level_group_counts(rank, timeout)
    counted = grid.round_axes if rounds else ()
    specs = dict.fromkeys((*grid.axes, *grid.cp_axes, *grid.ep_axes, *grid.expert_axes, *counted))
    axes = {spec.name: _make_axis(spec, rank, timeout) for spec in specs}
    joined = _join_ends(grid, rank, timeout) if ends and pp > 1 else None
    mesh = Mesh(grid, rank, device, axes, joined, tuple(_make_axis(s, rank, timeout) for s in grid.row_axes))
    _connect((*axes.values(), *([joined] if joined else [])), device)
    mesh.gather_rows(torch.zeros(1, device=device))  # these connect, too
    return mesh


@waiting
def destroy_mesh(mesh: Mesh) -> None:
    """Free the communicators of the mesh that was made last, without ends. Collective.

    torch names a new group by how many there are (``_level_group_counts``). Groups of one rank, with no communicator,
    take the places of the old ones: under their names the store still says where the old ones met.
    """
    axes = (*mesh.axes.values(), *mesh.row_axes)
    groups = dict.fromkeys(group for axis in axes for group in (axis.gather_group, axis.reduce_group))
    own = [group for group in groups if group not in (None, world_group())]
    if dist.is_initialized():
        dist.barrier()  # nobody is in a collective of theirs
    for group in reversed(own):
        dist.destroy_process_group(group)
    for _ in own:
        _new_group([mesh.rank], None)


@dataclass(frozen=True)
class GroupSettings:
    """How the communicators of an axis are made: their timeout (None: torch's default), and the backend's options."""

    timeout: timedelta | None = None
    options: Callable[[], Any] = lambda: None  # new ones at every call, as torch writes into them


def create_axes(
    wanted: Sequence[tuple[AxisSpec, Sequence[int], GroupSettings]], device: torch.device
) -> tuple[Axis, ...]:
    """Make axes over given ranks, each with this rank in it, for a program with its own process groups.

    The ranks of an axis are by index along it; the spec's stride is not used. This is collective over the
    default group: every rank calls it with as many axes, and axes of the same ranks stand at the same place. An axis
    of one rank has no communicators.
    """
    rank = dist.get_rank()
    bound = dist.distributed_c10d._get_default_group().bound_device_id is not None
    if bound:
        every = gather_objects([list(ranks) for _, ranks, _ in wanted])
    else:
        _level_group_counts(rank, wanted[0][2].timeout if wanted else None)
    axes = []
    for place, (spec, ranks, settings) in enumerate(wanted):
        if bound:
            pair = _new_pair_of_all([lists[place] for lists in every], settings)
        else:  # of one rank, too: ranks keep as many groups
            pair = [_new_group(ranks, settings.timeout, settings.options) for _ in range(2)]
        gather, reduce = pair if len(ranks) > 1 else (None, None)
        axes.append(Axis(spec, list(ranks).index(rank), tuple(ranks), gather, reduce))
    _connect(axes, device)
    return tuple(axes)


def _new_pair_of_all(every: Sequence[Sequence[int]], settings: GroupSettings) -> list[Any]:
    """Make two groups of each of these ranks, by rank, and return this rank's own.

    Where the program has bound a device (``init_process_group(device_id=...)``), NCCL splits groups off the default
    one. That is collective over the default group: all ranks make all groups, in one order.
    """
    own: list[Any] = []
    for ranks in dict.fromkeys(map(tuple, every)):
        if len(ranks) > 1:
            pair = [
                dist.new_group(list(ranks), timeout=settings.timeout, pg_options=settings.options())
                for _ in range(2)
            ]
            own = pair if dist.get_rank() in ranks else own
    return own


def _level_group_counts(rank: int, timeout: timedelta | None) -> None:
    """Make groups of one rank until every rank has as many groups as the one with the most. This is collective.

    torch names a group of ``use_local_synchronization`` by its ranks and by how many groups the process has. Ranks
    whose numbers of groups differ, as a program with groups of its own leaves them, would wait for each other under
    different names. Objects travel over gloo where there is gloo: a communicator of all ranks on their devices would
    take memory there for one number.
    """
    own = len(dist.distributed_c10d._world.pg_names)  # get_pg_count() leaves such groups out
    for _ in range(max(gather_objects(own)) - own):
        _new_group([rank], timeout)


@waiting
def _connect(axes: Sequence[Axis], device: torch.device) -> None:
    """Run a small collective of each kind that an axis will carry on each of its communicators, axis by axis.

    All ranks share the order of the axes. NCCL makes a communicator, and its connections between pairs for an
    all-to-all, at the first use; the connections of other collectives, too, unless it makes them all with the
    communicator (``launch.NCCL_SETTINGS``). In that, the ranks wait for each other and memory is allocated, which
    waits for kernels under way. In the middle of a step, these kernels may be waiting for this rank. Communicators
    of a pipeline are for pairs, which its schedule knows: ``pp/links.py: connect``.
    """
    for axis in axes:
        if axis.spec.role == "pp" or axis.size == 1:
            continue
        row, own = torch.zeros(axis.size, device=device), torch.zeros(1, device=device)
        all_gather_flat(row, own, group=axis.gather_group)
        if axis.spec.role == "tp":
            dist.all_reduce(row, group=axis.reduce_group)
            reduce_scatter_flat(own, row, group=axis.reduce_group)
        else:  # a sum's way there and its way back
            dist.all_to_all_single(torch.empty_like(row), row, group=axis.reduce_group)
            all_gather_flat(row, own, group=axis.reduce_group)


def _join_ends(grid: Grid, rank: int, timeout: timedelta | None) -> Axis | None:
    pp = grid.axis("pp")
    line = pp.ranks(rank)
    if pp.index(rank) not in (0, pp.size - 1):
        _new_group([rank], timeout)  # every rank must make as many: _level_group_counts
        return None
    first, last = line[0], line[-1]
    spec = AxisSpec("ends", "ends", 2, last - first, grid.link(first, last))
    group = _new_group([first, last], timeout)
    return Axis(spec, int(rank == last), (first, last), group, group)


def _make_axis(spec: AxisSpec, rank: int, timeout: timedelta | None) -> Axis:
    ranks = spec.ranks(rank)
    if spec.size == 1:
        return Axis(spec, 0, ranks, None, None)

    if spec.role == "rows" and spec.size == dist.get_world_size():
        gather = dist.group.WORLD
    else:
        gather = _new_group(ranks, timeout)
    reduce = gather if spec.role in ("tp", "cp", "ep", "round", "rows") else _new_group(ranks, timeout)
    return Axis(spec, spec.index(rank), ranks, gather, reduce)


def _new_group(
    ranks: Sequence[int], timeout: timedelta | None, options: Callable[[], Any] = lambda: None
) -> dist.ProcessGroup:
    # Only the members meet: a full enumeration costs world/size rendezvous on every rank.
    return dist.new_group(list(ranks), timeout=timeout, pg_options=options(), use_local_synchronization=True)


@waiting
def init_distributed(launch: Launch, device: torch.device, timeout: timedelta, store: dist.Store) -> None:
    """Form the default process group. CPU tensors always have gloo, and CUDA tensors have NCCL.

    ``store`` is where the ranks met (``mesh/rendezvous.py``).
    """
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    # torch sets no limit on a store that it did not make. NCCL asks it when a communicator is first used, for which a
    # rank may be as late as for a collective.
    store.set_timeout(timeout)
    # No device_id: with it NCCL carries every point-to-point message of a group on one stream, where receives that a
    # pipeline posts ahead would stand before its sends.
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=store,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
    )


def world_group() -> dist.ProcessGroup | None:
    """Return the group of all ranks, or None in a run of one process without torch.distributed."""
    return dist.group.WORLD if dist.is_initialized() else None


def discover_ranks_per_node(launch: Launch, override: int | None = None) -> int:
    """Return the ranks per node by exchanging host names, or return the override.

    If the launcher gives a node size, it must agree with the host names. The override lets one machine pretend to be
    several nodes. Raises ValueError on every rank if the launcher and the host names disagree, if nodes differ in
    size, or if a node's ranks are not consecutive.
    """
    if launch.world_size == 1:
        return 1
    if override is not None:
        return override
    return check_hosts(gather_objects(socket.gethostname()), launch.local_world_size)


def check_hosts(names: Sequence[str], local_world_size: int | None) -> int:
    """Return the ranks per node by the host name of every rank.

    Raises ValueError if the launcher's size differs (None: it gives none), or if nodes are not alike.
    """
    cure = "start the same number of consecutive ranks on every node, or override the ranks per node"
    counts = {n: names.count(n) for n in dict.fromkeys(names)}
    if len(set(counts.values())) > 1:
        raise ValueError(f"nodes hold different numbers of ranks: {counts}; {cure}")
    size = next(iter(counts.values()))
    if any(names[i] != names[i - i % size] for i in range(len(names))):
        raise ValueError(f"ranks of one node are not consecutive: {list(names)}; {cure}")
    if local_world_size not in (None, size):
        raise ValueError(
            f"the launcher says {local_world_size} ranks per node, the host names say {size} ({counts}); {cure}"
        )
    return size
