"""What options need to have an effect: one row for each group of options with the same need.

A row is 'options: need', or 'options: need: the need in words for people'. A need names an option, or a fact that
rules.py adds to them. It holds where the option is set ('save', 'not finetune') or has a value ('outer_interval > 0',
'optimizer = adamw|muon', 'lr_decay_style != constant'); an option without a value meets no comparison. Of needs
with 'or' between them one is enough. An error names the first row of an option whose need is not met.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any, NamedTuple

from megazero.config.layout.outer import EXACT_BITS
from megazero.config.model.section import ModelConfig
from megazero.config.options.data_inputs import FILE_OPTIONS, TOKENIZERS
from megazero.config.options.fields import Condition
from megazero.config.options.optimizers import OPTIMIZERS
from megazero.config.options.sections import OuterConfig

_ROTARY = """rotary_base rotary_percent rotary_interleaved rotary_scaling rotary_window_base no_rope_freq
rotary_scaling_factor rotary_original_max_position rotary_attention_factor rotary_low_freq_factor
rotary_high_freq_factor rotary_short_factor rotary_long_factor yarn_mscale yarn_mscale_all_dim yarn_beta_fast
yarn_beta_slow yarn_correction_range_round_to_int"""
_EXPERTS = [field.name for field in fields(ModelConfig) if field.name.startswith("moe_")]
_OUTER = [field.name for field in fields(OuterConfig) if field.name != "outer_interval"]
_GELU = "GELU (--no-swiglu, and no --squared-relu)"
ROWS = (
    f"openai_gelu: not swiglu: {_GELU}",
    f"openai_gelu: not squared_relu: {_GELU}",
    "window_attn_skip_freq rotary_window_base: sliding_window",
    "scaled_alibi: position_embedding_type = alibi",
    f"{_ROTARY}: position_embedding_type = rope",
    "rotary_scaling_factor: rotary_scaling = linear|dynamic|llama3|yarn|longrope",
    "rotary_original_max_position: rotary_scaling = dynamic|llama3|yarn|longrope",
    "rotary_attention_factor: rotary_scaling = yarn|longrope",
    "rotary_low_freq_factor rotary_high_freq_factor: rotary_scaling = llama3",
    "rotary_short_factor rotary_long_factor: rotary_scaling = longrope",
    "yarn_mscale yarn_mscale_all_dim yarn_beta_fast yarn_beta_slow: rotary_scaling = yarn",
    "yarn_correction_range_round_to_int: rotary_scaling = yarn",
    f"{' '.join(_EXPERTS)}: num_experts > 1",
    "moe_shared_expert_gate: moe_shared_expert_intermediate_size",
    "moe_router_pre_softmax: moe_router_score_function = softmax",
    "moe_router_num_groups: moe_router_group_topk",
    "yarn_mscale yarn_mscale_all_dim: not rotary_attention_factor: "
    "the computed attention factor (no --rotary-attention-factor)",
    *(
        f"{name}: optimizer = {'|'.join(o for o, each in OPTIMIZERS.items() if name in each.options)}"
        for name in dict.fromkeys(name for each in OPTIMIZERS.values() for name in each.options)
    ),
    "lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples: lr_decay_style = WSD",
    "min_lr decoupled_min_lr lr_decay_iters lr_decay_samples: lr_decay_style != constant: "
    "a --lr-decay-style that decays",
    "decoupled_min_lr: decoupled_lr",
    "lr_warmup_init: lr_warmup_iters or lr_warmup_samples or lr_warmup_fraction: a warm-up",
    "loss_policy: zero_preset = auto",
    # ALiBi's distances are those within a document wherever attention stays in it.
    "reset_position_ids: position_embedding_type != alibi or reset_attention_mask: "
    "--reset-attention-mask, or positions other than ALiBi",
    "data_cache_path: not mock_data: --data-path instead of --mock-data",
    *(
        f"{name}: tokenizer_type = {'|'.join(kind for kind, files in TOKENIZERS.items() if name in files)}"
        for name in FILE_OPTIONS
    ),
    "split: not names_parts: --data-path, which it divides",
    "sequence_parallel: tensor_model_parallel_size > 1",
    "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis: params_dtype = fp16: --fp16",
    "initial_loss_scale min_loss_scale loss_scale_window hysteresis: not loss_scale: "
    "a scale that changes (no --loss-scale)",
    "eval_interval eval_at_start: eval_iters > 0 or callbacks: --eval-iters above 0",
    "compile_backend: compile",
    "moe_aux_loss_coeff moe_z_loss_coeff moe_router_bias_update_rate moe_per_layer_logging: num_experts > 1",
    "moe_aux_loss_coeff: moe_router_load_balancing_type = aux_loss|seq_aux_loss",
    "moe_router_load_balancing_type: moe_aux_loss_coeff > 0",
    "moe_router_bias_update_rate: moe_router_enable_expert_bias",
    "save_interval save_hf async_save save_retry_minutes save_copy save_retain_interval save_keep_last: save",
    "save_retain_interval save_keep_last async_save save_copy_interval: save_interval > 0",
    "save_copy_interval save_copy_keep_last: save_copy",
    "ckpt_step allow_fresh_start finetune load_optim load_rng exit_on_missing_checkpoint: load",
    "use_checkpoint_opt_param_scheduler: load",
    "ckpt_step allow_fresh_start exit_on_missing_checkpoint: not loads_hugging_face: --load of a checkpoint",
    "accept_field: loads_hugging_face: --load hf:DIR",
    "stop_on_spike: save or save_interval > 0: --save and --save-interval above 0",
    "stop_on_spike: save",
    "stop_on_spike: save_interval > 0",
    "spike_loss_bound spike_norm_bound: stop_on_spike",
    "load_optim load_rng use_checkpoint_opt_param_scheduler: not finetune: continuing the run (no --finetune)",
    "profile_step_start profile_step_end profile_ranks: profile",
    "wandb_entity wandb_exp_name wandb_save_dir: wandb_project",
    "num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank use_tp_pp_dp_mapping "
    "pipeline_schedule pipeline_partition decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers: "
    "pipeline_model_parallel_size > 1",
    "expert_model_parallel_size: num_experts > 1",
    "moe_dispatch_across_nodes: expert_model_parallel_size > 1 or elastic: --expert-model-parallel-size above 1",
    "cp_comm_type hierarchical_context_parallel_sizes cp_gather_bits: context_parallel_size > 1",
    "hierarchical_context_parallel_sizes: cp_comm_type = a2a+p2p",
    "cp_gather_bits: gathers_keys: a --cp-comm-type other than a2a",
    "zero_weight_bits: sends_weights: --zero-quantized-weights",
    "zero_gradient_bits zero_gradient_bits_intra_node: sends_gradients: --zero-quantized-gradients",
    # No transform is what happens without quantised gradients.
    "zero_gradient_transform: sends_gradients or zero_gradient_transform = none: --zero-quantized-gradients",
    "zero_block_size zero_exact_numel: sends_weights or sends_gradients: "
    "--zero-quantized-weights or --zero-quantized-gradients",
    f"{' '.join(_OUTER)}: outer_interval > 0",
    "outer_lr outer_momentum: outer_optimizer = nesterov|sgd",
    f"outer_rounding: outer_bits < {EXACT_BITS}",
)
_NEED = re.compile(r"(not )?(\w+)(?: (>|<|!?=) (\S+))?")
_WORDS = {">": "above ", "<": "below ", "=": "", "!=": "other than "}


class Need(NamedTuple):
    """The option or fact that a need names, what holds of its value, and what a user would add."""

    name: str
    holds: Callable[[Any], bool]
    words: str


def _need(text: str) -> Need:
    match = _NEED.fullmatch(text)
    assert match, f"{text!r} is no need"
    negated, name, comparison, wanted = match.groups(default="")
    values = frozenset(wanted.split("|"))
    bound = float(wanted) if comparison in (">", "<") else 0.0

    def equal(value: Any) -> bool:
        return value in values or isinstance(value, tuple) and not values.isdisjoint(value)

    holds: dict[str, Callable[[Any], bool]] = {
        "": operator.not_ if negated else bool,
        ">": lambda value: value is not None and value > bound,
        "<": lambda value: value is not None and value < bound,
        "=": equal,
        "!=": lambda value: value is not None and not equal(value),
    }
    said = f" {_WORDS[comparison]}{' or '.join(wanted.split('|'))}" if comparison else ""
    return Need(name, holds[comparison], f"--{name.replace('_', '-')}{said}")


@lru_cache(maxsize=1)
def _rows() -> tuple[tuple[list[str], list[Need], str], ...]:
    """Return the options of each row, its needs, and what would give the options an effect."""
    rows = []
    for row in ROWS:
        names, needs, cure = (*row.split(": ", 2), "")[:3]
        found = [_need(need) for need in needs.split(" or ")]
        rows.append((names.split(), found, cure or found[0].words))
    return tuple(rows)


def needs(known: Mapping[str, Any]) -> Iterator[Condition]:
    """Yield the options of each row, whether they have an effect, and what would give them one.

    known: options and facts by name. Rows whose needs are not among them are left out.
    """
    for names, wanted, cure in _rows():
        if all(need.name in known for need in wanted):
            yield names, any(need.holds(known[need.name]) for need in wanted), cure
