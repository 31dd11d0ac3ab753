"""Measures collectives with the engine's own verbs: on the axes of its meshes, all groups of an axis at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from megazero.calibrate.points import CollectivePoint
from megazero.calibrate.timing import Clock
from megazero.comm.hops import Traffic, start_exchange, start_gather
from megazero.comm.peers import Peers
from megazero.comm.timing import Waits
from megazero.mesh.levels import INTER, INTRA
from megazero.mesh.mesh import Mesh, create_mesh, destroy_mesh
from megazero.pp.links import Links
from megazero.pp.schedules import Message

Operation = Callable[[], Any]
SLOW_S = 0.5  # a message that takes longer ends its series: from there on time grows with the bytes


def measure_wire(
    wire: CollectivePoint, sizes: list[int], per_node: int, dtype: torch.dtype, clock: Clock
) -> Iterator[dict[str, Any]]:
    """Yield a row of the cluster file for each size. dtype: in which a sum is taken. Collective."""
    mesh = _mesh(wire, per_node, clock.device)
    for size in sizes:
        sent, operation, each = _operation(wire, mesh, size, dtype)
        sample = clock(operation, slowest=True)
        yield {
            **wire._asdict(),
            "bytes": sent,
            "seconds": sample.median / each,
            "busy": sample.busy / each,
            "spread": sample.spread,
        }
        if sample.median / each > SLOW_S:
            break
    destroy_mesh(mesh)  # the memory of its communicators is for what is measured next


def _mesh(wire: CollectivePoint, per_node: int, device: torch.device) -> Mesh:
    """Make the mesh that has an axis of this kind."""
    operation, ranks, nodes = wire
    if operation == "sum":
        return create_mesh(tp=ranks, ranks_per_node=per_node, device=device)
    if operation == "message":
        world = dist.get_world_size()
        stages = 2 if nodes == 1 else next(k for k in range(2, world + 1) if (world // per_node) % k == 0)
        return create_mesh(pp=stages, dp_outermost=nodes == 1, ranks_per_node=per_node, device=device)
    shard = ranks if nodes == 1 else per_node * ranks
    return create_mesh(shards=(shard, shard, shard), ranks_per_node=per_node, device=device)


def _operation(
    wire: CollectivePoint, mesh: Mesh, size: int, dtype: torch.dtype
) -> tuple[int, Operation, int]:
    """Return the bytes that a rank sends, the operation, and how many collectives it is."""
    traffic, device = Traffic(), mesh.device
    if wire.operation == "message":
        return _messages(mesh, size)
    if wire.operation == "sum":
        tp = Peers.of(mesh.tp, kind="tp")
        x = torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)
        return 2 * (tp.size - 1) * x.nbytes // tp.size, lambda: tp.start_sum(x).wait(), 1
    link = INTRA if wire.nodes == 1 else INTER
    axis = next(axis for axis in mesh.data_axes if axis.link == link)
    each = size // (axis.size - 1)
    out = torch.zeros(axis.size, each, dtype=torch.uint8, device=device)
    if wire.operation == "gather":
        own = out[axis.index]
        return (
            (axis.size - 1) * each,
            lambda: start_gather(axis, out.view(-1), own, "gather", traffic).wait(),
            1,
        )
    messages = torch.zeros(axis.size - 1, each, dtype=torch.uint8, device=device)
    received = torch.zeros_like(messages)
    return messages.nbytes, lambda: start_exchange(axis, received, messages, traffic).wait(), 1


def _messages(mesh: Mesh, size: int) -> tuple[int, Operation, int]:
    """Return an operation in which neighbouring stages send each other one message after the other."""
    links = Links(mesh, torch.uint8, Traffic(), lambda: False, Waits())
    pairs = [(stage, stage + 1) for stage in range(0, mesh.pp.size - 1, 2)]
    links.connect(pairs)
    own = mesh.pp.index
    other = next((b if own == a else a for a, b in pairs if own in (a, b)), None)
    message, tensor = Message("activation", 0, 1, 0), torch.zeros(size, dtype=torch.uint8, device=mesh.device)

    def there_and_back() -> None:
        if other is None:
            return
        links.open((size,), {other: [message]}, {message: 0})
        if own < other:
            links.send(tensor, other)
            links.receive(message, other)
        else:
            links.send(links.receive(message, other), other)
        links.close()

    return size, there_and_back, 2
