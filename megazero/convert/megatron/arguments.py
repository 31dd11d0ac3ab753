"""The arguments of a Megatron run, as its checkpoint keeps them, as options of megazero.

A checkpoint keeps every flag of Megatron by the name of its attribute, given or not, as Megatron has checked and
completed it. config/foreign/megatron.tsv says what the flags mean.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megazero.config.errors import ConfigError
from megazero.config.foreign.megatron import accepted_note, flags
from megazero.config.foreign.table import ACCEPT, MAP, REFUSE, Row
from megazero.config.model.section import NOT_GELU
from megazero.config.options.fields import show
from megazero.config.read.completion import Known, complete_by
from megazero.config.read.files import put
from megazero.config.read.flags import read_flags
from megazero.config.read.parse import read_layers, settle
from megazero.config.read.resolve import CONDITIONS, DERIVED_LENGTHS, GELU
from megazero.config.read.sources import Layer, all_switches, merge
from megazero.config.run import REMOVED

_HERE = "the checkpoint's arguments"
# Arguments that decide what the model computes, of which only "none" is built: 0, False, None or what is here.
DECIDING: Mapping[str, Collection[Any]] = {
    **dict.fromkeys(
        (
            *("mtp_use_repeated_layer", "mtp_hsm"),
            "experimental_attention_variant",
            "linear_attention_type",
            "attention_output_gate",
            "qk_l2_norm",
            "apply_residual_connection_post_layernorm",
            "heterogeneous_layers_config_path",
            "heterogeneous_layers_config_encoded_json",
            "enable_mhc_connections",
            "spec",
            "is_hybrid_model",
            "hybrid_layer_pattern",
            "hybrid_override_pattern",
            "hybrid_attention_ratio",
            "hybrid_mlp_ratio",
            "use_mup",
            "retro_add_retriever",
            "enable_gpt_oss",
            "xiprelu",
            "xiprelup",
            "parallel_attn",
            "parallel_layernorm",
            "post_norm",
            "no_post_layer_norm",
            "use_post_ln",
            "add_rmsnorm_offset",
            "dim_model_base",
            "scale_depth",
            "output_multiplier_scale",
            "query_pre_attn_scalar",
            "swiglu_limit",
            "interleave_sliding_window",
            "use_glm_rope",
            "rope_scaling_type",
            "square_alibi_mask",
            "embed_layernorm",
            "share_kvstates",
            "multi_head_latent_attention",
        ),
        (),
    ),
}
# About the machine and the finished run: the weights, or whoever starts the next run, decide these.
_OF_THE_RUN = re.compile(
    r"load|save|ckpt_step|finetune|no_load_\w+|use_checkpoint_\w+|padded_vocab_size|params_dtype|tensorboard_dir"
    r"|wandb_save_dir|data_cache_path|exit_on_missing_checkpoint|profile\w*|encoder_(num_layers|seq_length)"
    r"|num_layers_per_virtual_pipeline_stage|cp_comm_type|hierarchical_context_parallel_sizes"
)
# What Megatron's programs add to the flags, and switches under other names: none decides the model.
_OF_THE_PROGRAM = re.compile(
    r"_\w+|rank|world_size|local_rank|data_parallel_size|transformer_pipeline_model_parallel_size|model_type|iteration"
    r"|curr_iteration|(consumed|skipped)_\w+|num_floating_point_operations_so_far|(do|to)_(train|valid|test)"
    r"|variable_seq_lengths|add_position_embedding|barrier_with_L1_time|\w+_deprecated|deprecated_\w+|test_mode"
    r"|enable_gloo_process_groups|use_gloo_process_groups|finetune_(data_split|hf_dataset)|fp[48](_param)?|nccl_ub"
    r"|export_\w+|modelopt_\w+|muon_\w+|perform_initialization|torch_fsdp2_reshard_after_forward|overlap_p2p_comm\w*"
    r"|microbatch_group_size_per_vp_stage|no_weight_decay_cond_type|use_mamba_mem_eff_path|layernorm_zero_centered_gamma"
    r"|log_learning_rate_to_tensorboard|(bert|retro|grpo|rl|inference|moe|skip|cuda_graph|kitchen|mrope|dsa|tp_comm)_\w+"
    r"|(ep|tp)_size|gemm_shapes|stream_ckpt_dequant|use_layer_wise_distributed_optimizer"
)
_IDLE = re.compile(r"fim_|expert_|moe_")  # have an effect beside others alone
_OF_YARN = (
    *("rotary_scaling_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"),
    "original_max_position_embeddings",
)
_OF_LATENTS = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type")
_FP16 = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


@dataclass(frozen=True)
class Arguments:
    """The options of a run.

    options: by megazero's names, those that were given; the command line's replace the checkpoint's.
    notes: what is not taken over, and why.
    """

    options: Mapping[str, Any]
    notes: tuple[str, ...]


def read_arguments(args: Mapping[str, Any], words: Collection[str], accept: Collection[str]) -> Arguments:
    """Return the arguments as options. words: flags of a command line, of megazero or Megatron, which replace them.

    accept: names of arguments that are set aside although nothing here knows them.
    Raises ConfigError, which names every argument that the model cannot have here, and every wrong flag.
    """
    layer = Layer(_HERE)
    for name, value in _said(args).items():
        put(layer, "--", name.replace("_", "-"), value)
    settle(layer)
    layer.errors += _refused(args, accept)
    others = [f"--{word}" for word in _of_experts(args)]
    said = merge([layer, read_layers(read_flags(others)), read_layers(read_flags(list(words)))])
    done = complete_by((DERIVED_LENGTHS, CONDITIONS, GELU), Known(said))
    options, notes = done.values, [*accepted_note(said.accepted), *done.notes]
    if errors := [*said.errors, *done.errors]:
        raise ConfigError(errors)
    left = tuple(f"not taken over: {each}" for each in _left_out(args))
    return Arguments(options, (*said.notes, *notes, *left))


def _said(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are options here or stand for some, but for those without effect in Megatron."""
    plain = (bool, int, float, str, list, tuple)
    said = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in args.items()
        if isinstance(value, plain)
        and value not in ("", [], ())
        and _known(name, value)
        and not _OF_THE_RUN.fullmatch(name)
    }
    if args.get("layernorm_zero_centered_gamma"):  # the name in megatron-core's own configuration
        said["apply_layernorm_1p"] = True
    unit = "_iters" if said.get("train_samples") else "_samples"
    latent = args.get("multi_latent_attention")
    yarn = args.get("position_embedding_type") == "yarn" or (latent and args.get("rope_type") != "rope")
    rotary = args.get("position_embedding_type") in (None, "rope") or args.get(
        "use_rotary_position_embeddings"
    )
    idle: tuple[tuple[Any, Collection[str]], ...] = (
        (True, [name for name in said if name.endswith(unit) and name.startswith(("train_", "lr_"))]),
        ("lr_warmup_fraction" in said, ("lr_warmup_iters", "lr_warmup_samples")),
        (not said.get("fp16"), _FP16),
        (not said.get("openai_gelu"), ("openai_gelu",)),  # Megatron's fused kernel has that form without it
        (any(said.get(name) for name in NOT_GELU), ("bias_gelu_fusion",)),
        (not args.get("group_query_attention", True), ("num_query_groups",)),
        (
            not (args.get("use_megatron_fsdp") or args.get("use_custom_fsdp")),
            ("data_parallel_sharding_strategy",),
        ),
        (not rotary, ("rotary_base", "rotary_percent", "rotary_seq_len_interpolation_factor")),
        (not said.get("use_rope_scaling"), ("use_rope_scaling", "rope_scaling_factor")),
        (not yarn, _OF_YARN),
        (not latent, _OF_LATENTS),
        (latent, ("rotary_interleaved", "kv_channels")),
        (not _has_experts(args), [name for name in said if name.startswith(("moe_", "expert_"))]),
    )
    without = {name for holds, names in idle if holds for name in names}
    return {name: value for name, value in said.items() if name not in without}


