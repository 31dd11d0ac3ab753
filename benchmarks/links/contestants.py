"""Contestants of the comparison: megazero's presets and the peers, with bf16 parameters, an fp32 master, AdamW and
clipping, on the same decoder and tokens. Peers send bf16 gradients; megazero's exact presets send fp32 where a
rank's gradient is already a sum. All start from the same fp32 weights but DeepSpeed and Megatron's, which make their
master of the bf16 ones (0.007 of the loss after 4 steps, measured; the others agree to 0.0001).

Peers stand in two forms: as most people write the loop (everything after every micro-batch), and "once", which
crosses the nodes once per step as far as the peer's own switches allow. Those of OUTER cross every INTERVAL steps.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import Taken, device
from benchmarks.links import hfsdp, pipelines, volume
from benchmarks.steps import (
    ADAMW,
    CLIP,
    AdamW,
    Shape,
    Step,
    batches,
    decoder,
    options_of,
    ours,
    pipelined,
    policy_of,
    shared_mesh,
    torch_step,
    world_group,
)
from fsdp2_patch.patch import Fsdp2Patch
from megazero.comm.codec import codecs_of
from megazero.comm.hops import Traffic
from megazero.config import World, make_config, resolve_shards
from megazero.config.layout.wire import Wire, asked_for
from megazero.config.options.sections import ZeroConfig
from megazero.moe import ExpertParallel
from megazero.patches.options import MessageOptions, read_words
from megazero.plan.communication import OF_ROUNDING, SCALARS
from megazero.train.distributed import make_mesh
from megazero.zero import Policy
from tests.bytes_across import Across

# The formats that flags give. What is called zeropp, and what is patched, was measured before gradients were
# transformed by default; "Hadamard" is the preset as it is.
MIXED = ZeroConfig(zero_preset="zeropp", zero_gradient_transform="hadamard")
PLAIN = replace(MIXED, zero_gradient_transform="none")
DELTA, INT8 = asked_for(PLAIN), asked_for(replace(PLAIN, zero_quantized_weights_delta=False))
EXPERTS = "experts"  # the heat that trains a mixture
LATENT = "latent experts"  # one like DeepSeek-V3


@dataclass(frozen=True)
class Running:
    """traffic: the engine's own counters; None for peers."""

    step: Step
    traffic: Traffic | None = None


@dataclass(frozen=True)
class Contestant:
    """build: from the shape and the ranks per node, collective. sent: formula (volume.py), bytes per step of a node,
    where there is one.

    interval: steps from one meeting to the next: a turn has whole ones. lead: steps before the first, so that nothing
    is on its way when a turn ends. most: formula, the bytes of a meeting.
    """

    build: Callable[[Shape, int], Running]
    sent: Callable[[volume.Case], float] | None = None
    interval: int = 1
    lead: int = 0
    most: Callable[[volume.Case], float] | None = None


