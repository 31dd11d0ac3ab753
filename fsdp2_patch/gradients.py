"""Gradients: what FSDP2's reduction of a group does while the patch is on.

1-D mesh: the reduce-scatter takes the hop inside the node, exactly unless the user says otherwise, and leaves one row
of sums for each node. FSDP2's all-reduce hook then takes the hop across nodes, once per step: a backward that is not
the last (``set_requires_all_reduce(False)``) leaves zeros in the gradients, and its sums wait in fp32.

2-D mesh (HSDP): FSDP2's own reduce-scatter stays inside the node. Its all-reduce over replicas is replaced while the
reduction runs: each replica sums its share of what the others send, and sends the sum back in the same format; all of
them, the owner too, take what was sent, so replicas stay equal to the bit.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from fsdp2_patch.group import Group
from fsdp2_patch.packing import Packing
from fsdp2_patch.torch_parts import COLLECTIVES
from megazero.comm.codec import at_least_fp32
from megazero.comm.hops import Leg, give_back, run_through
from megazero.mesh.levels import INTER, INTRA
from megazero.mesh.mesh import reduce_scatter_flat
from megazero.patches.checks import refuse_recording
from megazero.patches.names import replaced
from megazero.zero.rounding import GRADIENTS


class TwoHopReduceScatter(ReduceScatter):
    """Stands for a group's reduce-scatter on a 1-D mesh; ``cross`` is its all-reduce hook.

    sums: [nodes, n], fp32, what this rank's node has summed and has not sent. params: whose they are. factor: FSDP2's
        divide factor of these gradients, if it was set.
    exact: [n], what FSDP2's own collective would have given, in verified steps.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.params: list[Any] = []
        self.sums: torch.Tensor | None = None
        self.exact: torch.Tensor | None = None
        self.factor: float | None = None
        self.last, self.divisor = True, 1.0

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def reduce(self, given: Mapping[str, Any], original: Callable[[], Any]) -> Any:
        """Run torch's ``foreach_reduce`` with these arguments."""
        if given["reduce_scatter_comm"] is not self or given["all_reduce_hook"] != self.cross:
            raise RuntimeError(
                f"fsdp2_patch: {self.group.name} was given another reduce-scatter or all-reduce hook behind "
                "enable(), and its gradients would not cross nodes: leave that out, or call disable() before it"
            )
        factor = given["gradient_divide_factor"]
        if self.sums is not None:
            self._refuse_other_sums(given["fsdp_params"], factor)
        self.params, self.last = list(given["fsdp_params"]), given["all_reduce_grads"]
        self.factor = factor
        return original()

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum the input [nodes * ranks * n] inside the node; the output [n] is filled by ``cross``."""
        refuse_recording(input_tensor.device, "fsdp2_patch", input_tensor)
        self.group.check_sums(input_tensor, self.params, group.size())
        if op == ReduceOp.SUM:
            self.divisor = 1.0
        else:
            self.divisor = float(group.size()) if op == ReduceOp.AVG else self.factor or 1.0
        if self.group.verifies:
            exact = torch.empty_like(output_tensor, dtype=torch.float32)
            reduce_scatter_flat(exact, input_tensor.float(), group=group)
            self.exact = exact if self.exact is None else self.exact.add_(exact)
        hops = self.group.hops
        rows = input_tensor.view(hops.inter.size, hops.intra.size, -1).transpose(0, 1)
        sums = run_through(self._inside(rows))
        self.sums = sums if self.sums is None else self.sums.add_(sums)

    def cross(self, output: torch.Tensor) -> None:
        """Take the hop across nodes, behind the last backward, into the output [n]; else leave zeros there."""
        refuse_recording(output.device, "fsdp2_patch", output)
        _hold(output)  # nothing else holds it for this stream before torch 2.15
        if not self.last:
            output.zero_()
            return
        sums, exact = self.sums, self.exact
        assert sums is not None
        self.drop()
        _hold(sums)
        run_through(self._across(sums, output))
        if exact is not None:
            _hold(exact)
            self.group.differences.note(
                GRADIENTS, self.group.updates + 1, output, exact.div_(self.divisor), self.group.shard_group
            )

    def _refuse_other_sums(self, params: list[Any], factor: float | None) -> None:
        """Raise RuntimeError unless the sums that wait are of these parameters, of this step and for this factor."""
        if self.params != params:
            raise RuntimeError(
                f"fsdp2_patch: {self._named({*self.params} ^ {*params})} had gradients in some micro-batches of a "
                "step alone: call model.set_reduce_scatter_unused_params(True) (torch 2.13), or "
                "model.set_requires_all_reduce(True) in every micro-batch"
            )
        gone = {p for p in params if p.sharded_param.grad is None}
        if gone:
            raise RuntimeError(
                f"fsdp2_patch: gradients of {self._named(gone)} were dropped (zero_grad) while their sums wait for "
                "the step's last backward, and would be in the next step's: drop these, too, by "
                "model.reset_iter_state() (torch 2.13) or by disable() and enable()"
            )
        if self.factor != factor:
            raise RuntimeError(
                f"fsdp2_patch: {self.group.name} was given another gradient divide factor, {factor}, between "
                "micro-batches whose sums are divided once: set it before a step's first micro-batch, or call "
                "model.set_requires_all_reduce(True) in every micro-batch"
            )

    def _named(self, params: set[Any]) -> str:
        return ", ".join(sorted(self.group.names[id(p)] for p in params))

    def drop(self) -> None:
        """Forget the sums that wait."""
        self.sums = self.exact = None

    def _inside(self, rows: torch.Tensor) -> Generator[dist.Work, None, torch.Tensor]:
        """Sum rows [ranks, nodes, n] of the node's ranks; return [nodes, n]."""
        group, (_, nodes, n) = self.group, rows.shape
        axis = group.hops.intra
        if axis.size == 1:
            return rows[0].to(at_least_fp32(rows.dtype), copy=True)
        codec, packing = group.format(group.codecs.gradients.get(INTRA), self.params, rows.dtype)
        if packing is None:
            return (yield from group.sum_over(axis, codec, [rows]))[0]
        with group.channel.frame() as frame:
            packed = yield from group.sum_over(axis, codec, packing.pack(rows, frame.take))
        sums = torch.empty(nodes, n, dtype=packed[0].dtype, device=rows.device)
        packing.unpack(packed, sums)
        return sums

    def _across(self, sums: torch.Tensor, output: torch.Tensor) -> Generator[dist.Work, None, None]:
        group = self.group
        codec, packing = group.format(group.codecs.gradients.get(INTER), self.params, sums.dtype)
        with group.channel.frame() as frame:
            regions = [sums] if packing is None else packing.pack(sums, frame.take)
            totals = yield from group.sum_over(group.hops.inter, codec, regions)
        for total in totals:  # before they are rounded to the reduction's dtype, in which they may overflow
            total.div_(self.divisor)
        if packing is None:
            output.copy_(totals[0])
        else:
            packing.unpack(totals, output)


