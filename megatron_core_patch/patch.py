"""MicroBatchIndex the patch on and off: which of Megatron's functions are wrapped, and what the wrappers do."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch.distributed as dist

from megatron_core_patch.carrier import Carrier, Sync, collective_group
from megatron_core_patch.names import (
    BASE,
    BUFFER,
    DDP,
    FINALIZE,
    OPTIMIZER,
    STATE,
    check_names,
)
from megatron_core_patch.options import PatchOptions
from megatron_core_patch.refusals import ddp_problems, module_problems, optimizer_problems, wrapper_problems
from megatron_core_patch.report import Kind, Teller, connections_note
from megatron_core_patch.tied import exchange_parts, is_tied
from megazero.comm.hops import Traffic
from megazero.config.errors import ConfigError
from megazero.mesh.grid import INTER, INTRA
from megazero.mesh.launch import CONNECTIONS
from megazero.patches.checks import WEIGHTS
from megazero.patches.names import Replaced, replaced
from megazero.patches.two_hops import TwoHops, cut_groups, node_size, timeout_of

BUCKET_GROUP = "_ParamAndGradBucketGroup"
GROUPS = {
    "dense": "intra_dp_cp_group",
    "expert": "intra_expt_dp_group",
}  # attributes of DistributedDataParallel


class Patch:
    """The patch while it is on. It has its carrier from the first DistributedDataParallel on."""

    def __init__(self, options: PatchOptions, switch_off: Callable[[], None]) -> None:
        """switch_off: takes the patch off; called when it refuses what Megatron built."""
        self.options, self.switch_off = options, switch_off
        self.version, notes = check_names()
        for note in notes:
            warnings.warn(f"megatron_core_patch: {note}", stacklevel=3)
        self.traffic = Traffic()
        self.tied: list[tuple[Any, TwoHops]] = []  # buckets of weights that other stages hold, too
        self.tied_link = INTRA  # between these stages
        self.whole_sums = False  # the step's gradients are summed whole on every rank
        self.carrier: Carrier | None = None
        self.teller: Teller | None = None
        self.names = Replaced()
        self.buffer = importlib.import_module(BUFFER)
        self._wrap_all()

    def remove(self) -> None:
        """Give Megatron its own functions back."""
        if self.carrier is not None:
            self.carrier.drain()
        self.names.restore()

    def _wrap_all(self) -> None:
        self._wrap(BASE, "_BaseDataParallel.__init__", self._build_any)
        self._wrap(DDP, "DistributedDataParallel.__init__", self._build)
        self._wrap(BUFFER, f"{BUCKET_GROUP}.start_param_sync", self._start_param_sync)
        self._wrap(BUFFER, f"{BUCKET_GROUP}.start_grad_sync", self._start_grad_sync)
        self._wrap(BUFFER, f"{BUCKET_GROUP}.finish_param_sync", self._polling)
        self._wrap(BUFFER, f"{BUCKET_GROUP}.register_grad_ready", self._polling)
        self._wrap(OPTIMIZER, "DistributedOptimizer.__init__", self._build_optimizer)
        self._wrap(OPTIMIZER, "DistributedOptimizer.step_with_ready_grads", self._step)
        self._wrap(OPTIMIZER, "DistributedOptimizer.load_state_dict", self._load)
        self._wrap(FINALIZE, "_allreduce_word_embedding_grads", self._exchange_tied)

    def _wrap(self, module: str, path: str, around: Callable[..., Any]) -> None:
        """Replace a method by ``around(original, self, *args, **kwargs)``."""

        def wrapper(original: Any) -> Any:
            @functools.wraps(original)
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                return around(original, *args, **kwargs)

            return wrapped

        self.names.wrap(module, path, wrapper)

    # -- what Megatron's functions do now ---------------------------------------------------------

    def _build_any(self, original: Any, wrapper: Any, *args: Any, **kwargs: Any) -> None:
        self._refuse(wrapper_problems(type(wrapper).__name__))
        original(wrapper, *args, **kwargs)

    def _build(self, original: Any, ddp: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(original).bind(ddp, *args, **kwargs).arguments
        self._refuse((*ddp_problems(given["ddp_config"], given["config"]), *module_problems(given["module"])))
        original(ddp, *args, **kwargs)
        try:
            if self.carrier is None:
                self.carrier = self._make_carrier(ddp)
                self.teller = Teller(self.version, self.carrier.codecs, pipeline_of(ddp))
            for bucket_group in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups):
                hops = self.carrier.hops_of(collective_group(bucket_group))
                self.tied += [(bucket, hops) for bucket in bucket_group.buckets if is_tied(bucket)]
        except ValueError as error:
            self._refuse([str(error)])
        assert self.teller is not None
        self.teller.tell(self._kinds(ddp))

    def _build_optimizer(self, original: Any, *args: Any, **kwargs: Any) -> None:
        config = inspect.signature(original).bind(*args, **kwargs).arguments["config"]
        self._refuse(optimizer_problems(config, self.options))
        original(*args, **kwargs)

    def _start_param_sync(self, original: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
        sync = Sync(self._carrier, group, self.buffer.dist_all_gather_func)
        with replaced(self.buffer, _coalescing_manager=sync.collect, dist_all_gather_func=sync.all_gather):
            return original(group, *args, **kwargs)

    def _start_grad_sync(self, original: Any, group: Any, force_all_reduce: bool = False) -> Any:
        self.whole_sums = force_all_reduce
        if force_all_reduce:  # whole sums are asked for
            return original(group, force_all_reduce=True)
        sync = Sync(self._carrier, group, self.buffer.dist_reduce_scatter_func)
        names = {"_coalescing_manager": sync.collect, "dist_reduce_scatter_func": sync.reduce_scatter}
        with replaced(self.buffer, **names):
            return original(group)

    def _polling(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._carrier.poll()
        return original(*args, **kwargs)

    def _step(self, original: Any, optimizer: Any) -> Any:
        for buffer in getattr(optimizer, "buffers", ()):  # a stub, of a rank without parameters, has none
            self._carrier.updating(buffer.buckets, buffer.data_parallel_group)
        done = original(optimizer)
        self._carrier.checks.tell(WEIGHTS)
        return done

    def _load(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        for buffer in getattr(optimizer, "buffers", ()):
            self._carrier.loaded(buffer.buckets)
        return original(optimizer, *args, **kwargs)

    def _exchange_tied(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        tied = [] if self.whole_sums else self.tied
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        state = importlib.import_module(STATE)  # Megatron's own choice where no group is given
        group = given.get("embd_group") or state.get_embedding_group(check_initialized=False)
        stages = group.size() if isinstance(group, dist.ProcessGroup) else 1
        exchange = partial(original, *args, **kwargs)
        return exchange_parts(exchange, tied, stages, self.traffic, self.tied_link)

    # -- parts ------------------------------------------------------------------------------------

    @property
    def _carrier(self) -> Carrier:
        if self.carrier is None:
            raise RuntimeError(
                "megatron_core_patch.enable() was called after DistributedDataParallel was built: call it before"
            )
        return self.carrier

    def _refuse(self, problems: Iterable[str]) -> None:
        """Raise ConfigError, with the patch taken off, if there are any."""
        found = list(problems)
        if found:
            self.switch_off()
            raise ConfigError([f"megatron_core_patch: {text}" for text in found])

    def _make_carrier(self, ddp: Any) -> Carrier:
        ranks_per_node = node_size(self.options.ranks_per_node)
        device = next(ddp.module.parameters()).device
        groups = {name: getattr(ddp, attribute, None) for name, attribute in GROUPS.items()}
        own = [dist.get_rank()]
        ranks = {
            name: dist.get_process_group_ranks(group) if group else own for name, group in groups.items()
        }
        timeout = timeout_of(groups["dense"] or dist.distributed_c10d._get_default_group(), device)
        cut = cut_groups(ranks, ranks_per_node, device, timeout)
        stages = [rank // ranks_per_node for rank in pipeline_of(ddp)]
        self.tied_link = INTRA if stages[0] == stages[-1] else INTER
        at_once = device.type == "cpu" and len(stages) > 1
        note = connections_note(os.environ.get(CONNECTIONS)) if device.type == "cuda" else ""
        if note and dist.get_rank() == 0:
            print(f"megatron_core_patch: {note}", flush=True)
        return Carrier(self.options, cut, device, at_once, self.traffic)

    def _kinds(self, ddp: Any) -> list[Kind]:
        buffers = {"dense": ddp.buffers, "expert": ddp.expert_parallel_buffers}
        hops_of = self._carrier.hops_of
        return [(name, hops_of(own[0].data_parallel_group), own) for name, own in buffers.items() if own]


def pipeline_of(ddp: Any) -> list[int]:
    """Return the ranks of this rank's pipeline, by stage."""
    group = ddp.pp_group[0] if isinstance(ddp.pp_group, list) else ddp.pp_group
    return dist.get_process_group_ranks(group)
