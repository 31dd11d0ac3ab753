"""Where tensor parallelism, pipelines and ZeRO meet: from a run's configuration to a sharded decoder.

Fixed order, and why:
1. pp and tp first: the decoder is built on the meta device with this rank's stages and its share of every parameter;
2. recompute sits inside each layer's forward, so the engine's hooks stand outside of it and a unit stays
   gathered from the recompute to the end of its backward;
3. zero then: it takes the (local) parameters unit by unit, initialised from the seed alone, so that the full
   weights are the same for every layout and every preset;
4. the pipeline last: it runs the stages under the engine's eyes. One stage is a pipeline, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megazero import zero
from megazero.comm.codec import Blockwise
from megazero.comm.lane import no_timing
from megazero.comm.traffic import Traffic
from megazero.config import RunConfig, World
from megazero.config.wire import Coding
from megazero.mesh.mesh import Mesh, create_mesh
from megazero.models import Decoder, initializer
from megazero.models.positions import Documents
from megazero.pp.executor import Pipeline
from megazero.pp.links import Links
from megazero.pp.partition import StageSpec
from megazero.tp import DeferredGradients, TensorParallel, start_all_gather
from megazero.zero.optimizer import OptimizerFactory

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def make_mesh(
    config: RunConfig, world: World, device: torch.device, timeout: timedelta | None = None
) -> Mesh:
    """The mesh of a configuration. Collective."""
    parallel = config.parallel
    return create_mesh(
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        shards=config.shards(world).factors,
        dp_outermost=parallel.use_tp_pp_dp_mapping,
        ends=not config.model.untie_embeddings_and_output_weights,
        ranks_per_node=config.ranks_per_node(world),
        device=device,
        timeout=timeout,
    )


def build_decoder(config: RunConfig, mesh: Mesh, traffic: Traffic | None = None) -> Decoder:
    """The decoder on the meta device, with this rank's stages and tensor-parallel share."""
    splits = config.pipeline_schedule == "zb-h1" and mesh.pp.size > 1
    tp = TensorParallel(
        group=mesh.tp.gather_group,
        rank=mesh.tp.index,
        size=mesh.tp.size,
        sequence_parallel=config.parallel.sequence_parallel,
        traffic=traffic,
        deferred=DeferredGradients() if splits else None,
    )
    dtype = DTYPES[config.precision.params_dtype]
    own = [stage for stage in config.stages() if stage.rank == mesh.pp.index]
    recompute = config.training.recompute_granularity
    return Decoder(config.model, tp, recompute=recompute, stages=own, device="meta", dtype=dtype)


def optimizer_factory(config: RunConfig) -> OptimizerFactory:
    o = config.optimizer
    assert o.lr
    if o.optimizer == "sgd":
        return partial(torch.optim.SGD, lr=o.lr, momentum=o.sgd_momentum, weight_decay=o.weight_decay)
    return zero.default_adamw(
        lr=o.lr, betas=(o.adam_beta1, o.adam_beta2), eps=o.adam_eps, weight_decay=o.weight_decay
    )


def make_policy(config: RunConfig, mesh: Mesh) -> zero.Policy:
    """The engine's choices and wire formats on this mesh. ValueError where configuration and mesh do not fit."""
    world = World(mesh.grid.world_size, mesh.grid.ranks_per_node)
    wire = config.wire(world)
    return zero.Policy(
        lifetime=config.shards(world).lifetime,
        keep_gathered=config.shards(world).keep_gathered,
        prefetch_bytes=config.zero.zero_prefetch_bytes,
        chunk_numel=config.zero.zero_chunk_numel,
        block=wire.block,
        exact_numel=wire.exact_numel,
        codecs=zero.Codecs(
            weights=_codec(wire.weights),
            gradients_intra=_codec(wire.gradients_intra),
            gradients_inter=_codec(wire.gradients_inter),
            delta=wire.delta,
            feedback=wire.feedback,
        ),
        seed=config.training.seed,
        weight_error_bound=config.zero.zero_weight_error_bound,
        gradient_error_bound=config.zero.zero_gradient_error_bound,
    )


def _codec(coding: Coding | None) -> Blockwise | None:
    return Blockwise(coding.bits, coding.block, coding.stochastic, coding.clip) if coding else None


def _refuse_all_exact(decoder: Decoder, mesh: Mesh, policy: zero.Policy, replicated: Collection[str]) -> None:
    """A threshold above every parameter of every stage would leave quantised hops without effect. Collective."""
    if policy.codecs.exact:
        return
    own = max((p.numel() for n, p in decoder.named_parameters() if n not in replicated), default=0)
    largest = int(mesh.gather_rows(torch.tensor([own], device=mesh.device)).max())
    if largest <= policy.exact_numel:
        raise ValueError(
            f"--zero-exact-numel {policy.exact_numel}: no parameter of this model has more elements on a rank (the "
            f"largest has {largest}), so nothing would be quantised; nearest: {max(largest - 1, 0)}, or exact "
            "messages (--no-zero-quantized-weights --no-zero-quantized-gradients)"
        )


