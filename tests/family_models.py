"""Small models of transformers: every family that is read here, in each of its variants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.config.model.section import ModelConfig
from megazero.models.placements import stored_tensors

transformers = pytest.importorskip("transformers", "5.23")  # variants have the names of its fields

# No pad token: transformers gives its embedding no gradient.
SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": None,
}
LLAMA = {
    **SIZES,
    "intermediate_size": 80,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
WHOLE_ROPE = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
YARN_MSCALE = {
    **YARN,
    "mscale": 0.7,
    "mscale_all_dim": 0.4,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "truncate": False,
}
YARN_FACTOR = {**YARN, "attention_factor": 1.2}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
LONGROPE |= {"short_factor": [1.0, 1.1, 1.3], "long_factor": [1.5, 2.5, 7.0]}
MULTIPLIERS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2}
MULTIPLIERS["logits_scaling"] = 1.7
# Of 16 channels half turn. Without a partial_rotary_factor: half.
GLM = {**LLAMA, "head_dim": 16, "eos_token_id": None}
GPT2 = {
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "vocab_size": 101,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "attn_implementation": "eager",
}
NEOX = {**SIZES, "intermediate_size": 112, "max_position_embeddings": 64, "attn_implementation": "eager"}
NEOX["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
# As in verification: with a small epsilon, norms of small queries and keys are ill-conditioned.
NORMED = {**LLAMA, "rms_norm_eps": 1e-2}
WINDOW = {**LLAMA, "use_sliding_window": True, "sliding_window": 5}
OLMO3_ROPE = {
    "full_attention": {**YARN_FACTOR, "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
LOCAL_ROPE = {"rope_type": "default", "rope_theta": 100.0}
GEMMA3_ROPE = {"full_attention": LINEAR_ROPE, "sliding_attention": LOCAL_ROPE}
GEMMA = {
    **NORMED,
    "head_dim": 16,
    "sliding_window": 5,
    "query_pre_attn_scalar": 12,
    "tie_word_embeddings": True,
}
STARCODER2 = {**LLAMA, "tie_word_embeddings": True, "norm_epsilon": 1e-4}
FALCON = {**SIZES, "max_position_embeddings": 64, "attn_implementation": "sdpa"}
NEW_FALCON = {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}

EXPERTS = {
    **NORMED,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
}
EXPERTS |= {"head_dim": 16}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 36, "norm_topk_prob": False}
LOCAL_EXPERTS = {**LLAMA, "num_local_experts": 6, "num_experts_per_tok": 2}
ROUTED = {**EXPERTS, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1}
ROUTED = {name: value for name, value in ROUTED.items() if name != "num_experts"}
ROUTED |= {"num_nextn_predict_layers": 0}  # transformers has no such layers
GROUPED = {"num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
# One width alone would not show which is which.
LATENT = {
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
DEEPSEEK = {name: value for name, value in ROUTED.items() if name != "head_dim"}
DEEPSEEK |= {**LATENT, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1}
DEEPSEEK_V2 = {**DEEPSEEK, "norm_topk_prob": False, "q_lora_rank": None}
YARN_LATENT = {**YARN_MSCALE, "rope_theta": 10000.0}
# Yarn's betas and a limit that matter in a small model.
GPT_OSS = {**LOCAL_EXPERTS, "head_dim": 16, "intermediate_size": 20, "sliding_window": 5, "swiglu_limit": 0.4}
GPT_OSS["rope_parameters"] = {**YARN_MSCALE, "mscale": None, "mscale_all_dim": None}
OLMOE = {**NORMED, "num_experts": 6, "num_experts_per_tok": 3}

NEXT = {**SHARED, "norm_topk_prob": True, "num_hidden_layers": 4}
NEXT |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8}
NEXT |= {"linear_value_head_dim": 6}

QWEN3_5 = {
    **LLAMA,
    "head_dim": 16,
    **{name: value for name, value in NEXT.items() if name.startswith("linear_")},
}
QWEN3_5 |= {"num_hidden_layers": 4}
NEMOTRON_H = {name: LLAMA[name] for name in LLAMA if name != "num_hidden_layers"}
NEMOTRON_H |= {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "head_dim": 16}
NEMOTRON_H |= {"mamba_num_heads": 8, "mamba_head_dim": 6, "ssm_state_size": 10, "n_groups": 4}
NEMOTRON_H |= {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
NEMOTRON_H |= {"moe_shared_expert_intermediate_size": 24, "layer_norm_epsilon": 1e-4}

# Name of the variant -> (transformers' configuration class, what differs from its defaults).
VARIANTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "llama-tied": ("Llama", {**LLAMA, "tie_word_embeddings": True}),
    "llama-mha": ("Llama", {**LLAMA, "num_key_value_heads": 4, "head_dim": 16}),
    "llama-biases": ("Llama", {**LLAMA, "attention_bias": True, "mlp_bias": True}),
    "llama-attention-bias": ("Llama", {**LLAMA, "attention_bias": True}),
    "llama-mlp-bias": ("Llama", {**LLAMA, "mlp_bias": True}),
    "llama-rope-linear": ("Llama", {**LLAMA, "rope_parameters": LINEAR_ROPE}),
    "llama-rope-llama3": ("Llama", {**LLAMA, "rope_parameters": LLAMA3_ROPE}),
    "llama-rope-yarn": ("Llama", {**LLAMA, "rope_parameters": YARN}),
    "mistral": ("Mistral", {**LLAMA, "sliding_window": None, "head_dim": 16}),
    "mistral-window": ("Mistral", {**LLAMA, "sliding_window": 5}),
    "qwen2": ("Qwen2", LLAMA),
    "qwen2-yarn": ("Qwen2", {**LLAMA, "rope_parameters": YARN_MSCALE}),
    "qwen2-tied-linear": ("Qwen2", {**LLAMA, "tie_word_embeddings": True, "rope_parameters": LINEAR_ROPE}),
    "qwen2-window": ("Qwen2", {**WINDOW, "max_window_layers": 1}),
    "qwen3-layer-types": (
        "Qwen3",
        {**NORMED, **WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen3": ("Qwen3", {**NORMED, "head_dim": 16}),
    "qwen3-biases-tied": (
        "Qwen3",
        {
            **NORMED,
            "rope_parameters": YARN_FACTOR,
            "head_dim": 12,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "qwen3_moe-dense-first": (
        "Qwen3Moe",
        {**EXPERTS, "num_hidden_layers": 3, "mlp_only_layers": [0], "norm_topk_prob": False, "head_dim": 12},
    ),
    "qwen2_moe": ("Qwen2Moe", SHARED),
    "qwen2_moe-dense-layers": (
        "Qwen2Moe",
        {**SHARED, **WINDOW, "num_hidden_layers": 4, "mlp_only_layers": [3], "decoder_sparse_step": 2}
        | {"max_window_layers": 3, "qkv_bias": False, "norm_topk_prob": True, "head_dim": 12},
    ),
    "qwen3_next": ("Qwen3Next", NEXT),
    "qwen3_next-dense-layers": (
        "Qwen3Next",
        {**NEXT, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 3, "mlp_only_layers": [1, 3]}
        | {"layer_types": ["full_attention", "linear_attention"] * 2, "attention_bias": True}
        | {"norm_topk_prob": False, "tie_word_embeddings": True, "rope_parameters": PARTIAL_ROPE},
    ),
    "qwen3_5": ("Qwen3_5Text", QWEN3_5),
    "qwen3_5-tied": (
        "Qwen3_5Text",
        {**QWEN3_5, "layer_types": ["full_attention", "linear_attention"] * 2, "attention_bias": True}
        | {"tie_word_embeddings": True, "rope_parameters": PARTIAL_ROPE, "linear_conv_kernel_dim": 3},
    ),
    "nemotron_h": ("NemotronH", NEMOTRON_H),
    "nemotron_h-groups": (
        "NemotronH",
        {**NEMOTRON_H, "layers_block_type": ["mlp", "linear_attention", "moe", "moe", "full_attention"]}
        | {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5}
        | {"time_step_min": 0.01, "moe_intermediate_size": 28},
    ),
    "mixtral": ("Mixtral", {**LOCAL_EXPERTS, "head_dim": 16}),
    "mixtral-window-tied": ("Mixtral", {**LOCAL_EXPERTS, "sliding_window": 5, "tie_word_embeddings": True}),
    "olmoe": ("Olmoe", OLMOE),
    "olmoe-biases": (
        "Olmoe",
        {**OLMOE, "attention_bias": True, "num_key_value_heads": 4, "norm_topk_prob": True},
    ),
    "olmo2": ("Olmo2", NORMED),
    "olmo2-biases": ("Olmo2", {**NORMED, "attention_bias": True, "num_key_value_heads": 4}),
    "phi3": ("Phi3", LLAMA),
    "phi3-partial-window": ("Phi3", {**LLAMA, "rope_parameters": PARTIAL_ROPE, "sliding_window": 5}),
    "olmo3": (
        "Olmo3",
        {**NORMED, "sliding_window": 5, "num_hidden_layers": 4, "rope_parameters": OLMO3_ROPE},
    ),
    "smollm3": ("SmolLM3", {**LLAMA, "num_hidden_layers": 4}),
    # No biases of keys: without positions they change no softmax, and their gradient is rounding alone.
    "smollm3-window": ("SmolLM3", {**WINDOW, "no_rope_layers": [1, 0], "mlp_bias": True}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}),
    "gemma2-plain": (
        "Gemma2",
        {**GEMMA, "layer_types": ["full_attention"] * 2, "attention_bias": True, "tie_word_embeddings": False}
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": ("Gemma3Text", {**GEMMA, "layer_types": ["full_attention", "sliding_attention"]}),
    "gemma3-linear-capped": (
        "Gemma3Text",
        {**GEMMA, "num_hidden_layers": 6, "rope_parameters": GEMMA3_ROPE, "final_logit_softcapping": 1.5},
    ),
    "starcoder2": ("Starcoder2", {**STARCODER2, "sliding_window": 5}),
    "starcoder2-plain": ("Starcoder2", {**STARCODER2, "use_bias": False, "hidden_act": "gelu"}),
    "glm": ("Glm", GLM),
    "glm-yarn-tied": (
        "Glm",
        {**GLM, "rope_parameters": {**YARN, "partial_rotary_factor": 1.0}, "attention_bias": False}
        | {"tie_word_embeddings": True},
    ),
    "glm4": ("Glm4", {**GLM, "rms_norm_eps": 1e-2}),
    "phi3-longrope-short": (
        "Phi3",
        {**LLAMA, "rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
    ),
    "phi3-longrope-long": (
        "Phi3",
        {**LLAMA, "rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
    ),
    "granite": ("Granite", {**LLAMA, **MULTIPLIERS}),
    "granite-biases-tied": (
        "Granite",
        {**LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "granitemoe": ("GraniteMoe", {**LOCAL_EXPERTS, **MULTIPLIERS}),
    "granitemoe-biases-tied": (
        "GraniteMoe",
        {**LOCAL_EXPERTS, "attention_bias": True, "tie_word_embeddings": True, "attention_multiplier": 0.3},
    ),
    "glm4_moe": ("Glm4Moe", {**ROUTED, "attention_bias": True}),
    "glm4_moe-groups-tied": (
        "Glm4Moe",
        {**ROUTED, **GROUPED, "num_hidden_layers": 3, "first_k_dense_replace": 2, "use_qk_norm": True}
        | {"tie_word_embeddings": True, "n_shared_experts": 1, "rope_parameters": WHOLE_ROPE},
    ),
    "dots1": ("Dots1", ROUTED),
    "dots1-groups-window": (
        "Dots1",
        {**ROUTED, **GROUPED, "num_hidden_layers": 3, "first_k_dense_replace": 0, "sliding_window": 5}
        | {"max_window_layers": 2, "attention_bias": True},
    ),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK),
    "deepseek_v3-groups-yarn": (
        "DeepseekV3",
        {**DEEPSEEK, **GROUPED, "num_hidden_layers": 3, "rope_parameters": YARN_LATENT, "topk_group": 3}
        | {"rope_interleave": False, "tie_word_embeddings": True},
    ),
    "deepseek_v3-no-query-latent": ("DeepseekV3", {**DEEPSEEK, "q_lora_rank": None}),
    "deepseek_v2": ("DeepseekV2", DEEPSEEK_V2),
    "deepseek_v2-groups-yarn": (
        "DeepseekV2",
        {**DEEPSEEK_V2, **GROUPED, "topk_method": "group_limited_greedy", "rope_parameters": YARN_LATENT}
        | {"q_lora_rank": 20, "topk_group": 3, "n_shared_experts": 1, "tie_word_embeddings": True},
    ),
    "apertus": ("Apertus", {**LLAMA, "rope_parameters": LLAMA3_ROPE}),
    "apertus-biases-tied": (
        "Apertus",
        {**LLAMA, "attention_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 1e-2}
        | {"rope_parameters": WHOLE_ROPE, "head_dim": 16},
    ),
    "gpt_oss": ("GptOss", GPT_OSS),
    "gpt_oss-windows-tied": (
        "GptOss",
        {**GPT_OSS, "layer_types": ["sliding_attention"] * 2, "attention_bias": False, "swiglu_limit": 1e9}
        | {"tie_word_embeddings": True, "rope_parameters": WHOLE_ROPE},
    ),
    "gpt2": ("GPT2", GPT2),
    "gpt2-exact-gelu": ("GPT2", {**GPT2, "activation_function": "gelu", "n_inner": 112}),
    "gpt2-pytorch-gelu": ("GPT2", {**GPT2, "activation_function": "gelu_pytorch_tanh"}),
    "gpt_neox": ("GPTNeoX", NEOX),
    "gpt_neox-sequential": ("GPTNeoX", {**NEOX, "use_parallel_residual": False}),
    "gpt_neox-fast-gelu": ("GPTNeoX", {**NEOX, "hidden_act": "gelu_fast"}),
    "gpt_neox-no-attention-bias": (
        "GPTNeoX",
        {**NEOX, "attention_bias": False, "tie_word_embeddings": True},
    ),
    "falcon-7b": ("Falcon", FALCON),
    "falcon-7b-bias": ("Falcon", {**FALCON, "bias": True, "ffn_hidden_size": 112}),
    "falcon-7b-heads": ("Falcon", {**FALCON, "multi_query": False, "tie_word_embeddings": False}),
    "falcon-40b": ("Falcon", NEW_FALCON),
    "falcon-40b-untied": ("Falcon", {**NEW_FALCON, "num_kv_heads": 4, "tie_word_embeddings": False}),
    "falcon-11b": ("Falcon", {**NEW_FALCON, "num_ln_in_parallel_attn": 1, "bias": True}),
}


def spelled(values: dict[str, Any]) -> dict[str, Any]:
    """The same for transformers 4, whose rotary positions have fields of their own instead of rope_parameters."""
    if "rope_parameters" not in values or not transformers.__version__.startswith("4."):
        return values
    rope = dict(values["rope_parameters"])
    base, share = rope.pop("rope_theta"), rope.pop("partial_rotary_factor", None)
    fields = {"rope_theta": base}
    if share is not None and "num_key_value_heads" in values:  # Phi-3's names; the others are GPT-NeoX's
        fields["partial_rotary_factor"] = share
    elif share is not None:
        fields = {"rotary_emb_base": base, "rotary_pct": share}
    scaling = None if rope["rope_type"] == "default" else rope
    others = {name: value for name, value in values.items() if name != "rope_parameters"}
    return {**others, **fields, "rope_scaling": scaling}


def head_of(variant: str) -> str:
    """The name of transformers' class of a variant."""
    family = VARIANTS[variant][0].removesuffix("Text")
    return "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"


