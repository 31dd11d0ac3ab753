"""Orders nodes so that groups with much traffic lie under one leaf switch.

It is AMSP's communication order (section V-D) for any layout. Ranks and collectives do not change, only the host of
each rank. In a group that crosses nodes, each rank's bytes are assumed to go to the others in equal parts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

from megazero.mesh.grid import INTER
from megazero.plan.communication import step_hops
from megazero.plan.layout import Layout
from megazero.plan.topology import Topology


@dataclass(frozen=True)
class NodeOrder:
    """An order of hosts, node by node.

    under, before: bytes of a step that stay under leaf switches, in this order and in the one given. total: all that
    cross nodes.
    """

    hosts: tuple[str, ...]
    leaves: int
    under: float
    before: float
    total: float


@dataclass(frozen=True)
class Ring:
    """An axis in nodes: groups of ``size`` that are ``stride`` apart. sent: a node's bytes over it in a step."""

    name: str
    size: int
    stride: int
    sent: float


def place(layout: Layout, topology: Topology, hosts: Sequence[str]) -> NodeOrder:
    """Return the best order found: the given one, or nodes packed under leaves in some order of the axes."""
    leaf_of = {node: leaf for leaf, nodes in topology.leaves.items() for node in nodes}
    axes = rings(layout)
    before = _under(axes, [leaf_of[host] for host in hosts])
    chosen, most = tuple(hosts), before
    tall = sorted(hosts, key=lambda host: topology.path(leaf_of[host]))  # neighbours in the tree; stable
    for order in permutations(_cut(axes, len(hosts))):
        packed = _packed([axis.size for axis in order], tall, leaf_of)
        placed = [""] * len(hosts)
        for at, host in zip(_coordinates(order, len(hosts)), packed, strict=True):
            placed[at] = host
        under = _under(axes, [leaf_of[host] for host in placed])
        if under > most * (1 + 1e-9):
            chosen, most = tuple(placed), under
    total = sum(axis.sent for axis in axes) * len(hosts)
    return NodeOrder(chosen, len({leaf_of[host] for host in hosts}), most, before, total)


