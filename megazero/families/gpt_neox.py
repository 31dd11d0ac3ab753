"""GPT-NeoX (Black et al. 2022) and Pythia rotate a part of each head and compute attention and MLP in parallel."""

from __future__ import annotations

from megazero.families.config_json.field_groups import chosen, gelu, single
from megazero.families.config_json.huggingface import HuggingFace
from megazero.families.config_json.rotary_fields import rotary
from megazero.families.family import PLAIN_ATTENTION, PLAIN_LAYER, Family, TensorNames, qkv

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
        **qkv("attention.query_key_value"),
        "attention.o_proj": "attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
    groups={"attention.query_key_value": "num_query_groups"},
    needs={
        **PLAIN_LAYER,
        **CHOICES,
        "squared_relu": False,
        "transformer_block_type": (PARALLEL, SEQUENTIAL),
    },
    equal=PLAIN_ATTENTION,
    aliases={"lm_head.weight": "embed_out.weight"},  # since transformers 5
)


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
            single("attention_bias", "add_attention_bias", True),
            gelu("hidden_act", "gelu"),
            rotary("rotary_emb_base", "rotary_pct", 0.25),
            chosen("use_parallel_residual", "transformer_block_type", (SEQUENTIAL, PARALLEL), True),
        ),
    ),
)
