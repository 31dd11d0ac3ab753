"""Shrinks the sizes of a configuration and keeps its structure. Pure; no torch.

It keeps the family and every choice of the model, the layout, the schedule, uneven stages, the preset or factors,
lifetimes, codecs and their rounding, recompute, ramp-up, the optimizer and the dtype. It also keeps whether sizes are
odd, divide, pad or repeat. Data are made-up tokens and the learning rate is constant. Saving and logging are off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from math import lcm
from typing import Any

from megazero.config import RunConfig, World, make_config
from megazero.config.layout.context import BOTH, GATHER, SWAP
from megazero.config.model.section import ModelConfig
from megazero.config.model.spec import model_spec
from megazero.config.options.fields import section_of
from megazero.config.options.optimizers import OPTIMIZERS
from megazero.config.options.sections import OuterConfig
from megazero.config.run import all_options
from megazero.families.layer_kinds import layer_kinds, some_layers
from megazero.verify.shrink_world import SubLayout, sub_layout

# Fixed: a dynamic scale would skip the first steps on its way down. Gradients of these sizes neither overflow with it
# nor become zero.
LOSS_SCALE = 1024.0
HEAD, SEQUENCE, BLOCK = 4, 8, 8  # width of a head, tokens, elements of a quantised block
INIT_STD = 0.03  # well-conditioned in fp32 at these sizes
# With norms of queries and keys, which are small here, so that their scores would not be: one fp32 rank of OLMo 2 is
# 1.2e-6 to 2.6e-6 from the truth with 1e-5, and 4e-7 to 6e-7 with this.
QK_NORM_EPSILON = 1e-2
CARRIED = ("model", "parallel", "zero", "outer", "precision", "optimizer", "batch", "training")
# Of outer steps, at most: steps from one meeting of all to the next, if it may be so few; fragments; steps of delay.
INTERVAL, FRAGMENTS, DELAY = 2, 2, 1
# A run of made-up tokens on CPUs.
MADE_UP = {
    "mock_data": True,
    "eval_iters": 0,
    "device": "cpu",
    "init_method_std": INIT_STD,
    "lr_decay_style": "constant",
    "norm_impl": "torch",  # apex runs on CUDA alone
}
# Of the data, what the model computes by.
OF_DOCUMENTS = ("reset_position_ids", "reset_attention_mask")
# What ``_parallel`` says by other options.
STAGES = (
    "num_layers_per_virtual_pipeline_stage",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
)


@dataclass(frozen=True)
class Shrunk:
    """A shrunk configuration.

    config: what is run, on ``layout.world``. changes: maps an option to (before, after). notes: what else differs, in
    words.
    """

    config: RunConfig
    layout: SubLayout
    changes: Mapping[str, tuple[Any, Any]]
    notes: tuple[str, ...]


def shrink(config: RunConfig, world: World, most: int, steps: int) -> Shrunk:
    """Choose sizes for a run on at most ``most`` ranks. Raises ValueError as sub_layout does.

    The run has ``steps`` steps, with outer replicas as many more as take every fragment to arrive twice.
    """
    layout = sub_layout(config, world, most)
    carried = {
        name: option.default if option.whole_run or name in STAGES else config.get(name)
        for name, option in all_options().items()
        if option.section in CARRIED
    }
    values = {
        **carried,
        **MADE_UP,
        **{name: config.get(name) for name in OF_DOCUMENTS},
        **_parallel(config, layout),
        **_model(config, layout, config.context_levels(world)),
        **_batch(config, world, layout),
        **_outer(config.outer, layout.replicas),
        **_optimizer(config),
        **_on_processors(config),
    }
    values |= _zero(config, world, layout, values)
    values["loss_chunk_tokens"] = _loss_chunk(config, values)
    if layout.replicas > 1:
        steps = max(steps, 2 * values["outer_interval"] + values["outer_delay"])
    values["train_iters"] = steps
    run = make_config(values, layout.world)
    changes = {
        name: (config.get(name), run.get(name)) for name in carried if config.get(name) != run.get(name)
    }
    return Shrunk(run, layout, changes, (*layout.notes, *_notes(config, world)))


def _optimizer(config: RunConfig) -> dict[str, Any]:
    """Choose rates for small sizes. One rank in fp64 is the judge, and it has matrices whole."""
    optimizer, spec = config.optimizer, OPTIMIZERS[config.optimizer.optimizer]
    values: dict[str, Any] = {"lr": spec.small_rate}
    if optimizer.decoupled_lr is not None:
        values["decoupled_lr"] = spec.small_rate * optimizer.decoupled_lr / optimizer.lr
    if spec.by_matrix:
        values |= {"muon_fp32_matmul_prec": "high"}
    return values


def _on_processors(config: RunConfig) -> dict[str, Any]:
    """Choose what runs on CPUs, in place of what runs on CUDA alone."""
    values: dict[str, Any] = {}
    if config.training.optimizer_impl == "apex":
        values["optimizer_impl"] = "auto"
    if config.training.attention_backend != "math":
        values["attention_backend"] = "auto"
    if config.precision.params_dtype == "fp16" and not config.precision.loss_scale:
        values["loss_scale"] = LOSS_SCALE
    return values


def _outer(outer: OuterConfig, replicas: int) -> dict[str, Any]:
    """Keep whether there are fragments and a delay, with no more steps than these take. One replica is a run without
    outer steps."""
    if replicas == 1:
        return {opt.name: opt.default for opt in all_options().values() if opt.section == "outer"}
    count, delay = min(outer.outer_fragments, FRAGMENTS), min(outer.outer_delay, DELAY)
    return {
        "outer_interval": min(outer.outer_interval, max(INTERVAL, count * (delay + 1))),
        "outer_fragments": count,
        "outer_delay": delay,
        "outer_replicas": replicas,
    }


def like(size: int, most: int) -> int:
    """Return ``size`` if it is at most ``most``, else the largest number up to that which is odd or even as it is."""
    return size if size <= most else most - (most - size) % 2


def _parallel(config: RunConfig, layout: SubLayout) -> dict[str, Any]:
    values: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        **_contexts(*layout.contexts),
        "expert_model_parallel_size": layout.ep,
        "ranks_per_node": layout.world.ranks_per_node,
    }
    if layout.pp > 1:
        layers = stage_layers(config, layout.pp)
        virtual = config.virtual_stages
        values["num_virtual_stages_per_pipeline_rank"] = virtual if virtual > 1 else None
        values["pipeline_partition"] = ",".join(map(str, layers))
    return values


def _contexts(heads: int, keys: int) -> dict[str, Any]:
    """Say how ranks attend to whole samples, whatever the nodes."""
    if heads > 1 and keys > 1:
        return {"cp_comm_type": (BOTH,), "hierarchical_context_parallel_sizes": (heads, keys)}
    word = (SWAP if keys == 1 else GATHER[0],) if heads * keys > 1 else None
    return {"cp_comm_type": word, "hierarchical_context_parallel_sizes": None}


def stage_layers(config: RunConfig, pp: int) -> list[int]:
    """Return how many layers each stage has in a pipeline of ``pp`` ranks.

    A stage has 1 or 2 layers, and more where the configuration has more.
    """
    counts = [len(stage.layers) for stage in _stages(config)]
    wanted = pp * config.virtual_stages
    if wanted < len(counts):  # first and last stage, and as many in between as there is room for
        last = len(counts) - 1
        counts = [counts[round(i * last / max(wanted - 1, 1))] for i in range(wanted)]
    low, high = min(counts), max(counts)
    if low == high:
        return [2 if low > 1 and wanted <= 4 else 1] * wanted
    return [1 if count == low else 2 for count in counts]


def _stages(config: RunConfig) -> Any:
    """Return the configuration's stages. A vocabulary that only the tokenizer knows counts as one of 32 000."""
    if config.model.vocab_size is not None:
        return config.stages()
    return replace(config, model=replace(config.model, vocab_size=32000)).stages()


