"""Flags of Megatron-LM, Megatron-DeepSpeed and their forks that change nothing here, by the reason.

Each name has after "=" how many values follow it: 1, ? (none or one), * (any number), + (at least one), else none.
"""

from __future__ import annotations

KERNEL = "which kernels and fusions compute it; the mathematics is the same"
SUMS = "sums of gradients, master weights and the loss are always in at least fp32, and over the valid tokens"
ZERO = (
    "the optimizer's states are shared by default (zero1); --zero-preset, --zero-stage and "
    "--zero-shard decide"
)
SPLIT = "this size means that it is not used"

ACCEPTED: tuple[tuple[str, str], ...] = (
    (
        "what is printed or sent to TensorBoard; metrics.jsonl always has every value",
        """
        app-tag-run-name=1 app-tag-run-version=1 codecarbon-dir=1 config-logger-dir=1 debug deepspeed-mpi
        disable-log-loss-scale-to-tensorboard disable-straggler-on-startup dump-param-to-param-group-map=1
        enable-one-logger enable-onelogger log-batch-size-to-tensorboard log-device-memory-used log-energy
        log-l2-norm-grad-to-tensorboard log-level=1 log-level-replica=1 log-max-attention-logit
        log-memory-interval=1 log-memory-to-tensorboard log-num-zeros-in-grad
        log-optimizer-states-to-tensorboard log-params-norm log-params-norm-per-layer
        log-params-norm-per-param log-path=1 log-progress log-straggler log-throughput
        log-throughput-to-tensorboard log-timers-to-tensorboard log-tokens-per-second
        log-validation-ppl-to-tensorboard log-weight-decay log-world-size-to-tensorboard log-zeros
        logging-level=1 moe-per-layer-logging no-barrier-with-level-1-timing
        no-log-learnig-rate-to-tensorboard no-log-loss-scale-to-tensorboard no-log-memory-to-tensorboard
        no-one-logger one-logger-async one-logger-entity=1 one-logger-project=1 one-logger-run-name=1
        otel-enabled otel-service-name=1 otel-span-groups=1 straggler-ctrlr-port=1 straggler-minmax-count=1
        structured-logs structured-logs-dir=1 tensorboard-log-interval=1 tensorboard-queue-size=1
        timing-log-level=1 timing-log-option=1 transformer-timers wandb-log-interval=1 wandb-step-offset=1
        """,
    ),
    (
        KERNEL,
        """
        abort-on-unmet-fused-kernel-constraints apply-layernorm-1p apply-query-key-layer-scaling
        apply-rope-fusion async-tensor-model-parallel-allreduce async-tensor-parallel-allreduce
        attention-softmax-in-fp32 bias-gelu-fusion bias-swiglu-fusion cross-entropy-fusion-impl=1
        cross-entropy-loss-fusion cuda-graph-impl=1 cuda-graph-modules=+ cuda-graph-scope=+
        cuda-graph-warmup-steps=1 disable-bf16-reduced-precision-matmul
        disable-clone-scatter-output-in-embedding disable-jit-fuser disable-mem-efficient-ln ds-fused-adam
        enable-cuda-graph enable-zbh1-exact-semantics external-cuda-graph flash-attention-version=1
        fused-residual-rmsnorm layernorm-tp-auto-sync mlp-chunks-for-training=1
        no-async-tensor-model-parallel-allreduce no-bias-dropout-fusion
        no-bias-swiglu-fusion no-clone-scatter-output-in-embedding no-gradient-accumulation-fusion
        no-layer-norm-fusion no-masked-softmax-fusion no-optimizer-fusion no-persist-layer-norm
        no-query-key-layer-scaling no-rope-fusion no-scaled-masked-softmax-fusion onnx-safe=?
        optimizer-cuda-graph scaled-masked-softmax-fusion scaled-upper-triang-masked-softmax-fusion=?
        symmetric-ar-type=1 sync-tp-duplicated-parameters te-rng-tracker use-flash-attn
        use-flash-attn-builder use-flash-attn-triton use-flash-attn-v1 use-flash-attn-v2 use-fused-rmsnorm=1
        use-fused-sdpa=1 use-fused-weighted-squared-relu use-grouped-gemm-for-dense-mlp use-legacy-models
        use-mcore-models use-te-activation-func use-torchqknorm use-transformer-engine-op-fuser
        """,
    ),
    (
        "how messages are sent and overlapped; here they always overlap, in buffers and groups of their own",
        """
        align-param-gather cp-comm-type=+ create-all-gather-group ddp-average-in-collective
        ddp-bucket-size=1 ddp-num-buckets=1 ddp-pad-buckets-for-high-nccl-busbw deallocate-pipeline-outputs
        defer-embedding-wgrad-compute delay-param-gather delay-wgrad-compute disable-align-grad-reduce
        disable-gloo-process-groups disable-symmetric-registration disable-tp-comm-bulk-dgrad
        disable-tp-comm-bulk-wgrad disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs
        disable-tp-comm-split-ag disable-tp-comm-split-rs disrib-opt-comm-mem-savings=1
        distrib-opt-comm-mem-savings=1 fsdp-db-use-persist-buf-on-alloc-fail fsdp-double-buffer
        fsdp-manual-registration high-priority-a2a-comm-stream high-priority-stream-groups=* lazy-mpu-init=?
        megatron-fsdp-enable-fine-grained-param-gather megatron-fsdp-max-pool-double-buffer
        megatron-fsdp-version=1 microbatch-group-size-per-virtual-pipeline-stage=1
        nccl-communicator-config-path=1 no-align-grad-reduce no-align-param-gather
        no-contiguous-buffers-in-local-ddp no-delay-grad-reduce no-gradient-reduce-div-fusion
        no-overlap-p2p-communication no-scatter-gather-tensors-in-pipeline no-tp-comm-bulk-dgrad
        no-tp-comm-bulk-wgrad no-tp-comm-overlap-ag no-tp-comm-overlap-rs no-tp-comm-split-ag
        no-tp-comm-split-rs no-use-layer-wise-param-layout overlap-grad-reduce overlap-p2p-communication
        overlap-p2p-communication-warmup-flush overlap-param-gather overlap-param-gather-with-optimizer-step
        pipeline-model-parallel-comm-backend=1 scatter-gather-tensors-in-pipeline sharp-enabled-group=1
        suggested-communication-unit-size=1 torch-fsdp2-no-reshard-after-forward tp-comm-bootstrap-backend=1
        tp-comm-bulk-dgrad tp-comm-bulk-wgrad tp-comm-overlap tp-comm-overlap-cfg=1 tp-comm-overlap-rs-dgrad
        tp-comm-split-ag tp-comm-split-rs use-contiguous-buffers-in-ddp use-nccl-ub use-pipelining
        use-ring-exchange-p2p use-sharp wgrad-deferral-limit=1 zero-allgather-bucket-size=1
        zero-contigious-gradients zero-reduce-bucket-size=1 zero-reduce-scatter
        """,
    ),
    (
        SUMS,
        """
        accumulate-allreduce-grads-in-fp32 calculate-per-token-loss
        ddp-reduce-scatter-with-fp32-accumulation fp32-allreduce grad-reduce-in-bf16
        """,
    ),
    (
        ZERO,
        """
        memory-centric-tiled-linear no-pin-cpu-grads no-pin-cpu-params scattered-embeddings
        split-transformers tile-factor=1 use-custom-fsdp use-distributed-optimizer use-megatron-fsdp
        use-pin-memory
        """,
    ),
    (
        "how what --recompute-granularity asks for is done; the numbers are the same",
        """
        activations-checkpoint-num-layers=1 checkpoint-in-cpu checkpoint-num-layers=1
        contigious-checkpointing distribute-checkpointed-activations distribute-recomputed-activations
        distribute-saved-activations=? model-parallel-memory-opt moe-layer-recompute partition-activations
        profile-backward recompute-modules=* recompute-num-layers=1 synchronize-each-layer
        """,
    ),
    (
        "stages always have equal cost, the embedding and the head counted; --pipeline-partition says "
        "otherwise",
        """
        account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split standalone-embed-stage
        standalone-embedding-stage
        """,
    ),
    (
        "how samples are read; their order depends on --seed alone",
        """
        dataloader-defer-npy-index-mmap dataloader-fast-cache-load exit-signal-handler-for-dataloader
        mmap-warmup no-create-attention-mask-in-dataloader no-mmap-bin-files
        num-dataset-builder-threads=1 num-workers=1 sanity-check-dataloader-interval=1 skip-mmap-warmup
        valid-num-workers=1
        """,
    ),
    (
        "how checkpoints are written; here each rank always writes its slices and any layout loads them",
        """
        async-ckpt-cpu-priority=1 async-ckpt-io-priority=1 async-ckpt-use-cpu-shm
        async-strategy=1 auto-detect-ckpt-format ckpt-assume-constant-structure
        ckpt-drop-redundant-extra-state ckpt-format=1 ckpt-fully-parallel-load
        ckpt-fully-parallel-load-exchange-algo=1 ckpt-fully-parallel-load-per-rank-objects
        ckpt-fully-parallel-load-process-group=1 ckpt-fully-parallel-save
        ckpt-fully-parallel-save-process-group=1 ckpt-pg-tensors-cache-create ckpt-pg-tensors-cache-path=1
        disable-ckpt-load-validate-sharding-integrity disable-save-tokenizer-assets
        disable-strict-fsdp-dtensor-load dist-ckpt-format=1 dist-ckpt-optim-fully-reshardable
        dist-ckpt-save-pre-mcore-014 dist-ckpt-strictness=1 dist-ckpt-workers=1
        distrib-optim-fully-reshardable-mem-efficient load-all-rng no-ckpt-fully-parallel-save
        no-ckpt-load-validate-sharding-integrity no-save-tokenizer-assets no-strict-fsdp-dtensor-load
        save-all-rng universal-checkpoint use-dist-ckpt use-persistent-ckpt-worker validate-model-load
        verify-integrity
        """,
    ),
    (
        "checkpoints always hold it",
        """
        disable-save-optim disable-save-rng no-save-optim no-save-rng
        """,
    ),
    (
        "follows from --num-query-groups",
        """
        group-query-attention
        """,
    ),
    (
        "a run that continues a checkpoint always has its architecture; flags that say another one are an error",
        """
        use-checkpoint-args
        """,
    ),
    (
        "at a resume the flags always decide the schedule",
        """
        override-lr-scheduler override-opt-param-scheduler
        """,
    ),
    (
        "a step whose gradients are not finite is always skipped, on every rank",
        """
        check-for-nan-in-loss-and-grad disable-check-for-nan-in-loss no-check-for-nan-in-loss
        no-check-for-nan-in-loss-and-grad rerun-mode=1 result-rejected-tracker-filename=1
        """,
    ),
    (
        "of Megatron's processes and their memory, not of training",
        """
        adlr-autoresume adlr-autoresume-interval=1 check-weight-hash-across-dp-replicas-interval=1 deepscale
        deepspeed disable-flight-recorder-dump-on-timeout disable-flight-recorder-extra-dump-on-exec
        disable-flight-recorder-include-only-active disable-manual-gc-eval disable-msc distributed-timeout=1
        distributed-timeout-seconds-after-init=1 empty-unused-memory-each-iter=1 empty-unused-memory-level=1
        enable-experimental enable-msc flight-recorder-dump-path=1 flight-recorder-include-stack-trace
        flight-recorder-trace-buffer-size=1 gpu-sniff-test-interval=1 manual-gc manual-gc-interval=1
        no-flight-recorder-dump-on-timeout no-flight-recorder-extra-dump-on-exec
        no-flight-recorder-include-only-active no-manual-gc-eval train-sync-interval=1
        """,
    ),
    (
        "weights are always made on the device of their rank, the same ones on any layout",
        """
        init-model-with-meta-device no-initialization use-cpu-initialization=? use-gpu-initialization
        """,
    ),
    (
        "--profile always uses torch's profiler",
        """
        memory-snapshot-path=1 nvtx-ranges pytorch-profiler-collect-callstack
        pytorch-profiler-collect-chakra pytorch-profiler-collect-shapes record-memory-history record-shapes
        use-pytorch-profiler
        """,
    ),
    (
        "the tokenizer is made from its file alone, with the ids that it gives",
        """
        legacy-tokenizer tokenizer-hf-no-use-fast tokenizer-hf-use-fast tokenizer-metadata=1
        tokenizer-sentencepiece-legacy trust-remote-code use-gigatoken=1
        """,
    ),
    (
        "of mixtures of experts, of which there are none (--num-experts above 1 is an error)",
        """
        create-moe-param-group delay-offload-until-cuda-graph disable-moe-token-dropping
        disable-moe-top2-2nd-expert-sampling enable-expert-tensor-parallelism
        ep-overlap-early-attn-memory-release expert-interval=1 moe-apply-probs-on-input moe-aux-loss-coeff=+
        moe-combine-bwd-dtype=1 moe-deepep-num-sms=1 moe-dispatch-fwd-dtype=1 moe-enable-deepep
        moe-enable-routing-replay moe-eval-capacity-factor=1 moe-expert-capacity-factor=1
        moe-expert-rank-capacity-factor=1 moe-extended-tp moe-ffn-hidden-size=1
        moe-flex-dispatcher-backend=1 moe-flex-dispatcher-num-sms=1 moe-frequency=1 moe-grouped-gemm
        moe-hybridep-num-blocks-permute=1 moe-hybridep-num-blocks-unpermute=1 moe-hybridep-num-sms=1
        moe-hybridep-num-sms-preprocessing=1 moe-hybridep-pad-uneven-dispatch-inputs moe-input-jitter-eps=1
        moe-latent-size=1 moe-layer-freq=1 moe-loss-coeff=1 moe-min-capacity=1 moe-mlp-glu-interleave-size=1
        moe-ncclep-zero-copy moe-pad-expert-input-to-capacity moe-pad-experts-for-cuda-graph-inference
        moe-paged-stash moe-paged-stash-buffer-size-factor-cpu=1 moe-paged-stash-buffer-size-factor-cuda=1
        moe-paged-stash-page-size=1 moe-permute-fusion moe-permute-fusion-into-hybridep
        moe-router-bias-update-rate=1 moe-router-dtype=1 moe-router-enable-expert-bias
        moe-router-force-biased=1 moe-router-force-load-balancing moe-router-fusion moe-router-group-topk=1
        moe-router-load-balancing-type=+ moe-router-num-groups=1 moe-router-padding-for-fp8=?
        moe-router-padding-for-quantization=? moe-router-pre-softmax moe-router-quantile-balancing-ema=1
        moe-router-score-function=1 moe-router-topk=1 moe-router-topk-scaling-factor=1 moe-router-type=1
        moe-routing-trace-capture-hidden-states moe-routing-trace-capture-logits
        moe-routing-trace-dump-weights moe-routing-trace-max-training-iters=1 moe-routing-trace-path=1
        moe-shared-expert-gate moe-shared-expert-glu-interleave-size=1 moe-shared-expert-intermediate-size=1
        moe-shared-expert-overlap moe-single-grouped-bias moe-single-grouped-weight
        moe-token-dispatcher-type=1 moe-token-drop-policy=1 moe-train-capacity-factor=1
        moe-upcycling-granularity=1 moe-use-grouped-tensor moe-use-legacy-grouped-gemm moe-z-loss-coeff=1
        overlap-dispatch-backward-with-experts-wgrad overlap-moe-expert-parallel-comm topk=1
        use-grouped-gemm-for-shared-expert use-tutel
        """,
    ),
)
