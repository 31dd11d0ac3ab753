"""Shrinks the sizes of a configuration and keeps its structure. Pure; no torch.

It keeps the family and every choice of the model, the layout, the schedule, uneven stages, the preset or factors,
lifetimes, codecs and their rounding, recompute, ramp-up, the optimizer and the dtype. Each option says its small
value (``small_value``). Of a size that ranks share the run takes the nearest multiple that they can share; RULES
judge all of them together.
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
from megazero.config.options.fields import KEPT, SHORT, Option
from megazero.config.options.optimizers import OPTIMIZERS
from megazero.config.run import all_options, section_types
from megazero.families.layer_kinds import MAMBA, layer_kinds, mixers, some_layers
from megazero.verify.shrink_world import SubLayout, sub_layout

# Fixed: a dynamic scale would skip the first steps on its way down. Gradients of these sizes neither overflow with it
# nor become zero.
LOSS_SCALE = 1024.0
FP8_SIDE = 16  # of the smallest matrices in fp8
HEADS_OF_GROUP = 2  # query heads that share a key/value head, at most
# With norms of queries and keys, or of Mamba-2's output, which are small here, and would not be behind them: one fp32
# rank of OLMo 2 is 1.2e-6 to 2.6e-6 from the truth with 1e-5, and 4e-7 to 6e-7 with this.
INNER_NORM_EPSILON = 1e-2


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

    The run has ``steps`` steps, of one replica.
    """
    layout = sub_layout(config, world, most)
    values = {
        **{name: small_value(option, config.get(name)) for name, option in all_options().items()},
        **_parallel(config, layout),
        **_model(config, layout, config.context_levels(world)),
        **_batch(config, world, layout),
        **{opt.name: opt.default for opt in all_options().values() if opt.section == "outer"},
        **_optimizer(config),
        **_on_processors(config),
        **({"fp8_min_size": FP8_SIDE} if config.precision.fp8_format else {}),
    }
    values |= _zero(config, world, layout, values)
    values["train_iters"] = steps
    run = make_config(values, layout.world)
    carried = [
        o.name for o in all_options().values() if getattr(section_types()[o.section], "SMALL", KEPT) != SHORT
    ]
    changes = {
        name: (config.get(name), run.get(name)) for name in carried if config.get(name) != run.get(name)
    }
    return Shrunk(run, layout, changes, (*layout.notes, *_notes(config, world)))


def small_value(option: Option, value: Any) -> Any:
    """Return an option's value in a small, short run, as far as it does not depend on others (Option.small)."""
    if option.small == SHORT:
        return option.default
    if option.small == KEPT or value is None:
        return value
    return min(value, option.small) if type(value) is type(option.small) is int else option.small


def _small(name: str) -> int:
    return int(all_options()[name].small)


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
    if config.training.attention_backend != "math":
        values["attention_backend"] = "auto"
    if config.precision.params_dtype == "fp16" and not config.precision.loss_scale:
        values["loss_scale"] = LOSS_SCALE
    return values