def _has_experts(args: Mapping[str, Any]) -> bool:
    return (args.get("num_experts") or 0) > 1


def _of_experts(args: Mapping[str, Any]) -> Iterator[str]:
    """Yield Megatron's flags of mixtures that are no options here, as a command line has them, to be judged so."""
    for name, value in sorted(args.items()) if _has_experts(args) else ():
        key = name.replace("_", "-")
        given = value is True or (value and isinstance(value, int | float | str))
        if name.startswith("moe_") and given and not _known(name, value) and key in flags():
            yield key if value is True else f"{key}={value}"


def _known(name: str, value: Any) -> bool:
    """Tell whether the name is an option here, or a flag of Megatron that means some, and says something."""
    key = name.replace("_", "-")
    if key in all_switches():
        return value is not False or all_switches()[key].option.kind == "bool"
    return any(_kind(flag) == MAP for flag in (key, f"no-{key}"))


def _kind(flag: str) -> str | None:
    rows = flags().get(flag)
    return rows[0].kind if rows else None


def _refused(args: Mapping[str, Any], accept: Collection[str]) -> Iterator[str]:
    """Yield an error for each argument that makes another model, or of which nothing is known, and for each that
    cannot be set aside."""
    for name in accept:
        if name not in args:
            yield f"{_HERE} have no {name} to accept"
        elif _known(name, args[name]):
            yield f"{name} of {_HERE} is read, so it cannot be set aside"
    for name, value in sorted(args.items()):
        key = name.replace("_", "-")
        if not value or name in accept or _known(name, value):
            continue
        if name in DECIDING and value not in DECIDING[name]:
            rows = flags().get(key, ())
            cure = rows[-1].text if rows else "the model has no such choice here"
            yield f"--{key} {_text(value)} of {_HERE}: {cure}"
        elif name not in DECIDING and not _mentioned(key) and not _OF_THE_PROGRAM.fullmatch(name):
            yield (
                f"{name} {_text(value)} of {_HERE} is not known here; --accept-field {name} sets it aside, if you "
                "know that it does not change the model"
            )
    learned = args.get("position_embedding_type") == "learned_absolute"
    if learned and args.get("add_position_embedding") is False:
        yield f"--no-position-embedding of {_HERE}: a model without positions is not built"


