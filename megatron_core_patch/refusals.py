"""What the patch refuses, by message.

These are configurations of Megatron's whose messages do not go through its bucket groups, or whose states would not
survive quantised weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from megatron_core_patch.names import LAYER_WISE, MEGATRON_FSDP, OTHER_WRAPPERS
from megatron_core_patch.options import PatchOptions
from megazero.config.errors import ConfigError
from megazero.mesh.levels import INTRA
from megazero.mesh.objects import gather_objects
from megazero.patches.agreement import nothing_quantised
from megazero.patches.two_hops import TwoHops

LAYER_WISE_SAID = (
    "a layer-wise optimizer (--optimizer muon, dist_muon and their like) gives whole layers to ranks, sums gradients "
    "and gathers parameters past the buckets that the patch carries: choose adam or sgd, or megazero's own Muon "
    "(--optimizer muon of megazero train)"
)


def wrapper_problems(name: str) -> Iterator[str]:
    """Say what is wrong with a data-parallel wrapper, or an optimizer that is one, by the name of its class."""
    if name in OTHER_WRAPPERS:
        yield (
            f"{name} (--use-megatron-fsdp, --use-torch-fsdp2) has communication of its own, which the patch does not "
            "carry: use --use-distributed-optimizer, or megazero's own engine (--zero-preset zeropp)"
        )
    if name in MEGATRON_FSDP.values():
        yield (
            f"{name} (fully_shard of megatron_fsdp) has communication of its own, across nodes, too (HSDP, HFSDP), "
            "which the patch does not carry: use Megatron's DistributedDataParallel with its distributed optimizer, "
            "torch's fully_shard with fsdp2_patch, or megazero's own engine (--zero-preset zeropp)"
        )
    if name == LAYER_WISE[1]:
        yield LAYER_WISE_SAID


def ddp_problems(ddp_config: Any, model_config: Any) -> Iterator[str]:
    """Say what is wrong with a DistributedDataParallelConfig and a TransformerConfig."""
    if not ddp_config.use_distributed_optimizer:
        yield "no distributed optimizer: without shards there is nothing to gather; add --use-distributed-optimizer"
    instances = getattr(ddp_config, "num_distributed_optimizer_instances", 1)
    if instances > 1:
        yield (
            f"--num-distributed-optimizer-instances {instances}: sums cross instances by an all-reduce that the "
            "patch does not carry; leave it at 1, the hops follow the node boundary by themselves"
        )
    if getattr(ddp_config, "use_megatron_fsdp", False) or getattr(ddp_config, "use_custom_fsdp", False):
        yield "--use-megatron-fsdp has communication of its own, which the patch does not carry; leave it out"
    if getattr(ddp_config, "nccl_ub", False):
        yield (
            "--use-nccl-ub registers Megatron's buffers for NCCL's own collectives, which the patch replaces; leave "
            "it out"
        )
    if getattr(ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False):
        yield (
            "--reuse-grad-buf-for-mxfp8-param-ag gathers parameters in the buffer of gradients, so that no rank "
            "keeps what others hold of them; leave it out"
        )
    if records_iterations(model_config):
        yield (
            "CUDA graphs of a full iteration (--cuda-graph-impl full_iteration, or --cuda-graph-scope "
            "full_iteration before megatron-core 0.18) record a step with its collectives once, but the patch "
            "decides in every step what is sent: choose graphs of layers, or none"
        )


def records_iterations(model_config: Any) -> bool:
    """Tell whether a TransformerConfig asks for CUDA graphs of a full training iteration, in any version's words."""
    scopes = getattr(model_config, "cuda_graph_scope", None) or []
    asked = [getattr(model_config, "cuda_graph_impl", None)]
    asked += (
        scopes.split(",") if isinstance(scopes, str) else scopes if isinstance(scopes, list) else [scopes]
    )
    return any(str(getattr(word, "name", word)).split(".")[-1] == "full_iteration" for word in asked)


def module_problems(module: torch.nn.Module) -> Iterator[str]:
    """Say what is wrong with a model chunk, by what Megatron has noted on its parameters."""
    if any(getattr(p, "is_managed_by_layer_wise_optimizer", False) for p in module.parameters()):
        yield LAYER_WISE_SAID


def optimizer_problems(config: Any, options: PatchOptions) -> Iterator[str]:
    """Say what is wrong with an OptimizerConfig."""
    if getattr(config, "optimizer_cpu_offload", False):
        yield (
            "--optimizer-cpu-offload updates parameters by copies from the CPU, past the step that the patch "
            "follows; leave it out"
        )
    if getattr(config, "optimizer_cuda_graph", False):
        yield (
            "--optimizer-cuda-graph records the optimizer's step once, and the patch does not see when it is run "
            "again; leave it out"
        )
    remainders = getattr(config, "use_precision_aware_optimizer", False) and getattr(
        config, "store_param_remainders", False
    )
    if remainders and options.wire.weights is not None:
        yield (
            "--use-precision-aware-optimizer keeps a master weight as its bf16 parameter and a remainder "
            "(store_param_remainders), so a parameter that comes back rounded changes the master: switch remainders "
            "off, or send weights exactly"
        )


def refuse_without_effect(options: PatchOptions, groups: Iterable[TwoHops], largest: int) -> None:
    """Raise ConfigError on every rank where something that was asked for would have no effect. Collective.

    groups: of this rank. largest: the most elements of a parameter that may be quantised, of all its model chunks.
    """
    every = gather_objects((any(two.intra.size > 1 for two in groups), largest))
    faults = []
    if INTRA in options.wire.gradients and not any(inside for inside, _ in every):
        faults.append(
            "gradients_intra_node has no effect where no node holds two ranks of a data-parallel group: leave it out"
        )
    if options.wire.codings and not max(numel for _, numel in every):
        faults.append(nothing_quantised(options.wire.exact_numel))
    if faults:
        raise ConfigError(faults)