def multiple(name: str, of: int) -> int:
    """Return the multiple of ``of`` nearest to an option's small value, at least twice ``of``."""
    return of * max(2, _small(name) // of)


def _parallel(config: RunConfig, layout: SubLayout) -> dict[str, Any]:
    values: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        **_contexts(*layout.contexts),
        "expert_model_parallel_size": layout.ep,
        "ranks_per_node": layout.world.ranks_per_node,
        "level_sizes": layout.level_sizes,
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
    """Return how many layers each stage has in a pipeline of ``pp`` ranks. Of uneven stages the first has more."""
    have, wanted = [len(stage.layers) for stage in _stages(config)], pp * config.virtual_stages
    counts = set(have)
    if 0 in counts and wanted > 2:
        return [min(1, have[0]), *[1] * (wanted - 2), min(1, have[-1])]
    if len(counts) > 1:
        return [2, *[1] * (wanted - 1)]
    kinds = -(-len(set(layer_kinds(config.model))) // wanted)
    return [max(kinds, 1 if counts == {1} or wanted > 4 else 2)] * wanted


def _stages(config: RunConfig) -> Any:
    """Return the configuration's stages. A vocabulary that only the tokenizer knows counts as one of 32 000."""
    if config.model.vocab_size is not None:
        return config.stages()
    return replace(config, model=replace(config.model, vocab_size=32000)).stages()


def _model(config: RunConfig, layout: SubLayout, contexts: tuple[int, int]) -> dict[str, Any]:
    m, tp, (cp, keys) = config.model, layout.tp, layout.contexts
    heads, groups = _heads(config, layout, contexts[0])
    linear = min(m.linear_num_key_heads, multiple("linear_num_key_heads", tp))
    shared = min(m.linear_num_value_heads // m.linear_num_key_heads, HEADS_OF_GROUP)
    grouped = min(m.mamba_num_groups, multiple("mamba_num_groups", tp))
    width = _head_width(m)
    hidden = heads * width
    if m.kv_channels * m.num_attention_heads != m.hidden_size:  # heads that do not fill the residual stream
        hidden = 2 * hidden if m.hidden_size > m.kv_channels * m.num_attention_heads else hidden // 2
    length = multiple("seq_length", lcm(tp * cp * keys, 2 * keys if keys > 1 else 1))
    return {
        "num_query_groups": groups,
        "num_attention_heads": heads,
        "linear_num_key_heads": linear,
        "linear_num_value_heads": linear * shared,
        "mamba_num_groups": grouped,
        "mamba_num_heads": grouped * max(1, min(m.mamba_num_heads // m.mamba_num_groups, HEADS_OF_GROUP)),
        "kv_channels": width,
        "hidden_size": hidden,
        "ffn_hidden_size": tp * -(-5 * hidden // (2 * tp)),
        "seq_length": length,
        "max_position_embeddings": length if m.seq_length == m.max_position_embeddings else 2 * length,
        **_rotary(m, width, length),
        **_vocabulary(m, tp),
        **_experts(config, layout, hidden),
        **_kinds(m, sum(stage_layers(config, layout.pp))),
        **({"norm_epsilon": INNER_NORM_EPSILON} if _norms_inside(m) else {}),
        **({"sliding_window": length // 2} if m.sliding_window and m.sliding_window < m.seq_length else {}),
    }


def _norms_inside(m: ModelConfig) -> bool:
    return m.qk_norm != "none" or MAMBA in mixers(m)


def _heads(config: RunConfig, layout: SubLayout, full_cp: int) -> tuple[int, int]:
    """Return how many query heads and key/value heads there are.

    Tensor-parallel ranks, and those that swap heads, share key/value heads if they share the configuration's.
    """
    m, tp, cp = config.model, layout.tp, layout.contexts[0]
    full_tp = config.parallel.tensor_model_parallel_size
    of_rank = m.num_query_groups // full_tp
    if of_rank >= full_cp:
        same = m.num_query_groups == m.num_attention_heads
        most = multiple("num_attention_heads" if same else "num_query_groups", tp * cp)
        groups = min(tp * cp * (of_rank // full_cp), most)
    elif of_rank:
        groups = tp * max(k for k in range(1, cp) if cp % k == 0 and k <= of_rank)
    else:
        groups = max(1, m.num_query_groups * tp // full_tp)
    of_group = m.num_attention_heads // (full_tp * max(of_rank, full_cp))
    return tp * max(groups // tp, cp) * min(of_group, HEADS_OF_GROUP), groups


def _experts(config: RunConfig, layout: SubLayout, hidden: int) -> dict[str, Any]:
    """Keep whether tokens go to one expert or to several, or to those of some groups, whether there are shared ones,
    and whether a rank has several."""
    m, tp, ep = config.model, layout.tp, layout.ep
    if m.num_experts is None:
        return {}
    of_rank = m.num_experts // config.parallel.expert_model_parallel_size
    experts, shared = min(ep * of_rank, multiple("num_experts", ep)), m.moe_shared_expert_intermediate_size
    values = {
        "num_experts": experts,
        "moe_router_topk": min(m.moe_router_topk, _small("moe_router_topk"), experts),
        "moe_ffn_hidden_size": hidden,
        "moe_shared_expert_intermediate_size": shared and tp * -(-hidden // tp),
    }
    if m.moe_router_group_topk is not None:
        values |= {"num_experts": lcm(8, ep), "moe_router_topk": 3}
        values |= {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
    return values


def _kinds(model: ModelConfig, layers: int) -> dict[str, Any]:
    """Choose that many layers, of each kind in turn."""
    kinds = layer_kinds(model)
    firsts = sorted({kinds.index(kind) for kind in kinds})
    return some_layers(model, [firsts[i % len(firsts)] for i in range(layers)])


def _rotary(m: ModelConfig, width: int, length: int) -> dict[str, Any]:
    """Keep on which side of the original length samples are, and as many divisors as there are pairs."""
    values: dict[str, Any] = {}
    if m.rotary_scaling == "longrope" and m.seq_length > m.rotary_original_max_position:
        values["rotary_original_max_position"] = length // 2
    pairs = int(width * m.rotary_percent) // 2
    for name in ("rotary_short_factor", "rotary_long_factor"):
        if divisors := getattr(m, name):
            values[name] = tuple(divisors[i * len(divisors) // pairs] for i in range(pairs))
    return values


def _head_width(m: ModelConfig) -> int:
    """Return the width of a head, of which rotary positions turn whole pairs of elements."""
    part = m.rotary_percent if m.position_embedding_type == "rope" else 1.0
    turned = ((width, int(width * part)) for width in count(_small("kv_channels"), 2))
    return next(width for width, channels in turned if channels >= 2 and channels % 2 == 0)


def _vocabulary(m: ModelConfig, tp: int) -> dict[str, Any]:
    """Choose a vocabulary that needs padding, if any can: that is more to get right."""
    divisible = min(m.make_vocab_size_divisible_by, _small("make_vocab_size_divisible_by"))
    words = multiple("vocab_size", divisible * tp)
    return {
        "vocab_size": words - divisible * tp + 1,
        # More than the multiple, so that it is seen to count.
        "pad_vocab_size_to": m.pad_vocab_size_to and words + divisible * tp,
    }


def _batch(config: RunConfig, world: World, layout: SubLayout) -> dict[str, Any]:
    batch = config.batch
    micro = min(batch.micro_batch_size, _small("micro_batch_size"))
    d = layout.world.world_size // (layout.tp * layout.pp * layout.cp)
    group = layout.pp if config.micro_batch_multiple > 1 else 1
    have = config.num_micro_batches(world)
    number = min(have, max(2, layout.pp + 1))
    if group > 1:
        number = 2 * group if have >= 2 * config.micro_batch_multiple else group
    quantum = micro * d * group
    values: dict[str, Any] = {"global_batch_size": micro * d * number}
    if batch.resized_by:
        values["global_batch_size"] = max(2 * quantum, micro * d * number)
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
    if zero.num_distributed_optimizer_instances > 1:
        ranks = layout.world.world_size // (layout.tp * layout.pp)
        out["num_distributed_optimizer_instances"] = ranks // layout.shards[2]
    matrices = max(kind.matrices for kind in model_spec(config.model).layers)
    if matrices // config.parallel.tensor_model_parallel_size > zero.zero_chunk_numel:
        out["zero_chunk_numel"] = values["hidden_size"] ** 2  # several chunks
    wire = config.wire(world)
    if wire.codings:  # norms that were exact still are, and matrices are not
        out["zero_block_size"] = _small("zero_block_size")
        exact = wire.exact_numel >= config.model.hidden_size
        out["zero_exact_numel"] = values["hidden_size"] if exact else 0
    return out


def _notes(config: RunConfig, world: World) -> list[str]:
    notes = [
        "data are made-up tokens, and a fifth of them do not count in the loss; the learning rate is constant; "
        f"initial weights have a standard deviation of {all_options()['init_method_std'].small}"
    ]
    if config.outer.outer_meet:
        notes.append(
            "one replica is run, and meets no others: tests/dist/outer compares their meetings with DiLoCo"
        )
    if _norms_inside(config.model):
        notes.append(
            f"norms have an epsilon of {INNER_NORM_EPSILON:g}, with which small sizes are well-conditioned"
        )
    if config.wire(world).codings:
        block = _small("zero_block_size")
        notes.append(f"quantised blocks have {block} elements, so that slices of small matrices hold several")
    return notes
