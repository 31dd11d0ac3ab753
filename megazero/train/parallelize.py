"""Where tensor parallelism, pipelines and ZeRO meet: from a run's configuration to a sharded decoder.

Fixed order, and why:
1. pp and tp first: the decoder is built on the meta device with this rank's stages and its share of every parameter;
2. recompute sits inside each layer's forward, and torch.compile inside that, so the engine's hooks stand outside of
   both and a unit stays gathered from the recompute to the end of its backward;
3. zero then: it takes the (local) parameters unit by unit, initialised from the seed alone, so that the full
   weights are the same for every layout and every preset;
4. the pipeline last: it runs the stages of the sharded decoder. One stage is a pipeline, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megazero import zero
from megazero.comm.codec import Blockwise, Identity
from megazero.comm.hops import Traffic
from megazero.comm.peers import Peers
from megazero.comm.timing import Waits, no_timing
from megazero.config import RunConfig, World
from megazero.config.layout.outer import BF16_BITS, averages, feedback, outer_coding, wires
from megazero.config.layout.wire import dispatch_coding
from megazero.config.model.spec import ParameterSpec
from megazero.config.options.optimizers import OPTIMIZERS
from megazero.config.options.sections import OuterConfig
from megazero.cp import ContextParallel
from megazero.mesh.mesh import Mesh
from megazero.models import Decoder, initializer
from megazero.models.compilation import compile_decoder
from megazero.models.decoder import Decisions
from megazero.models.dtypes import DTYPES
from megazero.models.multi_token import Further
from megazero.models.positions import Documents
from megazero.moe import ExpertParallel
from megazero.pp.executor import Pipeline
from megazero.pp.links import Links
from megazero.pp.partition import StageSpec
from megazero.pp.schedules import SCHEDULES
from megazero.products import make_product
from megazero.tp import DeferredGradients, TensorParallel
from megazero.train.expert_balance import ExpertBalance, balance_losses
from megazero.train.qk_clip import QKClip
from megazero.train.schedule.learning_rate import DECOUPLED, FACTOR, UNDECAYED
from megazero.zero.optimizer import OptimizerFactory


def build_decoder(
    config: RunConfig, mesh: Mesh, traffic: Traffic | None = None, timed: Callable[[str], Any] = no_timing
) -> Decoder:
    """Build the decoder on the meta device, with this rank's stages and its share of every tensor-parallel parameter.

    traffic: counts the bytes that tensor and context parallelism send. timed: as in ``shard_decoder``.
    """
    traffic, waits = traffic or Traffic(mesh.links), Waits(mesh.device, timed)
    splits = SCHEDULES[config.pipeline_schedule].splits_backward and mesh.pp.size > 1
    product = make_product(config.precision.product, **config.precision.product_options)
    product.require(mesh.device)
    tp = TensorParallel.of(
        mesh.tp,
        sequence_parallel=config.parallel.sequence_parallel,
        traffic=traffic,
        waits=waits,
        product=product,
        deferred=DeferredGradients() if splits else None,
    )
    dtype = DTYPES[config.precision.params_dtype]
    own = [stage for stage in config.stages() if stage.rank == mesh.pp.index]
    training = config.training
    chunk = training.loss_chunk_tokens
    world = World(mesh.grid.world_size, mesh.grid.ranks_per_node)
    assert not isinstance(chunk, str), f"{chunk}: train/forecast.py puts a number, or none, in its place"
    decoder = Decoder(
        config.model,
        tp,
        ContextParallel.of(mesh, traffic, waits, config.gathered_keys(world), training.seed),
        ep=ExpertParallel.of(mesh, traffic, waits, _dispatch_codec(config), product),
        recompute=training.recompute_granularity,
        attention_backend=training.attention_backend,
        z_loss=training.z_loss_strength,
        loss_chunk=chunk,
        balance=balance_losses(
            config,
            others=[Peers.of(a, kind="scalar", traffic=traffic, waits=waits) for a in mesh.round_axes],
        ),
        mtp_loss_scaling_factor=training.mtp_loss_scaling_factor,
        stages=own,
        device="meta",
        dtype=dtype,
    )
    if training.compile:
        compile_decoder(decoder, training.compile_backend)
    return decoder


def _dispatch_codec(config: RunConfig) -> Blockwise | None:
    coding = dispatch_coding(config.parallel.moe_dispatch_across_nodes, config.model.hidden_size)
    return Blockwise(coding.bits, coding.block) if coding else None


def optimizer_factory(config: RunConfig) -> OptimizerFactory:
    """The configured optimizer with its options, for a list of parameter groups."""
    chosen = OPTIMIZERS[config.optimizer.optimizer]
    factory = resolve_name(chosen.factories[config.training.optimizer_impl])
    return partial(factory, **config.optimizer.arguments)


def make_policy(config: RunConfig, mesh: Mesh) -> zero.Policy:
    """Choose the engine's policy and wire formats for this mesh. Raises ValueError if they do not fit it."""
    world = World(mesh.grid.world_size, mesh.grid.ranks_per_node)
    wire, shards = config.wire(world), config.shards(world)
    return zero.Policy(
        lifetime=shards.lifetime,
        keep_gathered=shards.keep_gathered,
        whole_gradients=shards.whole_gradients,
        prefetch_bytes=config.zero.zero_prefetch_bytes,
        chunk_numel=config.zero.zero_chunk_numel,
        block=wire.block,
        exact_numel=wire.exact_numel,
        loss_scaled=config.precision.params_dtype == "fp16",  # train/schedule/loss_scaling.py
        codecs=wire,
        seed=config.training.seed,
        outer=make_outer(config.outer, mesh.dp_size) if config.outer.outer_meet else None,
    )


