"""GPT-2 (Radford et al. 2019) has LayerNorm, learned positions, GELU, biases and tied embeddings.

It is what Megatron trains unless its flags say otherwise, with dropout, and the default here.
"""

from __future__ import annotations

from megazero.families.config_json.field_groups import gelu
from megazero.families.config_json.huggingface import HuggingFace
from megazero.families.family import PLAIN_ATTENTION, PLAIN_LAYER, Family, TensorNames, qkv

CHOICES = {
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "swiglu": False,
    "add_bias_linear": True,
}
NAMES = TensorNames(
    model={
        "embedding.tokens": "transformer.wte",
        "embedding.positions": "transformer.wpe",
        "head.norm": "transformer.ln_f",
        "head": "lm_head",
    },
    layer_prefix="transformer.h.",
    layer={
        "input_norm": "ln_1",
        **qkv("attn.c_attn"),
        "attention.o_proj": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
    },
    transposed=True,
    needs={
        **PLAIN_LAYER,
        **CHOICES,
        "add_attention_bias": True,
        "squared_relu": False,
    },
    equal=PLAIN_ATTENTION,
)
GPT = Family(
    name="gpt",
    defaults={
        **CHOICES,
        "untie_embeddings_and_output_weights": False,
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
    },
    names=(NAMES,),
    rounds_swiglu_down=True,
    exact_gelu_without_biases=True,
    hugging_face=HuggingFace(
        "gpt2",
        "GPT2LMHeadModel",
        fields={
            "num_layers": "n_layer",
            "hidden_size": "n_embd",
            "ffn_hidden_size": "n_inner",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "norm_epsilon": "layer_norm_epsilon",
        },
        absent={"ffn_hidden_size": None, "norm_epsilon": 1e-5},
        tied=True,
        aliases={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
        },
        only={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
        },
        groups=(gelu("activation_function", "gelu_new"),),
    ),
)