def _model(config: RunConfig, layout: SubLayout, contexts: tuple[int, int]) -> dict[str, Any]:
    m, tp, (cp, _) = (
        config.model,
        layout.tp,
        layout.contexts,
    )  # of those that share samples, whose heads differ
    full_tp, (full_cp, _) = config.parallel.tensor_model_parallel_size, contexts
    most = 8 if m.num_query_groups == m.num_attention_heads else 4
    if m.num_query_groups < full_tp:  # ranks share them
        groups = max(1, m.num_query_groups * tp // full_tp)
    elif (of_rank := m.num_query_groups // full_tp) >= full_cp:
        groups = tp * cp * like(of_rank // full_cp, max(2, most // (tp * cp)))
    else:  # context-parallel ranks share them
        groups = tp * max(k for k in range(1, cp) if cp % k == 0 and k <= of_rank)
    # Ranks share query heads evenly, too.
    units = tp * max(groups // tp, cp)
    full_units = full_tp * max(m.num_query_groups // full_tp, full_cp)
    heads = units * like(m.num_attention_heads // full_units, max(3, 8 // units))
    width = _head_width(config)
    hidden = heads * width
    if m.kv_channels * m.num_attention_heads != m.hidden_size:  # heads that do not fill the residual stream
        hidden = 2 * heads * width if m.hidden_size > m.kv_channels * m.num_attention_heads else hidden // 2
    length = like(m.seq_length, SEQUENCE + m.seq_length % 2)
    for of_tensor, full_tensor in ((tp, full_tp), (1, 1)):
        small, full = (
            lcm(tensor * heads * keys, 2 * keys if keys > 1 else 1)
            for tensor, (heads, keys) in ((of_tensor, layout.contexts), (full_tensor, contexts))
        )
        if m.seq_length % full == 0:
            length = small * like(m.seq_length // full, max(2, SEQUENCE // small))
            break
    return {
        "num_query_groups": groups,
        "num_attention_heads": heads,
        "kv_channels": width,
        "hidden_size": hidden,
        "ffn_hidden_size": tp * like(m.ffn_hidden_size // full_tp, -(-5 * hidden // (2 * tp))),
        "seq_length": length,
        "max_position_embeddings": length if m.seq_length == m.max_position_embeddings else 2 * length,
        **_rotary(m, width, length),
        **_vocabulary(config, tp),
        **_experts(config, layout, hidden),
        **_kinds(m, sum(stage_layers(config, layout.pp))),
        **({"norm_epsilon": QK_NORM_EPSILON} if m.qk_norm != "none" else {}),
        **({"sliding_window": length // 2} if m.sliding_window and m.sliding_window < m.seq_length else {}),
    }


def _experts(config: RunConfig, layout: SubLayout, hidden: int) -> dict[str, Any]:
    """Keep whether tokens go to one expert, to several or to all, or to those of some groups, whether there are
    shared ones, and whether a rank has several."""
    m, tp, ep = config.model, layout.tp, layout.ep
    if m.num_experts is None:
        return {}
    count = ep * like(m.num_experts // config.parallel.expert_model_parallel_size, max(2, 6 // ep))
    topk = count if m.moe_router_topk == m.num_experts else min(like(m.moe_router_topk, 3), count - 1)
    grouped: dict[str, Any] = {}
    if m.moe_router_group_topk is not None:
        count, topk = lcm(8, ep), 3
        grouped = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
    shared = m.moe_shared_expert_intermediate_size
    return {
        "num_experts": count,
        "moe_router_topk": topk,
        **grouped,
        "moe_ffn_hidden_size": like(m.expert_width, hidden),
        "moe_shared_expert_intermediate_size": shared and tp * like(shared // tp, -(-hidden // tp)),
    }


def _kinds(model: ModelConfig, layers: int) -> dict[str, Any]:
    """Choose that many layers, of each kind in turn."""
    kinds = layer_kinds(model)
    firsts = sorted({kinds.index(kind) for kind in kinds})
    return some_layers(model, [firsts[i % len(firsts)] for i in range(layers)])


def _rotary(m: ModelConfig, width: int, length: int) -> dict[str, Any]:
    """Keep on which side of the original length samples are, and as many divisors as there are pairs."""
    values: dict[str, Any] = {}
    if m.rotary_scaling in ("dynamic", "longrope") and m.seq_length > m.rotary_original_max_position:
        values["rotary_original_max_position"] = length // 2
    pairs = int(width * m.rotary_percent) // 2
    for name in ("rotary_short_factor", "rotary_long_factor"):
        if divisors := getattr(m, name):
            values[name] = tuple(divisors[i * len(divisors) // pairs] for i in range(pairs))
    return values


def _head_width(config: RunConfig) -> int:
    """Choose a head width that is odd or even as the configuration's is.

    Rotary positions rotate pairs of elements, so the rotated part of the width is whole pairs.
    """
    m = config.model
    widths = count(HEAD + m.kv_channels % 2, 2)
    if m.position_embedding_type != "rope":
        return next(widths)
    turned, least = ((width, int(width * m.rotary_percent)) for width in widths), 2
    if m.rotary_scaling == "dynamic":
        least = 4
    return next(width for width, channels in turned if channels >= least and channels % 2 == 0)


def _vocabulary(config: RunConfig, tp: int) -> dict[str, Any]:
    """Choose a vocabulary of about 60 words, with padding where the configuration's has it.

    A vocabulary that only the tokenizer knows is taken to have padding.
    """
    m = config.model
    divisible, exactly = min(m.make_vocab_size_divisible_by, 8), m.pad_vocab_size_to
    unit = divisible * tp
    full = m.make_vocab_size_divisible_by * config.parallel.tensor_model_parallel_size
    padded = m.vocab_size is None or (
        m.vocab_size % full != 0 if exactly is None else m.vocab_size != exactly
    )
    whole = unit * max(2, 64 // unit)
    return {
        # More than the multiple, so that it is seen to count.
        "pad_vocab_size_to": None if exactly is None else whole + unit * padded,
        "vocab_size": whole - unit + 1 if padded else whole,
        "make_vocab_size_divisible_by": divisible,
    }


def _batch(config: RunConfig, world: World, layout: SubLayout) -> dict[str, Any]:
    batch = config.batch
    micro = like(batch.micro_batch_size, 2)
    d = layout.world.world_size // (layout.tp * layout.pp * layout.cp)
    group = layout.pp if config.micro_batch_multiple > 1 else 1
    have = config.num_micro_batches(world)
    if group > 1:
        count = 2 * group if have >= 2 * config.micro_batch_multiple else group
    else:
        count = min(have, max(2, layout.pp + 1))
    quantum = micro * d * group
    values: dict[str, Any] = {"micro_batch_size": micro, "global_batch_size": micro * d * count}
    if batch.rampup_batch_size is not None:
        values["global_batch_size"] = max(2 * quantum, micro * d * count)
        # two sizes, the second from the middle of the run on
        increment = values["global_batch_size"] - quantum
        values["rampup_batch_size"] = (quantum, increment, 2 * quantum)
    return values


def _zero(config: RunConfig, world: World, layout: SubLayout, values: Mapping[str, Any]) -> dict[str, Any]:
    zero, out = config.zero, dict[str, Any]()
    if zero.zero_shard is not None:
        out["zero_shard"] = layout.shards
    if zero.zero_hpz_partition_size is not None:
        out["zero_hpz_partition_size"] = layout.shards[0]
    out["zero_unit_layers"] = min(zero.zero_unit_layers, 2)
    full = _layer_numel(config.model) // config.parallel.tensor_model_parallel_size
    small = _layer_numel(section_of(ModelConfig, values)) // layout.tp
    if full > zero.zero_chunk_numel:  # as many chunks as there are
        out["zero_chunk_numel"] = max(1, small * zero.zero_chunk_numel // full)
    wire = config.wire(world)
    if wire.codings:  # what was exact as a vector still is, and matrices still are not
        out["zero_block_size"] = BLOCK
        exact = [size for before, size in _vectors(config, layout.tp, values) if before <= wire.exact_numel]
        out["zero_exact_numel"] = max(exact, default=0)
    return out


def _loss_chunk(config: RunConfig, values: Mapping[str, Any]) -> int | None:
    """Keep whether the loss has several chunks, and whether the last is smaller. auto takes such ones."""
    chunk, full = config.training.loss_chunk_tokens, config.batch.micro_batch_size * config.own_length
    tokens = values["micro_batch_size"] * values["seq_length"] // values["context_parallel_size"]
    if chunk is None or not isinstance(chunk, str) and chunk >= full:
        return chunk and tokens
    if isinstance(chunk, str) or full % chunk:
        return next(size for size in range(2, tokens + 2) if tokens % size)
    return tokens // next(n for n in range(2, tokens + 1) if tokens % n == 0)


def _vectors(config: RunConfig, tp: int, values: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return (elements on a rank, shrunk) of norms, of those of single heads where there are some, and of the MLP's
    biases where it has some.
    """
    m, full_tp = config.model, config.parallel.tensor_model_parallel_size
    biases = [(m.ffn_hidden_size // full_tp, values["ffn_hidden_size"] // tp)] if m.add_bias_linear else []
    heads = [(m.kv_channels, values["kv_channels"])] if m.qk_norm == "head" else []
    return [(m.hidden_size, values["hidden_size"]), *heads, *biases]


def _layer_numel(model: ModelConfig) -> int:
    """Return the number of elements of the matrices of the largest layer."""
    return max(kind.matrices for kind in model_spec(model).layers)


def _notes(config: RunConfig, world: World) -> list[str]:
    notes = [
        "data are made-up tokens, a fifth of which do not count in the loss; the learning rate is constant; initial "
        f"weights have a standard deviation of {INIT_STD}"
    ]
    if config.model.qk_norm != "none":
        notes.append(
            f"norms have an epsilon of {QK_NORM_EPSILON:g}, with which small sizes are well-conditioned"
        )
    if config.model.vocab_size is None:
        notes.append("the vocabulary is the tokenizer's, which is not read: one that needs padding is run")
    if config.batch.rampup_seq_length:
        notes.append("sequences have one length")
    if config.wire(world).codings:
        notes.append(f"quantised blocks have {BLOCK} elements, so that slices of small matrices hold several")
    return notes
