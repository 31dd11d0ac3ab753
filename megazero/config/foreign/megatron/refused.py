"""Flags of Megatron-LM, Megatron-DeepSpeed and their forks that would change the training and are not built here."""

from __future__ import annotations

# Names have how many values follow them as in accepted.py.
REFUSED: tuple[tuple[str, str], ...] = (
    (
        "fp8 and fp4 are not built; train in --bf16",
        """
        activation-func-fp8-input-store disable-fp8-wgrad first-last-layers-bf16 fp4-format=1
        fp4-param-gather fp4-quantizer-factory=1 fp4-recipe=1 fp8-amax-compute-algo=1 fp8-amax-history-len=1
        fp8-e4m3 fp8-format=1 fp8-hybrid fp8-interval=1 fp8-margin=1 fp8-output-proj fp8-param-gather
        fp8-quantizer-factory=1 fp8-recipe=1 gtp-remat-opt-in-modules=+ keep-fp8-transpose-cache
        keep-fp8-transpose-cache-when-using-custom-fsdp kitchen-attention-backend=1 kitchen-config-file=1
        kitchen-recipe-number=1 no-fp8-wgrad num-layers-at-end-in-bf16=1 num-layers-at-start-in-bf16=1
        reuse-grad-buf-for-mxfp8-param-ag te-precision-config-file=1 use-kitchen-attention
        """,
    ),
    (
        "the optimizer is torch's AdamW or SGD on the device, with states in fp32; offload and states in "
        "fewer bits are not built: shard further (--zero-preset zero3)",
        """
        cpu-optimizer cpu-torch-adam optimizer-cpu-offload optimizer-offload-fraction=1
        overlap-cpu-optimizer-d2h-h2d use-bnb-optimizer use-precision-aware-optimizer
        use-torch-optimizer-for-cpu-offload
        """,
    ),
    (
        "offload of activations is not built; recompute them (--recompute-granularity full)",
        """
        activation-offload-fraction=1 cpu-offloading cpu-offloading-retain-pinned-cpu-buffers
        delta-offload-bytes-across-pp-ranks=1 fine-grained-activation-offloading
        fine-grained-offloading-max-inflight-offloads=1 min-offloaded-tensor-size=1 offload-modules=*
        """,
    ),
    (
        "Muon, Lion, AdEMAMix and other optimizers are not built; use --optimizer adam",
        """
        ademamix-alpha=1 ademamix-alpha-warmup=1 ademamix-beta3=1 ademamix-beta3-warmup=1 lion-beta1=1
        lion-beta2=1 muon-coefficient-type=1 muon-extra-scale-factor=1 muon-fp32-matmul-prec=1
        muon-momentum=1 muon-nesterov=? muon-no-split-qkv muon-num-ns-steps=1 muon-scalar-optimizer=1
        muon-scale-mode=1 muon-tp-mode=1 muon-use-nesterov muon-use-syrk
        """,
    ),
    (
        "weight decay has one value, and norms and biases have none; use --weight-decay",
        """
        apply-wd-to-qk-layernorm end-wd=1 end-weight-decay=1 start-wd=1 start-weight-decay=1 wd-incr-style=1
        """,
    ),
    (
        "multi-token prediction is not built; train for the next token",
        """
        mtp-detach-heads mtp-hsm mtp-hybrid-override-pattern=1 mtp-loss-scaling-factor=1 mtp-standalone
        mtp-use-repeated-layer
        """,
    ),
    (
        "maximal update parametrisation is not built; set --lr and --init-method-std yourself",
        """
        mup-attn-scale-power=1 mup-base-head-dim=1 mup-base-hidden-size=1 mup-embedding-mult=1
        mup-output-mult=1 mup-width-mult=1 use-mup
        """,
    ),
    (
        "latent attention is not built; use grouped-query attention (--num-query-groups)",
        """
        beta-fast=1 beta-slow=1 cache-mla-latents kv-lora-rank=1 mla-down-proj-fusion mscale=1
        mscale-all-dim=1 multi-latent-attention original-max-position-embeddings=1 q-lora-rank=1
        qk-head-dim=1 qk-pos-emb-head-dim=1 rope-type=1 v-head-dim=1
        """,
    ),
    (
        "linear, sparse, windowed and other experimental attention is not built; attention is causal over "
        "the whole sequence",
        """
        attention-output-gate disable-dsa-indexer-rotate-activation disable-dsa-indexer-scoring-relu
        dsa-indexer-head-dim=1 dsa-indexer-k-norm-epsilon=1 dsa-indexer-k-norm-fp32 dsa-indexer-loss-coeff=1
        dsa-indexer-n-heads=1 dsa-indexer-rope-interleaved dsa-indexer-skip-topk-offset=1 dsa-indexer-topk=1
        dsa-indexer-topk-freq=1 dsa-indexer-use-sparse-loss dsa-kernel-backend=1
        experimental-attention-variant=1 gdp-cutedsl-kernel gdp-num-chunk-states-to-recompute=1
        gdp-num-householder=1 linear-attention-freq=1 linear-attention-type=1 linear-conv-kernel-dim=1
        linear-key-head-dim=1 linear-num-key-heads=1 linear-num-value-heads=1 linear-value-head-dim=1
        no-dsa-indexer-rotate-activation no-dsa-indexer-scoring-relu
        window-attn-skip-freq=1 window-size=+
        """,
    ),
    (
        "of norms of queries and keys --qk-layernorm and --qk-norm all-heads are built; use one, or leave it out",
        """
        qk-clip qk-clip-alpha=1 qk-clip-threshold=1 qk-l2-norm qknorm-impl=1
        """,
    ),
    (
        "positions are --position-embedding-type rope, learned_absolute or alibi; other kinds are not built",
        """
        mrope-section=+ no-rope-freq=1 no-yarn-correction-range-round-to-int
        relative-attention-max-distance=1 relative-attention-num-buckets=1 rotary-interleaved
        yarn-beta-fast=1 yarn-beta-slow=1 yarn-correction-range-round-to-int yarn-mscale=1
        yarn-mscale-all-dim=1 yarn-original-max-position-embeddings=1 yarn-rotary-scaling-factor=1
        """,
    ),
    (
        "the layer is norm, attention, norm, MLP, each with a residual sum; other layers are not built",
        """
        apply-residual-connection-post-layernorm deep-init downscale-residual=1 enable-mhc-connections
        heterogeneous-layers-config-encoded-json=1 heterogeneous-layers-config-path=1
        mhc-init-gating-factor=1 mhc-num-residual-streams=1 mhc-recompute-layer-num=1
        mhc-sinkhorn-iterations=1 model-spec=+ no-attn-layernorm no-final-layernorm no-mlp-layernorm
        num-unique-layers=1 param-sharing-style=1 post-layer-norm single-residual-gain softmax-scale=1
        spec=*
        """,
    ),
    (
        "the MLP is --swiglu, --squared-relu or GELU; other activations are not built",
        """
        activation-func-clamp-value=1 quick-geglu xielu xiprelu xiprelup
        """,
    ),
    (
        "weights begin as normal numbers of --init-method-std; other initial weights are not built",
        """
        data-parallel-random-init embedding-init-method-std=1 init-method-xavier-uniform
        """,
    ),
    (
        "residual sums and embeddings are in the dtype of the parameters; train in --fp32 for more bits",
        """
        embedding-weights-in-fp32 fp32-embedding fp32-layernorm fp32-residual-connection fp32-tokentypes
        """,
    ),
    (
        "the loss is always computed in at least fp32; leave it out",
        """
        fp16-lm-cross-entropy
        """,
    ),
    (
        "kernels that are alike for every batch size are not built; use --deterministic-mode",
        """
        batch-invariant-backend=1 batch-invariant-mode
        """,
    ),
    (
        "mixtures of experts are not built; train a dense model",
        """
        expert-parallel moe-router-topk-limited-devices=1 moe-use-upcycling num-experts-switch=1
        """,
    ),
    (
        "context parallelism is not built; use --tensor-model-parallel-size with --sequence-parallel",
        """
        force-ds-sequence-parallel hierarchical-context-parallel-sizes=+ hybrid-context-parallel
        max-seqlen-per-cp-rank=1 max-seqlen-per-dp-cp-rank=1
        """,
    ),
    (
        "weights are shared over ranks by --zero-preset; leave it out",
        """
        ddp-param-name-patterns-for-fp32-local-accumulation=+ enable-full-sharding-in-hsdp
        expert-tensor-parallel-num-weight-shards=1 gtp-expert-remat-nccl-ub gtp-remat-nccl-ub
        gtp-remat-reduce-scatter-with-fp32-accumulation tensor-parallel-num-weight-shards=1
        """,
    ),
    (
        "stages are named otherwise; use --pipeline-partition or --num-virtual-stages-per-pipeline-rank",
        """
        pipeline-model-parallel-layout=1
        """,
    ),
    (
        "the batch is --global-batch-size, or grows by --rampup-batch-size; other schedules of it are not "
        "built",
        """
        decrease-batch-size-if-needed step-batch-size-schedule=1
        """,
    ),
    (
        "it is the batch size of Megatron before 2.0; use --micro-batch-size and --global-batch-size",
        """
        batch-size=1 num-microbatches=1 num-microbatches-in-minibatch=1
        """,
    ),
    (
        "it is the warm-up of Megatron before 2.0; use --lr-warmup-fraction",
        """
        lr-warmup-percent=1 warmup=1
        """,
    ),
    (
        "control by files is not built; use --kill-switch-path, --exit-signal-handler or "
        "--exit-duration-in-mins",
        """
        trigger-path=1
        """,
    ),
    (
        "lengths that grow, dropped tokens and sampled data of DeepSpeed are not built; train at "
        "--seq-length throughout",
        """
        data-efficiency-curriculum-learning random-ltd repeated-dataloader return-data-index
        train-data-exact-num-epochs=1 train-desc-path=1 train-doc-idx-path=1 train-idx-path=1
        train-sample-idx-path=1 train-shuffle-idx-path=1
        """,
    ),
    (
        "losses and masks are those of causal language models; other objectives are not built",
        """
        bod-hiding chat-template=1 dataloader-inter-document-masking fim-data fim-eod-token=1
        fim-fragment-rate=1 fim-middle-token=1 fim-no-prefix=1 fim-pad-token=1 fim-prefix-token=1
        fim-split-sample=1 fim-suffix-token=1 fragment-fim-rate=1 goldfish-h=1 goldfish-k=1 goldfish-loss
        loss-on-targets-only mean-noise-span-length=1 noise-density=1
        reweight-loss-based-on-position-frequency sft sft-tokenizer-prompt-format=1 use-random-spans
        """,
    ),
    (
        "data are named by --data-path and its kin; write the words there",
        """
        aml-data-download-path=1 hf-tokenizer-path=1 object-storage-cache-path=1
        per-dataset-sequences-path=1 phase-transition-iterations=1
        renormalize-blend-weights s3-cache-path=1 train-data=+ val-data-path=1 valid-data=*
        """,
    ),
    (
        "evaluation is --eval-iters batches of the validation data every --eval-interval; other kinds are "
        "not built",
        """
        eval-global-batch-size=1 eval-micro-batch-size=1 eval-only=1 full-validation
        multiple-validation-sets skip-train start-eval-at-iter=1 validation-set-names=+
        """,
    ),
    (
        "the newest complete checkpoint of --load is taken, and flags decide the rest; leave it out",
        """
        ckpt-step=1 disable-use-tokenizer-model-from-checkpoint-args load-iteration=1
        load-main-params-from-ckpt load-tag=1 no-load-lr-state no-use-tokenizer-model-from-checkpoint-args
        override-checkpoint-version=1 override-ckpt-iteration=1
        use-checkpoint-lr-scheduler use-checkpoint-opt-param-scheduler use-mp-args-from-checkpoint-args
        """,
    ),
    (
        "weights of another run are loaded by --load DIR --finetune",
        """
        finetune-from=1 load-model-opt-format pretrained-checkpoint=1 reset-iteration reset-progress
        """,
    ),
    (
        "checkpoints are read and written in one format; convert others through their Hugging Face weights",
        """
        ckpt-convert-format=1 ckpt-convert-save=1 ckpt-convert-update-legacy-dist-opt-format
        override-dataloader-consumed-samples=1
        """,
    ),
    (
        "checkpoints in memory and on local disks are not built; use --save-interval",
        """
        non-persistent-ckpt-type=1 non-persistent-global-ckpt-dir=1 non-persistent-local-ckpt-algo=1
        non-persistent-local-ckpt-dir=1 non-persistent-save-interval=1 replication replication-factor=1
        replication-jump=1
        """,
    ),
    (
        "tensors of a step are not written; use tools of torch in a script of your own",
        """
        save-activations-interval=1 save-dgrads-interval=1 save-params-interval=1
        save-tokens-per-expert-interval=1 save-wgrads-interval=1
        """,
    ),
    (
        "losses and gradients are only checked for being finite; leave it out",
        """
        check-for-large-grads check-for-spiky-loss
        """,
    ),
    (
        "profiled iterations are --profile with --profile-step-start and --profile-step-end",
        """
        profile-steps=1
        """,
    ),
    (
        "parts of the model are not frozen; leave it out",
        """
        freeze-all-layers
        """,
    ),
    (
        "use --config FILE, a YAML file of flags",
        """
        yaml-cfg=1
        """,
    ),
    (
        "it runs no training; use megazero verify",
        """
        max-training-rank=1 use-dataset-only=1
        """,
    ),
    (
        "the vocabulary is padded by --make-vocab-size-divisible-by or --pad-vocab-size-to; leave it out",
        """
        disable-pad-vocab-size no-pad-vocab-size
        """,
    ),
    (
        "the tokenizer is one of --tokenizer-type's; this is of others",
        """
        allow-ambiguous-pad-tokens disable-tokenizer-sentencepiece-ignore-extra-whitespaces
        no-tokenizer-sentencepiece-ignore-extra-whitespaces null-tokenizer-eod-id=1 null-tokenizer-pad-id=1
        tiktoken-num-special-tokens=1 tiktoken-pattern=1 tiktoken-special-tokens=+
        tokenizer-hf-include-special-tokens tokenizer-hf-no-include-special-tokens tokenizer-model-type=1
        tokenizer-path=1 tokenizer-special-tokens=+
        """,
    ),
)