def _mentioned(key: str) -> bool:
    return key.replace("-", "_") in REMOVED or any(
        flag in flags() for flag in (key, f"no-{key}", f"disable-{key}")
    )


def _left_out(args: Mapping[str, Any]) -> Iterator[str]:
    """Yield the arguments that change the training in a way that is not built, as far as the table judges values."""
    for name, value in sorted(args.items()):
        rows = flags().get(name.replace("_", "-"), ())
        judged = type(value) in (int, float, str) and not _IDLE.match(name) and name not in DECIDING
        refused = [row for row in rows if row.kind == REFUSE]
        if judged and rows and rows[0].kind == ACCEPT and refused and not _accepted(rows, value):
            yield f"--{rows[0].name} {value}: {refused[-1].text}"
        # The two ends of a growth are there without one, too.
        idle = (
            name.startswith(("start_", "end_"))
            or name.startswith("muon_")
            and args.get("optimizer") != "muon"
        )
        removed = REMOVED.get(name)
        if removed is not None and not idle and f"{value}".lower() not in ("none", removed.off):
            yield f"--{name.replace('_', '-')} {show(value)}: {removed.cure}"


def _accepted(rows: Collection[Row], value: Any) -> bool:
    return any(row.kind == ACCEPT and show(value) in row.value.split(",") for row in rows)


def _text(value: Any) -> str:
    if value is True:
        return ""
    return str(value) if isinstance(value, int | float | str | list | tuple) else "is set"
