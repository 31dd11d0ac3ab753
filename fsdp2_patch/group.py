"""One parameter group of FSDP2 as the patch sees it: its parameters, its axes, and the formats of its messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from fsdp2_patch.packing import Packing
from megazero.comm.codec import Blockwise, Codec, Identity
from megazero.comm.hops import Channel, Leg, Moves, reduce
from megazero.comm.rows import Rows
from megazero.comm.watch import Watch
from megazero.comm.wire import Codecs
from megazero.mesh.mesh import Axis
from megazero.patches.checks import Differences
from megazero.patches.two_hops import TwoHops


@dataclass(eq=False)
class Group:
    """A group, as torch has it in ``raw``.

    hops: those over which it crosses nodes: of the ranks that share a parameter on a 1-D mesh, of the replicas on a
        2-D one (``replicas``).
    exact: the FSDPParams that are never quantised. names: by id of an FSDPParam.
    updates: how many steps' gradients optimizers have written into its parameters. reduced: there are new ones.
    updated: parameters were written since they were last gathered.
    samples: what looks at its messages of gradients, by the step's number.
    """

    name: str
    raw: Any
    hops: TwoHops
    replicas: bool
    exact: frozenset[int]
    names: dict[int, str]
    codecs: Codecs[Codec]
    channel: Channel
    differences: Differences
    samples: Callable[[int], Sequence[Watch]]
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
        return [p.sharded_param.to_local().detach().reshape(-1) for p in self.params]

    @property
    def shard_numel(self) -> int:
        """How many elements FSDP2 gathers of this rank, padding included."""
        return sum(p.padded_sharded_param_size.numel() for p in self.params)

    def format(
        self, codec: Codec | None, params: Sequence[Any], dtype: torch.dtype, shares: int = 1
    ) -> tuple[Codec, Packing | None]:
        """Return the format in which these parameters' values of a dtype go, and how they are packed.

        Without a packing they go as they lie: where nothing is asked for, or all of them are exact.
        """
        exact = [id(p) in self.exact for p in params]
        if not isinstance(codec, Blockwise) or all(exact):
            return Identity(dtype), None
        key = (tuple(map(id, params)), codec.form.block, shares)
        if key not in self.packings:
            numels = [p.padded_sharded_param_size.numel() for p in params]
            self.packings[key] = Packing.of(numels, exact, codec.form.block, shares)
        return replace(codec, exact_dtype=dtype), self.packings[key]

    def check_sums(self, sums: torch.Tensor, params: Sequence[Any], shards: int = 1) -> None:
        """Raise RuntimeError unless ``sums`` are gradients of these parameters, so many shards, in one dtype."""
        numel = shards * sum(p.padded_sharded_param_size.numel() for p in params)
        if not sums.dtype.is_floating_point or sums.numel() != numel:
            raise RuntimeError(
                f"fsdp2_patch: FSDP2 reduces gradients of {self.name} in a buffer of {sums.numel()} {sums.dtype}, "
                f"and not of {numel} numbers of one float dtype: give its parameters one reduce_dtype "
                "(MixedPrecisionPolicy), or leave the patch out"
            )

    def sum_over(
        self, axis: Axis, codec: Codec, regions: Sequence[torch.Tensor]
    ) -> Moves[list[torch.Tensor]]:
        """Sum row i of every region [size, ...] at index i of the axis; return the sums [...], in new memory."""
        rows = Rows(regions, axis.index)
        sums = rows.room(lambda numel, dtype: torch.empty(numel, dtype=dtype, device=self.channel.device))
        watches = self.samples(self.updates)
        yield from reduce(Leg(axis, codec), rows, sums, self.channel, watches=watches)
        return [total.view(region.shape[1:]) for total, region in zip(sums, regions, strict=True)]