def make(variant: str, **changes: Any) -> Any:
    """transformers' model of a variant, with random weights."""
    family, values = VARIANTS[variant]
    config = getattr(transformers, f"{family}Config")(**spelled({**values, **changes}))
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"  # which takes fp64, as transformers' grouped products do not
    model = getattr(transformers, head_of(variant))(config)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # else a state forgets at once, and gradients of decays vanish
            parameter.data -= 4
    return model


# By the class of a model: the name in files of the module of experts, and of its matrices where it is not Qwen's.
MIXTURES = {
    "Mixtral": ("block_sparse_moe", {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}),
}
# Names in files of tensors that are stacked there, too.
STACKED = {"experts.gate_up_proj": "input_linear.weight", "experts.down_proj": "output_linear.weight"}
STACKED["router.weight"] = "router.layer.weight"


def in_files(model: torch.nn.Module, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of transformers' model, or their gradients, by the names in files: experts, which it stacks in memory,
    each by itself, as views."""
    return dict(chain.from_iterable(_in_files(type(model).__name__, *pair) for pair in named.items()))


def _in_files(model: str, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if model.startswith("GptOss"):  # whose files have what is in memory
        yield name, tensor
        return
    if model.startswith("NemotronH"):
        before, experts, part = name.replace("model.", "backbone.", 1).partition(".mixer.experts.")
        apart = ((f"{before}{experts}{number}.{part}.weight", own) for number, own in enumerate(tensor))
        yield from apart if experts else [(before, tensor)]
        return
    before, mixture, inside = name.partition(".block_sparse_moe.")
    if mixture:  # Granite
        yield f"{before}{mixture}{STACKED[inside]}", tensor
        return
    before, _, inside = name.partition(".mlp.")
    module, names = MIXTURES.get(model.removesuffix("ForCausalLM"), ("mlp", {}))
    if not inside.startswith("experts."):
        yield (f"{before}.{module}.{inside}" if inside else name), tensor
        return
    parts = ("gate_proj", "up_proj") if inside == "experts.gate_up_proj" else ("down_proj",)
    for number, own in enumerate(tensor):
        for part, values in zip(parts, own.chunk(len(parts)), strict=True):
            yield f"{before}.{module}.experts.{number}.{names.get(part, part)}.weight", values


def in_checkpoints(config: ModelConfig, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same by the names in checkpoints, which have each expert by itself in every family, and no aliases."""
    names = config.tensor_names
    found = {names.aliases.get(name, name): tensor for name, tensor in named.items()}
    places = {name: place for name in stored_tensors(config) if (place := names.in_folders(name))}
    apart = {name: place.of(found[place.tensor]) for name, place in places.items()}
    whole = {place.tensor for place in places.values()}
    return {**{name: t for name, t in found.items() if name not in whole}, **apart}


BIAS = "e_score_correction_bias"


def stored(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What files have of a model: parameters, and the biases by which routers choose experts."""
    biases = {name: b for name, b in model.named_buffers() if name.endswith(BIAS)}
    return {**dict(model.named_parameters()), **biases}


def perturb(model: torch.nn.Module) -> None:
    """Random biases and norms too, so that none is checked at its trivial value only."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in stored(model).values():
            tensor.add_(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) * 0.1)


def save(variant: str, folder: Path, **changes: Any) -> Path:
    """Write a variant with random weights, biases and norms to ``folder``, as transformers does."""
    torch.manual_seed(1)
    model = make(variant, **changes)
    perturb(model)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    return folder
