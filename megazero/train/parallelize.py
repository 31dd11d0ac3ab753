"""Where tensor parallelism and ZeRO meet: from a run's configuration to a sharded decoder.

Fixed order, and why:
1. tp first: the decoder is built on the meta device with this rank's share of every parameter;
2. recompute sits inside each layer's forward, so the engine's hooks stand outside of it and a unit stays
   gathered from the recompute to the end of its backward;
3. zero last: it takes the (local) parameters unit by unit, initialised from the seed alone, so that the full
   weights are the same for every tensor-parallel degree and every preset.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch

from megazero import zero
from megazero.comm.codec import Blockwise
from megazero.comm.lane import no_timing
from megazero.comm.traffic import Traffic
from megazero.config import RunConfig, World
from megazero.config.wire import Coding
from megazero.mesh.mesh import Mesh
from megazero.models import Decoder, DecoderConfig, RopeScaling, initializer
from megazero.tp import TensorParallel
from megazero.zero.optimizer import OptimizerFactory

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
_POSITIONS = {"rope": "rope", "learned_absolute": "learned", "alibi": "alibi"}
_LAYOUTS = {"llama": "llama", "gpt": "gpt2", "bloom": "bloom"}


def decoder_config(config: RunConfig) -> DecoderConfig:
    """The decoder that the resolved model section describes. Raises ValueError as DecoderConfig does."""
    m = config.model
    assert m.num_layers and m.hidden_size and m.ffn_hidden_size and m.num_attention_heads and m.vocab_size
    assert m.kv_channels and m.max_position_embeddings and m.position_embedding_type
    built = DecoderConfig(
        num_layers=m.num_layers,
        hidden_size=m.hidden_size,
        ffn_hidden_size=m.ffn_hidden_size,
        num_heads=m.num_attention_heads,
        vocab_size=m.vocab_size,
        max_position_embeddings=m.max_position_embeddings,
        num_kv_heads=m.num_query_groups,
        head_dim=m.kv_channels,
        normalization="rmsnorm" if m.normalization == "RMSNorm" else "layernorm",
        norm_eps=m.norm_epsilon,
        position=_POSITIONS[m.position_embedding_type],  # type: ignore[arg-type]
        rope_base=m.rotary_base,
        rope_scaling=_rope_scaling(config),
        activation="swiglu" if m.swiglu else "gelu",
        qkv_bias=bool(m.add_bias_linear),
        linear_bias=bool(m.add_bias_linear),
        embedding_norm=bool(m.embed_layernorm),
        tied_embeddings=not m.untie_embeddings_and_output_weights,
        attention_dropout=m.attention_dropout,
        hidden_dropout=m.hidden_dropout,
        recompute=config.training.recompute_granularity,  # type: ignore[arg-type]
        init_std=m.init_method_std,
        make_vocab_size_divisible_by=m.make_vocab_size_divisible_by,
        layout=_layout(config),  # type: ignore[arg-type]
    )
    built.validate(config.parallel.tensor_model_parallel_size)
    return built


def _rope_scaling(config: RunConfig) -> RopeScaling | None:
    m = config.model
    if m.rotary_scaling == "none" or m.position_embedding_type != "rope":
        return None
    return RopeScaling(
        m.rotary_scaling,  # type: ignore[arg-type]
        m.rotary_scaling_factor,
        m.rotary_low_freq_factor,
        m.rotary_high_freq_factor,
        m.rotary_original_max_position,
    )


def _layout(config: RunConfig) -> str:
    """The family's own tensor names where its choices were kept; Llama's names can express any mixture."""
    m = config.model
    wanted = _LAYOUTS[m.model_family]
    plain = m.num_query_groups == m.num_attention_heads and bool(m.add_bias_linear) and not m.swiglu
    plain = plain and m.normalization == "LayerNorm"
    plain = plain and (m.num_attention_heads or 0) * (m.kv_channels or 0) == m.hidden_size
    own = {
        "gpt2": m.position_embedding_type == "learned_absolute" and not m.embed_layernorm,
        "bloom": m.position_embedding_type == "alibi" and bool(m.embed_layernorm),
    }
    return wanted if wanted != "llama" and plain and own[wanted] else "llama"


def build_decoder(config: RunConfig, mesh: Mesh, traffic: Traffic | None = None) -> Decoder:
    """The decoder on the meta device, with this rank's tensor-parallel share."""
    tp = TensorParallel(
        group=mesh.tp.gather_group,
        rank=mesh.tp.index,
        size=mesh.tp.size,
        sequence_parallel=config.parallel.sequence_parallel,
        traffic=traffic,
    )
    dtype = DTYPES[config.precision.params_dtype]
    return Decoder(decoder_config(config), tp, device="meta", dtype=dtype)


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


def _refuse_all_exact(decoder: Decoder, policy: zero.Policy, replicated: Collection[str]) -> None:
    """A threshold above every parameter would leave quantised hops without effect."""
    if policy.codecs.exact:
        return
    largest = max((p.numel() for n, p in decoder.named_parameters() if n not in replicated), default=0)
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
    _refuse_all_exact(decoder, policy, replicated)

    def traits(name: str, _: torch.nn.Parameter) -> zero.Traits:
        options = (("weight_decay", 0.0),) if name in plain else ()
        return zero.Traits(options, replicated=name in replicated, partial=name in partial_names)

    return zero.shard(
        decoder,
        mesh=mesh,
        policy=policy,
        units=decoder.units(),
        optimizer=optimizer_factory(config),
        clip_norm=config.optimizer.clip_grad or None,
        traits=traits,
        init=initializer(decoder, config.training.seed),
        timed=timed,
        traffic=decoder.tp.traffic,
    )