def rings(layout: Layout) -> list[Ring]:
    """Return the axes that cross nodes, with the bytes of the mean rank's node."""
    grid, per_node = layout.grid, layout.grid.ranks_per_node
    sent = axis_bytes(layout)
    out = []
    for axis in dict.fromkeys((*grid.axes, *grid.cp_axes, *grid.expert_axes, *grid.ep_axes)):
        if axis.link == INTER and axis.size > 1:
            inside = max(1, per_node // axis.stride)  # ranks of a group that share a node
            out.append(
                Ring(
                    axis.name,
                    -(-axis.size // inside),
                    max(1, axis.stride // per_node),
                    sent[axis.name] * per_node,
                )
            )
    return out


def _cut(axes: Sequence[Ring], nodes: int) -> list[Ring]:
    """Return axes, outermost first, by which each node has one place: the nodes, cut where groups begin and end.

    Axes of ranks that share samples or experts lie in the data-parallel ones. Where groups of two axes end at numbers
    of nodes that do not divide each other, the smaller one counts.
    """
    cuts = [1]
    for end in sorted({end for axis in axes for end in (axis.stride, axis.stride * axis.size)} | {nodes}):
        cuts += [end] * (end > cuts[-1] and end % cuts[-1] == 0)
    return [Ring("", high // low, low, 0.0) for low, high in pairwise(cuts)][::-1]


def axis_bytes(layout: Layout) -> dict[str, float]:
    """Return the bytes that a rank sends over each axis that crosses nodes in a step: the mean over stages.

    A meeting's bytes count as those of a step on average.
    """
    base = layout.base
    out: defaultdict[str, float] = defaultdict(float)
    names = {"pp": "pp", "ep": layout.grid.ep_axes[1].name}  # of the axis on which a kind crosses
    names |= [("cp", a.name) for a in layout.grid.cp_axes if a.link == INTER and a.size > 1]  # one does
    for rank in range(base.pp):
        for _, hop, times in step_hops(*layout.step(rank)):
            out[hop.axis.name] += hop.sent * times / base.pp
        for kind, name in names.items():
            out[name] += base.other_bytes[rank][kind, INTER] / base.pp
    out["outer"] = layout.bytes_of_meetings[0]
    return out


def _under(axes: Sequence[Ring], leaves: Sequence[str]) -> float:
    """Return the bytes of a step that stay under leaf switches, where node i lies under leaves[i]."""
    total = 0.0
    for axis in axes:
        groups: defaultdict[int, list[str]] = defaultdict(list)
        for node, leaf in enumerate(leaves):
            groups[node - node // axis.stride % axis.size * axis.stride].append(leaf)
        for members in groups.values():
            pairs = sum(n * (n - 1) for n in Counter(members).values())
            total += axis.sent * pairs / max(1, axis.size - 1)
    return total


def _packed(sizes: Sequence[int], hosts: Sequence[str], leaf_of: dict[str, str]) -> list[str]:
    """Return the hosts in blocks of sizes[0], of sizes[0] x sizes[1] and so on, as many as possible under one leaf.

    hosts: by place in the tree, which is kept where there is a choice. What is left over of the leaves makes the last
    blocks.
    """
    blocks: list[tuple[tuple[str, ...], str]] = [((host,), leaf_of[host]) for host in hosts]
    for size in sizes:
        by_leaf: defaultdict[str, list[tuple[str, ...]]] = defaultdict(list)
        for nodes, leaf in blocks:
            by_leaf[leaf].append(nodes)
        whole: list[tuple[tuple[str, ...], str]] = []
        rest: list[tuple[tuple[str, ...], str]] = []
        for leaf, parts in by_leaf.items():
            full = len(parts) // size * size
            whole += [(sum(parts[i : i + size], ()), leaf) for i in range(0, full, size)]
            rest += [(nodes, leaf) for nodes in parts[full:]]
        for i in range(0, len(rest), size):
            part = rest[i : i + size]
            whole.append((sum((nodes for nodes, _ in part), ()), part[0][1]))
        blocks = whole
    return [host for nodes, _ in blocks for host in nodes]


def _coordinates(order: Sequence[Ring], nodes: int) -> list[int]:
    """Return the number of the node at each place, where the first axis counts fastest, then the second and so on."""
    out = []
    for at in range(nodes):
        node = 0
        for axis in order:
            node += at % axis.size * axis.stride
            at //= axis.size
        out.append(node)
    return out


def lines(order: NodeOrder, layout: Layout, folder: str) -> list[str]:
    """Return the lines to print: the gain, the rank order, and how to start ranks in this order."""
    total = order.total or 1.0
    mapping = layout.config.parallel.use_tp_pp_dp_mapping
    return [
        f"placement of {len(order.hosts)} nodes under {order.leaves} leaf switches: of the "
        f"{order.total / 1e9:.1f} GB that cross nodes in a step, {order.before / total:.1%} stay under a "
        f"leaf as the nodes are given, {order.under / total:.1%} in the order of {folder}/hosts",
        f"rank order: {'--use-tp-pp-dp-mapping (tp, pp, dp)' if mapping else 'the default (tp, dp, pp)'}, from the "
        "innermost",
        f"Open MPI: mpirun --hostfile {folder}/hosts --map-by slot ...",
        f"SLURM: SLURM_HOSTFILE={folder}/slurm_hosts srun --distribution=arbitrary ...",
        "torchrun: --node-rank is the number of the node's line in hosts, counted from 0",
    ]


def host_files(order: NodeOrder, ranks_per_node: int) -> dict[str, str]:
    """Return the texts of the two files: a line for each node, and a line for each rank."""
    return {
        "hosts": "".join(f"{host} slots={ranks_per_node}\n" for host in order.hosts),
        "slurm_hosts": "".join(f"{host}\n" * ranks_per_node for host in order.hosts),
    }
