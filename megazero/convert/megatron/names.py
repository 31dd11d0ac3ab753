"""What Megatron calls the decoder's tensors.

megatron-core has two spellings: of its own layers, and of TransformerEngine's, which hold a norm with the linear
behind it. torch_dist has the second for both. Both are read as the first.
"""

from __future__ import annotations

import re
from dataclasses import replace

from megazero.config.model.mixers import MIXERS
from megazero.families.family import TensorNames

# What layers that predict further tokens have beside a layer.
_FURTHER = ("enorm", "hnorm", "eh_proj")
NAMES = TensorNames(
    model={
        "embedding.tokens": "embedding.word_embeddings",
        "embedding.positions": "embedding.position_embeddings",
        "head.norm": "decoder.final_layernorm",
        "head": "output_layer",
    },
    layer_prefix="decoder.layers.",
    layer={
        "input_norm": "input_layernorm",
        **{module: there for mixer in MIXERS.values() for module, there in mixer.megatron.items()},
        "mlp_norm": "pre_mlp_layernorm",
        "mlp.up_proj": "mlp.linear_fc1",
        "mlp.down_proj": "mlp.linear_fc2",
        "mlp.activation": "mlp.activation_func",
        "mlp.router": "mlp.router",
        "mlp.experts.up_proj": "mlp.experts.{}.linear_fc1",
        "mlp.experts.down_proj": "mlp.experts.{}.linear_fc2",
        "mlp.shared_expert.up_proj": "mlp.shared_experts.linear_fc1",
        "mlp.shared_expert.down_proj": "mlp.shared_experts.linear_fc2",
        "mlp.shared_gate": "mlp.shared_experts.gate",
        **{name: name for name in _FURTHER},
        "output_norm": "final_layernorm",
    },
    groups={"self_attention.linear_qkv": "num_query_groups"},
    needs={
        "position_embedding_type": ("rope", "learned_absolute"),
        "qk_norm": ("none", "head"),
        "transformer_block_type": "sequential",
        "attention_output_gate": False,
        "experimental_attention_variant": None,
        "single_branches": False,
    },
)
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"

# Other spellings, in the order in which they are replaced.
_SPELLINGS = tuple(
    (re.compile(pattern), ours)
    for pattern, ours in (
        (r"^module\.", ""),
        (r"\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$", r".input_layernorm.\1"),
        (r"\.linear_(q|kv)_up_proj\.layer_norm_(weight|bias)$", r".\1_layernorm.\2"),
        (r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$", r".pre_mlp_layernorm.\1"),
        (r"\.mlp\.experts\.experts\.(?=\d)", ".mlp.experts."),
        (r"\.mlp\.router\.expert_bias$", ".mlp.router.e_score_correction_bias"),
        (r"\.mlp\.shared_experts\.gate_weight$", ".mlp.shared_experts.gate.weight"),
        (r"^(mtp\.layers\.\d+)\.mtp_model_layer\.", r"\1.transformer_layer."),
    )
)
# What is no weight: states of the optimizer and of random generators, scales of fp8, frequencies of rotary positions.
_PASSED_OVER = re.compile(
    r"^(chained_\d+\.)?optimizer\.|^rng_state|^rerun_state|\._extra_state|rotary_pos_emb\.inv_freq$"
    r"|^word_embeddings_for_head\.|\.local_tokens_per_expert$"
)


def own_spelling(name: str) -> str | None:
    """Return a tensor's name as ``NAMES`` spells it, or None if it is no weight."""
    if _PASSED_OVER.search(name):
        return None
    for pattern, ours in _SPELLINGS:
        name = pattern.sub(ours, name)
    return name


def behind(name: str, layers: int) -> str:
    """Return the name of a tensor of ``NAMES`` in a model of so many layers, behind which others have their own."""
    found = re.fullmatch(rf"{re.escape(NAMES.layer_prefix)}(\d+)\.(.*)", name)
    if found is None or int(found[1]) < layers:
        return name
    inside = "" if found[2].startswith((*_FURTHER, "final_layernorm")) else "transformer_layer."
    return f"mtp.layers.{int(found[1]) - layers}.{inside}{found[2]}"


def names_of(gated: bool) -> TensorNames:
    """Return the names of a model whose MLP has a gate, in the first half of a tensor, or none."""
    halves = {"gate_proj": 0, "up_proj": 1}
    up = {role: tensor for role, tensor in NAMES.layer.items() if role.endswith(".up_proj")}
    fused = {
        role.replace("up_proj", half): (str(tensor), part)
        for role, tensor in up.items()
        for half, part in halves.items()
    }
    return replace(NAMES, layer={**NAMES.layer, **fused}) if gated else NAMES
