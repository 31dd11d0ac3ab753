"""Where the decoder's parameters lie in the Hugging Face tensors of its family.

Two tables: what the parameters are (shape, and the dim cut over the tp axis), and what each family
calls them. GPT-2 stores linears transposed (Conv1D) and q, k, v side by side in one; BLOOM stores
q, k, v in one tensor, interleaved by head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megazero.checkpoint.placement import Placement, Segment
from megazero.models.decoder_config import DecoderConfig
from megazero.tp import TensorParallel, VocabShard


@dataclass(frozen=True)
class ParameterRole:
    """One parameter of the whole model: its name, its full shape, the dim cut over tp (None: whole)."""

    name: str
    shape: tuple[int, ...]
    split: int | None


@dataclass(frozen=True)
class FamilyNames:
    """A family's tensor names: module names here to module names there, (name, part) where fused."""

    model: dict[str, str]
    layer_prefix: str
    layer: dict[str, str | tuple[str, int]]
    transposed: bool = False


_LLAMA = FamilyNames(
    model={
        "embedding.tokens": "model.embed_tokens",
        "embedding.positions": "model.embed_positions",
        "embedding.norm": "model.embed_norm",
        "head.norm": "model.norm",
        "head": "lm_head",
    },
    layer_prefix="model.layers.",
    layer={
        "input_norm": "input_layernorm",
        "attention.q_proj": "self_attn.q_proj",
        "attention.k_proj": "self_attn.k_proj",
        "attention.v_proj": "self_attn.v_proj",
        "attention.o_proj": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate_proj": "mlp.gate_proj",
        "mlp.up_proj": "mlp.up_proj",
        "mlp.down_proj": "mlp.down_proj",
    },
)
_GPT2 = FamilyNames(
    model={
        "embedding.tokens": "transformer.wte",
        "embedding.positions": "transformer.wpe",
        "head.norm": "transformer.ln_f",
        "head": "lm_head",
    },
    layer_prefix="transformer.h.",
    layer={
        "input_norm": "ln_1",
        "attention.q_proj": ("attn.c_attn", 0),
        "attention.k_proj": ("attn.c_attn", 1),
        "attention.v_proj": ("attn.c_attn", 2),
        "attention.o_proj": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
    },
    transposed=True,
)
_BLOOM = FamilyNames(
    model={
        "embedding.tokens": "transformer.word_embeddings",
        "embedding.norm": "transformer.word_embeddings_layernorm",
        "head.norm": "transformer.ln_f",
        "head": "lm_head",
    },
    layer_prefix="transformer.h.",
    layer={
        "input_norm": "input_layernorm",
        "attention.q_proj": ("self_attention.query_key_value", 0),
        "attention.k_proj": ("self_attention.query_key_value", 1),
        "attention.v_proj": ("self_attention.query_key_value", 2),
        "attention.o_proj": "self_attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
)
_FAMILIES = {"llama": _LLAMA, "gpt2": _GPT2, "bloom": _BLOOM}


def _norm_roles(c: DecoderConfig, name: str) -> Iterator[ParameterRole]:
    yield ParameterRole(f"{name}.weight", (c.hidden_size,), None)
    if c.normalization == "layernorm":
        yield ParameterRole(f"{name}.bias", (c.hidden_size,), None)


def _layer_roles(c: DecoderConfig) -> Iterator[ParameterRole]:
    h, q, kv, ffn = c.hidden_size, c.query_size, c.kv_size, c.ffn_hidden_size
    yield from _norm_roles(c, "input_norm")
    for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
        yield ParameterRole(f"attention.{name}.weight", (rows, h), 0)
        if c.qkv_bias:
            yield ParameterRole(f"attention.{name}.bias", (rows,), 0)
    yield ParameterRole("attention.o_proj.weight", (h, q), 1)
    if c.linear_bias:
        yield ParameterRole("attention.o_proj.bias", (h,), None)
    yield from _norm_roles(c, "mlp_norm")
    for name in ("gate_proj", "up_proj") if c.activation == "swiglu" else ("up_proj",):
        yield ParameterRole(f"mlp.{name}.weight", (ffn, h), 0)
        if c.linear_bias:
            yield ParameterRole(f"mlp.{name}.bias", (ffn,), 0)
    yield ParameterRole("mlp.down_proj.weight", (h, ffn), 1)
    if c.linear_bias:
        yield ParameterRole("mlp.down_proj.bias", (h,), None)


def parameter_roles(c: DecoderConfig) -> Iterator[ParameterRole]:
    """Every parameter of the whole model, true vocabulary, in the order of ``named_parameters``."""
    yield from (role for role in _embedding_roles(c))
    for index in range(c.num_layers):
        for role in _layer_roles(c):
            yield ParameterRole(f"layers.{index}.{role.name}", role.shape, role.split)
    if not c.tied_embeddings:
        yield ParameterRole("head.weight", (c.vocab_size, c.hidden_size), 0)
    yield from _norm_roles(c, "head.norm")


def _embedding_roles(c: DecoderConfig) -> Iterator[ParameterRole]:
    if c.position == "learned":
        yield ParameterRole("embedding.positions", (c.max_position_embeddings, c.hidden_size), None)
    yield ParameterRole("embedding.tokens.weight", (c.vocab_size, c.hidden_size), 0)
    if c.embedding_norm:
        yield from _norm_roles(c, "embedding.norm")


def replicated_names(c: DecoderConfig) -> set[str]:
    """Parameters that tensor parallelism does not cut."""
    return {role.name for role in parameter_roles(c) if role.split is None}


def decoder_placements(c: DecoderConfig, tp: TensorParallel) -> dict[str, Placement]:
    """Parameter name to placement, for the rank ``tp.rank``."""
    return {role.name: _placement(c, tp, role) for role in parameter_roles(c)}


def _stored_name(family: FamilyNames, name: str) -> tuple[str, int | None]:
    """The stored tensor's name, and which of q, k, v the parameter is within it if it is fused."""
    if name == "embedding.positions":
        return f"{family.model[name]}.weight", None
    module, kind = name.rsplit(".", 1)
    if not module.startswith("layers."):
        return f"{family.model[module]}.{kind}", None
    _, index, module = module.split(".", 2)
    entry = family.layer[module]
    stored, part = entry if isinstance(entry, tuple) else (entry, None)
    return f"{family.layer_prefix}{index}.{stored}.{kind}", part


def _placement(c: DecoderConfig, tp: TensorParallel, role: ParameterRole) -> Placement:
    family = _FAMILIES[c.layout]
    name, part = _stored_name(family, role.name)
    if role.name in ("embedding.tokens.weight", "head.weight"):
        shard = VocabShard.of(c.vocab_size, c.make_vocab_size_divisible_by, tp)
        return Placement.plain(name, role.shape, (shard.rows, c.hidden_size), shard.start)
    local = list(role.shape)
    if role.split is not None:
        local[role.split] = tp.share(role.shape[role.split], role.name)
    rows = local[0]
    first = tp.rank * rows if role.split == 0 else 0
    offset1 = tp.rank * local[1] if role.split == 1 else 0
    segments: tuple[Segment, ...] = (Segment(0, rows, first),)
    shape = role.shape
    if part is not None:
        shape = (3 * role.shape[0], *role.shape[1:])
        segments = _fused_segments(c, part, first, rows)
    transposed = family.transposed and len(shape) == 2 and role.name != "embedding.positions"
    return Placement(name, shape[::-1] if transposed else shape, tuple(local), segments, offset1, transposed)


def _fused_segments(c: DecoderConfig, part: int, first: int, rows: int) -> tuple[Segment, ...]:
    """Rows ``first`` .. of part 0, 1 or 2 (q, k, v) in the family's fused tensor."""
    if c.layout == "gpt2":
        return (Segment(0, rows, part * c.query_size + first),)
    d = c.head_size
    return tuple(Segment(j, d, 3 * (first + j) + part * d) for j in range(0, rows, d))
