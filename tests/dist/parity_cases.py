"""Which combinations the parity tests run: the full product of legal ones, and a seeded pairwise cover of it."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import combinations, product
from typing import Any

from megazero.config import RunConfig, World, make_config, resolve_shards
from megazero.mesh.grid import data_ranks
from megazero.mesh.levels import make_levels

Layout = tuple[int, int, int, str, str | None, bool]  # tp, dp, per_node, shards, lifetime, sequence_parallel
# By ranks. What a pipeline adds is there in the third step (the first records the order of use, the second gathers
# ahead by it, and so does the third after another update); more ranks than cores take turns at every message.
LONGEST = 20
STEPS = dict.fromkeys((1, 2, 4, 8), LONGEST)
STEPS_OF_PIPELINES = {2: LONGEST, 4: 6, 8: 3}
FEW_STEPS, FEW_STEPS_OF_PIPELINES = {1: 6, 2: 6, 4: 3, 8: 3}, {2: 3, 4: 3, 8: 2}
PRESETS = ("ddp", "zero1", "zero2", "zero3", "mics", "hpz")
LIFETIMES = (None, "step", "resident", "gathered")
EXPLICIT = ("1,2,4", "2,2,4", "1,2,2")  # an axis for each of P, G, OS and the replicas
UP_TO_FOUR = [(tp, dp) for tp in (1, 2, 4) for dp in (1, 2, 4) if tp * dp <= 4]
MICRO_BATCHES, TIED = (1, 3), (False, True)
RECOMPUTE, DTYPES, FAMILIES = ("none", "selective", "mlp", "full"), ("fp32", "fp64"), ("llama", "gpt")
LOSS_CHUNKS = (None, 3)  # tokens of samples of 8: the last chunk is smaller
VOCABULARIES = {
    "odd": (33, 32),
    "even": (64, 8),
}  # size, divisible by; of 33, a rank of TP 4 holds no true row
# Well-conditioned in fp32: with weights twice as large, or once 20 steps of lr 1e-2 have made them so, one fp32
# rank is itself 1e-6 to 3e-6 from the truth in fp64; with these 3e-7 to 6e-7. Deeper models learn more slowly: after
# 20 steps of 3e-3 the keys' gradients in 9 layers are 1e-5 of the global norm, and one rank's are 1.2e-5 from the
# truth; after steps of 5e-4 7e-7.
LR_OF_DEEP = 5e-4
MULTI_QUERY = "multi-query"  # Llama with one key/value head, which tensor-parallel ranks share
TWO_KEY_HEADS = "two key heads"
LATENT = "latent attention"
FURTHER, FURTHER_EXPERTS = "further tokens", "experts of further tokens"
# Families of other options than their name's own.
MORE: dict[str, dict[str, Any]] = {
    MULTI_QUERY: {"model_family": "llama", "num_query_groups": 1},
    TWO_KEY_HEADS: {
        **{"model_family": "llama", "num_query_groups": 2, "squared_relu": True, "swiglu": False},
        **{"kv_channels": 8, "rotary_percent": 0.5, "pad_vocab_size_to": 128},
    },
    LATENT: {
        **{"model_family": "llama", "multi_latent_attention": True, "qk_norm": "head", "kv_lora_rank": 6},
        **{"qk_head_dim": 4, "qk_pos_emb_head_dim": 2, "v_head_dim": 3},
    },
    FURTHER: {"model_family": "llama", "mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.7},
    "qwen2-window": {"model_family": "qwen2", "num_query_groups": 4, "sliding_window": 3},
    "gemma2-documents": {
        "model_family": "gemma2",
        "num_query_groups": 2,
        "sliding_window": 5,
        "reset_attention_mask": True,
        "reset_position_ids": True,
    },
}
# Llama with experts in all layers; in all but the first, with shared experts behind a gate; so many that a
# micro-batch leaves some without tokens; or such that it leaves ranks without; with losses over samples, and over
# micro-batches.
EXPERTS: dict[str, dict[str, Any]] = {
    "experts": {"num_experts": 4, "moe_ffn_hidden_size": 12},
    "shared experts": {
        **{"num_experts": 6, "moe_router_topk": 3, "moe_ffn_hidden_size": 8, "moe_router_pre_softmax": True},
        **{"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True},
    },
    "balanced experts": {
        **{"num_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 8, "moe_z_loss_coeff": 0.3},
        **{"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 2.0},
    },
    "experts of micro-batches": {
        **{"num_experts": 6, "moe_router_topk": 4, "moe_ffn_hidden_size": 8, "moe_aux_loss_coeff": 2.0},
        **{"moe_router_score_function": "sigmoid", "moe_router_num_groups": 3, "moe_router_group_topk": 2},
    },
    "experts of steps": {
        **{"num_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 8, "moe_router_pre_softmax": True},
        "moe_router_load_balancing_type": ("global_aux_loss", "aux_loss", "seq_aux_loss"),
        "moe_aux_loss_coeff": (2.0, 0.5, 0.3),
    },
    "even experts": {
        **{"num_experts": 6, "moe_router_topk": 1, "moe_ffn_hidden_size": 8, "moe_z_loss_coeff": 0.3},
        **{"moe_router_load_balancing_type": "sinkhorn", "moe_router_score_function": "sigmoid"},
    },
    "latent experts": {
        **{"model_family": "deepseek_v3", "q_lora_rank": 6, "kv_lora_rank": 8, "qk_head_dim": 4},
        **{"qk_pos_emb_head_dim": 4, "v_head_dim": 8, "num_experts": 6, "moe_router_topk": 3},
        **{"moe_layer_freq": (0, 1), "moe_ffn_hidden_size": 8, "moe_shared_expert_intermediate_size": 16},
        **{"moe_router_num_groups": 3, "moe_router_group_topk": 2, "moe_router_group_best": 2},
        "moe_router_enable_expert_bias": False,
    },
    FURTHER_EXPERTS: {
        **{"num_experts": 6, "moe_ffn_hidden_size": 8, "moe_shared_expert_intermediate_size": 16},
        **{"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 2.0, "mtp_num_layers": 1},
        **{"moe_layer_freq": (0, 1), "mtp_loss_scaling_factor": 0.7},
    },
    "idle experts": {"num_experts": 32, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    "idle ranks": {"num_experts": 8, "moe_router_topk": 1, "moe_router_pre_softmax": True},
}
IDLE_RANKS = "idle ranks"  # all tokens go to the first two experts
SIZES = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 40,
    "num_attention_heads": 8,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "seq_length": 8,
    "init_method_std": 0.1,
    "lr": 3e-3,  # of 2 layers
    "weight_decay": 0.1,
    "clip_grad": 0.5,
    "train_iters": LONGEST,
    "mock_data": True,
}


@dataclass(frozen=True)
class Model:
    """What the one-rank reference depends on. batch: samples of a step. block: of a micro-batch, and together: the
    micro-batches of a round, if they matter."""

    family: str
    tied: bool
    vocabulary: str
    dtype: str
    batch: int
    layers: int = 2
    block: int = 1
    together: int = 1

    def values(self) -> dict[str, Any]:
        size, divisor = VOCABULARIES[self.vocabulary]
        return {
            **SIZES,
            "num_layers": self.layers,
            "lr": SIZES["lr"] if self.layers == 2 else LR_OF_DEEP,
            "model_family": "llama" if self.family in EXPERTS else self.family,
            "num_query_groups": {"llama": 4, "qwen2": 4}.get(self.family),
            **EXPERTS.get(self.family, {}),
            **({"moe_layer_freq": (0,) + (1,) * (self.layers - 1)} if "shared" in self.family else {}),
            "untie_embeddings_and_output_weights": not self.tied,
            "vocab_size": size,
            "make_vocab_size_divisible_by": divisor,
            "params_dtype": self.dtype,
            "global_batch_size": self.batch,
            **MORE.get(self.family, {}),
        }

    def config(self) -> RunConfig:
        """One rank, one micro-batch, nothing recomputed."""
        return make_config({**self.values(), "micro_batch_size": self.batch}, World(1, 1))


@dataclass(frozen=True)
class Case:
    """One run to compare with one rank. shards: a preset or P,G,OS. per_node: ranks of a node."""

    tp: int
    dp: int
    per_node: int
    shards: str
    lifetime: str | None
    sequence_parallel: bool
    micro_batches: int
    tied: bool
    vocabulary: str
    recompute: str
    dtype: str
    family: str
    pp: int = 1
    dp_outermost: bool = False
    schedule: str = "1f1b"
    virtual: int = 1
    layers: int = 2
    compiled: str | None = None  # --compile-backend
    loss_chunk: int | None = None
    cp: int = 1
    keys: int = 1  # groups of these that gather keys
    ep: int = 1
    levels: tuple[int, ...] = ()  # --level-sizes

    @property
    def world(self) -> int:
        return self.pp * self.tp * self.dp

    @property
    def crosses(self) -> bool:
        """Whether ranks of several nodes share the experts."""
        return self.ep > self.h * self.tp

    @property
    def way(self) -> dict[str, Any]:
        """How the ranks that share samples attend to whole ones."""
        heads = self.cp // self.keys
        if heads > 1 and self.keys > 1:
            return {"cp_comm_type": ("a2a+p2p",), "hierarchical_context_parallel_sizes": (heads, self.keys)}
        return {"cp_comm_type": ("a2a" if self.keys == 1 else "all_gather",)} if self.cp > 1 else {}

    @property
    def near(self) -> tuple[int, ...]:
        """The data-parallel ranks of a node, and of each level above it."""
        levels = make_levels(self.world, self.per_node, self.levels)
        return data_ranks(levels, self.tp, self.pp, self.dp_outermost)

    @property
    def h(self) -> int:
        return self.near[0]

    @property
    def mesh(self) -> tuple[Any, ...]:
        """(world, tp, (P, G, OS), ranks of a node, ...): cases with equal ones can share a mesh."""
        factors = resolve_shards(_factors(self.shards), self.dp, self.near).factors
        ends = self.tied or self.family in (FURTHER, FURTHER_EXPERTS)
        pipeline = (self.pp, self.dp_outermost, ends) if self.pp > 1 else ()
        return (
            self.world,
            self.tp,
            factors,
            self.per_node,
            self.levels,
            self.cp,
            self.keys,
            self.ep,
            self.family == "experts of steps",
            *pipeline,
        )

    @property
    def id(self) -> str:
        words = [f"tp{self.tp}-dp{self.dp}-node{self.per_node}", self.shards, self.lifetime or ""]
        if self.pp > 1:
            words[:0] = [f"pp{self.pp}", self.schedule, f"v{self.virtual}" if self.virtual > 1 else ""]
            words += ["dp-pp-tp" if self.dp_outermost else "", f"layers{self.layers}"]
        words += ["sp" if self.sequence_parallel else "", f"micro{self.micro_batches}"]
        words += ["tied" if self.tied else "untied", self.vocabulary, self.recompute, self.dtype, self.family]
        words += [self.compiled or ""]
        words += [
            f"chunks{self.loss_chunk}" if self.loss_chunk else "",
            f"cp{self.cp // self.keys}x{self.keys}" if self.cp > 1 else "",
            f"ep{self.ep}" if self.ep > 1 else "",
            f"levels{self.levels}" if self.levels else "",
        ]
        return "-".join(word for word in words if word)

    @property
    def model(self) -> Model:
        batch = 12 if self.pp * self.dp <= 4 else 24  # every split into micro-batches is of the same samples
        micro = self.dp // self.cp * self.micro_batches
        matter = self.family in ("experts of micro-batches", "experts of steps", "even experts")
        block, together = (batch // micro, self.dp // self.cp) if matter else (1, 1)
        return Model(self.family, self.tied, self.vocabulary, self.dtype, batch, self.layers, block, together)

    def config(self) -> RunConfig:
        factors = _factors(self.shards)
        named = isinstance(factors, str)
        values = {
            **self.model.values(),
            "tensor_model_parallel_size": self.tp,
            "sequence_parallel": self.sequence_parallel,
            "ranks_per_node": self.per_node,
            "level_sizes": self.levels,
            "zero_preset": factors if named else None,
            "zero_shard": None if named else factors,
            "zero_params_lifetime": self.lifetime,
            "micro_batch_size": self.model.batch // (self.dp // self.cp * self.micro_batches),
            "context_parallel_size": self.cp,
            **self.way,
            "expert_model_parallel_size": self.ep,
            "moe_dispatch_across_nodes": "exact" if self.crosses else "no",
            "recompute_granularity": self.recompute,
            "loss_chunk_tokens": self.loss_chunk,
        }
        if self.compiled:
            values |= {"compile": True, "compile_backend": self.compiled}
        if self.pp > 1:
            values |= {
                "pipeline_model_parallel_size": self.pp,
                "use_tp_pp_dp_mapping": self.dp_outermost,
                "pipeline_schedule": self.schedule,
                "num_virtual_stages_per_pipeline_rank": self.virtual if self.virtual > 1 else None,
            }
        return make_config(values, World(self.world, self.per_node))


def _factors(shards: str) -> str | tuple[int, ...]:
    return shards if shards in PRESETS else tuple(map(int, shards.split(",")))


def layouts(worlds: Sequence[tuple[int, int]]) -> Iterator[Layout]:
    """Legal (tp, dp, per_node, shards, lifetime, sequence_parallel); the configuration refuses the others.

    A lifetime that changes nothing and explicit factors that a preset has are left out.
    """
    for tp, dp in worlds:
        for per_node in (n for n in range(1, tp * dp + 1) if tp * dp % n == 0 and n % tp == 0):
            h = data_ranks(make_levels(tp * dp, per_node), tp)[0]
            seen: set[Any] = set()
            for shards, lifetime in product((*PRESETS, *EXPLICIT), LIFETIMES):
                try:
                    resolved = resolve_shards(_factors(shards), dp, (h,), lifetime)
                except ValueError:
                    continue
                name = (shards, resolved) if shards in PRESETS else resolved
                if name in seen:
                    continue
                seen.update((name, resolved))
                for sequence in (False, True) if tp > 1 else (False,):
                    yield tp, dp, per_node, shards, lifetime, sequence


def full_product() -> list[Case]:
    """All legal cases on up to 4 ranks, about 30 000."""
    model = list(product(MICRO_BATCHES, TIED, VOCABULARIES, RECOMPUTE, DTYPES, FAMILIES))
    every = product(layouts(UP_TO_FOUR), model, LOSS_CHUNKS)
    return [Case(*layout, *rest, loss_chunk=chunk) for layout, rest, chunk in every]


def preset_product() -> list[Case]:
    """Every preset and node size on up to 4 ranks x the model's dimensions with the odd vocabulary, about 1000.

    Presets with the same factors here (all of them at DP 1; mics, hpz and zero3 on one node) are one case. The
    family and the chunks of the loss take turns: they go by the sum of the other dimensions' indices, so that each
    occurs with every pair of their values.
    """
    named: dict[tuple, Layout] = {}
    for layout in layouts(UP_TO_FOUR):
        tp, dp, per_node, shards, lifetime, sequence = layout
        if shards in PRESETS and lifetime is None:
            factors = resolve_shards(shards, dp, data_ranks(make_levels(tp * dp, per_node), tp)).factors
            named.setdefault((tp, dp, per_node, factors, sequence), layout)
    dimensions: tuple[Sequence[Any], ...] = (MICRO_BATCHES, TIED, RECOMPUTE, DTYPES)
    found = []
    for index, layout in enumerate(named.values()):
        for others in product(*(enumerate(values) for values in dimensions)):
            turn = index + sum(i for i, _ in others)
            micro, tied, recompute, dtype = (value for _, value in others)
            chunk = LOSS_CHUNKS[turn % 2]
            found.append(
                Case(*layout, micro, tied, "odd", recompute, dtype, FAMILIES[turn % 2], loss_chunk=chunk)
            )
    return found


def pairwise_cover(
    cases: Sequence[Case], seed: int, sample: int = 48, chosen: Sequence[Case] = ()
) -> list[Case]:
    """Some of the cases, with every pair of values of two dimensions that occurs in them. Deterministic.

    chosen: cases that are run anyway, whose pairs need no others.

    Greedy: take the first pair not covered yet, and of ``sample`` random cases that have it the one that
    covers most.
    """
    generator = random.Random(seed)
    holders: dict[tuple, list[int]] = defaultdict(list)
    for index, case in enumerate(cases):
        for pair in pairs(case):
            holders[pair].append(index)
    had = {pair for case in chosen for pair in pairs(case)}
    rarest = sorted(holders.keys() - had, key=lambda pair: (len(holders[pair]), repr(pair)))
    open_pairs = dict.fromkeys(rarest)
    found: list[Case] = []
    while open_pairs:
        having = holders[next(iter(open_pairs))]
        tried = generator.sample(having, min(sample, len(having)))
        best = max(tried, key=lambda i: sum(pair in open_pairs for pair in pairs(cases[i])))
        found.append(cases[best])
        for pair in pairs(cases[best]):
            open_pairs.pop(pair, None)
    return found


def pairs(case: Case) -> list[tuple]:
    """Of two dimensions and their values in this case."""
    values = [(f.name, getattr(case, f.name)) for f in fields(case)]
    return list(combinations(values, 2))


def eight_ranks() -> list[Case]:
    """A chosen few: all presets and explicit factors over TP 2 x DP 4 on 2 and 4 nodes, DP 8 and TP 4 x DP 2 on 2;
    the model's dimensions take turns."""
    rest = list(product(MICRO_BATCHES, TIED, VOCABULARIES, RECOMPUTE, DTYPES, FAMILIES))
    shapes = {(2, 4, 2), (2, 4, 4), (1, 8, 4), (4, 2, 4)}
    every = [c for c in layouts([(2, 4), (1, 8), (4, 2)]) if c[:3] in shapes and c[4] is None]
    return [
        Case(*layout, *rest[index * 31 % len(rest)], loss_chunk=LOSS_CHUNKS[index % 2])
        for index, layout in enumerate(every)
    ]
