"""The ranks along one axis, as a layer exchanges tensors with them.

Every verb counts the bytes that this rank sends (``Traffic``) and times its wait for the others (``Waits``, which the
watchdog sees). ``start_...`` returns a ``Pending``, so that the caller computes meanwhile. ``gather``, ``scatter``,
``sum`` and ``swap`` wait, and have gradients: a gather's is the sum of the ranks' gradients of this rank's part, a
sum's is the gradient itself, and a swap's is swapped back. ``route`` has none.

Sums take the ranks in order and are rounded once, except where NCCL sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from megazero.comm.codec import Blockwise
from megazero.comm.hops import Traffic
from megazero.comm.timing import Waits
from megazero.kernels.sum_rows import sum_rows
from megazero.mesh.levels import INTRA, short
from megazero.mesh.mesh import Axis, all_gather_flat, reduce_scatter_flat


class Pending(NamedTuple):
    """A collective in flight. ``inputs`` keeps its buffers alive until ``wait``, which is timed under ``name``."""

    work: Any
    waits: Waits
    name: str
    inputs: Tensor
    finish: Callable[[], Tensor]

    def wait(self) -> Tensor:
        """Return the result once the collective is done (on CUDA: once the current stream waits for it)."""
        with self.waits(self.name):
            self.work.wait()
        return self.finish()


@dataclass(frozen=True)
class Peers:
    """The ranks of one axis, as one of them sees them: their group, its index, and their number.

    With ``size`` 1 nothing communicates and ``group`` is not looked at. With ``group`` None and a larger size they
    serve for shapes and placements only. Communication needs the group by name, since torch.distributed reads None as
    the whole world.

    others: how many of the others lie beyond each link, the nearest first; None: all share a node.
    kind: the hop's kind, by which bytes and waits are counted: "tp", "cp", "ep" or "scalar".
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    others: Mapping[str, int] | None = field(default=None, hash=False)
    kind: str = ""
    traffic: Traffic = field(default_factory=Traffic, compare=False, repr=False)
    waits: Waits = field(default_factory=Waits, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"{self.kind or 'peers'}: rank {self.rank} is not in [0, {self.size})")

    @classmethod
    def of(cls, axis: Axis, **options: Any) -> Self:
        """Return an axis's. options: the other fields; ``others`` is not given where all of them share a link."""
        others = {axis.link: axis.size - 1}
        return cls(axis.gather_group, axis.index, axis.size, **{"others": others, **options})

    @property
    def link(self) -> str:
        """Return the slowest link that the ranks use."""
        return [INTRA, *(link for link, others in self._others if others)][-1]

    def count(self, row: int) -> None:
        """Add the bytes that this rank sends if each of the others receives ``row``."""
        for link, others in self._others:
            if others:
                self.traffic.add(self.kind, link, row * others)

    # -- started -----------------------------------------------------------------------------------

    def start_gather(self, own: Tensor) -> Pending:
        """Concatenate the ranks' [n, ...] along dim 0. The result is [size * n, ...]."""
        own = own.contiguous()
        self.count(own.nbytes)
        out = own.new_empty(self.size * own.shape[0], *own.shape[1:])
        # gloo knows no fp8
        whole, part = (x.view(torch.uint8) if x.itemsize == 1 else x for x in (out, own))
        work = all_gather_flat(whole, part, group=self._group(), async_op=True)
        return self._pending(work, own, lambda: out)

    def start_sum(self, x: Tensor, operation: Any = dist.ReduceOp.SUM) -> Pending:
        """Sum ``x`` (any shape) over the ranks, in place where it is contiguous. operation: in place of the sum."""
        x = x.contiguous()
        self.traffic.add(self.kind, self.link, 2 * (self.size - 1) * x.nbytes // self.size)  # a ring's share
        work = dist.all_reduce(x, operation, group=self._group(), async_op=True)
        return self._pending(work, x, lambda: x)

    def start_scatter(self, x: Tensor, ordered: bool = False) -> Pending:
        """Sum [size * n, ...] over the ranks and keep this rank's [n, ...], in the dtype of ``x``.

        On CPUs this is an all-to-all and a sum by source: for a million fp32 values on 4 ranks it took 10 ms, and
        gloo's own reduce-scatter 54 ms. ``ordered``: on CUDA, too.
        """
        shape = (x.shape[0] // self.size, *x.shape[1:])
        if x.is_cuda and not ordered:
            x = x.contiguous()
            self.count(x.nbytes // self.size)
            out = x.new_empty(shape)
            work = reduce_scatter_flat(out, x, group=self._group(), async_op=True)
            return self._pending(work, x, lambda: out)
        swapped = self.start_swap(x.reshape(self.size, *shape))
        return swapped._replace(finish=lambda: _sum(swapped.finish()))

    def start_swap(self, rows: Tensor) -> Pending:
        """Send row i of [size, ...] to rank i. The result has the rows by source."""
        rows = rows.contiguous()
        self.count(rows.nbytes // self.size)
        out = torch.empty_like(rows)
        work = dist.all_to_all_single(out, rows, group=self._group(), async_op=True)
        return self._pending(work, rows, lambda: out)

    def start_route(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Pending:
        """Send the first ``sent[0]`` of the rows [n, ...] to rank 0, and so on. The result has those received, by
        source: ``received[i]`` from rank i.
        """
        rows = rows.contiguous()
        out, each = rows.new_empty(sum(received), *rows.shape[1:]), prod(rows.shape[1:])
        leaving = (len(rows) - sent[self.rank]) * each * rows.element_size()
        self.traffic.add(self.kind, self.link, leaving)
        sizes = [n * each for n in received], [n * each for n in sent]
        work = dist.all_to_all_single(out.view(-1), rows.view(-1), *sizes, group=self._group(), async_op=True)
        return self._pending(work, rows, lambda: out)

    # -- waited for --------------------------------------------------------------------------------

    def gather(
        self, own: Tensor, codec: Blockwise | None = None, observers: Sequence[Observer] = ()
    ) -> Tensor:
        """Return what the ranks have, [size, ...], by rank. Differentiable.

        codec: the format of the messages, one of each of the ``own`` [k, ...] tensors. This rank's own are not
        rounded. The gradient takes rounding for the identity, and travels exactly. observers: are called with what
        was sent and what arrived.
        """
        if self.size == 1:
            return own.unsqueeze(0)
        return _apply(_Gather, own, self, codec, observers)

    def scatter(self, x: Tensor) -> Tensor:
        """Return this rank's [n, ...] of the sum of [size * n, ...]. Differentiable: the gradient is gathered."""
        return x if self.size == 1 else _apply(_Scatter, x, self)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of ``x``, in its place. Differentiable: ranks hold the same gradient, which passes on."""
        return x if self.size == 1 else _apply(_Sum, x, self)

    def swap(self, rows: Tensor) -> Tensor:
        """Send row i of [size, ...] to rank i, and return the rows by source. Differentiable."""
        return rows if self.size == 1 else _apply(_Swap, rows, self)

    def route(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int], codec: Blockwise | None = None
    ) -> Tensor:
        """Return the rows that ``start_route`` exchanges. codec: in which rows [n, h] are sent; this rank's own are
        not rounded. Without one rows have any dtype.
        """
        if codec is None:
            return self.start_route(rows, sent, received).wait()
        own = self.rank
        start, coming = sum(sent[:own]), sum(received[:own])
        kept = rows[start : start + sent[own]]
        leaving = rows.new_empty(len(rows) - len(kept), rows.shape[1])
        leaving[:start], leaving[start:] = rows[:start], rows[start + len(kept) :]
        others = [[n * (i != own) for i, n in enumerate(each)] for each in (sent, received)]
        came = self.start_route(_encoded(codec, leaving), *others).wait()
        out = rows.new_empty(sum(received), rows.shape[1])
        out[coming : coming + len(kept)] = kept
        for part, messages in ((out[:coming], came[:coming]), (out[coming + len(kept) :], came[coming:])):
            if len(part):
                codec.decode(messages, part)
        return out

    # -- parts -------------------------------------------------------------------------------------

    @property
    def _others(self) -> Iterable[tuple[str, int]]:
        return ((INTRA, self.size - 1),) if self.others is None else self.others.items()

    def _group(self) -> dist.ProcessGroup:
        assert self.group is not None, "these Peers have no process group: they cannot communicate"
        return self.group

    def _pending(self, work: Any, inputs: Tensor, finish: Callable[[], Tensor]) -> Pending:
        name = f"exposed_{self.kind}_{short(self.link)}"
        return Pending(work, self.waits, name, inputs, finish)

    def _gathered(self, own: Tensor) -> Tensor:
        return self.start_gather(own.unsqueeze(0)).wait()


# It is called with the codec of a gather, the tensors [k, n] that this rank sent, what those of all ranks became
# [size, k, n], and the ranks. A rank's own in there stay as they are.
Observer = Callable[[Blockwise, Tensor, Tensor, Peers], None]


def _sum(rows: Tensor) -> Tensor:
    """Return the sum of rows [size, ...] in their order, in at least fp32, rounded once to their dtype."""
    total = rows.new_empty(rows[0].numel(), dtype=torch.promote_types(rows.dtype, torch.float32))
    sum_rows(rows.flatten(1), total, accumulate=False)
    return total.to(rows.dtype).view(rows.shape[1:])


def _encoded(codec: Blockwise, rows: Tensor) -> Tensor:
    """Return messages of rows [n, h], of which there may be none."""
    if len(rows):
        return codec.encode(rows)
    return rows.new_empty(0, codec.message_numel(rows.shape[1])).to(codec.wire_dtype)


def _gathered_in_code(own: Tensor, peers: Peers, codec: Blockwise, observers: Sequence[Observer]) -> Tensor:
    """Gather ``own`` [k, ...] by messages, one of each of the k tensors, which is filled up to whole blocks."""
    rows = own.flatten(1)
    n = rows.shape[1]
    rows = pad(rows, (0, -n % codec.block))
    received = peers._gathered(codec.encode(rows))
    out = own.new_empty(peers.size, *rows.shape)
    for rank, (messages, decoded) in enumerate(zip(received, out, strict=True)):
        if rank == peers.rank:
            decoded.copy_(rows)
        else:
            codec.decode(messages, decoded)
    for observer in observers:
        observer(codec, rows, out, peers)
    return out[..., :n].reshape(peers.size, *own.shape)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own: Tensor, peers: Peers, codec: Blockwise | None, observers: Sequence[Observer]
    ) -> Tensor:
        ctx.peers = peers
        if codec is None:
            return peers._gathered(own)
        return _gathered_in_code(own, peers, codec, observers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.peers.start_scatter(grad, ordered=True).wait().squeeze(0), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return peers.start_scatter(x).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.start_gather(grad).wait(), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        out = peers.start_sum(x).wait()
        if out is x:
            ctx.mark_dirty(x)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return peers.start_swap(rows).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.start_swap(grad).wait(), None


@torch._disable_dynamo  # they wait for a collective, count its bytes and time it
def _apply(verb: type[torch.autograd.Function], *arguments: Any) -> Any:
    return verb.apply(*arguments)
