"""Nemotron-H and Nemotron 3 (NVIDIA 2025, arXiv 2504.03624): layers of one branch, which is Mamba-2, attention
without positions, an MLP of relu(x)^2, or experts of that."""

from __future__ import annotations

from typing import Any

from megazero.families.config_json.expert_fields import (
    DEEPSEEK_COUNT,
    OTHER_DEEPSEEK_COUNT,
    by_sigmoids,
    write_sigmoids,
)
from megazero.families.config_json.huggingface import TIED, Config, FieldGroup, HuggingFace
from megazero.families.family import Family, TensorNames, mamba

# By transformers' names of layers, of which the older ones are in files, too.
_LETTERS = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}
_TYPES, _PATTERN, _SHARED = (
    "layers_block_type",
    "hybrid_override_pattern",
    "moe_shared_expert_intermediate_size",
)
_MLP = {f"{part}_proj": f"{part}_proj" for part in ("up", "down")}
NAMES = TensorNames(
    model={
        "embedding.tokens": "backbone.embeddings",
        "head.norm": "backbone.norm_f",
        "head": "lm_head",
    },
    layer_prefix="backbone.layers.",
    layer={
        "input_norm": "norm",
        "mlp_norm": "norm",
        **mamba("mixer"),
        **{f"attention.{part}_proj": f"mixer.{part}_proj" for part in "qkvo"},
        **{f"mlp.{part}": f"mixer.{part}" for part in _MLP},
        **{f"mlp.experts.{part}": f"mixer.experts.{{}}.{part}" for part in _MLP},
        **{f"mlp.shared_expert.{part}": f"mixer.shared_experts.{part}" for part in _MLP},
        "mlp.router": "mixer.gate",
    },
    needs={
        "single_branches": True,
        "transformer_block_type": "sequential",
        "qk_norm": "none",
        "gated_mlp": False,
        "position_embedding_type": "rope",
    },
)


def _read_layers(config: Config) -> dict[str, Any]:
    types, pattern, layers = (config.get(name) for name in (_TYPES, _PATTERN, "num_hidden_layers"))
    if types is None and pattern is None:
        raise ValueError(f"{_TYPES} is missing")
    if others := sorted({*(types or ())} - _LETTERS.keys()):
        raise ValueError(f"{_TYPES} with {', '.join(others)} is not supported (only {', '.join(_LETTERS)})")
    said = f"{pattern}" if types is None else "".join(_LETTERS[kind] for kind in types)
    if pattern not in (None, said):
        raise ValueError(f"{_TYPES} is {said}, and {_PATTERN} = {pattern!r}")
    if layers not in (None, len(said)):
        raise ValueError(f"{said} has {len(said)} layers, and num_hidden_layers = {layers}")
    without = {"num_experts": None, "moe_router_topk": 2, "moe_ffn_hidden_size": None}
    return {
        "num_layers": len(said),
        "hybrid_layer_pattern": said,
        **({**by_sigmoids(config), _SHARED: config[_SHARED]} if "E" in said else without),
    }


def _write_layers(options: Any) -> dict[str, Any]:
    shared = options.moe_shared_expert_intermediate_size
    written = {_PATTERN: options.hybrid_layer_pattern, **write_sigmoids(options)}
    return written if shared is None else {**written, _SHARED: shared}


_ABSENT = {
    **{"num_experts_per_tok": 2, "norm_topk_prob": True, "n_group": 1, "topk_group": 1},
    **{"routed_scaling_factor": 1.0, _SHARED: 7688},
}
LAYERS = FieldGroup(
    (_TYPES, _PATTERN, *_ABSENT), lambda config: _read_layers({**_ABSENT, **config}), _write_layers
)
# How states begin, and are computed and kept; the shared experts count as one.
ASIDE = FieldGroup(
    (
        *("time_step_max", "time_step_floor", "time_step_limit", "chunk_size", "expand", "norm_eps"),
        *("mamba_ssm_cache_dtype", "use_mamba_kernels", "num_logits_to_keep", "moe_shared_expert_overlap"),
        *("n_shared_experts", "rescale_prenorm_residual", "mtp_layers_block_type"),
        "mtp_hybrid_override_pattern",
    )
)
_MAMBA = {
    "mamba_num_heads": "mamba_num_heads",
    "mamba_head_dim": "mamba_head_dim",
    "mamba_state_dim": "ssm_state_size",
    "mamba_num_groups": "n_groups",
    "mamba_min_time_step": "time_step_min",
}
CHOICES = {"mamba_min_time_step": 0.001, "position_embedding_type": "rope", "no_rope_freq": (1,)}
NEMOTRON_H = Family(
    name="nemotron_h",
    defaults={
        **CHOICES,
        "normalization": "RMSNorm",
        "swiglu": False,
        "squared_relu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
    },
    names=(NAMES,),
    hugging_face=HuggingFace(
        "nemotron_h",
        "NemotronHForCausalLM",
        fields={
            "num_layers": "num_hidden_layers",
            "hidden_size": "hidden_size",
            "ffn_hidden_size": "intermediate_size",
            "num_attention_heads": "num_attention_heads",
            "num_query_groups": "num_key_value_heads",
            "kv_channels": "head_dim",
            "max_position_embeddings": "max_position_embeddings",
            "norm_epsilon": "layer_norm_epsilon",
            **_MAMBA,
            **DEEPSEEK_COUNT,
        },
        absent={
            **{"num_layers": None, "num_query_groups": 8, "kv_channels": 128, "norm_epsilon": 1e-5},
            **{"max_position_embeddings": 4096, "ffn_hidden_size": 21504, "num_attention_heads": 32},
            **{"mamba_num_heads": 128, "mamba_head_dim": 64, "mamba_state_dim": 128, "mamba_num_groups": 8},
            **{"mamba_min_time_step": 0.001, "num_experts": 8, "moe_router_topk": 2},
            "moe_ffn_hidden_size": 7688,
        },
        tied=False,
        aliases={**OTHER_DEEPSEEK_COUNT, "layer_types": _TYPES, "attention_head_dim": "head_dim"},
        only={
            **{"mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu",), "conv_kernel": (4,)},
            **{"use_conv_bias": (True,), "use_bias": (False,), "mamba_proj_bias": (False,)},
            **{"mlp_bias": (False,), "attention_bias": (False,), "sliding_window": (None,)},
            # Its class has a head of its own, whatever that says.
            **{"residual_in_fp32": (False,), "moe_latent_size": (None,), TIED: (False,)},
        },
        groups=(LAYERS, ASIDE),
    ),
)
