"""The model section, and what each family sets in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megazero.config.fields import option

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "embed_layernorm": False,
    },
    "gpt": {
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "swiglu": False,
        "add_bias_linear": True,
        "untie_embeddings_and_output_weights": False,
        "embed_layernorm": False,
    },
    "bloom": {
        "position_embedding_type": "alibi",
        "normalization": "LayerNorm",
        "swiglu": False,
        "add_bias_linear": True,
        "untie_embeddings_and_output_weights": False,
        "embed_layernorm": True,
    },
}


@dataclass(frozen=True)
class ModelConfig:
    """The decoder. Fields that a family or other sizes decide are None until the configuration is resolved."""

    model_family: str = option(
        "llama",
        "family that sets the defaults marked 'by family'",
        choices=tuple(FAMILIES),
    )
    num_layers: int | None = option(None, "transformer layers", low=1, required=True)
    hidden_size: int | None = option(None, "width of the residual stream", low=1, required=True)
    ffn_hidden_size: int | None = option(
        None,
        "width inside the MLP (default: 4 x hidden; with --swiglu 8/3 x hidden, rounded up to 64)",
        low=1,
    )
    num_attention_heads: int | None = option(None, "attention heads", low=1, required=True)
    num_query_groups: int | None = option(
        None, "key/value heads of grouped-query attention (default: as many as heads)", low=1
    )
    kv_channels: int | None = option(None, "width of one head (default: hidden / heads)", low=1)
    seq_length: int | None = option(None, "tokens of one sample", low=1, required=True)
    max_position_embeddings: int | None = option(None, "longest sequence (default: --seq-length)", low=1)
    position_embedding_type: str | None = option(
        None, "how positions enter (by family)", choices=("rope", "learned_absolute", "alibi")
    )
    rotary_base: float = option(10000.0, "base of rotary frequencies", above=0)
    rotary_scaling: str = option(
        "none",
        "scaling of rotary frequencies for long contexts",
        choices=("none", "linear", "llama3"),
        consts={"use-rope-scaling": "llama3"},
    )
    rotary_scaling_factor: float = option(
        8.0, "factor of that scaling", above=0, aliases=("rope-scaling-factor",)
    )
    rotary_low_freq_factor: float = option(1.0, "llama3: low-frequency factor", above=0)
    rotary_high_freq_factor: float = option(4.0, "llama3: high-frequency factor", above=0)
    rotary_original_max_position: int = option(8192, "llama3: context length before scaling", low=1)
    normalization: str | None = option(None, "norm layers (by family)", choices=("RMSNorm", "LayerNorm"))
    norm_epsilon: float = option(1e-5, "epsilon inside norms", above=0)
    swiglu: bool | None = option(None, "SwiGLU in the MLP, else GELU (by family)")
    add_bias_linear: bool | None = option(
        None, "biases in linear layers (by family)", negative="disable-bias-linear"
    )
    untie_embeddings_and_output_weights: bool | None = option(
        None, "a head with its own weights, else the embedding's (by family)"
    )
    embed_layernorm: bool | None = option(None, "a norm after the embedding (by family)")
    attention_dropout: float = option(0.0, "dropout of attention probabilities", low=0, below=1)
    hidden_dropout: float = option(0.0, "dropout before each residual sum", low=0, below=1)
    init_method_std: float = option(0.02, "standard deviation of initial weights", above=0)
    vocab_size: int | None = option(None, "vocabulary before padding (default: the tokenizer's)", low=1)
    make_vocab_size_divisible_by: int = option(
        128, "the padded vocabulary is a multiple of this and of the tensor-parallel size", low=1
    )
