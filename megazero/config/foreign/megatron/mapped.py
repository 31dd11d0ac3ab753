"""Flags and values of Megatron-LM, Megatron-DeepSpeed and their forks that are options here under another name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Sets = Mapping[str, Any]
TYPED = "(its value)"  # stands for what follows the flag
UNFUSED_GELU = "no_bias_gelu_fusion"  # decided with the architecture, which a checkpoint may say
UNFUSED_GELU_MEANS = "--no-openai-gelu, where the MLP has GELU and --openai-gelu is not given"
DERIVED = (
    "train_tokens",
    "lr_decay_tokens",
    "lr_warmup_tokens",
    "glu_activation",
    UNFUSED_GELU,
)  # of derived.py; no options

# Names whose value is another option's, as it is. "=?": without a value, which is a variable of a script that is
# empty, the flag says nothing, with a note.
RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "activations-checkpoint-granularity": "recompute_granularity",
        "checkpoint-granularity": "recompute_granularity",
        "encoder-num-layers": "num_layers",
        "encoder-seq-length": "seq_length",
        "inter-layer-model-parallel-size": "pipeline_model_parallel_size",
        "intra-layer-model-parallel-size": "tensor_model_parallel_size",
        "kill-switch-file": "kill_switch_path",
        "layernorm-epsilon": "norm_epsilon",
        "lr-decay-tokens=?": "lr_decay_tokens",
        "lr-warmup-tokens": "lr_warmup_tokens",
        "min-scale": "min_loss_scale",
        "model-parallel-size": "tensor_model_parallel_size",
        "num-key-value-heads": "num_query_groups",
        "padded-vocab-size": "pad_vocab_size_to",
        "persistent-save-interval": "save_interval",
        "rope-theta": "rotary_base",
        "rotary-position-embeddings-theta": "rotary_base",
        "rotary-theta": "rotary_base",
        "save-iters": "save_interval",
        "tokenizer-file": "tokenizer_model",
        "tokenizer-name-or-path": "tokenizer_model",
        "train-tokens": "train_tokens",
        "virtual-pipeline-model-parallel-size": "num_virtual_stages_per_pipeline_rank",
        "wandb-entity-name": "wandb_entity",
        "wandb-name": "wandb_exp_name",
        "wandb-project-name": "wandb_project",
        "wandb-run-name": "wandb_exp_name",
    }
)
# Switches that mean a value of an option.
SWITCHES: Mapping[str, Sets] = MappingProxyType(
    {
        "checkpoint-activations": {"recompute_granularity": "full"},
        "checkpoint-attention": {"recompute_granularity": "selective"},
        "deepspeed-activation-checkpointing": {"recompute_granularity": "full"},
        "disable-load-optim": {"load_optim": False},
        "disable-load-rng": {"load_rng": False},
        "enable-zbh1-pipeline": {"pipeline_schedule": "zb-h1"},
        "erf-gelu": {"openai_gelu": False},
        "exit-signal-handler-for-training": {"exit_signal_handler": True},
        "multi-query-attention": {"num_query_groups": 1},
        "no-bias-gelu-fusion": {UNFUSED_GELU: 1},
        "no-cross-document-attention": {"reset_attention_mask": True},
        "recompute-activations": {"recompute_granularity": "selective"},
        "use-rotary-position-embeddings": {"position_embedding_type": "rope"},
        "use-torch-fsdp2": {"zero_preset": "zero3"},
    }
)
# Flags each of whose values means something: value -> what it sets. For other values, what to do.
BY_VALUE: Mapping[str, tuple[Mapping[str, Sets], str]] = MappingProxyType(
    {
        "activations-checkpoint-method": (
            {"uniform": {"recompute_granularity": "full"}, "block": {"recompute_granularity": "full"}},
            "use --recompute-granularity full",
        ),
        "attention-head-type": (
            {"multihead": {}, "multiquery": {"num_query_groups": 1}},
            "use --num-query-groups",
        ),
        "data-parallel-sharding-strategy": (
            {
                "no_shard": {"zero_preset": "ddp"},
                "optim": {"zero_preset": "zero1"},
                "optim_grads": {"zero_preset": "zero2"},
                "optim_grads_params": {"zero_preset": "zero3"},
            },
            "use --zero-preset",
        ),
        "glu-activation": (
            {"swiglu": {"swiglu": True, "glu_activation": 1}},
            "of the gated activations SwiGLU is built; use --swiglu",
        ),
        "rotary-seq-len-interpolation-factor": (
            {"1": {}, TYPED: {"rotary_scaling": "linear", "rotary_scaling_factor": TYPED}},
            "use --rotary-scaling linear --rotary-scaling-factor",
        ),
    }
)
# Values of options, as other programs spell them.
VALUES: Mapping[tuple[str, str], Any] = MappingProxyType(
    {
        ("position_embedding_type", "rotary"): "rope",
        ("position_embedding_type", "absolute"): "learned_absolute",
        ("normalization", "rmsnorm"): "RMSNorm",
        ("normalization", "layernorm"): "LayerNorm",
        ("tokenizer_type", "PretrainedFromHF"): "HuggingFaceTokenizer",
        ("tokenizer_type", "TokenizerFromFile"): "HuggingFaceTokenizer",
        ("tokenizer_type", "HFTokenizer"): "HuggingFaceTokenizer",
        ("tokenizer_type", "GPTSentencePieceTokenizer"): "SentencePieceTokenizer",
        ("tokenizer_type", "Llama2Tokenizer"): "SentencePieceTokenizer",
    }
)
# Values of options that Megatron has and that are not built here, with what to do instead.
UNBUILT: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("position_embedding_type", "none"): "use rope, learned_absolute or alibi",
        ("position_embedding_type", "relative"): "use rope, learned_absolute or alibi",
        ("position_embedding_type", "mrope"): "use rope",
        ("position_embedding_type", "yarn"): "use rope, with --rotary-scaling llama3 or linear",
        ("tokenizer_type", "TokenizerFromFileWithFIM"): "use TokenizerFromFile on plain text",
        ("tokenizer_type", "TikTokenizer"): "use HuggingFaceTokenizer with the model's tokenizer.json",
        ("tokenizer_type", "GPT4BPETokenizer"): "use HuggingFaceTokenizer with the model's tokenizer.json",
        ("tokenizer_type", "SFTTokenizer"): "pretraining only is done here",
        ("tokenizer_type", "MultimodalTokenizer"): "text only is trained on here",
    }
)
# Accepted where an option has one of these values: (option, values, why it then changes nothing, what to do else).
CONDITIONAL: Mapping[str, tuple[str, tuple[Any, ...], str, str]] = MappingProxyType(
    {
        "no-position-embedding": (
            "position_embedding_type",
            ("rope", "alibi"),
            "rotary and ALiBi positions have no embedding",
            "a model without positions is not built; add --position-embedding-type rope",
        ),
        "no-pipeline-parallel": (
            "pipeline_model_parallel_size",
            (1, None),
            "without pipeline ranks there is no pipeline",
            "a pipeline is what --pipeline-model-parallel-size asks for; leave one of them out",
        ),
    }
)