def make_outer(outer: OuterConfig, d: int = 1) -> zero.Outer:
    """Return how the configuration's outer steps are taken by d data-parallel ranks."""
    return zero.Outer(
        momentum=0.0 if averages(outer) else outer.outer_momentum,
        nesterov=outer.outer_optimizer == "nesterov",
        codec=Identity(torch.bfloat16) if outer.outer_bits == BF16_BITS else outer_coding(outer),
        feedback=feedback(outer),
        wires=wires(outer, d),
    )


def _refuse_all_exact(decoder: Decoder, mesh: Mesh, policy: zero.Policy, exact: Collection[str]) -> None:
    """Refuse a threshold above every parameter of every stage: nothing would be quantised. Collective."""
    if policy.codecs.exact:
        return
    own = max((p.numel() for n, p in decoder.named_parameters() if n not in exact), default=0)
    largest = int(mesh.gather_rows(torch.tensor([own], device=mesh.device)).max())
    if largest <= policy.exact_numel:
        raise ValueError(
            f"--zero-exact-numel {policy.exact_numel}: no parameter of this model has more elements on a rank (the "
            f"largest has {largest}), so nothing would be quantised; nearest: {max(largest - 1, 0)}, or exact "
            "messages (--no-zero-quantized-weights --no-zero-quantized-gradients)"
        )


def traits_of(p: ParameterSpec, config: RunConfig) -> zero.Traits:
    """Return the traits of a parameter, but for what of it is padding."""
    tp, sequence_parallel = config.parallel.tensor_model_parallel_size, config.parallel.sequence_parallel
    undecayed: tuple[tuple[str, Any], ...] = ((UNDECAYED, True), ("weight_decay", 0.0))
    decayed = config.optimizer.apply_wd_to_qk_layernorm and p.name.startswith(
        ("attention.q_norm.", "attention.k_norm.")
    )
    options = undecayed if p.vector and not decayed else ()
    if own := own_rates(p, config):
        decoupled = p.vocabulary and config.optimizer.decoupled_lr is not None
        mark = (DECOUPLED, True) if decoupled else (FACTOR, own["lr"] / config.optimizer.lr)
        options = (mark, *own.items(), *options)
    matrix, copies = is_matrix(p, config), p.copies(tp)
    return zero.Traits(
        options,
        p.replicated(tp),
        p.partial(tp, sequence_parallel),
        span=copies if copies > 1 else 0,
        matrix=matrix,
        split=p.cut if matrix else None,
        rounded=p.experts > 0,
    )


