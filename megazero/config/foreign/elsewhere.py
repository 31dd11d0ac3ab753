"""Names that other programs have for what is an option here: no flags, but understood in errors.

torchtitan's names are of all its releases, with - for _.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

TORCHTITAN: Mapping[str, str] = MappingProxyType(
    {
        "activation-checkpoint.mode": "recompute_granularity",
        "activation-checkpoint.selective-ac-option": "recompute_granularity",
        "checkpoint.folder": "save",
        "checkpoint.initial-load-model-only": "finetune",
        "checkpoint.initial-load-model-weights-only": "finetune",
        "checkpoint.initial-load-path": "load",
        "checkpoint.interval": "save_interval",
        "checkpoint.keep-latest-k": "save_keep_last",
        "comm.init-timeout-seconds": "distributed_init_timeout_minutes",
        "comm.train-timeout-seconds": "distributed_timeout_minutes",
        "debug.deterministic": "deterministic_mode",
        "debug.seed": "seed",
        "experimental.pipeline-parallel-degree": "pipeline_model_parallel_size",
        "experimental.pipeline-parallel-schedule": "pipeline_schedule",
        "experimental.pipeline-parallel-split-points": "pipeline_partition",
        "job.dump-folder": "log_dir",
        "lr-scheduler.decay-type": "lr_decay_style",
        "lr-scheduler.lr-min": "min_lr",
        "lr-scheduler.min-lr-factor": "min_lr",
        "lr-scheduler.warmup-steps": "lr_warmup_iters",
        "metrics.enable-tensorboard": "tensorboard_dir",
        "metrics.enable-wandb": "wandb_project",
        "metrics.log-freq": "log_interval",
        "metrics.save-tb-folder": "tensorboard_dir",
        "model.attn-mask-type": "reset_attention_mask",
        "model.hf-assets-path": "tokenizer_model",
        "model.name": "model_family",
        "model.norm-type": "normalization",
        "model.tokenizer-path": "tokenizer_model",
        "optimizer.beta1": "adam_beta1",
        "optimizer.beta2": "adam_beta2",
        "optimizer.eps": "adam_eps",
        "optimizer.lr": "lr",
        "optimizer.name": "optimizer",
        "optimizer.weight-decay": "weight_decay",
        "parallelism.data-parallel-replicate-degree": "zero_shard",
        "parallelism.data-parallel-shard-degree": "zero_shard",
        "parallelism.fsdp-reshard-after-forward": "zero_params_lifetime",
        "parallelism.module-fqns-per-model-part": "pipeline_partition",
        "parallelism.pipeline-parallel-degree": "pipeline_model_parallel_size",
        "parallelism.pipeline-parallel-first-stage-less-layers": "decoder_first_pipeline_num_layers",
        "parallelism.pipeline-parallel-last-stage-less-layers": "decoder_last_pipeline_num_layers",
        "parallelism.pipeline-parallel-layers-per-stage": "num_layers_per_virtual_pipeline_stage",
        "parallelism.pipeline-parallel-microbatch-size": "micro_batch_size",
        "parallelism.pipeline-parallel-schedule": "pipeline_schedule",
        "parallelism.pipeline-parallel-split-points": "pipeline_partition",
        "parallelism.tensor-parallel-degree": "tensor_model_parallel_size",
        "profiling.enable-profiling": "profile",
        "profiling.profile-freq": "profile_step_start",
        "profiling.run-profiler": "profile",
        "training.batch-size": "micro_batch_size",
        "training.data-parallel-degree": "zero_shard",
        "training.data-parallel-replicate-degree": "zero_shard",
        "training.data-parallel-shard-degree": "zero_shard",
        "training.data-parallel-type": "zero_preset",
        "training.dataset": "data_path",
        "training.dataset-path": "data_path",
        "training.deterministic": "deterministic_mode",
        "training.dtype": "params_dtype",
        "training.fsdp-reshard-after-forward": "zero_params_lifetime",
        "training.global-batch-size": "global_batch_size",
        "training.local-batch-size": "micro_batch_size",
        "training.max-norm": "clip_grad",
        "training.mixed-precision-param": "params_dtype",
        "training.pipeline-parallel-degree": "pipeline_model_parallel_size",
        "training.seed": "seed",
        "training.seq-len": "seq_length",
        "training.steps": "train_iters",
        "training.tensor-parallel-degree": "tensor_model_parallel_size",
        "training.warmup-steps": "lr_warmup_iters",
        "validation.freq": "eval_interval",
        "validation.steps": "eval_iters",
    }
)
# Names of torchtitan that nothing here is like.
WITHOUT = """
    activation-checkpoint.debug activation-checkpoint.determinism-check activation-checkpoint.early-stop
    activation-checkpoint.memory-budget activation-checkpoint.preserve-rng-state
    activation-checkpoint.per-op-sac-force-recompute-mm-shapes-by-fqns
    activation-checkpoint.visualize-memory-budget-pareto checkpoint.async-mode checkpoint.create-seed-checkpoint
    checkpoint.enable checkpoint.enable-checkpoint checkpoint.enable-first-step-checkpoint
    checkpoint.enable-ft-dataloader-checkpoints checkpoint.exclude-from-loading checkpoint.export-dtype
    checkpoint.initial-load-in-hf checkpoint.initial-load-in-hf-quantized checkpoint.interval-type
    checkpoint.last-save-in-hf checkpoint.last-save-in-safetensors-format checkpoint.last-save-model-only
    checkpoint.last-save-model-weights-only checkpoint.load-only checkpoint.load-step checkpoint.model-weights-only
    comm.mode comm.save-traces-file-prefix comm.save-traces-folder comm.trace-buf-size compile.backend
    compile.components compile.enable debug.deterministic-warn-only debug.moe-force-load-balance
    experimental.context-parallel-degree experimental.context-parallel-rotate-method experimental.custom-args-module
    experimental.custom-import experimental.custom-model-path experimental.enable-async-tensor-parallel
    experimental.enable-compiled-autograd experimental.pipeline-parallel-microbatches
    experimental.pipeline-parallel-schedule-csv experimental.pipeline-parallel-split-mode fault-tolerance.enable
    fault-tolerance.fragment-sync-delay fault-tolerance.fragment-update-alpha fault-tolerance.group-size
    fault-tolerance.min-replica-size fault-tolerance.module-fqns-per-model-fragment fault-tolerance.num-fragments
    fault-tolerance.process-group fault-tolerance.process-group-timeout-ms fault-tolerance.replica-id
    fault-tolerance.semi-sync-method fault-tolerance.should-quantize fault-tolerance.sync-steps float8.emulate
    float8.enable-float8-linear float8.enable-fsdp-float8-all-gather float8.filter-fqns
    float8.force-recompute-fp8-weight-in-bwd float8.moe-fqns-prototype
    float8.precompute-float8-dynamic-scale-for-fsdp float8.recipe-name float8.scaling-type-grad-output
    float8.scaling-type-input float8.scaling-type-weight job.config-file job.custom-config-module job.description
    job.print-args job.print-config job.save-config-file job.save-config-folder job.use-for-integration-test
    lr-scheduler.decay-ratio memory-estimation.disable-fake-mode memory-estimation.enable memory-estimation.enabled
    metrics.disable-color-printing metrics.disable-logging-from-checkpoint metrics.enable-color-printing
    metrics.rank-0-only metrics.save-for-all-ranks model.converters model.flavor model.print-after-conversion
    model.use-flex-attn mx.filter-fqns mx.moe-fqns-prototype mx.mxfp8-dim1-cast-kernel-choice mx.recipe-name
    mx.use-fp8-dim1-cast-triton-kernel optimizer.early-step-in-backward optimizer.fused optimizer.implementation
    parallelism.context-parallel-degree parallelism.context-parallel-load-balancer
    parallelism.context-parallel-rotate-method parallelism.disable-loss-parallel
    parallelism.enable-async-tensor-parallel parallelism.enable-compiled-autograd
    parallelism.expert-parallel-comm-backend parallelism.expert-parallel-degree
    parallelism.expert-tensor-parallel-degree parallelism.pipeline-parallel-expert-parallel-overlap
    parallelism.pipeline-parallel-microbatches parallelism.pipeline-parallel-schedule-csv
    profiling.enable-memory-snapshot profiling.profile-every-x-iter profiling.profiler-active
    profiling.profiler-warmup profiling.save-memory-snapshot-folder profiling.save-traces-folder training.compile
    training.dataloader.num-workers training.dataloader.persistent-workers training.dataloader.pin-memory
    training.dataloader.prefetch-factor training.debug-moe-force-load-balance training.disable-loss-parallel
    training.enable-cpu-offload training.enable-float8-linear training.enable-fsdp-float8-all-gather
    training.enable-loss-parallel training.fp8-linear training.gc-debug training.gc-freq
    training.mixed-precision-reduce training.precompute-float8-dynamic-scale-for-fsdp validation.dataset
    validation.dataset-path validation.enable validation.enabled validation.local-batch-size validation.seq-len
