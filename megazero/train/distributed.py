"""How a rank joins the others: device, process group, a check that all ranks have the same options, and the mesh."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megazero.config import ConfigError, RunConfig, World
from megazero.config.layout.elastic import fit
from megazero.config.options.fields import show
from megazero.config.options.sections import GLOBAL_AUX, TrainingConfig
from megazero.config.run import all_options
from megazero.kernels import dispatch
from megazero.mesh.launch import Launch, prepare_cuda
from megazero.mesh.mesh import Mesh, create_mesh, discover_ranks_per_node, init_distributed
from megazero.mesh.objects import gather_objects
from megazero.mesh.rendezvous import RanksMissing, meet
from megazero.ops.failures import RankFailure
from megazero.ops.health import refuse_missing_gpus
from megazero.ops.health_probes import missing_gpus
from megazero.ops.memory import use_libraries

# Options that may differ between ranks: what only the first rank uses, and where files lie on a node.
OWN_OPTIONS = {"data_cache_path", "tokenizer_model", "vocab_file", "merge_file"}
OWN_SECTIONS = {"logging"}


def start_rank(
    training: TrainingConfig,
    launch: Launch,
    timeout: timedelta,
    met: Callable[[], None] | None = None,
    patience: float = 0.0,
) -> tuple[torch.device, tuple[str, ...]]:
    """Choose the device and join the other ranks. Returns the device and notes for the user. Collective.

    timeout: of a collective. met: called when all ranks are there, before the first collective. patience: seconds to
    wait for rank 0 beyond --distributed-init-timeout-minutes.

    Raises ValueError if the device that was asked for is not there, Unhealthy if a node lacks GPUs that it was given,
    RankFailure if ranks do not come.
    """
    notes = prepare_cuda(launch.world_size)  # before anyone asks for devices: that starts CUDA
    device = pick_device(training.device, launch)
    if training.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS wants it before its first use
        torch.use_deterministic_algorithms(True)
    if launch.world_size > 1 and not dist.is_initialized():
        limit = training.distributed_init_timeout_minutes * 60
        with _missing_named(limit):
            store = meet(launch, limit, patience)
            if met is not None:
                met()
        init_distributed(launch, device, timeout, store)
    refuse_missing_gpus(training.device, launch.host)
    if device.type == "cuda":
        refuse_shared_gpus(launch.host, str(torch.cuda.get_device_properties(device).uuid))
        use_libraries(device)
        return device, (*notes, *try_kernels(device))
    return device, ()


def refuse_shared_gpus(host: str, gpu: str) -> None:
    """Raise ValueError, the same on all ranks, if two ranks have one GPU. Collective.

    host, gpu: this rank's node, and its device's UUID.
    """
    # By NCCL's rule: ranks of one GPU each run as if on a host of its own where NCCL_HOSTID says so (rehearsals).
    every = gather_objects((os.environ.get("NCCL_HOSTID", host), gpu))
    taken: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(every):
        taken.setdefault(place, []).append(rank)
    for (node, uuid), ranks in taken.items():
        if len(ranks) > 1:
            raise ValueError(
                f"ranks {', '.join(map(str, ranks))} of {node} have one GPU ({uuid}): start one rank for each GPU, "
                "show each rank its own (CUDA_VISIBLE_DEVICES, srun --gpus-per-task=1), or use --device cpu"
            )


def try_kernels(device: torch.device) -> tuple[str, ...]:
    """Launch a Triton kernel, and have all ranks do without if one cannot. Collective. Returns a note of that.

    The references give the same bits; but AdamW is torch's then, which rounds differently, so replicas must agree.
    """
    failed = {rank: why for rank, why in enumerate(gather_objects(dispatch.why_none_runs(device))) if why}
    if not failed:
        return ()
    rank, why = next(iter(failed.items()))
    dispatch.do_without(why)
    return (
        f"no Triton kernel runs on {len(failed)} ranks, the first is rank {rank}: {why}. On all ranks the torch "
        "references run, and torch's fused AdamW; a C compiler and Python's headers are what Triton needs (gcc, "
        "python3-dev)",
    )


@contextmanager
def _missing_named(seconds: float) -> Iterator[None]:
    """Turn RanksMissing into a RankFailure. seconds: the limit, but for patience."""
    try:
        yield
    except RanksMissing as error:
        raise RankFailure(
            f"{error}. The limit is {seconds:g} s (--distributed-init-timeout-minutes); look for the first error in "
            "the logs of those ranks, or for a node to exclude",
            reported_elsewhere=error.told,
        ) from error


def pick_device(wanted: str, launch: Launch) -> torch.device:
    """Return the device that --device names. 'auto' takes CUDA where there is one, one GPU for each local rank.

    A rank that sees one GPU alone takes it: of srun --gpus-per-task=1, or a MIG slice (``refuse_shared_gpus``).
    A rank whose node lacks GPUs that it was given gets the CPU, to meet the others: ``refuse_missing_gpus`` names
    the node.
    """
    present = torch.cuda.is_available()
    if wanted == "cpu" or missing_gpus() is not None:
        return torch.device("cpu")
    if wanted == "cuda" and not present:
        raise ValueError("--device cuda, but torch sees no CUDA device; use --device cpu or auto")
    if not present:
        return torch.device("cpu")
    if torch.cuda.device_count() == 1:
        return torch.device("cuda", 0)
    if launch.local_rank is None:
        raise ValueError(
            f"{launch.launcher} does not say which rank of its node this is, so which GPU it has: set LOCAL_RANK, or "
            "LOCAL_WORLD_SIZE (ranks per node)"
        )
    if launch.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {launch.local_rank} has no GPU: torch sees {torch.cuda.device_count()}; start at most "
            "that many ranks per node, or use --device cpu"
        )
    return torch.device("cuda", launch.local_rank)


def find_world(config: RunConfig, launch: Launch) -> tuple[RunConfig, World]:
    """Find how many ranks a node has, now that the ranks have joined. Collective.

    Also returns the configuration: --elastic may have to know the nodes first. Raises ValueError, the same on all
    ranks, if they were started with different options or if the nodes differ.
    """
    _refuse_different_options(config)  # before ranks form groups by their own options
    world = World(launch.world_size, discover_ranks_per_node(launch, config.parallel.ranks_per_node))
    if launch.local_world_size is None:  # what the first check of the flags could not ask yet
        config, verdict = fit(config, world)
        if verdict.errors:
            raise ConfigError(verdict.errors)
    return config, world


def make_mesh(
    config: RunConfig, world: World, device: torch.device, timeout: timedelta | None = None
) -> Mesh:
    """Arrange the ranks of ``world`` in the mesh that the configuration asks for. Collective."""
    parallel = config.parallel
    return create_mesh(
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        shards=config.shards(world).factors,
        dp_outermost=parallel.use_tp_pp_dp_mapping,
        cp=parallel.context_parallel_size,
        cp_keys=config.context_levels(world)[1],
        ep=parallel.expert_model_parallel_size,
        rounds=GLOBAL_AUX in config.training.balance_weights,
        ends=config.model.embeds_at_both_ends,
        ranks_per_node=config.ranks_per_node(world),
        level_sizes=config.parallel.level_sizes,
        device=device,
        timeout=timeout,
    )


def _refuse_different_options(config: RunConfig) -> None:
    own = {
        name: config.get(name)
        for name, option in all_options().items()
        if name not in OWN_OPTIONS and option.section not in OWN_SECTIONS
    }
    digests = gather_objects(hashlib.sha256(json.dumps(own).encode()).hexdigest())
    if len(set(digests)) > 1:  # only now the values: they are large, the digests are not
        raise ValueError(_odd_ranks(gather_objects(own), digests))


def _odd_ranks(every: Sequence[Mapping[str, Any]], digests: Sequence[str]) -> str:
    """Return which ranks differ from most others, and in which options.

    If no set of options is the most frequent one, the first rank's counts as the usual one.
    """
    usual = digests.index(Counter(digests).most_common(1)[0][0])
    groups: dict[str, list[int]] = {}
    for rank, digest in enumerate(digests):
        if digest != digests[usual]:
            groups.setdefault(digest, []).append(rank)
    parts = []
    for ranks in groups.values():
        wrong = {name: value for name, value in every[ranks[0]].items() if value != every[usual][name]}
        differing = (
            f"{all_options()[name].flag} {show(value)} (rank {usual}: {show(every[usual][name])})"
            for name, value in wrong.items()
        )
        who = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
        parts.append(f"{who} {', '.join(differing)}")
    return (
        f"ranks were started with different options: {'; '.join(parts)}. Start every rank with the same ones"
    )
