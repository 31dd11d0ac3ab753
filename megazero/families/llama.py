"""Llama 1 to 3 and models of its shape have RMSNorm, rotary positions, SwiGLU and no biases.

- Mistral (Jiang et al. 2023) looks back through a window at most. Mixtral (2024) has experts in all layers.
- SmolLM3 (Bakouch et al. 2025) has rotary positions in three layers of four.
- Granite 3 (IBM 2024) has multipliers of embeddings, scores and residual sums, and a divisor of logits. Its mixtures
  have experts in all layers, stored in one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megazero.families.config_json.expert_fields import EVERY_LAYER, LOCAL_COUNT, OTHER_LOCAL_COUNT
from megazero.families.config_json.field_groups import WHOLE_HEADS, biases, single
from megazero.families.config_json.huggingface import FieldGroup, HuggingFace
from megazero.families.config_json.layer_groups import UNTURNED_LAYERS, window
from megazero.families.config_json.rotary_fields import ROTARY, rotary
from megazero.families.family import Family, TensorNames

DEFAULTS = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
}
# embed_positions, which no Llama has, makes these names express every mixture. Qwen3 and OLMo 2 have norms of queries
# and keys. OLMo 2 has norms of outputs, and then none of inputs. Experts have the names of Qwen's.
NAMES = TensorNames(
    model={
        "embedding.tokens": "model.embed_tokens",
        "embedding.positions": "model.embed_positions",
        "head.norm": "model.norm",
        "head": "lm_head",
    },
    layer_prefix="model.layers.",
    layer={
        "input_norm": "input_layernorm",
        "attention_output_norm": "post_attention_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate_proj": "mlp.gate_proj",
        "mlp.up_proj": "mlp.up_proj",
        "mlp.down_proj": "mlp.down_proj",
        "mlp.activation": "mlp.act_fn",
        "mlp.router": "mlp.gate",
        "mlp.experts.gate_proj": "mlp.experts.{}.gate_proj",
        "mlp.experts.up_proj": "mlp.experts.{}.up_proj",
        "mlp.experts.down_proj": "mlp.experts.{}.down_proj",
        "mlp.shared_expert.gate_proj": "mlp.shared_expert.gate_proj",
        "mlp.shared_expert.up_proj": "mlp.shared_expert.up_proj",
        "mlp.shared_expert.down_proj": "mlp.shared_expert.down_proj",
        "mlp.shared_gate": "mlp.shared_expert_gate",
        "mlp_output_norm": "post_feedforward_layernorm",
    },
    needs={"transformer_block_type": ("sequential", "parallel", "parallel-two-norms", "output-norm")},
)
# Of the four norms of a layer (Gemma 2 and 3), the one before the MLP has another name.
SANDWICH_NAMES = replace(
    NAMES,
    layer={**NAMES.layer, "mlp_norm": "pre_feedforward_layernorm"},
    needs={"transformer_block_type": "sandwich"},
)


def mixture_names(mlp: Mapping[str, str | tuple[str, int]], **needs: Any) -> TensorNames:
    """Return the names of a family whose layers all have experts: Llama's, with ``mlp`` for experts and router."""
    others = {name: entry for name, entry in NAMES.layer.items() if not name.startswith("mlp.")}
    return replace(NAMES, layer={**others, **mlp}, needs={**NAMES.needs, **needs})


# DeepSeek's name of the shared experts, which have no gate.
SHARED = "mlp.shared_expert"
DEEPSEEK_NAMES = replace(
    NAMES,
    layer={
        own: entry.replace(SHARED, f"{SHARED}s")
        if own.startswith(SHARED) and isinstance(entry, str)
        else entry
        for own, entry in NAMES.layer.items()
        if own != "mlp.shared_gate"
    },
)
FIELDS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
}
WITHOUT_HEAD_DIM = {name: field for name, field in FIELDS.items() if name != "kv_channels"}
ABSENT = {"num_query_groups": None, "kv_channels": None, "norm_epsilon": 1e-6}
SILU = {"hidden_act": ("silu", "swish")}  # one function of transformers, by two names


