"""GPT-NeoX (Black et al. 2022) and Pythia rotate a part of each head and compute attention and MLP in parallel."""

from __future__ import annotations

from typing import Any

from megazero.families.config_json.field_groups import biases, gelu
from megazero.families.config_json.huggingface import Config, FieldGroup, HuggingFace
from megazero.families.config_json.rotary_fields import rotary
from megazero.families.family import PLAIN_ATTENTION, Family, TensorNames

CHOICES = {"position_embedding_type": "rope", "normalization": "LayerNorm", "swiglu": False}
PARALLEL, SEQUENTIAL = "parallel-two-norms", "sequential"
NAMES = TensorNames(
    model={
        "embedding.tokens": "gpt_neox.embed_in",
        "head.norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
    },
    layer_prefix="gpt_neox.layers.",
    layer={
        "input_norm": "input_layernorm",
        "attention.q_proj": ("attention.query_key_value", 0),
        "attention.k_proj": ("attention.query_key_value", 1),
        "attention.v_proj": ("attention.query_key_value", 2),
        "attention.o_proj": "attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
    fused="groups",
    needs={
        **CHOICES,
        "squared_relu": False,
        "embed_layernorm": False,
        "qk_norm": "none",
        "transformer_block_type": (PARALLEL, SEQUENTIAL),
    },
    equal=PLAIN_ATTENTION,
    aliases={"lm_head.weight": "embed_out.weight"},  # since transformers 5
)


def _block(config: Config) -> dict[str, Any]:
    return {"transformer_block_type": PARALLEL if config.get("use_parallel_residual", True) else SEQUENTIAL}


RESIDUAL = FieldGroup(
    ("use_parallel_residual",),
    _block,
    lambda options: {"use_parallel_residual": options.transformer_block_type == PARALLEL},
)


def _attention_bias(config: Config) -> dict[str, Any]:
    return {"add_attention_bias": config.get("attention_bias", True)}


GPT_NEOX = Family(
    name="gpt_neox",
    defaults={
        **CHOICES,
        "add_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
        "rotary_percent": 0.25,
        "openai_gelu": False,
        "transformer_block_type": PARALLEL,
    },
    names=(NAMES,),
    hugging_face=HuggingFace(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        fields={
            "num_layers": "num_hidden_layers",
            "hidden_size": "hidden_size",
            "ffn_hidden_size": "intermediate_size",
            "num_attention_heads": "num_attention_heads",
            "max_position_embeddings": "max_position_embeddings",
            "norm_epsilon": "layer_norm_eps",
        },
        absent={"max_position_embeddings": 2048, "norm_epsilon": 1e-5},
        tied=False,
        groups=(
            FieldGroup(("attention_bias",), _attention_bias, biases(mlp=False).write),
            gelu("hidden_act", "gelu"),
            rotary("rotary_emb_base", "rotary_pct", 0.25),
            RESIDUAL,
        ),
    ),
)
