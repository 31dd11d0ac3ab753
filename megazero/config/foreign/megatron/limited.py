"""Flags of Megatron whose value decides: these values change nothing here, and others are not built."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megazero.config.foreign.megatron.accepted import KERNEL, SPLIT, SUMS, ZERO

# Name, with how many values follow it: the accepted values, why they change nothing, what to do for others.
LIMITED: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "mid-level-dataset-surplus=1": (
            "0.005",
            "it is the share of spare samples that a blend asks of its parts, as here",
            "another share is another order of samples, and is not built; leave it out",
        ),
        "context-parallel-size=1": (
            "1",
            SPLIT,
            "context parallelism is not built; use --tensor-model-parallel-size with --sequence-parallel",
        ),
        "ds-sequence-parallel-size=1": (
            "1",
            SPLIT,
            "DeepSpeed's sequence parallelism is not built; use --tensor-model-parallel-size with "
            "--sequence-parallel",
        ),
        "expert-model-parallel-size=1": (
            "1",
            SPLIT,
            "experts are not built; train a dense model",
        ),
        "expert-tensor-parallel-size=1": (
            "1",
            SPLIT,
            "experts are not built; train a dense model",
        ),
        "moe-expert-parallel-size=1": (
            "1",
            SPLIT,
            "experts are not built; train a dense model",
        ),
        "num-experts=+": (
            "1",
            SPLIT,
            "mixtures of experts are not built; train a dense model",
        ),
        "mlp-type=1": (
            "standard",
            SPLIT,
            "mixtures of experts are not built; train a dense model",
        ),
        "encoder-tensor-model-parallel-size=1": (
            "0",
            SPLIT,
            "there is no encoder; use --tensor-model-parallel-size",
        ),
        "encoder-pipeline-model-parallel-size=1": (
            "0",
            SPLIT,
            "there is no encoder; use --pipeline-model-parallel-size",
        ),
        "num-distributed-optimizer-instances=1": (
            "1",
            SPLIT,
            "replicas of a sharded optimizer are --zero-shard 1,1,OS, with OS the data-parallel ranks of one "
            "instance",
        ),
        "outer-dp-sharding-strategy=1": (
            "no_shard",
            SPLIT,
            "use --zero-preset hpz, whose optimizer states are shared by all ranks",
        ),
        "cpu-offloading-num-layers=1": (
            "0",
            SPLIT,
            "offload is not built; shard further (--zero-preset zero3) or recompute (--recompute-granularity "
            "full)",
        ),
        "remote-device=1": (
            "none",
            SPLIT,
            "offload is not built; shard further (--zero-preset zero3)",
        ),
        "mtp-num-layers=1": (
            "0",
            SPLIT,
            "multi-token prediction is not built; train for the next token",
        ),
        "fim-rate=1": (
            "0 0.0",
            SPLIT,
            "fill in the middle is not built; train on plain text",
        ),
        "fim-spm-rate=1": (
            "0 0.0",
            SPLIT,
            "fill in the middle is not built; train on plain text",
        ),
        "data-impl=1": (
            "mmap infer",
            "it is the format of the data",
            "only Megatron's mmap format is read; convert the data with tools/preprocess_data.py",
        ),
        "dataloader-type=1": (
            "single",
            "samples always go round the ranks in one order",
            "another order of samples would be another training run; use single",
        ),
        "distributed-backend=1": (
            "nccl gloo hccl ccl",
            "the device decides: nccl on CUDA, gloo on CPUs",
            "messages go through NCCL on CUDA and gloo on CPUs; leave it out",
        ),
        "transformer-impl=1": (
            "local transformer_engine",
            KERNEL,
            "it is of inference; use local",
        ),
        "attention-backend=1": (
            "auto flash fused unfused local",
            "attention always goes through torch's scaled_dot_product_attention; the mathematics is the same",
            "use auto",
        ),
        "DDP-impl=1": (
            "local torch",
            ZERO,
            "use --zero-preset",
        ),
        "recompute-method=1": (
            "uniform block",
            "with --recompute-granularity full every layer is recomputed by itself; the numbers are the same",
            "use uniform",
        ),
        "checkpoint-method=1": (
            "uniform block",
            "with --recompute-granularity full every layer is recomputed by itself; the numbers are the same",
            "use uniform",
        ),
        "weight-decay-incr-style=1": (
            "constant",
            "the weight decay is always constant",
            "a weight decay that grows is not built; use --weight-decay",
        ),
        "lr-warmup-init=1": (
            "0 0.0",
            "the warm-up always begins at 0",
            "a warm-up from another rate is not built; leave it out",
        ),
        "lr-warmup-style=1": (
            "linear",
            "the warm-up is always linear",
            "the warm-up is linear; leave it out",
        ),
        "exit-signal=1": (
            "SIGTERM sigterm 15",
            "--exit-signal-handler always waits for SIGTERM",
            "the signal is SIGTERM; have the scheduler send that",
        ),
        "softmax-type=1": (
            "vanilla",
            "attention's softmax is the plain one",
            "softmax with an offset is not built",
        ),
        "vocab-extra-ids=1": (
            "0",
            "no ids are added to the tokenizer's",
            "extra ids are not built; train on the tokenizer's own vocabulary, padded by "
            "--make-vocab-size-divisible-by",
        ),
        "main-params-dtype=1": (
            "fp32",
            SUMS,
            "master weights are in fp32; leave it out",
        ),
        "main-grads-dtype=1": (
            "fp32",
            SUMS,
            "sums of gradients are in fp32; leave it out",
        ),
        "megatron-fsdp-main-params-dtype=1": (
            "fp32",
            SUMS,
            "master weights are in fp32; leave it out",
        ),
        "megatron-fsdp-main-grads-dtype=1": (
            "fp32",
            SUMS,
            "sums of gradients are in fp32; leave it out",
        ),
        "megatron-fsdp-grad-comm-dtype=1": (
            "fp32",
            SUMS,
            "sums of gradients are in fp32; --zero-quantized-gradients sends fewer bits across nodes",
        ),
        "exp-avg-dtype=1": (
            "fp32",
            "the optimizer's states are in fp32",
            "states in fewer bits are not built; share them further (--zero-preset)",
        ),
        "exp-avg-sq-dtype=1": (
            "fp32",
            "the optimizer's states are in fp32",
            "states in fewer bits are not built; share them further (--zero-preset)",
        ),
        "output-logit-dtype=1": (
            "fp32",
            SUMS,
            "the loss is always in at least fp32; leave it out",
        ),
        "layernorm-init=1": (
            "1 1.0",
            "norms always begin at 1",
            "norms begin at 1; leave it out",
        ),
        "input-embeddings-multiplier=1": (
            "1 1.0",
            "embeddings are used as they are",
            "scaled embeddings are not built",
        ),
        "glu-linear-offset=1": (
            "0 0.0",
            "SwiGLU has no offset",
            "an offset in SwiGLU is not built",
        ),
    }
)
