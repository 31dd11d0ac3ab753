"""Weights on a 1-D mesh: they cross nodes once after an update, and what has crossed is kept.

A group's first all-gather after an update sends this rank's shard to the ranks of the same place on other nodes. What
those sent stays: [nodes, m] messages, exact or quantised, or the weights themselves [nodes, n] where differences are
sent. This gather and the later ones, until the next update, share that inside the node. Every rank, the owner too,
takes the message, so all have the same bits.

Nothing tells the patch that weights have changed, and version counters do not move. So at every forward that would
use what is kept, or send a difference to it, checksums of shards are compared with those noted before (``settle``).
A forward that sends notes them only if a later one stood on what the update before had sent: with one micro-batch a
step none are taken.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from fsdp2_patch.group import Group
from megazero.comm.codec import Blockwise
from megazero.comm.hops import gather, run_through
from megazero.kernels.fingerprint import fingerprints
from megazero.mesh.mesh import all_gather_flat
from megazero.patches.checks import compare_replicas, refuse_recording
from megazero.zero.rounding import WEIGHTS

# Weights in several dtypes come as bytes, as do fp8 ones with their scales.
CODED = (torch.float32, torch.bfloat16, torch.float16)


class KeptAllGather(AllGather):
    """Stands for a group's all-gather on a 1-D mesh.

    kept: what crossed nodes: [nodes, m] of the codec's dtype, or with differences [nodes, n] packed weights.
    whole: the next message is the weights and not a difference: what others hold is not near them.
    noted: checksums of this rank's shards, int64 [parameters], as of the last forward or update, if they were taken.
    begun: a forward has, since the last update. used_again: one stood on what an earlier one had sent. expected: one
        did before that update.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.kept: torch.Tensor | None = None
        self.whole = True
        self.noted: torch.Tensor | None = None
        self.begun, self.used_again, self.expected, self.told = False, False, True, False
        # Behind the last use of ``kept``, on whichever stream that was.
        self.used: torch.cuda.Event | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    @property
    def fresh(self) -> bool:
        """Whether what is kept are the current weights, as far as optimizers say."""
        return not (self.whole or self.group.updated)

    @property
    def compares(self) -> bool:
        """Whether the next gather stands on what is kept."""
        return not self.whole and (self.fresh or self.group.codecs.delta)

    def updated(self, checksums: torch.Tensor | None) -> None:
        """Take note of an optimizer's step. checksums: of what it wrote, where differences are sent.

        Several may follow one another: an optimizer that holds others, as torchtitan's does, steps behind them.
        """
        self.noted = checksums
        if self.begun:
            self.begun, self.used_again, self.expected = False, False, self.used_again

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather the input [n] of every rank into the output [nodes * ranks * n]."""
        refuse_recording(input_tensor.device, "fsdp2_patch", input_tensor)
        if group is not self.group.shard_group:  # of reshard_after_forward=int, inside a node
            return all_gather_flat(output_tensor, input_tensor, group=group, async_op=async_op)
        on_cuda, sent = input_tensor.device.type == "cuda", not self.fresh
        if on_cuda and self.used is not None:
            torch.cuda.current_stream().wait_event(self.used)
        exact = torch.empty_like(output_tensor) if sent and self.group.verifies else None
        if exact is not None:  # before what is sent replaces the input, which is a part of the output
            all_gather_flat(exact, input_tensor.clone(), group=group)
        run_through(self._gather(output_tensor, input_tensor))
        if on_cuda:
            self.used = torch.cuda.current_stream().record_event()
        step, interval = self.group.updates, self.group.checksum_interval
        if exact is not None:
            self.group.differences.note(WEIGHTS, step + 1, output_tensor, exact)
        if sent and interval and step and step % interval == 0:
            compare_replicas("fsdp2_patch", output_tensor, step, group)
        return None

    def _gather(self, output: torch.Tensor, own: torch.Tensor) -> Generator[dist.Work, None, None]:
        group, hops, channel = self.group, self.group.hops, self.group.channel
        # Where FSDP2 sends more than the shards (extensions), nobody knows what lies where.
        known = own.dtype in CODED and own.numel() == group.shard_numel
        if not known and group.codecs.weights is not None:
            self._tell(own.dtype)
        codec, packing = group.format(group.codecs.weights if known else None, group.params, own.dtype)
        rows = output.view(hops.inter.size, hops.intra.size, -1).transpose(0, 1)
        delta = group.codecs.delta and packing is not None
        with channel.frame() as frame:
            packed = [own] if packing is None else packing.pack(own, frame.take)
            if not self.fresh:
                if delta:
                    assert isinstance(codec, Blockwise)
                    yield from self._advance(packed, codec)
                else:
                    message = own
                    if packing is not None:
                        message = frame.take(
                            codec.message_numel(*(x.numel() for x in packed)), codec.wire_dtype
                        )
                        codec.encode(*(x.view(1, -1) for x in packed), out=message.view(1, -1))
                    yield from self._receive(message)
                self.whole = group.updated = False
            assert self.kept is not None
            axes = [hops.intra] if hops.intra.size > 1 else []
            every = yield from gather(axes, self.kept.view(-1), "gather", frame.take, channel)
            values = every.view(hops.intra.size, *self.kept.shape)
            if packing is None:
                rows.copy_(values)
            elif delta:
                packing.unpack(packing.cut(values), rows)
            else:
                shape = values.shape[:2]
                regions = [
                    frame.take(shape.numel() * r.numel, own.dtype).view(-1, r.numel) for r in packing.regions
                ]
                codec.decode(values.view(-1, values.shape[-1]), *regions)
                packing.unpack([region.view(*shape, -1) for region in regions], rows)

    def _tell(self, dtype: torch.dtype) -> None:
        """Say once that these weights are sent exactly, though a format was asked for."""
        if dist.get_rank() == 0 and not self.told:
            warnings.warn(
                f"fsdp2_patch: FSDP2 gathers {self.group.name} in a buffer of {dtype} that is not its shards in one "
                "dtype (several dtypes, fp8 with scales): its weights are sent exactly",
                stacklevel=2,
            )
        self.told = True

    def _receive(self, message: torch.Tensor) -> Generator[dist.Work, None, None]:
        """Send the message [m] across nodes; keep every node's."""
        axis = self.group.hops.inter
        shape = (axis.size, message.numel())
        if self.kept is None or self.kept.shape != shape or self.kept.dtype != message.dtype:
            with torch.inference_mode(False):  # else nothing could be written to it outside of that mode
                self.kept = torch.empty(shape, dtype=message.dtype, device=message.device)
        kept = self.kept
        yield from gather([axis], message, "refresh", lambda *_: kept.view(-1), self.group.channel)

    def _advance(self, packed: Sequence[torch.Tensor], codec: Blockwise) -> Generator[dist.Work, None, None]:
        """Send differences of the packed regions to what others hold, and add those received to what is kept."""
        axis, channel = self.group.hops.inter, self.group.channel
        if self.whole:
            yield from self._receive(torch.cat(list(packed)))
            return
        assert self.kept is not None
        sizes = [values.numel() for values in packed]
        with channel.frame() as frame:
            held, *exact = self.kept.split(sizes, dim=1)
            message = frame.take(codec.message_numel(*sizes), codec.wire_dtype).view(1, -1)
            own, *small = (x.view(1, -1) for x in packed)
            codec.encode_difference(own, held[axis.index].view(1, -1), *small, out=message)
            every = yield from gather([axis], message.view(-1), "refresh", frame.take, channel)
            codec.decode_add(every.view(axis.size, -1), held, *exact)


