"""Falcon (Almazrouei et al. 2023) in its two shapes: 7B, and 40B with 180B and 11B."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megazero.families.config_json.field_groups import gelu
from megazero.families.config_json.huggingface import Config, FieldGroup, HuggingFace
from megazero.families.config_json.rotary_fields import ROTARY
from megazero.families.family import FILLING_HEADS, PLAIN_LAYER, Family, TensorNames, qkv

CHOICES = {"position_embedding_type": "rope", "normalization": "LayerNorm", "swiglu": False}
ONE_NORM, TWO_NORMS = "parallel", "parallel-two-norms"
NAMES = TensorNames(
    model={
        "embedding.tokens": "transformer.word_embeddings",
        "head.norm": "transformer.ln_f",
        "head": "lm_head",
    },
    layer_prefix="transformer.h.",
    layer={
        "input_norm": "input_layernorm",
        **qkv("self_attention.query_key_value"),
        "attention.o_proj": "self_attention.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
    groups={"self_attention.query_key_value": "num_query_groups"},
    needs={**PLAIN_LAYER, **CHOICES, "squared_relu": False, "transformer_block_type": ONE_NORM},
    equal=FILLING_HEADS,
)
NAMES_OF_TWO_NORMS = replace(
    NAMES,
    layer={**NAMES.layer, "input_norm": "ln_attn", "mlp_norm": "ln_mlp"},
    needs={**NAMES.needs, "transformer_block_type": TWO_NORMS},
)


def _read_bias(config: Config) -> dict[str, Any]:
    bias = bool(config.get("bias"))
    return {"add_bias_linear": bias, "add_attention_bias": bias}


def _read_block(config: Config) -> dict[str, Any]:
    heads, norms = config.get("num_attention_heads"), config.get("num_ln_in_parallel_attn")
    multi_query, groups = config.get("multi_query", True), config.get("num_kv_heads") or heads
    if config.get("new_decoder_architecture"):
        block = ONE_NORM if norms == 1 else TWO_NORMS
        return {"transformer_block_type": block, "num_query_groups": groups}
    if norms == 2:
        raise ValueError("num_ln_in_parallel_attn = 2 without new_decoder_architecture fails in transformers")
    if not multi_query and groups != heads:
        raise ValueError(f"num_kv_heads = {groups} needs new_decoder_architecture (without it only {heads})")
    return {"transformer_block_type": ONE_NORM, "num_query_groups": 1 if multi_query else heads}


def _write_block(options: Any) -> dict[str, Any]:
    groups, heads, block = (
        options.num_query_groups,
        options.num_attention_heads,
        options.transformer_block_type,
    )
    new = block == TWO_NORMS or groups not in (1, heads)
    return {
        "new_decoder_architecture": new,
        "multi_query": groups == 1,
        "num_kv_heads": groups if new else heads,
        "num_ln_in_parallel_attn": (2 if block == TWO_NORMS else 1) if new else None,
    }


FALCON = Family(
    name="falcon",
    defaults={
        **CHOICES,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": False,
        "openai_gelu": False,
        "transformer_block_type": ONE_NORM,
        "num_query_groups": 1,
    },
    names=(NAMES, NAMES_OF_TWO_NORMS),
    hugging_face=HuggingFace(
        "falcon",
        "FalconForCausalLM",
        fields={
            "num_layers": "num_hidden_layers",
            "hidden_size": "hidden_size",
            "ffn_hidden_size": "ffn_hidden_size",
            "num_attention_heads": "num_attention_heads",
            "max_position_embeddings": "max_position_embeddings",
            "norm_epsilon": "layer_norm_epsilon",
        },
        absent={"ffn_hidden_size": None, "max_position_embeddings": 2048, "norm_epsilon": 1e-5},
        tied=True,
        aliases={"n_embed": "hidden_size"},
        only={"alibi": (False,), "parallel_attn": (True,)},
        groups=(
            ROTARY,
            FieldGroup(("bias",), _read_bias, lambda options: {"bias": options.add_bias_linear}),
            FieldGroup(
                ("new_decoder_architecture", "multi_query", "num_kv_heads", "num_ln_in_parallel_attn"),
                _read_block,
                _write_block,
            ),
            gelu("activation", "gelu"),
        ),
    ),
)
