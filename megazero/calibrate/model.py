"""Measures forward and backward of the embedding, of a layer and of the head, by micro-batch and TP.

Each is measured alone, and then all of them in sequence, as a step runs them. Module times are scaled so that their
sum matches the sequence: on a CPU a step returns memory that a single module keeps, and faults its pages in again (4
layers of width 256 on 4 ranks: 10,000 page faults of 2 us each, 5 to 10% of the processors' time).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megazero.calibrate.points import Modules
from megazero.calibrate.timing import Clock
from megazero.config import RunConfig, World, make_config
from megazero.config.model.spec import EMBEDDING, HEAD, LAYER
from megazero.config.options.cluster import Cluster
from megazero.mesh.mesh import create_mesh, destroy_mesh
from megazero.mesh.objects import gather_objects
from megazero.models import Decoder
from megazero.models.dtypes import DTYPES
from megazero.plan.compute import Compute
from megazero.plan.seconds import Collectives
from megazero.pp.partition import StageSpec
from megazero.products import make_product
from megazero.tp import TensorParallel

# Layers that are measured one after the other, with their activations kept: one layer again and again would find its
# weights and activations in the processor's caches, as a step does not.
STACK = 4
WHOLE = "whole"  # the embedding, so many layers and the head


class DoesNotFit(RuntimeError):
    """A rank has too little memory for a point. Raised on every rank alike."""


def measure_modules(
    point: Modules, values: Mapping[str, Any], cluster: Cluster, clock: Clock
) -> Iterator[dict[str, Any]]:
    """Yield a row of the cluster file for each module. Collective.

    values: the training's options. cluster: the measurements so far; its sizes, and the rates for counting work.
    Raises ConfigError where the model does not run on so many tensor-parallel ranks, DoesNotFit where a rank has too
    little memory. Both are raised on every rank.
    """
    world = World(cluster.world_size, cluster.ranks_per_node)
    length = int(values["seq_length"])
    config = make_config(
        {
            **values,
            "tensor_model_parallel_size": point.tp,
            "sequence_parallel": point.tp > 1 and length % point.tp == 0,
            "micro_batch_size": point.micro_batch,
            "global_batch_size": point.micro_batch * world.world_size // point.tp,
            "recompute_granularity": "none",
        },
        world,
    )
    sizes = Compute(config, cluster, Collectives(cluster)).sizes
    mesh = create_mesh(tp=point.tp, ranks_per_node=cluster.ranks_per_node, device=clock.device)
    product = make_product(config.precision.product, **config.precision.product_options)
    tp = TensorParallel.of(mesh.tp, sequence_parallel=config.parallel.sequence_parallel, product=product)
    try:
        decoder, calls = _tried(config, tp, point.micro_batch, clock.device)
    except DoesNotFit:  # on all ranks
        destroy_mesh(mesh)
        raise
    whole = calls.pop(WHOLE)
    times = {
        kind: (clock(call, slowest=False), clock(_with_backward(call, decoder), slowest=False))
        for kind, call in calls.items()
    }
    stretch = 1.0
    # The whole takes more time than its parts.
    if not _lacking(lambda: _with_backward(whole, decoder)(), clock.device):
        together = clock(_with_backward(whole, decoder), slowest=False)
        stretch = together.median / sum(both.median for _, both in times.values())
    for kind, (forward, both) in times.items():
        each = stretch / (len(decoder.layers) if kind == LAYER else 1)
        yield {
            "module": kind,
            "tp": point.tp,
            "micro_batch": point.micro_batch,
            "forward_flops": sizes[kind].operations,
            "forward_bytes": sizes[kind].moved,
            "forward_seconds": forward.median * each,
            # a round of noise must not make the difference vanish
            "backward_seconds": max(both.median - forward.median, forward.median / 10) * each,
            "spread": both.spread,
        }
    destroy_mesh(mesh)


def _tried(
    config: RunConfig, tp: TensorParallel, samples: int, device: torch.device
) -> tuple[Decoder, dict[str, Callable[[], Tensor]]]:
    """Return the modules and a forward of each, and of all; each is run once with its backward. Collective.

    If memory runs out, it does so here, before ranks of the world wait for each other. Ranks of one tensor-parallel
    group already wait for each other, but hold the same sizes. Raises DoesNotFit.
    """
    made: list[tuple[Decoder, dict[str, Callable[[], Tensor]]]] = []

    def attempt() -> None:
        """Make the modules, and run each with its backward."""
        dtype = DTYPES[config.precision.params_dtype]
        whole = StageSpec(0, 0, range(min(STACK, config.model.num_layers)), True, True)
        backend = config.training.attention_backend
        decoder = Decoder(
            config.model, tp, attention_backend=backend, stages=[whole], device=device, dtype=dtype
        )
        decoder.initialize(config.training.seed)
        dropout = max(config.model.hidden_dropout, config.model.attention_dropout) > 0
        calls = _calls(decoder, samples, config.model.seq_length, 1 if dropout else None)
        for kind, call in calls.items():
            if kind != WHOLE:
                _with_backward(call, decoder)()
        made.append((decoder, calls))

    if lacks := _lacking(attempt, device):
        raise DoesNotFit(lacks)
    return made[0]


def _lacking(attempt: Callable[[], None], device: torch.device) -> str:
    """Return which ranks had too little memory for an attempt, or nothing if none had. Collective."""
    lacks = ""
    try:
        attempt()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        lacks = f"{error}".partition("\n")[0] or "out of memory"
    every = gather_objects(lacks)
    rank = next((rank for rank, text in enumerate(every) if text), None)
    if rank is None:
        return ""
    return f"{sum(map(bool, every))} of {len(every)} ranks have too little, rank {rank}: {every[rank]}"


def _calls(decoder: Decoder, samples: int, length: int, key: int | None) -> dict[str, Callable[[], Tensor]]:
    """Return a forward of each module, on tensors of its own, and one of all."""
    embedding, head, device = decoder.embedding, decoder.head, decoder.head.weight.device  # type: ignore[union-attr]
    assert embedding is not None and head is not None
    tokens = torch.randint(decoder.config.vocabulary, (samples, length), device=device)
    x = embedding(tokens, key).detach().requires_grad_()

    def layers(x: Tensor) -> Tensor:
        return decoder.run_layers(decoder.stages[0].layers, x, key)

    return {
        EMBEDDING: lambda: embedding(tokens, key),
        LAYER: lambda: layers(x),
        HEAD: lambda: head(x, tokens).sum(),
        WHOLE: lambda: head(layers(embedding(tokens, key)), tokens).sum(),
    }


def _with_backward(call: Callable[[], Tensor], decoder: nn.Module) -> Callable[[], None]:
    output = call()
    # Random as a step's (rates.py: measure_device); a loss, which is one number, has 1.
    gradient = torch.randn_like(output) if output.dim() else torch.ones_like(output)

    def both() -> None:
        call().backward(gradient)
        decoder.zero_grad(set_to_none=True)  # the engine takes gradients away, too

    return both