def own_rates(p: ParameterSpec, config: RunConfig) -> dict[str, float]:
    """Return the learning rate and the epsilon of a parameter where they are not those of --lr and --adam-eps: they
    are --decoupled-lr, or muP's, as Megatron has them (get_mup_config_overrides)."""
    optimizer, width = config.optimizer, config.model.mup_width
    if p.vocabulary and optimizer.decoupled_lr is not None:
        return {"lr": optimizer.decoupled_lr}
    hidden = p.multiplies and not p.vocabulary
    if optimizer.optimizer == "sgd":
        factor = 1.0 if hidden else width
    else:
        factor = 1 / width if hidden and not is_matrix(p, config) else 1.0
    has_eps = "adam_eps" in OPTIMIZERS[optimizer.optimizer].options
    eps = {"eps": optimizer.adam_eps * factor} if has_eps else {}
    return {} if factor == 1 else {"lr": optimizer.lr * factor, **eps}


def is_matrix(p: ParameterSpec, config: RunConfig) -> bool:
    """Return whether the optimizer steps the parameter as a whole matrix."""
    return OPTIMIZERS[config.optimizer.optimizer].by_matrix and p.multiplies and not p.vocabulary


def units_of(decoder: Decoder, layers: int, mesh: Mesh) -> list[zero.UnitSpec]:
    """Return the decoder's units, of so many layers each. Experts that data-parallel ranks share have units of their
    own, beside their layers', on the axes of the ranks that hold the same ones."""
    units = decoder.units(layers)
    if mesh.grid.ep_data == 1:
        return list(units)
    axes, out = zero.DataAxes.of_experts(mesh), list[zero.UnitSpec]()
    for modules in units:
        experts = decoder.experts_of(modules)
        out += [modules, *([zero.On(experts, axes, apart=True)] if experts else [])]
    return out


def shard_decoder(
    decoder: Decoder,
    config: RunConfig,
    mesh: Mesh,
    timed: Callable[[str], Any] = no_timing,
    policy: zero.Policy | None = None,
) -> zero.Engine:
    """Hand the decoder to the ZeRO engine with the policy, optimizer and clipping of the configuration.

    timed: makes a context manager around each wait, given the wait's name in the time bill. policy: used instead of
    the configuration's own. Collective. Raises ValueError if configuration and mesh do not fit.
    """
    policy, optimizer = policy or make_policy(config, mesh), optimizer_factory(config)
    specs, used = decoder.specs, decoder.padded()
    _refuse_all_exact(decoder, mesh, policy, {name for name, p in specs.items() if p.exact(mesh.tp.size)})

    def traits(name: str, _: torch.nn.Parameter) -> zero.Traits:
        return replace(traits_of(specs[name], config), used=used.get(name))

    engine = zero.shard(
        decoder,
        mesh=mesh,
        policy=policy,
        units=units_of(decoder, config.zero.zero_unit_layers, mesh),
        optimizer=optimizer,
        clip_norm=config.optimizer.clip_grad or None,
        traits=traits,
        init=initializer(decoder, config.training.seed),
        parts=decoder.parts(),
        tied=decoder.tied_ends(),
        timed=timed,
        traffic=decoder.tp.traffic,
    )
    if config.model.num_experts is not None:
        rate, each = config.training.moe_router_bias_update_rate, config.logging.moe_per_layer_logging
        engine.join(balance := ExpertBalance(decoder, engine, rate, each))
        if engine.outer is not None:
            engine.outer.follow(balance.biases)
    if config.optimizer.qk_clip or config.logging.log_max_attention_logit:
        o = config.optimizer
        engine.join(QKClip(decoder, engine, o.qk_clip_alpha, o.qk_clip_threshold if o.qk_clip else None))
    return engine


