"""The families as configurations, and configurations from Hugging Face's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megazero.models.decoder_config import DecoderConfig, RopeScaling


def llama(**sizes: Any) -> DecoderConfig:
    """RMSNorm, rotary positions, SwiGLU, no biases; untied unless said otherwise."""
    return DecoderConfig(**sizes)


def gpt2(**sizes: Any) -> DecoderConfig:
    """LayerNorm, learned positions, GELU, biases, tied (Radford et al. 2019)."""
    return DecoderConfig(**{**_CLASSIC, "position": "learned", "layout": "gpt2", **sizes})


def bloom(**sizes: Any) -> DecoderConfig:
    """ALiBi, LayerNorm after the embedding, GELU, biases, tied (Le Scao et al. 2022)."""
    family = {"position": "alibi", "layout": "bloom", "embedding_norm": True}
    return DecoderConfig(**{**_CLASSIC, **family, **sizes})


_CLASSIC = {
    "normalization": "layernorm",
    "activation": "gelu",
    "qkv_bias": True,
    "linear_bias": True,
    "tied_embeddings": True,
}


def from_hf_config(config: Mapping[str, Any], **overrides: Any) -> DecoderConfig:
    """The configuration of a Llama, GPT-2 or BLOOM model from its config.json.

    overrides: DecoderConfig fields (recompute, dropout, ...). Dropout is 0 unless given here.
    Raises ValueError naming a model type or a setting that the decoder does not have.
    """
    readers = {"llama": _from_llama, "gpt2": _from_gpt2, "bloom": _from_bloom}
    kind = config.get("model_type")
    if kind not in readers:
        raise ValueError(f"model_type = {kind!r} is none of {', '.join(readers)}")
    return readers[kind](config, overrides)


def _refuse(config: Mapping[str, Any], supported: Mapping[str, tuple[Any, ...]]) -> None:
    errors = [
        f"{name} = {config[name]!r} is not supported (only {', '.join(map(repr, values))})"
        for name, values in supported.items()
        if name in config and config[name] not in values
    ]
    if errors:
        raise ValueError(f"{config['model_type']} config: " + "; ".join(errors))


def _from_llama(c: Mapping[str, Any], overrides: Mapping[str, Any]) -> DecoderConfig:
    _refuse(c, {"hidden_act": ("silu",)})
    if c.get("mlp_bias", False) != c.get("attention_bias", False):
        raise ValueError("llama config: attention_bias and mlp_bias must be equal")
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    return llama(
        **{
            "num_layers": c["num_hidden_layers"],
            "hidden_size": c["hidden_size"],
            "ffn_hidden_size": c["intermediate_size"],
            "num_heads": c["num_attention_heads"],
            "num_kv_heads": c.get("num_key_value_heads"),
            "head_dim": c.get("head_dim"),
            "vocab_size": c["vocab_size"],
            "max_position_embeddings": c["max_position_embeddings"],
            "norm_eps": c.get("rms_norm_eps", 1e-6),
            "rope_base": rope.get("rope_theta", c.get("rope_theta", 10000.0)),
            "rope_scaling": _rope_scaling(rope),
            "qkv_bias": c.get("attention_bias", False),
            "linear_bias": c.get("mlp_bias", False),
            "tied_embeddings": c.get("tie_word_embeddings", False),
            "init_std": c.get("initializer_range", 0.02),
            **overrides,
        }
    )


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", rope["factor"])
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            rope["factor"],
            rope["low_freq_factor"],
            rope["high_freq_factor"],
            rope["original_max_position_embeddings"],
        )
    raise ValueError(f"rope_type = {kind!r} is none of default, linear, llama3")


def _from_gpt2(c: Mapping[str, Any], overrides: Mapping[str, Any]) -> DecoderConfig:
    _refuse(
        c,
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
        },
    )
    return gpt2(
        **{
            "num_layers": c["n_layer"],
            "hidden_size": c["n_embd"],
            "ffn_hidden_size": c.get("n_inner") or 4 * c["n_embd"],
            "num_heads": c["n_head"],
            "vocab_size": c["vocab_size"],
            "max_position_embeddings": c["n_positions"],
            "norm_eps": c.get("layer_norm_epsilon", 1e-5),
            "tied_embeddings": c.get("tie_word_embeddings", True),
            "init_std": c.get("initializer_range", 0.02),
            **overrides,
        }
    )


def _from_bloom(c: Mapping[str, Any], overrides: Mapping[str, Any]) -> DecoderConfig:
    _refuse(c, {"apply_residual_connection_post_layernorm": (False,)})
    hidden = c.get("hidden_size", c.get("n_embed"))
    return bloom(
        **{
            "num_layers": c["n_layer"],
            "hidden_size": hidden,
            "ffn_hidden_size": 4 * hidden,
            "num_heads": c.get("n_head", c.get("num_attention_heads")),
            "vocab_size": c["vocab_size"],
            "max_position_embeddings": c.get("seq_length", 2048),
            "norm_eps": c.get("layer_norm_epsilon", 1e-5),
            "tied_embeddings": c.get("tie_word_embeddings", True),
            "init_std": c.get("initializer_range", 0.02),
            **overrides,
        }
    )
