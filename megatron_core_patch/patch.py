"""Turn the patch on and off: which of Megatron's functions are wrapped, and what the wrappers do."""

from __future__ import annotations

import importlib
import inspect
import os
import warnings
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from megatron_core_patch.carrier import TOO_LATE, Carrier, Sync, collective_group
from megatron_core_patch.names import (
    BASE,
    BUFFER,
    DDP,
    FINALIZE,
    LAYER_WISE,
    MEGATRON_FSDP,
    OPTIMIZER,
    OTHER_WRAPPERS,
    STATE,
    WRAPPERS,
    check_names,
    exists,
)
from megatron_core_patch.options import PatchOptions
from megatron_core_patch.refusals import (
    ddp_problems,
    module_problems,
    optimizer_problems,
    refuse_without_effect,
    wrapper_problems,
)
from megatron_core_patch.report import Kind, Teller, connections_note
from megatron_core_patch.tied import exchange_parts, is_tied
from megazero.comm.hops import Traffic
from megazero.config.errors import ConfigError
from megazero.mesh.launch import CONNECTIONS
from megazero.mesh.levels import INTER, INTRA
from megazero.patches.agreement import agree_on
from megazero.patches.names import Replaced, replaced
from megazero.patches.two_hops import TwoHops, cut_groups, node_size, settings_like
from megazero.zero.rounding import WEIGHTS

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
        # Buckets of weights that other stages hold, too; those of a model that is gone go with it.
        self.tied: WeakKeyDictionary[Any, TwoHops] = WeakKeyDictionary()
        self.tied_link = INTRA  # between these stages
        self.whole_sums = False  # the step's gradients are summed whole on every rank
        self.largest = 0  # the most elements of a parameter that may be quantised, of all model chunks
        self.has_effect = False  # what was asked for, as all ranks have agreed
        self.carrier: Carrier | None = None
        self.world: Any = None  # the default process group of the carrier's communicators
        self.teller: Teller | None = None
        self.names = Replaced()
        self.buffer = importlib.import_module(BUFFER)
        self._wrap_all()

    def remove(self) -> None:
        """Give Megatron its own functions back."""
        if self.carrier is not None and self._lives:
            self.carrier.drain()
        self.names.restore()

    def _wrap_all(self) -> None:
        wrap = self.names.wrap
        wrap(BASE, "_BaseDataParallel.__init__", self._build_any)
        for name in OTHER_WRAPPERS:
            if hasattr(importlib.import_module(WRAPPERS), name):
                wrap(WRAPPERS, f"{name}.__init__", self._build_any)
        for module, name in (*MEGATRON_FSDP.items(), LAYER_WISE):
            if exists(module, name):
                wrap(module, f"{name}.__init__", partial(self._build_other, name))
        wrap(DDP, "DistributedDataParallel.__init__", self._build)
        wrap(BUFFER, f"{BUCKET_GROUP}.start_param_sync", self._start_param_sync)
        wrap(BUFFER, f"{BUCKET_GROUP}.start_grad_sync", self._start_grad_sync)
        wrap(BUFFER, f"{BUCKET_GROUP}.finish_param_sync", self._polling)
        wrap(BUFFER, f"{BUCKET_GROUP}.register_grad_ready", self._polling)
        wrap(OPTIMIZER, "DistributedOptimizer.__init__", self._build_optimizer)
        wrap(OPTIMIZER, "DistributedOptimizer.step_with_ready_grads", self._step)
        wrap(OPTIMIZER, "DistributedOptimizer.load_state_dict", self._load)
        wrap(FINALIZE, "_allreduce_word_embedding_grads", self._exchange_tied)

    # -- what Megatron's functions do now ---------------------------------------------------------

    def _build_any(self, original: Any, wrapper: Any, *args: Any, **kwargs: Any) -> None:
        self._refuse(wrapper_problems(type(wrapper).__name__))
        original(wrapper, *args, **kwargs)

    def _build_other(self, name: str, original: Any, *args: Any, **kwargs: Any) -> None:
        self._refuse(wrapper_problems(name))
        original(*args, **kwargs)

    def _build(self, original: Any, ddp: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(original).bind(ddp, *args, **kwargs).arguments
        self._refuse((*ddp_problems(given["ddp_config"], given["config"]), *module_problems(given["module"])))
        original(ddp, *args, **kwargs)
        exact = exact_parameters(ddp.module, self.options.wire.exact_numel)
        try:
            # The communicators of an earlier default group are gone: Megatron-LM restarts in its process.
            if self.carrier is None or not self._lives:
                self.carrier, self.world = self._make_carrier(ddp), default_group()
                self.tied.clear()
                self.largest, self.has_effect = 0, False
                self.teller = Teller(self.version, self.carrier.codecs, pipeline_of(ddp))
            self._add_buckets((*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups), exact)
        except ConfigError as error:
            self._refuse(error.errors)
        except ValueError as error:
            self._refuse([str(error)])
        self.largest = max(self.largest, largest_but(exact, ddp.module))
        assert self.teller is not None
        self.teller.tell(self._kinds(ddp))

    def _build_optimizer(self, original: Any, *args: Any, **kwargs: Any) -> None:
        config = inspect.signature(original).bind(*args, **kwargs).arguments["config"]
        self._refuse(optimizer_problems(config, self.options))
        if not self.has_effect:  # of this rank's first optimizer: all of its model chunks are there
            try:
                refuse_without_effect(self.options, self._carrier.groups.values(), self.largest)
            except ConfigError as error:
                self._refuse(error.errors)
            self.has_effect = True
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
        buffers = getattr(optimizer, "buffers", ())
        for buffer in buffers:
            self._carrier.loaded(buffer.buckets)
        done = original(optimizer, *args, **kwargs)
        for buffer in buffers:
            self._carrier.go_on(buffer.buckets, step_of(optimizer))
        return done

    def _exchange_tied(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        tied = [] if self.whole_sums else list(self.tied.items())
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
            raise RuntimeError(TOO_LATE)
        return self.carrier

    def _refuse(self, problems: Iterable[str]) -> None:
        """Raise ConfigError, with the patch taken off, if there are any."""
        found = list(problems)
        if found:
            self.switch_off()
            raise ConfigError([f"megatron_core_patch: {text}" for text in found])

    @property
    def _lives(self) -> bool:
        """Whether the default process group is still the one that the carrier's communicators were made under."""
        return dist.is_initialized() and default_group() is self.world

    def _add_buckets(self, bucket_groups: Iterable[Any], exact: Collection[Any]) -> None:
        """Take the buckets of a model chunk."""
        assert self.carrier is not None
        for bucket_group in bucket_groups:
            hops = self.carrier.hops_of(collective_group(bucket_group))
            for bucket in bucket_group.buckets:
                self.carrier.add(bucket, [p for p in bucket.params_list if p in exact])
                if is_tied(bucket):
                    self.tied[bucket] = hops

    def _make_carrier(self, ddp: Any) -> Carrier:
        agree_on(self.options)
        ranks_per_node = node_size(self.options.ranks_per_node)
        device = next(ddp.module.parameters()).device
        groups = {name: getattr(ddp, attribute, None) for name, attribute in GROUPS.items()}
        own = [dist.get_rank()]
        ranks = {
            name: dist.get_process_group_ranks(group) if group else own for name, group in groups.items()
        }
        settings = {name: settings_like(group or default_group(), device) for name, group in groups.items()}
        cut = cut_groups(ranks, ranks_per_node, device, settings)
        stages = [rank // ranks_per_node for rank in pipeline_of(ddp)]
        self.tied_link = INTRA if stages[0] == stages[-1] else INTER
        at_once = device.type == "cpu" and len(stages) > 1
        connections = connections_note(os.environ.get(CONNECTIONS)) if device.type == "cuda" else ""
        for note in filter(None, (self.options.note, connections)):
            if dist.get_rank() == 0:
                print(f"megatron_core_patch: {note}", flush=True)
        return Carrier(self.options, cut, device, at_once, self.traffic)

    def _kinds(self, ddp: Any) -> list[Kind]:
        buffers = {"dense": ddp.buffers, "expert": ddp.expert_parallel_buffers}
        carrier = self._carrier
        return [
            (
                name,
                carrier.hops_of(own[0].data_parallel_group),
                own,
                sum(len(carrier.exact[bucket]) for buffer in own for bucket in buffer.buckets),
            )
            for name, own in buffers.items()
            if own
        ]


def default_group() -> Any:
    return dist.distributed_c10d._get_default_group()


def exact_parameters(module: torch.nn.Module, numel: int) -> set[torch.nn.Parameter]:
    """Return the parameters that are never quantised: those of at most ``numel`` elements, and routers of experts."""
    return {
        parameter
        for name, parameter in module.named_parameters()
        if parameter.numel() <= numel or "router" in name.split(".")
    }


def largest_but(exact: Collection[Any], module: torch.nn.Module) -> int:
    """Return the most elements of a trained parameter that is none of ``exact``, or 0."""
    return max((p.numel() for p in module.parameters() if p.requires_grad and p not in exact), default=0)


def step_of(optimizer: Any) -> int:
    """Return how many updates the optimizer of a DistributedOptimizer has made by the checkpoint it has loaded."""
    return max((int(group.get("step", 0)) for group in optimizer.optimizer.param_groups), default=0)


def pipeline_of(ddp: Any) -> list[int]:
    """Return the ranks of this rank's pipeline, by stage."""
    group = ddp.pp_group[0] if isinstance(ddp.pp_group, list) else ddp.pp_group
    return dist.get_process_group_ranks(group)