def relative(
    name: str,
    architecture: str,
    *,
    groups: tuple[FieldGroup, ...],
    choices: Mapping[str, Any] | None = None,
    names: tuple[TensorNames, ...] = (NAMES,),
    fields: Mapping[str, str] = FIELDS,
    absent: Mapping[str, Any] | None = None,
    tied: bool = False,
    only: Mapping[str, tuple[Any, ...]] = SILU,
    aliases: Mapping[str, str] | None = None,
    model_type: str | None = None,
    other_types: tuple[str, ...] = (),
) -> Family:
    """Return the record of a family that is Llama except for what is given.

    ``choices`` are defaults that differ from Llama's, ``absent`` what an absent field means where that differs.
    With ``tied``, embeddings and head are tied by default, in a new model as in a config.json. ``model_type`` is
    given where transformers has another name; ``other_types`` are read, too. See ``Family`` and ``HuggingFace`` for
    the rest.
    """
    return Family(
        name=name,
        defaults={**DEFAULTS, "untie_embeddings_and_output_weights": not tied, **(choices or {})},
        names=names,
        hugging_face=HuggingFace(
            model_type or name,
            architecture,
            fields=fields,
            absent={**ABSENT, **(absent or {})},
            tied=tied,
            aliases=aliases or {},
            only=only,
            groups=groups,
            other_types=other_types,
        ),
    )


LLAMA = relative(
    "llama", "LlamaForCausalLM", names=(NAMES, SANDWICH_NAMES), groups=(biases(mlp=True), ROTARY, WHOLE_HEADS)
)
MISTRAL = relative(
    "mistral",
    "MistralForCausalLM",
    absent={"num_query_groups": 8, "max_position_embeddings": 131072},
    groups=(ROTARY, window(4096)),
)
MIXTRAL = relative(
    "mixtral",
    "MixtralForCausalLM",
    names=(
        mixture_names(
            {
                "mlp.router": "block_sparse_moe.gate",
                "mlp.experts.gate_proj": "block_sparse_moe.experts.{}.w1",
                "mlp.experts.up_proj": "block_sparse_moe.experts.{}.w3",
                "mlp.experts.down_proj": "block_sparse_moe.experts.{}.w2",
            }
        ),
    ),
    fields={**FIELDS, **LOCAL_COUNT},
    absent={
        **{"num_query_groups": 8, "max_position_embeddings": 131072, "norm_epsilon": 1e-5},
        **{"num_experts": 8, "moe_router_topk": 2},
    },
    aliases=OTHER_LOCAL_COUNT,
    only={**SILU, "router_jitter_noise": (0.0,)},
    groups=(rotary(absent_base=1e6), window(None), EVERY_LAYER),
)
SMOLLM3 = relative(
    "smollm3",
    "SmolLM3ForCausalLM",
    absent={"num_query_groups": 4, "max_position_embeddings": 32768},
    tied=True,
    groups=(biases(mlp=True), rotary(absent_base=2e6), UNTURNED_LAYERS),
)
ATTENTION_MULTIPLIER = single("attention_multiplier", "softmax_scale", 1.0, "attention_scale")
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
GRANITE = relative(
    "granite",
    "GraniteForCausalLM",
    fields={**FIELDS, **{name: name for name in MULTIPLIERS}},
    absent={"max_position_embeddings": 2048, **dict.fromkeys(MULTIPLIERS, 1.0)},
    groups=(ATTENTION_MULTIPLIER, biases(mlp=True), ROTARY),
)
GRANITEMOE = relative(
    "granitemoe",
    "GraniteMoeForCausalLM",
    names=(
        mixture_names(
            {
                "mlp.router": "block_sparse_moe.router.layer",
                "mlp.experts.gate_proj": ("block_sparse_moe.input_linear", 0),
                "mlp.experts.up_proj": ("block_sparse_moe.input_linear", 1),
                "mlp.experts.down_proj": "block_sparse_moe.output_linear",
            },
            gated_mlp=True,
        ),
    ),
    fields={**GRANITE.hugging_face.fields, **LOCAL_COUNT},
    absent={**GRANITE.hugging_face.absent, "num_experts": 8, "moe_router_topk": 2},
    aliases=OTHER_LOCAL_COUNT,
    groups=(ATTENTION_MULTIPLIER, biases(mlp=False), ROTARY, EVERY_LAYER),
)