"""
# Of Hugging Face's Trainer.
HUGGING_FACE: Mapping[str, str] = MappingProxyType(
    {
        "eval-steps": "eval_interval",
        "gradient-checkpointing": "recompute_granularity",
        "learning-rate": "lr",
        "logging-steps": "log_interval",
        "lr-scheduler-type": "lr_decay_style",
        "max-grad-norm": "clip_grad",
        "max-steps": "train_iters",
        "num-train-epochs": "train_iters",
        "output-dir": "save",
        "per-device-train-batch-size": "micro_batch_size",
        "resume-from-checkpoint": "load",
        "save-steps": "save_interval",
        "save-total-limit": "save_keep_last",
        "warmup-ratio": "lr_warmup_fraction",
        "warmup-steps": "lr_warmup_iters",
    }
)
# What DeepSpeed's keys are here where config/foreign/deepspeed.py translates the value, too.
DEEPSPEED: Mapping[str, str] = MappingProxyType(
    {
        "gradient-accumulation-steps": "global_batch_size",
        "mics-shard-size": "zero_shard",
        "stage3-prefetch-bucket-size": "zero_prefetch_bytes",
        "zeropp-loco-param": "zero_gradient_rounding",
        "initial-scale-power": "initial_loss_scale",
        "offload-optimizer": "zero_preset",
        "offload-param": "zero_preset",
    }
)


@lru_cache(maxsize=1)
def deepspeed_names() -> Mapping[str, str]:
    """Return DeepSpeed's keys, without their section and with - for _: the field's name here, or ''."""
    from megazero.config.foreign.deepspeed import ALWAYS, NO_EFFECT, RENAMED, SPECIAL, UNSUPPORTED

    keys: dict[str, str] = dict.fromkeys((*SPECIAL, *ALWAYS, *NO_EFFECT, *UNSUPPORTED), "")
    names = {key.rpartition(".")[2].replace("_", "-"): option for key, option in {**keys, **RENAMED}.items()}
    return MappingProxyType({**names, **DEEPSPEED})


@lru_cache(maxsize=1)
def torchtitan_names() -> Mapping[str, str]:
    """Return torchtitan's names: the field's name here, or ''."""
    return MappingProxyType({**dict.fromkeys(WITHOUT.split(), ""), **TORCHTITAN})
