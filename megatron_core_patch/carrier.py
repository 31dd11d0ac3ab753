"""Carry the collectives of Megatron's bucket groups over megazero's hops.

Megatron's own ``start_param_sync`` and ``start_grad_sync`` of a bucket group run as they are; the functions of
torch.distributed that they call are replaced while they run (``Sync``). ``Held`` keeps track of a bucket's
parameters: a gather without an update before it is exact the first time and sends nothing later, and differences are
taken to what the other ranks hold.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from megatron_core_patch.chains import gather_coded, gather_columns, gather_exact, reduce_exact, reduce_rows
from megatron_core_patch.checks import Check, MessageChecks
from megatron_core_patch.layout import CodedBlocks, Columns, Exact, Range, cut_bucket, exact_ranges
from megatron_core_patch.options import PatchOptions
from megazero.comm.codec import Blockwise, Codec, codecs_of
from megazero.comm.hops import Channel, Traffic, hop_spec
from megazero.comm.lane import Chain, Lane, Ticket
from megazero.comm.timing import no_timing
from megazero.comm.wire import Codecs
from megazero.kernels.arena import Arena
from megazero.mesh.levels import INTER, INTRA
from megazero.mesh.mesh import Axis
from megazero.patches.checks import GradientSamples, refuse_recording
from megazero.patches.two_hops import TwoHops
from megazero.zero.rounding import GRADIENTS, WEIGHTS

TOO_LATE = "megatron_core_patch.enable() was called after DistributedDataParallel was built: call it before"
CODED = (torch.bfloat16, torch.float16)  # of fp32 buffers the optimizer's master weights are a part
# A bucket moves in PIECES, so that hops of one piece run beside another's; but a piece holds LEAST elements of each
# rank's shard, so that a message is bound by the link's rate, and MOST elements in all, as its buffers take memory.
# 2 nodes of 2 CPU ranks at 200 Mb/s, a bucket of 3.7M, s per step in 1 and in 4 pieces: exact 0.82 and 0.65, int8 and
# int4 0.27 and 0.24, 4-bit differences and int4 0.25 and 0.19.
PIECES, LEAST, MOST = 4, 2**18, 2**25


@dataclass
class Held:
    """What ranks hold of one bucket's parameters, and what its messages look like.

    equal: all ranks hold the same, as Megatron takes for granted at the start, and as they do since the last gather.
    updated: the optimizer has written this rank's shard since then.
    updates: how often it has done so. before: how often before a checkpoint was loaded.
    coded: what other ranks hold of this rank's coded blocks, where differences to it are sent.
    pieces, beside: how the bucket is cut where it is quantised (``layout``).
    """

    number: int
    before: int = 0
    equal: bool = True
    updated: bool = False
    updates: int = 0
    coded: torch.Tensor | None = None
    pieces: Sequence[CodedBlocks] | None = None
    beside: Exact | None = None


class Carrier:
    """The lanes, the groups and the state of every bucket, from the first DistributedDataParallel on."""

    def __init__(
        self,
        options: PatchOptions,
        groups: Mapping[tuple[int, ...], TwoHops],
        device: torch.device,
        at_once: bool,
        traffic: Traffic,
    ) -> None:
        """Take ``groups`` by their ranks. at_once: nothing is left in flight (see ``Sync.collect``)."""
        self.options, self.groups, self.at_once = options, groups, at_once
        self.codecs = codecs_of(options.wire)
        self.channel = Channel(traffic, Arena(), device)
        self.checks = MessageChecks(options)
        self.samples = GradientSamples("megatron_core_patch", self.codecs)
        rank = dist.get_rank()
        self.gathers = Lane("gather", device, rank, no_timing)
        self.reductions = Lane("reduce", device, rank, no_timing)
        self.numbers = itertools.count()
        self.exact: WeakKeyDictionary[Any, Sequence[Range]] = WeakKeyDictionary()  # of a bucket's elements
        self.held: WeakKeyDictionary[Any, Held] = WeakKeyDictionary()

    def hops_of(self, group: dist.ProcessGroup) -> TwoHops:
        """Return the two axes of a process group. Raises ValueError for one that was not cut at the start."""
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self.groups:
            raise ValueError(
                f"the ranks {list(ranks)} share gradients, but were no data-parallel group of "
                f"the first DistributedDataParallel, whose groups are {[list(known) for known in self.groups]}: give "
                "all of a rank's model chunks the same process groups"
            )
        return self.groups[ranks]

    def add(self, bucket: Any, exact: Iterable[Any]) -> None:
        """Take a new bucket, of whose parameters these are never quantised."""
        self.held[bucket] = Held(next(self.numbers))
        self.exact[bucket] = exact_ranges(bucket, exact)

    def weights_codec(self, hops: TwoHops, dtype: torch.dtype) -> Blockwise | None:
        """Return the format of parameters of this dtype in this group. None is exact."""
        codec = self.codecs.weights
        return codec if isinstance(codec, Blockwise) and hops.inter.size > 1 and dtype in CODED else None

    def updating(self, buckets: Sequence[Any], group: dist.ProcessGroup) -> None:
        """Note that the optimizer is about to write this rank's shards of these buckets. Collective."""
        hops = self.hops_of(group)
        self.checks.tell(GRADIENTS)
        self.samples.tell(self.channel.device)
        for bucket in buckets:
            held, params = self.state(bucket), bucket.param_data
            if self.codecs.delta and held.equal and self.weights_codec(hops, params.dtype):
                own = [piece.own(params) for piece in self._pieces(bucket, hops)]
                held.coded = torch.cat(own) if own else params.new_empty(0)
            held.equal, held.updated, held.updates = False, True, held.updates + 1

    def loaded(self, buckets: Iterable[Any]) -> None:
        """Forget these buckets' states, as a checkpoint may write their parameters: the next gather is exact."""
        for bucket in buckets:
            self.held[bucket] = Held(self.state(bucket).number)

    def go_on(self, buckets: Iterable[Any], step: int) -> None:
        """Note that the checkpoint was made after so many updates."""
        for bucket in buckets:
            self.held[bucket].before = step

    def state(self, bucket: Any) -> Held:
        """Return a bucket's state. Raises RuntimeError for one that was made without the patch."""
        if bucket not in self.held:
            raise RuntimeError(TOO_LATE)
        return self.held[bucket]

    def gather(self, bucket: Any, hops: TwoHops) -> list[Ticket]:
        """Start the gathers of a bucket's parameters; return what to wait for."""
        held, params = self.state(bucket), bucket.param_data
        if held.equal and held.updates:  # nothing was written since the last gather
            return []
        codec, known = None, held.coded if self.codecs.delta else None
        # Differences need what the others hold, which nobody knows after an update that followed no gather.
        if held.updated and not (self.codecs.delta and known is None):
            codec = self.weights_codec(hops, params.dtype)
        held.equal, held.updated = True, False
        self.gathers.follow()
        chains: list[tuple[Sequence[Axis], Chain]]
        if codec is None:
            parts = self._whole(params, hops)
            chains = [(hops.axes, gather_columns(part, params, self.channel)) for part in parts]
        else:
            chains = [
                (hops.axes, gather_coded(part, params, codec, known, self.channel))
                for part in self._pieces(bucket, hops)
            ]
            if held.beside is not None:
                chains.append((held.beside.axes, gather_exact(held.beside, params, self.channel)))
        outer_first = [(axes[::-1], chain) for axes, chain in chains]
        return self._submit(self.gathers, "refresh", bucket, outer_first)

    def reduce(self, bucket: Any, hops: TwoHops, average: bool) -> list[Ticket]:
        """Start the reductions of a bucket's gradients into this rank's shard; return what to wait for."""
        grads, held, codecs = bucket.grad_data, self.state(bucket), self.codecs
        factor = 1 / len(hops.ranks) if average else 1.0
        until = self.options.zero_quantized_gradients_until_step
        step = held.before + held.updates
        if until is not None and step >= until:
            codecs = Codecs[Codec]()
        quantised = bool(
            hops.intra.size > 1
            and INTRA in codecs.gradients
            or hops.inter.size > 1
            and INTER in codecs.gradients
        )
        self.reductions.follow()  # the gradients are the compute stream's latest
        parts = list[Columns | CodedBlocks](
            self._pieces(bucket, hops) if quantised else self._whole(grads, hops)
        )
        watches = self.samples.watches(held.number, len(self.held), step)
        chains: list[tuple[Sequence[Axis], Chain]] = [
            (hops.axes, reduce_rows(part, grads, codecs, factor, self.channel, watches)) for part in parts
        ]
        if quantised and held.beside is not None:
            chains.append((held.beside.axes, reduce_exact(held.beside, grads, factor, self.channel)))
        return self._submit(self.reductions, "reduce", bucket, chains)

    def poll(self) -> None:
        """Let chains in flight move on."""
        self.reductions.poll()
        self.gathers.poll()

    def drain(self) -> None:
        """Wait for every chain."""
        self.reductions.drain()
        self.gathers.drain()
        self.checks.tell(WEIGHTS)

    def _submit(
        self, lane: Lane, kind: str, bucket: Any, chains: Iterable[tuple[Sequence[Axis], Chain]]
    ) -> list[Ticket]:
        """Start a bucket's chains, given with the axes of their hops in order."""
        return [
            lane.submit(f"{id(bucket)} {i}", tuple(hop_spec(kind, axis) for axis in axes), chain)
            for i, (axes, chain) in enumerate(chains)
        ]

    def _whole(self, tensor: torch.Tensor, hops: TwoHops) -> list[Columns]:
        """Return how a bucket's tensor is cut where it is sent exactly."""
        return [Columns(hops, c) for c in self._columns(tensor.numel() // len(hops.ranks), hops)]

    def _pieces(self, bucket: Any, hops: TwoHops) -> Sequence[CodedBlocks]:
        """Return how the bucket is cut where it is quantised."""
        held = self.state(bucket)
        if held.pieces is None:
            held.pieces, held.beside = cut_bucket(
                bucket.grad_data.numel(),
                self.exact[bucket],
                hops,
                lambda n: self._columns(n, hops),
                bucket.grad_data.device,
            )
        return held.pieces

    def _columns(self, n: int, hops: TwoHops) -> Sequence[slice]:
        """Cut a shard of n elements into what moves together: whole blocks of every format, but for the end."""
        block, given = self.options.wire.block, self.options.zero_chunk_numel
        most = max(1, (given or MOST) // len(hops.ranks) // block)
        least = -(-max(-(-n // PIECES), LEAST) // block)
        size = block * (most if given else min(most, least))
        return [slice(low, min(n, low + size)) for low in range(0, n, size)]


class Sync:
    """One start of a bucket group's collectives. It stands for Megatron's names, and is the handle they give.

    Megatron calls its collective once for each bucket of the group, in their order.
    """

    def __init__(self, carrier: Carrier, bucket_group: Any, exact: Any) -> None:
        """Take Megatron's own collective, which this stands for, as ``exact``."""
        buffers = [bucket.grad_data for bucket in bucket_group.buckets]
        refuse_recording(carrier.channel.device, "megatron_core_patch", *buffers)
        self.carrier, self.exact = carrier, exact
        self.hops = carrier.hops_of(collective_group(bucket_group))
        self.buckets: Iterator[Any] = iter(bucket_group.buckets)
        self.waits: list[tuple[Lane, Ticket]] = []
        self.checks: list[Check] = []

    @contextmanager
    def collect(
        self, group: Any = None, device: Any = None, async_ops: bool | None = False
    ) -> Iterator[Sync]:
        """Stand for torch's coalescing manager.

        With gloo a chain moves only while its rank polls it. Stages of a pipeline wait for each other between polls,
        so there (``at_once``) nothing is left in flight: ranks of a data-parallel group run the same program, and
        so meet here.
        """
        yield self
        if not async_ops or self.carrier.at_once:
            self.wait()

    def all_gather(
        self, out: torch.Tensor, own: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Sync:
        """Start the gathers of the next bucket's parameters. Arguments as Megatron's call has them."""
        bucket = next(self.buckets)
        assert out is bucket.param_data
        lane, held = self.carrier.gathers, self.carrier.state(bucket)
        if held.updated:
            self.checks += self.carrier.checks.weights(bucket, self.hops, held.updates, self.exact, group)
        self.waits += [(lane, ticket) for ticket in self.carrier.gather(bucket, self.hops)]
        return self

    def reduce_scatter(
        self,
        out: torch.Tensor,
        grads: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Sync:
        """Start the reductions of the next bucket's gradients. Arguments as Megatron's call has them.

        op: SUM, or AVG, for which the sums are divided by the group's size.
        """
        bucket = next(self.buckets)
        assert grads is bucket.grad_data and op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        lane, watch, held = self.carrier.reductions, self.carrier.checks, self.carrier.state(bucket)
        watch.tell(WEIGHTS)
        self.checks += watch.gradients(bucket, self.hops, held.updates, self.exact, group, op)
        tickets = self.carrier.reduce(bucket, self.hops, average=op == dist.ReduceOp.AVG)
        self.waits += [(lane, ticket) for ticket in tickets]
        return self

    def wait(self) -> None:
        """Return when the results may be used on the current stream."""
        for lane, ticket in self.waits:
            lane.wait(ticket)
        self.waits.clear()
        while self.checks:
            self.checks.pop(0)()


def collective_group(bucket_group: Any) -> dist.ProcessGroup:
    """Return the process group whose ranks share the optimizer states of a bucket group."""
    return bucket_group.intra_distributed_optimizer_instance_group