def shard_decoder(
    decoder: Decoder,
    config: RunConfig,
    mesh: Mesh,
    timed: Callable[[str], Any] = no_timing,
    policy: zero.Policy | None = None,
) -> zero.Engine:
    """Hand the decoder to the ZeRO engine with the policy, optimizer and clipping of the configuration.

    policy: instead of the configuration's own.
    """
    policy = policy or make_policy(config, mesh)
    partial_names = decoder.partial_gradients()
    replicated, plain = decoder.replicated_parameters(), decoder.no_weight_decay()
    _refuse_all_exact(decoder, mesh, policy, replicated)

    def traits(name: str, _: torch.nn.Parameter) -> zero.Traits:
        options = (("weight_decay", 0.0),) if name in plain else ()
        span = decoder.replica_span(name)
        return zero.Traits(options, name in replicated, name in partial_names, span=span)

    return zero.shard(
        decoder,
        mesh=mesh,
        policy=policy,
        units=decoder.units(),
        optimizer=optimizer_factory(config),
        clip_norm=config.optimizer.clip_grad or None,
        traits=traits,
        init=initializer(decoder, config.training.seed),
        parts=decoder.parts(),
        tied=decoder.tied_ends(),
        timed=timed,
        traffic=decoder.tp.traffic,
    )


class MicroBatch(NamedTuple):
    """tokens, labels: int64 [b, s]. loss_mask: [b, s]. dropout_key: as Decoder.forward's. position_ids,
    document_starts: as Documents'."""

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    dropout_key: int | None = None
    position_ids: Tensor | None = None
    document_starts: Tensor | None = None

    @property
    def documents(self) -> Documents | None:
        """For the layers of one stage, which share what is made of it."""
        if self.position_ids is None and self.document_starts is None:
            return None
        return Documents(self.position_ids, self.document_starts)


def dropout_key(config: RunConfig, iteration: int, sample: int) -> int | None:
    """Names the micro-batch that begins with ``sample`` in an iteration (counted from 0), whatever the layout; None
    without dropout."""
    if max(config.model.attention_dropout, config.model.hidden_dropout) == 0:
        return None
    text = f"{config.training.seed}/{iteration}/{sample}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def build_pipeline(
    decoder: Decoder,
    engine: zero.Engine,
    config: RunConfig,
    mesh: Mesh,
    timed: Callable[[str], Any] = no_timing,
) -> Pipeline:
    """The executor of the configuration's schedule over MicroBatches; losses are sums over tokens that count."""

    def forward(stage: StageSpec, x: Tensor | None, batch: MicroBatch) -> Tensor:
        x = batch.tokens if x is None else x
        out = decoder.run_stage(stage, x, batch.labels, batch.dropout_key, batch.documents)
        return (out * batch.loss_mask).sum() if stage.head else out

    model, tp, size = config.model, decoder.tp, config.batch.micro_batch_size
    assert model.seq_length and model.hidden_size and size
    carrier = Slices((model.seq_length, size, model.hidden_size), tp)
    dtype = DTYPES[config.precision.params_dtype]
    links = Links(mesh, carrier.wire_shape, dtype, engine.traffic, engine.poll, timed)
    return Pipeline(config.stages(), config.pipeline_schedule, forward, engine, links, carrier, tp.deferred)


class Slices:
    """What of an activation [s, b, h] one tensor-parallel rank sends to the next stage: its own slice.

    Under sequence parallel that is all it has. Otherwise every rank has the whole, and the next stage's ranks gather
    what they got, inside their node (Narayanan et al. 2021, section 4.1).
    """

    def __init__(self, shape: tuple[int, int, int], tp: TensorParallel) -> None:
        self.tp = tp
        length, batch, hidden = shape
        self.shape = (length // tp.size, batch, hidden) if tp.sharded_sequence else shape
        self.cuts = tp.size > 1 and not tp.sequence_parallel and prod(shape) % tp.size == 0
        self.wire_shape = (prod(shape) // tp.size,) if self.cuts else self.shape

    def pack(self, x: Tensor) -> Tensor:
        return x.reshape(self.tp.size, -1)[self.tp.rank] if self.cuts else x

    def unpack(self, x: Tensor) -> Tensor:
        return start_all_gather(x, self.tp).wait().view(self.shape) if self.cuts else x
