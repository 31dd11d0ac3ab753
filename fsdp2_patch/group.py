"""One parameter group of FSDP2 as the patch sees it: its parameters, its axes, and the formats of its messages."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from fsdp2_patch.packing import Packing
from megazero.comm.codec import Blockwise, Codec, Identity
from megazero.mesh.mesh import Axis
from megazero.patches.checks import Differences
from megazero.patches.hops import Passing, add_others
from megazero.patches.two_hops import TwoHops
from megazero.zero.policy import Codecs
from megazero.zero.unit import at_least_fp32


@dataclass(eq=False)
class Group:
    """A group, as torch has it in ``raw``.

    hops: those over which it crosses nodes: of the ranks that share a parameter on a 1-D mesh, of the replicas on a
        2-D one (``replicas``).
    exact: the FSDPParams that are never quantised. names: by id of an FSDPParam.
    updates: how many steps' gradients optimizers have written into its parameters. reduced: there are new ones.
    updated: parameters were written since they were last gathered.
    """

    name: str
    module: Any
    raw: Any
    hops: TwoHops
    replicas: bool
    exact: frozenset[int]
    names: dict[int, str]
    codecs: Codecs
    passing: Passing
    differences: Differences
    verified_steps: int
    checksum_interval: int
    updates: int = 0
    reduced: bool = False
    updated: bool = False
    packings: dict[Any, Packing] = field(default_factory=dict)

    @property
    def params(self) -> list[Any]:
        return self.raw.fsdp_params

    @property
    def shard_group(self) -> dist.ProcessGroup:
        return self.raw.mesh_info.shard_process_group

    @property
    def verifies(self) -> bool:
        """Whether this step's messages are sent exactly, too."""
        return self.updates < self.verified_steps

    def shards(self) -> list[torch.Tensor]:
        """Return this rank's shard of each parameter, flat, without padding."""
        return [p.sharded_param.detach().to_local().reshape(-1) for p in self.params]

    def packing(self, params: Sequence[Any], codec: Blockwise, shares: int = 1) -> Packing:
        """Return where these parameters lie in messages of a format."""
        key = (tuple(map(id, params)), codec.form.block, shares)
        if key not in self.packings:
            numels = [p.padded_sharded_param_size.numel() for p in params]
            self.packings[key] = Packing.of(
                numels, [id(p) in self.exact for p in params], codec.form.block, shares
            )
        return self.packings[key]

    def format(
        self, codec: Codec | None, params: Sequence[Any], dtype: torch.dtype, shares: int = 1
    ) -> tuple[Codec, Packing | None]:
        """Return the format in which these parameters' values of a dtype go, and how they are packed.

        Without a packing they go as they lie: where nothing is asked for, or all of them are exact.
        """
        if isinstance(codec, Blockwise) and any(id(p) not in self.exact for p in params):
            return replace(codec, exact_dtype=dtype), self.packing(params, codec, shares)
        return Identity(dtype), None


def sum_over(
    axis: Axis, codec: Codec, regions: Sequence[torch.Tensor], passing: Passing
) -> Generator[dist.Work, None, list[torch.Tensor]]:
    """Take one hop: row i of every region [size, ...] goes to index i, and those received are added to the own row.

    Returns the sums, at least fp32, [...] as the regions' rows, in memory of their own.
    """
    own, rest = axis.index, ((0, axis.index, 0), (axis.index + 1, axis.size, axis.index))
    with passing.frame() as frame:
        m = codec.message_numel(*(region[0].numel() for region in regions))
        messages = frame.take((axis.size - 1) * m, codec.wire_dtype).view(-1, m)
        for first, last, to in rest:
            rows, out = [region[first:last] for region in regions], messages[to : to + last - first]
            if first == last:
                continue
            if isinstance(codec, Identity):  # of one region, which may lie in pieces
                out.view(rows[0].shape).copy_(rows[0])
            else:
                codec.encode(*(row.reshape(len(out), -1) for row in rows), out=out)
        sums = [torch.empty(r[own].shape, dtype=at_least_fp32(r.dtype), device=r.device) for r in regions]
        for total, region in zip(sums, regions, strict=True):
            total.copy_(region[own])
        yield from add_others(axis, codec, messages, [total.view(-1) for total in sums], passing)
    return sums


def refuse_capture(device: torch.device) -> None:
    """Raise RuntimeError inside a CUDA graph's capture."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "fsdp2_patch: a CUDA graph records a step's collectives once, but the host decides in every step what is "
            "sent: leave FSDP2's modules out of the graph (torch.compile without mode='reduce-overhead')"
        )
