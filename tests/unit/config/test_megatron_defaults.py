"""Defaults are Megatron's, which are read as facts; where they are not, differences.tsv says so."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any

import pytest
import torch

from megazero.config import parse
from megazero.config.foreign.explain import differences
from megazero.config.options.fields import show
from megazero.config.run import all_options

LEAST = (
    "--num-layers 2 --hidden-size 96 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --lr 1e-3 "
    "--train-iters 8 --mock-data --vocab-size 100"
)
# What a script that says no more than that gets in Megatron: megatron/training/arguments.py, training_config.py and
# common_config.py of core_v0.16.1, and what validate_args derives.
MEGATRON: dict[str, Any] = {
    "ffn_hidden_size": 384,
    "num_query_groups": 4,
    "kv_channels": 24,
    "position_embedding_type": "learned_absolute",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rotary_scaling_factor": 8.0,  # --rope-scaling-factor
    "swiglu": False,
    "squared_relu": False,
    "untie_embeddings_and_output_weights": False,
    "make_vocab_size_divisible_by": 128,
    "pad_vocab_size_to": None,  # --padded-vocab-size
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "use_tp_pp_dp_mapping": False,
    "sequence_parallel": False,
    "params_dtype": "fp32",
    "rampup_batch_size": None,
    "global_batch_size": None,
    "lr_decay_style": "linear",
    "lr_decay_iters": None,
    "lr_decay_samples": None,
    "lr_warmup_iters": 0,
    "lr_warmup_samples": 0,
    "lr_warmup_fraction": None,
    "lr_wsd_decay_style": "exponential",
    "lr_wsd_decay_iters": None,
    "lr_wsd_decay_samples": None,
    "min_lr": 0.0,
    "exit_interval": None,
    "exit_duration_in_mins": None,
    "exit_signal_handler": False,
    "eval_interval": None,
    "muon_momentum": 0.9,
    "eval_iters": 100,
    "seed": 1234,
    "deterministic_mode": False,
    "recompute_granularity": None,
    "fp8_recipe": "delayed",
    "distributed_timeout_minutes": 10,
    "split": None,
    "data_cache_path": None,
    "eod_mask_loss": False,
    "reset_position_ids": False,
    "reset_attention_mask": False,
    "tokenizer_type": None,
    "save": None,
    "load": None,
    "exit_on_missing_checkpoint": False,
    "save_interval": None,
    "save_retain_interval": None,
    "finetune": False,
    "load_optim": True,
    "load_rng": True,
    "log_interval": 100,
    "tensorboard_dir": None,
    "wandb_project": None,
    "profile": False,
    "profile_step_start": 10,
    "profile_step_end": 12,
    "profile_ranks": (0,),
}
# What is another name for the same here.
TRANSLATED = {"layernorm_epsilon": "norm_epsilon"}


def different() -> dict[str, str]:
    """The options whose default differs, and what the list says of Megatron's and of ours."""
    rows = [(flag, theirs, ours) for flag, theirs, ours, _ in differences() if ours.startswith("default ")]
    return {flag.removeprefix("--").replace("-", "_"): f"{theirs}|{ours}" for flag, theirs, ours in rows}


def check(theirs: dict[str, Any]) -> None:
    ours, listed = parse(LEAST.split()).values(), different()
    for name, their in theirs.items():
        value = their.name if isinstance(their, Enum) else their
        if name in listed:
            assert ours[name] != value, f"{name} does not differ; take it off the list"
            said = listed[name].split("|")
            assert (
                said[0].startswith(f"default {show(value)}") and said[1] == f"default {show(ours[name])}"
            ), name
        else:
            assert ours[name] in (value, (value,)), (
                f"{name}: Megatron's default is {value}, here it is {ours[name]}"
            )


def test_defaults_are_those_of_megatron() -> None:
    check(MEGATRON)
    assert different().keys() <= {*MEGATRON, "optimizer"}


def test_defaults_are_those_of_the_installed_megatron_core() -> None:
    """Whatever of its dataclasses is an option here, new ones included."""
    transformer = pytest.importorskip("megatron.core.transformer.transformer_config").TransformerConfig
    optimizer = pytest.importorskip("megatron.core.optimizer").OptimizerConfig
    derived = {
        name for name in MEGATRON if name.startswith(("ffn_", "kv_", "num_query"))
    }  # None until validated
    facts = {
        TRANSLATED.get(field.name, field.name): field.default
        for cls in (transformer, optimizer)
        for field in dataclasses.fields(cls)
        if field.default is not dataclasses.MISSING
    }
    # Required here and there, or said by consts (--bf16).
    skip = {"num_layers", "num_attention_heads", "hidden_size", "lr", "min_lr", "params_dtype", *derived}
    # 0.95 in the dataclass, and always 0.9 of the flags; the optimizer's, which follows the transformer's;
    # None for 0 or derived.
    skip |= {"muon_momentum", "fp8_recipe", "mtp_num_layers", "mamba_num_heads"}
    shared = {name: value for name, value in facts.items() if name in all_options() and name not in skip}
    assert {"hidden_dropout", "normalization", "add_bias_linear", "norm_epsilon", "adam_eps"} <= shared.keys()
    kept = {name: {torch.float32: "fp32"}[shared[name]] for name in ("exp_avg_dtype", "exp_avg_sq_dtype")}
    check({**shared, **kept, "sequence_parallel": False})


def test_every_difference_is_of_a_flag_and_says_all() -> None:
    assert len({row[0] for row in differences()}) == len(differences())
    assert all(flag.startswith("--") and all(said) for flag, *said in differences())


def test_what_megatron_would_compute_otherwise_is_noted() -> None:
    groups = parse(f"{LEAST} --num-query-groups 2".split()).notes
    assert any("--num-query-groups 2" in note and "--group-query-attention" in note for note in groups)
    assert not parse(f"{LEAST} --group-query-attention --num-query-groups 2".split()).notes[1:]
    assert not parse(f"{LEAST} --model-family llama --num-query-groups 2".split()).notes
