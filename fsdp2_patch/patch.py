"""The patch while it is on: the groups that it carries, and the functions of torch that it replaces."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp2_patch import torch_parts
from fsdp2_patch.gradients import ReplicaAllReduce, TwoHopReduceScatter
from fsdp2_patch.group import Group
from fsdp2_patch.refusals import effect_problems, group_problems, mesh_problems, nodes_of, not_sharded
from fsdp2_patch.report import start_line
from fsdp2_patch.weights import KeptAllGather, checksums, settle
from megazero.comm.codec import codecs_of
from megazero.comm.hops import Channel, Traffic
from megazero.config.errors import ConfigError
from megazero.kernels.arena import Arena
from megazero.mesh.objects import gather_objects
from megazero.patches.agreement import agree_on, nothing_quantised
from megazero.patches.checks import Differences, GradientSamples, compare_replicas
from megazero.patches.names import Replaced
from megazero.patches.options import MessageOptions
from megazero.patches.two_hops import cut_groups, node_size, settings_like
from megazero.zero.rounding import GRADIENTS, WEIGHTS

Reduction = TwoHopReduceScatter | ReplicaAllReduce


class ModuleGroup(NamedTuple):
    """A parameter group of torch's, under its module's name; a module has one for each mesh of its parameters."""

    name: str
    raw: Any

    @property
    def replicas(self) -> bool:
        """Whether its mesh has a dimension of replicas (HSDP)."""
        return isinstance(self.raw.mesh_info, HSDPMeshInfo)

    @property
    def across(self) -> dist.ProcessGroup:
        """Return the process group whose messages may cross nodes."""
        info = self.raw.mesh_info
        return info.replicate_process_group if self.replicas else info.shard_process_group

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(dist.get_process_group_ranks(self.across))

    def crosses(self, ranks_per_node: int) -> bool:
        """Whether some of its messages cross nodes."""
        names = ("shard_process_group", "replicate_process_group")
        groups = [getattr(self.raw.mesh_info, name, None) for name in names]
        return any(nodes_of(group, ranks_per_node) > 1 for group in groups if group is not None)


class Fsdp2Patch:
    """The patch on one model, from ``enable`` to ``disable``."""

    def __init__(self, model: nn.Module, options: MessageOptions) -> None:
        """Raise ConfigError on every rank, with nothing patched, if some rank cannot carry its part. Collective."""
        torch_parts.check_torch()
        self.model, self.options = model, options
        self.differences = Differences("fsdp2_patch")
        self.undo: list[Callable[[], object]] = []
        self.gathers: list[KeptAllGather] = []
        self.reductions: dict[int, Reduction] = {}  # by id of each of the group's FSDPParams
        self.samples = GradientSamples("fsdp2_patch", codecs_of(options.wire))
        self.groups = self._find()
        self._install()
        if dist.get_rank() == 0:
            print(start_line(self.groups), flush=True)
            if options.note:
                print(f"fsdp2_patch: {options.note}", flush=True)

    def remove(self) -> None:
        """Give FSDP2 its own collectives back."""
        while self.undo:
            self.undo.pop()()

    # -- the groups -------------------------------------------------------------------------------

    def _find(self) -> list[Group]:
        """Return the groups that cross nodes, with their hops."""
        agree_on(self.options)
        h, found = node_size(self.options.ranks_per_node), self._torchs()
        problems = self._problems(found, h)
        crossing = [] if problems else [one for one in found if one.crosses(h)]
        if not (crossing or problems):
            problems.append(
                f"no group of ranks that share or replicate parameters has ranks on two nodes of {h}: nothing "
                "crosses nodes; leave the patch out (or give ranks_per_node, if the launcher's is wrong)"
            )
        places = {one.ranks: one.across for one in crossing}
        exact = self._exact(found) if crossing else frozenset()
        largest = max(
            (_numel(p) for one in crossing for p in one.raw.fsdp_params if id(p) not in exact), default=0
        )
        most = self._agree(problems, len(places), largest)
        device = crossing[0].raw.device
        self.traffic, arena = Traffic(), Arena()
        named = {f"group {i}": ranks for i, ranks in enumerate(places)}
        settings = {name: settings_like(places[ranks], device) for name, ranks in named.items()}
        # A pipeline's stage without experts has fewer.
        named |= {f"group {i}": (dist.get_rank(),) for i in range(len(places), most)}
        hops = cut_groups(named, h, device, settings)
        codecs, names = codecs_of(self.options.wire), self._names(found)
        return [
            Group(
                *one,
                hops=hops[one.ranks],
                replicas=one.replicas,
                exact=exact,
                names=names,
                codecs=codecs,
                channel=Channel(self.traffic, arena, device),
                differences=self.differences,
                samples=partial(self.samples.watches, number, len(crossing)),
                verified_steps=self.options.zero_verify_first_steps,
                checksum_interval=self.options.zero_checksum_interval,
            )
            for number, one in enumerate(crossing)
        ]

    def _torchs(self) -> list[ModuleGroup]:
        """Return torch's parameter groups of the model."""
        return [
            ModuleGroup(f"{name} (mesh {i} of {len(raws)})" if len(raws) > 1 else name, raw)
            for name, raws in torch_parts.param_groups(self.model)
            for i, raw in enumerate(raws, 1)
        ]

    def _problems(self, found: list[ModuleGroup], h: int) -> list[str]:
        """Return what is wrong on this rank, on nodes of h ranks. Later checks stand on earlier ones."""
        if not found:
            return [not_sharded(self.model)]
        lacking = torch_parts.lacking_parts([one.raw for one in found])
        if lacking:
            return [f"torch {torch.__version__} lacks {name}" for name in lacking]
        crossing = [one for one in found if one.crosses(h)]  # the others stay FSDP2's
        return (
            [text for one in crossing for text in group_problems(*one)]
            or [text for one in crossing for text in mesh_problems(*one, h)]
            or list(effect_problems(crossing, h, self.options))
        )

    def _exact(self, found: list[ModuleGroup]) -> frozenset[int]:
        """Return the ids of the FSDPParams that are small, or that ranks replicate over which others are split.

        Dense parameters are data-parallel over the ranks over which experts are split.
        """
        params = [p for one in found for p in one.raw.fsdp_params]
        split = {ranks for p in params for ranks in torch_parts.split_ranks(p)}
        limit = self.options.wire.exact_numel
        return frozenset(
            id(p)
            for p in params
            if _numel(p) <= limit or not all(ranks <= torch_parts.own_ranks(p) for ranks in split)
        )

    def _names(self, found: list[ModuleGroup]) -> dict[int, str]:
        """Return the names of the FSDPParams, by id."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        params = [(one.name, p) for one in found for p in one.raw.fsdp_params]
        return {id(p): names.get(id(p.sharded_param), f"a parameter of {module}") for module, p in params}

    def _agree(self, problems: list[str], crossing: int, largest: int) -> int:
        """Return the largest number of process groups that cross nodes on a rank. Collective.

        Raises ConfigError on every rank if some rank has problems, or if nothing is quantised.
        """
        every = gather_objects((problems, crossing, largest))
        first: list[str] = next((texts for texts, *_ in every if texts), [])
        if not first and self.options.wire.codings and not max(numel for *_, numel in every):
            first = [nothing_quantised(self.options.wire.exact_numel)]
        if first:
            raise ConfigError([f"fsdp2_patch: {text}" for text in first])
        return max(count for _, count, _ in every)

    # -- what it stands in for --------------------------------------------------------------------

    def _install(self) -> None:
        for group in self.groups:
            reduction: Reduction = ReplicaAllReduce(group) if group.replicas else TwoHopReduceScatter(group)
            self.reductions.update((id(p), reduction) for p in group.params)
            if isinstance(reduction, TwoHopReduceScatter):
                self._install_shards(group, reduction)
        names = Replaced()
        self.undo.append(names.restore)
        self.signature = inspect.signature(importlib.import_module(torch_parts.GROUP).foreach_reduce)
        names.wrap(torch_parts.GROUP, "foreach_reduce", self._reduce)
        if hasattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state"):  # from torch 2.13 on
            names.wrap(torch_parts.FSDP, "FSDPModule.reset_iter_state", self._reset)
        if self.gathers:
            names.wrap(torch_parts.STATE, "FSDPState._root_pre_forward", self._begin)
            names.wrap(torch_parts.FSDP, "FSDPModule.unshard", self._unshard)
        self.undo.append(register_optimizer_step_pre_hook(self._before_update).remove)
        self.undo.append(register_optimizer_step_post_hook(self._after_update).remove)

    def _install_shards(self, group: Group, reduction: TwoHopReduceScatter) -> None:
        raw, gather = group.raw, KeptAllGather(group)
        self.gathers.append(gather)
        # What FSDP2's setters set, which take no module with several groups.
        for name, comm in (
            ("_all_gather_comm", gather),
            ("_reduce_scatter_comm", reduction),
            ("_all_reduce_hook", reduction.cross),
        ):
            self.undo.append(partial(setattr, raw, name, getattr(raw, name)))
            setattr(raw, name, comm)

    # -- what is called ---------------------------------------------------------------------------

    def _reduce(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stand for FSDP2's ``foreach_reduce``, which reduces one group's gradients."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given, call = bound.arguments, partial(original, *args, **kwargs)
        reduction = self.reductions.get(id(given["fsdp_params"][0]))
        if reduction is None:
            return call()
        for parameter in given["fsdp_params"]:
            if getattr(parameter.sharded_param, "_post_accumulate_grad_hooks", None):
                raise RuntimeError(
                    f"fsdp2_patch: {reduction.group.names[id(parameter)]} has a hook behind its gradient "
                    "(register_post_accumulate_grad_hook, an optimizer in the backward), which would see sums that "
                    "have not crossed nodes: step the optimizer behind the last backward"
                )
        reduction.group.reduced = True
        return reduction.reduce(given, call)

    def _begin(self, original: Callable[..., Any], state: Any, module: nn.Module, *rest: Any) -> Any:
        """Stand for ``_root_pre_forward``, which every forward calls, a part's or a registered method's, too."""
        if state._state_ctx.iter_forward_root is None:  # else it is a part of one that has begun
            self._settle(raw for _, raws in torch_parts.param_groups(module) for raw in raws)
        return original(state, module, *rest)

    def _unshard(self, original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand for ``unshard``, which a program or a pipeline's schedule may call ahead of the forward."""
        state = module._get_fsdp_state()
        if state._state_ctx.iter_forward_root is None:
            self._settle(torch_parts.groups_of(state))
        return original(module, *args, **kwargs)

    def _settle(self, raws: Iterable[Any]) -> None:
        """Settle the gathers of these groups of torch's."""
        own = {id(raw) for raw in raws}
        with torch.inference_mode(False), torch.no_grad():  # shards cannot be detached in inference mode
            settle([gather for gather in self.gathers if id(gather.group.raw) in own])

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        waiting = [
            r.group.name
            for r in self._touched(optimizer)
            if isinstance(r, TwoHopReduceScatter) and r.sums is not None
        ]
        if waiting:
            raise RuntimeError(
                f"fsdp2_patch: an optimizer steps while gradients of {', '.join(waiting)} wait for the last "
                "backward: call model.set_requires_all_reduce(True) before the step's last forward, or in every "
                "micro-batch if they have no gradients in the last one"
            )
        for kind in (WEIGHTS, GRADIENTS):
            self.differences.tell(kind)
        self.samples.tell(self.groups[0].channel.device)

    @torch.no_grad()
    def _after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        touched = {id(reduction.group) for reduction in self._touched(optimizer)}
        for group in self.groups:
            if id(group) in touched:
                # Of several optimizers that share a group the first one counts.
                group.updates += group.reduced
                group.reduced, group.updated = False, True
        written = [gather for gather in self.gathers if id(gather.group) in touched]
        noted = checksums([gather for gather in written if gather.group.codecs.delta])
        for gather in written:
            gather.updated(noted.get(gather))
        interval = self.options.zero_checksum_interval
        for group in self.groups:
            if group.replicas and id(group) in touched and interval and group.updates % interval == 0:
                replicas = group.raw.mesh_info.replicate_process_group
                compare_replicas("fsdp2_patch", torch.cat(group.shards()), group.updates, replicas)

    def _touched(self, optimizer: torch.optim.Optimizer) -> list[Reduction]:
        """Return the reductions of the groups whose parameters an optimizer updates, each once."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        found = {
            id(r): r
            for r in self.reductions.values()
            if any(id(p.sharded_param) in own for p in r.group.params)
        }
        return list(found.values())

    def _reset(self, original: Callable[..., None], module: Any) -> None:
        """Stand for ``reset_iter_state``, which drops a step that was cut short."""
        original(module)
        for reduction in self.reductions.values():
            if isinstance(reduction, TwoHopReduceScatter):
                reduction.drop()


def _numel(parameter: Any) -> int:
    """Return how many elements of an FSDPParam one tensor-parallel rank has."""
    return parameter._orig_size.numel()
