"""Turn the patch on and off: which of Megatron's functions are wrapped, and what the wrappers do."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron_core_patch.carrier import Carrier, Sync, collective_group
from megatron_core_patch.names import BUFFER, DDP, OPTIMIZER, Replaced, check_names, replaced
from megatron_core_patch.options import PatchOptions
from megatron_core_patch.two_hops import cut_groups
from megazero.comm.traffic import Traffic
from megazero.mesh.launch import Launch, read_launch
from megazero.mesh.mesh import discover_ranks_per_node

BUCKET_GROUP = "_ParamAndGradBucketGroup"
GROUPS = {
    "dense": "intra_dp_cp_group",
    "expert": "intra_expt_dp_group",
}  # attributes of DistributedDataParallel


class Patch:
    """The patch while it is on. It has its carrier from the first DistributedDataParallel on."""

    def __init__(self, options: PatchOptions) -> None:
        self.options = options
        self.version, self.notes = check_names()
        self.traffic = Traffic()
        self.carrier: Carrier | None = None
        self.names = Replaced()
        self.buffer = importlib.import_module(BUFFER)
        self._wrap_all()

    def remove(self) -> None:
        """Give Megatron its own functions back."""
        if self.carrier is not None:
            self.carrier.drain()
        self.names.restore()

    def _wrap_all(self) -> None:
        self._wrap(DDP, "DistributedDataParallel.__init__", self._build)
        self._wrap(BUFFER, f"{BUCKET_GROUP}.start_param_sync", self._start_param_sync)
        self._wrap(BUFFER, f"{BUCKET_GROUP}.start_grad_sync", self._start_grad_sync)
        self._wrap(BUFFER, f"{BUCKET_GROUP}.finish_param_sync", self._polling)
        self._wrap(BUFFER, f"{BUCKET_GROUP}.register_grad_ready", self._polling)
        self._wrap(OPTIMIZER, "DistributedOptimizer.step_with_ready_grads", self._step)
        self._wrap(OPTIMIZER, "DistributedOptimizer.load_state_dict", self._load)

    def _wrap(self, module: str, path: str, around: Callable[..., Any]) -> None:
        """Replace a method by ``around(original, self, *args, **kwargs)``."""

        def wrapper(original: Any) -> Any:
            @functools.wraps(original)
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                return around(original, *args, **kwargs)

            return wrapped

        self.names.wrap(module, path, wrapper)

    # -- what Megatron's functions do now ---------------------------------------------------------

    def _build(self, original: Any, ddp: Any, *args: Any, **kwargs: Any) -> None:
        original(ddp, *args, **kwargs)
        if self.carrier is None:
            self.carrier = self._make_carrier(ddp)
        for bucket_group in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups):
            self.carrier.hops_of(collective_group(bucket_group))

    def _start_param_sync(self, original: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
        sync = Sync(self._carrier, group)
        with replaced(self.buffer, _coalescing_manager=sync.collect, dist_all_gather_func=sync.all_gather):
            return original(group, *args, **kwargs)

    def _start_grad_sync(self, original: Any, group: Any, force_all_reduce: bool = False) -> Any:
        if force_all_reduce:  # whole sums are asked for
            return original(group, force_all_reduce=True)
        sync = Sync(self._carrier, group)
        names = {"_coalescing_manager": sync.collect, "dist_reduce_scatter_func": sync.reduce_scatter}
        with replaced(self.buffer, **names):
            return original(group)

    def _polling(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._carrier.poll()
        return original(*args, **kwargs)

    def _step(self, original: Any, optimizer: Any) -> Any:
        for buffer in optimizer.buffers:
            self._carrier.updating(buffer.buckets, buffer.data_parallel_group)
        return original(optimizer)

    def _load(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        for buffer in optimizer.buffers:
            self._carrier.loaded(buffer.buckets)
        return original(optimizer, *args, **kwargs)

    # -- parts ------------------------------------------------------------------------------------

    @property
    def _carrier(self) -> Carrier:
        if self.carrier is None:
            raise RuntimeError(
                "megatron_core_patch.enable() was called after DistributedDataParallel was built: call it before"
            )
        return self.carrier

    def _make_carrier(self, ddp: Any) -> Carrier:
        ranks_per_node = node_size(self.options.ranks_per_node)
        device = next(ddp.module.parameters()).device
        groups = {name: getattr(ddp, attribute, None) for name, attribute in GROUPS.items()}
        own = [dist.get_rank()]
        ranks = {
            name: dist.get_process_group_ranks(group) if group else own for name, group in groups.items()
        }
        at_once = device.type == "cpu" and ddp.pp_group.size() > 1
        return Carrier(self.options, cut_groups(ranks, ranks_per_node, device), device, at_once, self.traffic)


def node_size(override: int | None) -> int:
    """Return the ranks per node, by the launcher's word and the host names, or the override. Collective."""
    launch, world_size = read_launch(), dist.get_world_size()
    if launch.world_size != world_size:  # the ranks were not started by a launcher that says so
        launch = Launch(dist.get_rank(), world_size, None, None)
    size = discover_ranks_per_node(launch, override)
    if world_size % size:
        raise ValueError(
            f"{world_size} ranks do not divide by {size} ranks per node: start as many on each node, or give another "
            "--ranks-per-node"
        )
    return size
