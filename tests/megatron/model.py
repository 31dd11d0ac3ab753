"""The GPT of a Case, of megatron-core's local layers, with the same initial values under every layout."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from tests.megatron.case import Case

LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 12}
LATENT |= {"multi_latent_attention": True, "rotary_scaling_factor": 4.0, "mscale": 0.9, "mscale_all_dim": 0.7}
# With latents, experts are DeepSeek's.
ROUTED = {
    **{"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    **{"moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_topk_scaling_factor": 2.5},
    **{"moe_router_bias_update_rate": 0.1, "moe_shared_expert_intermediate_size": 24},
}
SINKS = {"softmax_type": "learnable", "window_size": (4, 0), "window_attn_skip_freq": 2}
SINKS |= {"activation_func_clamp_value": 0.2, "glu_linear_offset": 1.0}


def model_config(case: Case) -> Any:
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    moe = {
        "num_moe_experts": case.experts,
        "expert_model_parallel_size": case.ep,
        "expert_tensor_parallel_size": 1,
        "moe_router_load_balancing_type": "none",
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "add_bias_linear": False,
    }
    silu = torch.nn.functional.silu
    gated = {
        "gated_linear_unit": True,
        "activation_func": silu,
        "num_query_groups": 2,
        "add_bias_linear": False,
    }
    latent = {**LATENT, "qk_layernorm": True, "apply_rope_fusion": False, "add_bias_linear": False}
    return (MLATransformerConfig if case.latent else TransformerConfig)(
        num_layers=case.layers,
        hidden_size=case.hidden,
        num_attention_heads=case.heads,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=case.dtype,
        pipeline_dtype=case.dtype,
        bf16=case.bf16,
        tensor_model_parallel_size=case.tp,
        sequence_parallel=case.sp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp if case.vpp > 1 else None,
        # gloo keeps what it sends, so outputs must live; 2 ranks with chunks exchange both ways at once
        deallocate_pipeline_outputs=False,
        overlap_p2p_comm=case.vpp > 1,
        batch_p2p_comm=case.vpp == 1,
        calculate_per_token_loss=case.per_token_loss,
        recompute_granularity="full" if case.recompute else None,
        recompute_method="uniform" if case.recompute else None,
        recompute_num_layers=1 if case.recompute else None,
        mtp_num_layers=case.further or None,
        mtp_loss_scaling_factor=0.3,
        **{
            **(gated if case.gated else {}),
            **(moe if case.experts else {}),
            **(latent if case.latent else {}),
            **(ROUTED if case.latent and case.experts else {}),
            **(_sinks() if case.sinks else {}),
        },
    )


def _sinks() -> dict[str, Any]:
    from megatron.core.activations import quick_gelu  # not in 0.13

    gated = {"gated_linear_unit": True, "activation_func": quick_gelu, "num_query_groups": 2}
    return {**SINKS, **gated, "add_bias_linear": True}


def build_chunks(case: Case, config: Any) -> list[Any]:
    """Return this rank's model chunks, with initial values that depend on names and the seed alone."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec

    spec = get_gpt_layer_local_spec(
        num_experts=case.experts or None,
        normalization="RMSNorm",
        multi_latent_attention=case.latent,
        qk_layernorm=case.latent,
    )
    if case.latent:
        spec.submodules.self_attention.submodules.core_attention = _of_two_widths()
    chunks = []
    for index in range(case.vpp):
        stage = index if case.vpp > 1 else None
        chunk = GPTModel(
            config,
            spec,
            case.vocabulary,
            case.sequence,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=case.tied,
            position_embedding_type="rope",
            mtp_block_spec=get_gpt_mtp_block_spec(config, spec, False) if case.further else None,
            vp_stage=stage,
        )
        chunks.append(chunk.to(case.device, case.dtype))
    for name, parameter in named(chunks):
        _set_initial(case, name.partition("@")[0], parameter)
    return chunks


def _of_two_widths() -> type:
    """Return megatron-core's own attention that takes two widths, as only TransformerEngine's does there."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    multi_latent_attention.HAVE_TE = False  # or it takes the package for installed, and its classes are None

    class TwoWidths(DotProductAttention):  # type: ignore[misc]
        def __init__(
            self, config: Any, *args: Any, k_channels: int = 0, v_channels: int = 0, **more: Any
        ) -> None:
            super().__init__(config, *args, **more)
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels

    return TwoWidths


def named(chunks: list[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters of a rank's chunks by what they are in the whole model, 'name@k' for the k-th part."""
    from megatron.core import parallel_state

    tp = parallel_state.get_tensor_model_parallel_rank()
    for chunk in chunks:
        modules = dict(chunk.named_modules())
        for name, parameter in chunk.named_parameters():
            whole = _whole_name(name, modules, parameter)
            yield (f"{whole}@{tp}" if _parted(parameter) else whole), parameter


def _whole_name(name: str, modules: dict[str, Any], parameter: torch.nn.Parameter) -> str:
    """Return a parameter's name with the numbers that its layer and its expert have in the whole model."""
    from megatron.core import parallel_state

    if getattr(parameter, "shared_embedding", False):
        return "embedding.word_embeddings.weight"
    words = name.split(".")
    found = list(words)
    for i in range(1, len(words)):
        owner = ".".join(words[:i])
        if words[i - 1] == "layers":
            found[i] = str(modules[f"{owner}.{words[i]}"].layer_number - 1)
        if words[i - 1] == "local_experts":
            first = parallel_state.get_expert_model_parallel_rank() * len(modules[owner])
            found[i] = str(first + int(words[i]))
    return ".".join(found[words[0] == "module" :])


def _parted(parameter: torch.nn.Parameter) -> bool:
    expert = not getattr(parameter, "allreduce", True)
    return getattr(parameter, "tensor_model_parallel", False) and not expert


def _set_initial(case: Case, name: str, parameter: torch.nn.Parameter) -> None:
    from megatron.core import parallel_state

    if "norm" in name or name.endswith("bias"):
        return
    shape, parted = list(parameter.shape), _parted(parameter)
    dim = parameter.partition_dim if parted else 0
    if parted:
        shape[dim] *= case.tp
    seed = int.from_bytes(hashlib.sha256(f"{case.seed} {name}".encode()).digest()[:6], "big")
    full = (0.05 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(case.dtype)
    if case.nudge and name == "embedding.word_embeddings.weight":
        full.view(torch.int16 if case.bf16 else torch.int32).flatten()[case.nudge] ^= 1
    index = parallel_state.get_tensor_model_parallel_rank() if parted else 0
    parameter.data.copy_(full.narrow(dim, index * parameter.shape[dim], parameter.shape[dim]))
