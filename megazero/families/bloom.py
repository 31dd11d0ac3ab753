"""BLOOM (Le Scao et al. 2022) has ALiBi, a LayerNorm after the embedding, GELU, biases and tied embeddings."""

from __future__ import annotations

from typing import Any

from megazero.families.config_json.huggingface import Config, FieldGroup, HuggingFace
from megazero.families.family import PLAIN_ATTENTION, PLAIN_LAYER, Family, TensorNames, qkv

CHOICES = {
    "position_embedding_type": "alibi",
    "normalization": "LayerNorm",
    "swiglu": False,
    "add_bias_linear": True,
    "embed_layernorm": True,
}
NAMES = TensorNames(
    model={
        "embedding.tokens": "transformer.word_embeddings",
        "embedding.norm": "transformer.word_embeddings_layernorm",
        "head.norm": "transformer.ln_f",
        "head": "lm_head",
    },
    layer_prefix="transformer.h.",
    layer={
        "input_norm": "input_layernorm",
        **qkv("self_attention.query_key_value"),
        "attention.o_proj": "self_attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
    fused="groups",
    needs={
        **PLAIN_LAYER,
        **CHOICES,
        "add_attention_bias": True,
        "squared_relu": False,
    },
    equal=PLAIN_ATTENTION,
)


def _mlp_width(config: Config) -> dict[str, Any]:
    if config.get("n_inner") not in (None, 4 * (config.get("hidden_size") or 0)):
        raise ValueError(f"n_inner = {config['n_inner']!r} is not supported (only 4 x hidden_size, or null)")
    return {}


# The MLP's width is 4 x hidden, as the option's default; transformers' class has no field for it.
MLP_WIDTH = FieldGroup(("n_inner",), _mlp_width)
BLOOM = Family(
    name="bloom",
    defaults={**CHOICES, "untie_embeddings_and_output_weights": False},
    names=(NAMES,),
    hugging_face=HuggingFace(
        "bloom",
        "BloomForCausalLM",
        fields={
            "num_layers": "n_layer",
            "hidden_size": "hidden_size",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "seq_length",
            "norm_epsilon": "layer_norm_epsilon",
        },
        absent={"max_position_embeddings": 2048, "norm_epsilon": 1e-5},
        tied=True,
        aliases={
            "n_embed": "hidden_size",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        only={"apply_residual_connection_post_layernorm": (False,)},
        groups=(MLP_WIDTH,),
    ),
)