class MicroBatch(NamedTuple):
    """The samples of one forward pass on one rank, of whose sequences a context-parallel rank has its part.

    tokens, labels: int64 [b, s]. loss_mask: float [b, s], 1 where a token counts in the loss. read: without labels,
    what makes the result of an evaluation of this rank's logits [b, s, rows]. further_labels,
    further_mask: as Further's, in training, where further tokens are predicted. dropout_key: the key
    that Decoder.forward takes; None without dropout. position_ids, document_starts: as Documents'. decisions: as
    Decoder.forward's, for whoever replays or records them.
    """

    tokens: Tensor
    labels: Tensor | None
    loss_mask: Tensor
    dropout_key: int | None = None
    position_ids: Tensor | None = None
    document_starts: Tensor | None = None
    decisions: Decisions | None = None
    further_labels: Tensor | None = None
    further_mask: Tensor | None = None
    read: Callable[[Tensor], Tensor] | None = None

    @property
    def further(self) -> Further | None:
        if self.further_labels is None or self.further_mask is None:
            return None
        return Further(self.further_labels, self.further_mask)

    @property
    def documents(self) -> Documents | None:
        if self.position_ids is None and self.document_starts is None:
            return None
        return Documents(self.position_ids, self.document_starts)


def dropout_key(config: RunConfig, iteration: int, sample: int) -> int | None:
    """Return a number that names the micro-batch beginning with ``sample``, the same in every layout.

    iteration: counted from 0. Returns None if the model has no dropout.
    """
    if max(config.model.attention_dropout, config.model.hidden_dropout) == 0:
        return None
    text = f"{config.training.seed}/{iteration}/{sample}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def build_pipeline(decoder: Decoder, engine: zero.Engine, config: RunConfig, mesh: Mesh) -> Pipeline:
    """Make the executor that runs MicroBatches by the configuration's pipeline schedule.

    Its losses are sums over the tokens that count. The engine's ``waits`` time its waits, too.
    """

    def forward(stage: StageSpec, x: Tensor | None, batch: MicroBatch) -> Tensor:
        """Run a stage on what the one before sent; the first takes the micro-batch's tokens."""
        x = batch.tokens if x is None else x
        scale = pipeline.loss_factor
        y = decoder.run_stage(
            stage,
            x,
            batch.labels,
            batch.dropout_key,
            batch.documents,
            batch.loss_mask,
            scale,
            batch.decisions,
            batch.further,
        )
        return batch.read(y) if batch.read is not None and stage.head else y

    tp, dtype = decoder.tp, DTYPES[config.precision.params_dtype]
    links = Links(mesh, dtype, engine.traffic, engine.poll, engine.waits)
    carrier, stages, schedule = (
        Slices(config.model.hidden_size, tp),
        config.stages(),
        config.pipeline_schedule,
    )
    pipeline = Pipeline(stages, schedule, forward, engine, links, carrier, tp.deferred)
    return pipeline


class Slices:
    """Cuts an activation so that each tensor-parallel rank sends only its own slice of it to the next stage.

    Under sequence parallelism a rank has only its slice [s / tp, b, h] anyway. Otherwise every rank has the whole
    activation [s, b, h], and the ranks of the next stage gather the slices inside their node (Narayanan et al. 2021,
    section 4.1). Activations have the dtype of the parameters. A step's samples have one length.
    """

    def __init__(self, hidden: int, tp: TensorParallel) -> None:
        self.hidden, self.tp = hidden, tp
        self.shape, self.cuts = tuple[int, ...](), False

    def fit(self, micro_batch: MicroBatch) -> Sequence[int]:
        """Take ``shape`` from a micro-batch of the step, and return that of what travels."""
        batch, length = micro_batch.tokens.shape
        size, sharded = self.tp.size, self.tp.sharded_sequence
        self.shape = (length // size if sharded else length, batch, self.hidden)
        self.cuts = size > 1 and not self.tp.sequence_parallel and prod(self.shape) % size == 0
        return (prod(self.shape) // size,) if self.cuts else self.shape

    def pack(self, x: Tensor) -> Tensor:
        """Return the part of ``x`` (``shape``) that this rank sends."""
        return x.reshape(self.tp.size, -1)[self.tp.rank] if self.cuts else x

    def unpack(self, x: Tensor) -> Tensor:
        """Return the activation (``shape``) of the received slice ``x``. Collective over tp."""
        return self.tp.start_gather(x).wait().view(self.shape) if self.cuts else x