class ReplicaAllReduce:
    """Stands for ``torch.distributed`` in a group's reduction on a 2-D mesh, where it calls one name of it."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.params: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def reduce(self, given: Mapping[str, Any], original: Callable[[], Any]) -> Any:
        """Run torch's ``foreach_reduce`` with these arguments."""
        self.params = given["fsdp_params"]
        with replaced(importlib.import_module(COLLECTIVES), dist=self):
            return original()

    def all_reduce(self, tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None) -> None:
        """Sum, or average, the tensor [n] over the replicas, in place."""
        refuse_recording(tensor.device, "fsdp2_patch", tensor)
        self.group.check_sums(tensor, self.params)
        exact = tensor.clone() if self.group.verifies else None
        if exact is not None:
            dist.all_reduce(exact, op=op, group=group)
        run_through(self._chain(tensor, self.group.hops.inter.size if op == ReduceOp.AVG else 1))
        if exact is not None:
            self.group.differences.note(
                GRADIENTS, self.group.updates + 1, tensor, exact, self.group.shard_group
            )

    def _chain(self, tensor: torch.Tensor, divisor: int) -> Generator[dist.Work, None, None]:
        group, axis = self.group, self.group.hops.inter
        codec, packing = group.format(group.codecs.gradients.get(INTER), self.params, tensor.dtype, axis.size)
        if packing is None and tensor.numel() % axis.size:
            packing = Packing.of([tensor.numel()], [True], 1, axis.size)
        with group.channel.frame() as frame:
            packed = [tensor] if packing is None else packing.pack(tensor, frame.take)
            regions = [values.view(axis.size, -1) for values in packed]
            sums = yield from group.sum_over(axis, codec, regions)
            share = tuple(total.div_(divisor).view(1, -1) for total in sums)
            yield from give_back(Leg(axis, codec), share, tuple(regions), group.channel)
            if packing is not None:
                packing.unpack(packed, tensor)


def _hold(tensor: torch.Tensor) -> None:
    """Keep another stream's memory from reuse until the current stream is through with it."""
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.current_stream())