def megazero(shards: str, wire: Wire | None = None, joined: int = 1, shared: bool = False) -> Contestant:
    """Make a contestant of a preset's factors, or '1,1,d'. wire: its messages, exact by default. joined:
    --zero-unit-layers. shared: the ranks of a node share the experts; what crosses nodes is the same."""
    policy = policy_of(wire) if wire else Policy()

    def factors(nodes: int, ranks_per_node: int) -> tuple[int, int, int]:
        ranks = nodes * ranks_per_node
        return resolve_shards(
            (1, 1, ranks) if shards == "1,1,d" else shards, ranks, (ranks_per_node,)
        ).factors

    def build(shape: Shape, ranks_per_node: int) -> Running:
        chosen = factors(dist.get_world_size() // ranks_per_node, ranks_per_node)
        # Nothing ahead but the next module: a model as small as this would fit, and be gathered once per step.
        own = replace(policy, prefetch_bytes=0) if chosen[0] > 1 else policy
        ep = ranks_per_node if shared else 1
        step, engine = ours(chosen, shape, ranks_per_node, device(), own, joined, ep)
        return Running(step, engine.traffic)

    def sent(case: volume.Case) -> float:
        own = case if shared else replace(case, experts=0)
        return volume.megazero(factors(case.nodes, case.ranks_per_node), codecs_of(policy.codecs), own)

    return Contestant(build, sent)


def configured(tp: int = 1, shared: bool = False, **options: Any) -> Contestant:
    """Make a contestant of zeropp as ``megazero train`` has it, whose formula is the tests' arithmetic. tp:
    tensor-parallel ranks, each of which trains on the samples of all. shared: as ``megazero``'s. options: more of the
    run's."""

    def build(shape: Shape, ranks_per_node: int) -> Running:
        world = World(dist.get_world_size(), ranks_per_node)
        values = options_of(shape) | {
            "params_dtype": "bf16",
            "zero_preset": "zeropp",
            "zero_prefetch_bytes": 0,
        }
        values |= {"model_family": "mixtral", "num_experts": shape.experts} if shape.experts else {}
        values |= {"tensor_model_parallel_size": tp, "sequence_parallel": tp > 1, "micro_batch_size": tp}
        values |= {
            "expert_model_parallel_size": ranks_per_node if shared else 1,
            "mock_data": True,
            "seed": 1,
        }
        values |= {
            "lr": ADAMW.keywords["lr"],
            "train_iters": 1,
            "lr_warmup_iters": 0,
            "clip_grad": CLIP,
            **options,
        }
        config = make_config(values, world)
        mesh = make_mesh(config, world, device())
        first = dist.get_rank() // tp * tp
        every = zip(*(batches(shape, device(), rank) for rank in range(first, first + tp)), strict=True)
        tokens = torch.cat([each for micro_batch in every for each in micro_batch])
        step, engine = pipelined(config, mesh, tokens, shape.micro_batches)
        mesh.release()

        def mean() -> Taken:
            taken = step()
            return taken._replace(loss=taken.loss / tokens.numel())

        return Running(mean, engine.traffic)

    def sent(case: volume.Case) -> float:
        assert case.model is not None
        ep = case.ranks_per_node if shared else 1
        of_rank = Across(case.model, case.nodes, case.nodes * case.ranks_per_node, tp, ep).sent()
        return case.ranks_per_node * sum(of_rank.values()) + volume.scalars(case, SCALARS + OF_ROUNDING)

    return Contestant(build, sent)


def replicated(shape: Shape, once: bool, group: dist.ProcessGroup | None = None) -> tuple[Step, AdamW]:
    """Return a step of DDP over ``group``, by default all ranks, and its optimizer."""
    where = device()
    exact = decoder(replace(shape, dtype=torch.float32)).to(where)
    optimizer = AdamW(exact.parameters(), shape.dtype != torch.float32)
    model = DistributedDataParallel(exact.to(shape.dtype), process_group=group, gradient_as_bucket_view=True)
    quiet = lambda last: model.no_sync() if once and not last else nullcontext()  # noqa: E731
    return torch_step(model, optimizer, shape, where, quiet), optimizer


def ddp(*, once: bool = False) -> Contestant:
    def build(shape: Shape, ranks_per_node: int) -> Running:
        return Running(replicated(shape, once)[0])

    return Contestant(build, partial(volume.ddp, once=once))


@cache
def _kept_mesh(world: Any, device_type: str, dims: tuple[int, ...]) -> DeviceMesh:
    """Return one mesh for all contestants that have it, as ``steps.shared_mesh`` does."""
    return init_device_mesh(device_type, dims, mesh_dim_names=("replicate", "shard")[-len(dims) :])


def sharded(
    shape: Shape, ranks_per_node: int, hybrid: bool, reshard: bool | None = None
) -> tuple[FSDPModule, torch.device]:
    """Return the decoder with fully_shard on every layer and the root, and its device. Shards are fp32."""
    world = dist.get_world_size()
    dims = (world // ranks_per_node, ranks_per_node) if hybrid else (world,)
    where = device()
    mesh = _kept_mesh(world_group(), where.type, dims)
    precision = MixedPrecisionPolicy(param_dtype=shape.dtype, reduce_dtype=shape.dtype)
    model = decoder(replace(shape, dtype=torch.float32)).to(where)
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard)
    assert isinstance(model, FSDPModule)
    return model, where


def fsdp2(*, hybrid: bool = False, once: bool = False, keep: bool = False) -> Contestant:
    """fully_shard on every layer and the root; hybrid: shards inside a node, replicas across (HSDP).

    keep: gathered parameters stay for the step's other passes, so that they too cross once (ZeRO-2's memory). Else
    FSDP2's default, which drops them after the forward but for the root's.
    """

    def build(shape: Shape, ranks_per_node: int) -> Running:
        model, where = sharded(shape, ranks_per_node, hybrid, reshard=False if keep else None)

        def quiet(last: bool) -> AbstractContextManager:
            if once:
                model.set_requires_gradient_sync(last)
            if keep:
                model.set_reshard_after_backward(last)
            return nullcontext()

        # Its shards are fp32, cast to bf16 for the gather.
        return Running(torch_step(model, AdamW(model.parameters(), False), shape, where, quiet))  # type: ignore[attr-defined]

    def sent(case: volume.Case) -> float:
        if hybrid:
            return volume.hsdp(case, once)
        return volume.fsdp2(replace(case, experts=0), once, keep)

    return Contestant(build, sent)


def fsdp2_experts() -> Contestant:
    """fully_shard by per-parameter meshes, as torchtitan's: the ranks of a node share the experts, which are sharded
    over the nodes, and all else is sharded over all ranks. Tokens take megazero's own way."""

    def build(shape: Shape, ranks_per_node: int) -> Running:
        world, where = dist.get_world_size(), device()
        ep = ExpertParallel.of(shared_mesh((1, 1, 1), ranks_per_node, where, ep=ranks_per_node))
        mesh = _kept_mesh(world_group(), where.type, (world // ranks_per_node, ranks_per_node))["replicate"]
        precision = MixedPrecisionPolicy(param_dtype=shape.dtype, reduce_dtype=shape.dtype)
        model = decoder(replace(shape, dtype=torch.float32), ep=ep).to(where)
        experts = model.experts_of(model.layers.values())
        for each in experts:
            fully_shard(each, mesh=mesh, mp_policy=precision)
            each.set_gradient_divide_factor(world)
            each.set_force_sum_reduction_for_comms(True)  # gloo has no sum of multiples
        for module in (*model.layers.values(), model):
            fully_shard(module, mesh=_kept_mesh(world_group(), where.type, (world,)), mp_policy=precision)

        def clip(held: list[torch.Tensor]) -> torch.Tensor:
            own, others = ([p for p in held if (p.device_mesh is mesh) is apart] for apart in (True, False))  # type: ignore[attr-defined]
            squared = total_norm(own).square()
            dist.all_reduce(squared, group=ep.inside.group)
            norm = (squared + total_norm(others).square()).sqrt()
            for each in (own, others):
                torch.nn.utils.clip_grads_with_norm_(each, CLIP, norm)
            return norm

        return Running(torch_step(model, AdamW(model.parameters(), False, clip), shape, where))

    return Contestant(build, partial(volume.fsdp2, once=False, keep=False))


def total_norm(parameters: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of the gradients of DTensors of one mesh."""
    return torch.nn.utils.get_total_norm([p.grad for p in parameters]).full_tensor()  # type: ignore[attr-defined]


def patched(weights: str = "none", gradients: str = "none", *, hybrid: bool = False) -> Contestant:
    """FSDP2, or HSDP, across nodes once per step under fsdp2_patch."""
    options = read_words(MessageOptions, weights, gradients, gradient_transform="none")

    def build(shape: Shape, ranks_per_node: int) -> Running:
        model, where = sharded(shape, ranks_per_node, hybrid)
        # Not by enable(): several contestants are there at a time.
        patch = Fsdp2Patch(model, replace(options, ranks_per_node=ranks_per_node))

        def quiet(last: bool) -> AbstractContextManager:
            model.set_requires_all_reduce(last)
            return nullcontext()

        step = torch_step(model, AdamW(model.parameters(), False), shape, where, quiet)  # type: ignore[attr-defined]
        return Running(step, patch.traffic)

    sent = partial(volume.patched, codecs_of(options.wire), hybrid=hybrid)
    return Contestant(build, sent)


def megatron_fsdp(outer: str) -> Contestant:
    def build(shape: Shape, ranks_per_node: int) -> Running:
        return Running(hfsdp.hfsdp_step(shape, ranks_per_node, outer))

    return Contestant(build, volume.hfsdp if outer == "optim" else partial(volume.hsdp, once=True))


def deepspeed_zero(stage: int) -> Contestant:
    """ZeRO-1 reduces once per step by itself; ZeRO-3 gathers and reduces with every micro-batch and cannot else."""

    def build(shape: Shape, ranks_per_node: int) -> Running:
        import deepspeed
        from deepspeed.ops import __compatible_ops__

        # Its shared-memory operator would join ranks of different nodes, which here share a machine.
        __compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        model = decoder(shape)
        config = {
            "train_micro_batch_size_per_gpu": shape.micro_batch,
            "gradient_accumulation_steps": shape.micro_batches,
            "gradient_clipping": CLIP,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 2**31,
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=ADAMW(model.parameters()), config=config)
        data = batches(shape, device())

        def step() -> Taken:
            total = torch.zeros(())
            for tokens in data:
                loss = engine(tokens, tokens).sum() / (shape.sequence * shape.micro_batch)
                engine.backward(loss)  # divides by the micro-batches itself
                engine.step()
                total += loss.detach()
            return Taken(total / len(data), engine.get_global_grad_norm())

        return Running(step)

    sent = {1: volume.deepspeed_zero1, 3: volume.deepspeed_zero3}[stage]
    return Contestant(build, sent)


def staged(build: pipelines.Build) -> Contestant:
    return Contestant(lambda shape, ranks_per_node: Running(*build(shape, ranks_per_node)))


PIPELINES = {name: staged(build) for name, build in pipelines.contestants().items()}
CONTESTANTS: dict[str, Contestant] = {
    "megazero zeropp INT8": megazero("zeropp", INT8),
    "megazero zeropp": megazero("zeropp", DELTA),
    "megazero zeropp Hadamard": megazero("zeropp", asked_for(MIXED)),
    "megazero 1,1,d INT8": megazero("1,1,d", INT8),
    "megazero 1,1,d delta": megazero("1,1,d", DELTA),
    **{f"megazero {preset}": megazero(preset) for preset in ("ddp", "zero1", "mics", "hpz", "zero3")},
    # As DDP joins gradients into buckets of 25 MB: layers have 1.6 MB here.
    "megazero 1,1,d INT8 joined": megazero("1,1,d", INT8, joined=4),
    "megazero ddp joined": megazero("ddp", joined=4),
    "megazero zero1 joined": megazero("zero1", joined=4),
    "megazero zeropp as a run": configured(),
    "megazero zeropp EP": configured(shared=True),
    "megazero zeropp TP": configured(tp=2),
    "megazero hpz EP": megazero("hpz", shared=True),
    "megazero zeropp Hadamard EP": megazero("zeropp", asked_for(MIXED), shared=True),
    "FSDP2": fsdp2(),
    "FSDP2 EP": fsdp2_experts(),
    "FSDP2 once": fsdp2(once=True),
    "FSDP2 once, kept": fsdp2(once=True, keep=True),
    "HSDP": fsdp2(hybrid=True),
    "HSDP once": fsdp2(hybrid=True, once=True),
    "HSDP patched INT4": patched(gradients="int4", hybrid=True),
    "FSDP2 patched INT8": patched("int8", "int4"),
    "FSDP2 patched delta": patched("int4-delta", "int4"),
    "Megatron HFSDP": megatron_fsdp("optim"),
    "Megatron HSDP": megatron_fsdp("no_shard"),
    "DDP": ddp(),
    "DDP once": ddp(once=True),
    "DeepSpeed ZeRO-1": deepspeed_zero(1),
    "DeepSpeed ZeRO-3": deepspeed_zero(3),
    **PIPELINES,
}

# Who takes turns with whom, in processes of their own: every communicator of gloo has a thread that wakes 100 times a
# second, and with 24 contestants in one process zeropp's steps took 10 to 25% longer, FSDP2's 2%.
HEATS = {
    "sharded": (
        *("megazero zeropp INT8", "megazero zeropp", "FSDP2", "FSDP2 once", "FSDP2 once, kept"),
        *("HSDP", "HSDP once", "DeepSpeed ZeRO-3"),
    ),
    "replicated": (
        *("megazero 1,1,d INT8", "megazero 1,1,d delta", "megazero 1,1,d INT8 joined"),
        *("megazero ddp", "megazero ddp joined", "megazero zero1", "megazero zero1 joined"),
        *("FSDP2", "HSDP once", "DDP", "DDP once", "DeepSpeed ZeRO-1"),
    ),
    "presets": ("megazero mics", "megazero hpz", "megazero zero3", "FSDP2"),
    "formats": ("megazero zeropp", "megazero zeropp Hadamard", "FSDP2"),
    "patched": (
        *("HSDP patched INT4", "FSDP2 patched INT8", "FSDP2 patched delta", "megazero zeropp"),
        *("FSDP2", "HSDP", "HSDP once"),
    ),
    "megatron": ("megazero zeropp", "Megatron HFSDP", "Megatron HSDP", "HSDP once", "FSDP2"),
    EXPERTS: (
        *("megazero zeropp as a run", "megazero zeropp EP", "megazero zeropp TP", "megazero hpz EP"),
        *("FSDP2", "FSDP2 EP", "FSDP2 once", "HSDP", "HSDP once"),
    ),
    LATENT: (
        *("megazero zeropp Hadamard", "megazero zeropp Hadamard EP", "megazero hpz EP"),
        *("FSDP2", "FSDP2 EP", "FSDP2 once", "HSDP", "HSDP once"),
    ),
    "pipelines": tuple(PIPELINES),
}
# Those of docs/results/comparison.md.
PAGE_HEATS = ("sharded", "replicated", "presets", "formats", "patched", "megatron")


def absent(name: str) -> str | None:
    """Return why a contestant cannot take part here, or None."""
    needs = {"DeepSpeed": ("deepspeed",), "Megatron": ("megatron_fsdp", "einops")}.get(name.split()[0], ())
    missing = [package for package in needs if importlib.util.find_spec(package) is None]
    return f"pip install {' '.join(missing)}".replace("_", "-") if missing else None