def settle(gathers: Sequence[KeptAllGather]) -> None:
    """Find the shards that anything but an optimizer has written since the last forward: these are sent whole.

    Collective, called where a forward begins. If some gather would stand on what is kept, the ranks agree on the
    shards that have changed, with one small all-reduce for which the host waits.
    """
    now = checksums([one for one in gathers if one.compares or one.expected])
    comparing = [one for one in gathers if one.compares]
    known = [(one, one.noted, now[one]) for one in comparing if one.noted is not None]
    for group in dict.fromkeys(one.group.shard_group for one, *_ in known):
        _compare([each for each in known if each[0].group.shard_group is group])
    for one in comparing:
        one.used_again = True
        one.whole |= one.noted is None
    for one in gathers:
        one.noted, one.begun = now.get(one), True


def checksums(gathers: Sequence[KeptAllGather]) -> dict[KeptAllGather, torch.Tensor]:
    """Return the checksums of each gather's shards on this rank, int64 [parameters]."""
    shards = [one.group.shards() for one in gathers]
    if not shards:
        return {}
    every = fingerprints([shard for own in shards for shard in own])
    return dict(zip(gathers, every.split([len(own) for own in shards]), strict=True))


def _compare(gathers: Sequence[tuple[KeptAllGather, torch.Tensor, torch.Tensor]]) -> None:
    """Compare the checksums of gathers of one process group, those noted and those of now; mark what has changed."""
    group = gathers[0][0].group
    changed = torch.cat([noted != now for _, noted, now in gathers])
    changed = changed.to(group.raw.device, torch.uint8)  # shards may be offloaded
    dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=group.shard_group)
    found = iter(changed.tolist())
    for one, *_ in gathers:
        names = [one.group.names[id(p)] for p in one.group.params if next(found)]
        if names:
            one.whole = True
            if dist.get_rank() == 0:
                warnings.warn(
                    f"fsdp2_patch: {', '.join(names)} changed outside of an optimizer's step (a checkpoint was "
                    "loaded, or a program wrote): sent again, whole",
                    stacklevel=2,
                )
