"""Flags of Megatron that belong to other programs than the pretraining of decoders."""

from __future__ import annotations

# Names have how many values follow them as in accepted.py.
OTHER_PROGRAMS: tuple[tuple[str, str], ...] = (
    (
        "restarts inside the process and faults on purpose are not built; submit the script again, with "
        "--load",
        """
        calc-ft-timeouts enable-ft-package error-injection-rate=1 error-injection-type=1 fake-process-group
        ft-num-warmup-iters=1 inprocess-active-world-size=1 inprocess-barrier-timeout=1
        inprocess-completion-timeout=1 inprocess-empty-cuda-cache inprocess-granularity=1
        inprocess-hard-timeout=1 inprocess-heartbeat-interval=1 inprocess-heartbeat-timeout=1
        inprocess-last-call-wait=1 inprocess-max-iterations=1 inprocess-monitor-process-interval=1
        inprocess-monitor-thread-interval=1 inprocess-progress-watchdog-interval=1 inprocess-restart
        inprocess-soft-timeout=1 inprocess-termination-grace-time=1 run-workload-inspector-server
        """,
    ),
    (
        "distillation is not built",
        """
        hidden-size-teacher=1 kd kd-alpha-ce=1 kd-beta-ce=1 kd-temp=1 load-teacher=1
        logits-load-decode-threads=1 logits-load-dir=1 logits-load-ignore-errors logits-load-kd-loss-alpha=1
        logits-load-msc-prefetch-depth=1 logits-load-prefetch-factor=1 logits-save-dir=1 logits-save-dtype=1
        logits-save-top-k=1 logits-save-top-p=1 logits-save-top-p-min-k=1 mos num-attention-heads-teacher=1
        num-experts-teacher=+ num-layers-teacher=1
        """,
    ),
    (
        "it is of BERT, T5, retrieval or vision models; decoders only are trained here",
        """
        async-indexer bert-load=1 bert-no-binary-head biencoder-projection-dim=1
        biencoder-shared-query-context-model block-data-path=1 block-index-path=1 block-top-k=1
        cased-data-path=1 cased-vocab=1 classes-fraction=1 data-per-class-fraction=1 decoder-num-layers=1
        decoder-seq-length=1 dino-bottleneck-size=1 dino-freeze-last-layer=1 dino-head-hidden-size=1
        dino-local-crops-number=1 dino-local-img-size=1 dino-norm-last-layer dino-teacher-temp=1
        dino-warmup-teacher-temp=1 dino-warmup-teacher-temp-epochs=1 embedding-path=1 evidence-data-path=1
        faiss-use-gpu hash-data-path=1 head-lr-mult=1 ict-head-size=1 ict-load=1 ict-one-sent img-dim=1
        img-h=1 img-w=1 index-reload-interval=1 indexer-batch-size=1 indexer-log-interval=1 iter-per-epoch=1
        mask-factor=1 mask-prob=1 mask-type=1 ner-data-path=1 no-data-sharding num-channels=1 num-classes=1
        patch-dim=1 pipeline-model-parallel-split-rank=1 pool-type=1 projection-dim=1 query-in-block-prob=1
        report-topk-accuracies=+ retriever-report-topk-accuracies=+ retriever-score-scaling
        retriever-seq-length=1 retro-add-retriever retro-attention-gate=1 retro-cyclic-train-iters=1
        retro-encoder-attention-dropout=1 retro-encoder-hidden-dropout=1 retro-encoder-layers=1
        retro-fix-sub-epoch retro-no-verify-neighbor-count retro-num-neighbors=1
        retro-num-retrieved-chunks=1 retro-project-dir=1 retro-return-doc-ids retro-split-constraint=*
        retro-workdir=1 sample-rate=1 shared-query-context-model short-seq-prob=1 swin-backbone-type=1
        titles-data-path=1 use-one-sent-docs use-regular-masking vision-backbone-type=1 vision-pretraining
        vision-pretraining-type=1 vit-load=1
        """,
    ),
    (
        "it is of Mamba and hybrid models; decoders of attention only are trained here",
        """
        disable-mamba-mem-eff-path hybrid-attention-ratio=1 hybrid-layer-pattern=1 hybrid-mlp-ratio=1
        hybrid-override-pattern=1 is-hybrid-model mamba-head-dim=1 mamba-num-groups=1 mamba-num-heads=1
        mamba-state-dim=1
        """,
    ),
    (
        "it is of inference; use pretrain/generate.py",
        """
        bert-embedder-type=1 decode-only-cuda-graphs disable-chunked-prefill
        disable-offset-sampling-seed-by-dp-rank ds-inference enable-chunked-prefill flash-decode genfile=1
        greedy inference-batch-times-seqlen-threshold=1 inference-coordinator-port=1
        inference-cuda-graph-all-prefills inference-cuda-graph-max-tokens=1 inference-disable-ep-consensus=?
        inference-dynamic-batching inference-dynamic-batching-active-buffer-size-gb=1
        inference-dynamic-batching-async-sched-mode=1 inference-dynamic-batching-block-size=1
        inference-dynamic-batching-buffer-guaranteed-fraction=1
        inference-dynamic-batching-buffer-overflow-factor=1 inference-dynamic-batching-buffer-size-gb=1
        inference-dynamic-batching-chunk-size=1 inference-dynamic-batching-cuda-graph-max-tokens=1
        inference-dynamic-batching-cuda-graph-mixed-prefill-count=1
        inference-dynamic-batching-cuda-graph-sizing-distribution=1
        inference-dynamic-batching-enable-prefix-caching inference-dynamic-batching-logprobs-mode=1
        inference-dynamic-batching-mamba-memory-ratio=1 inference-dynamic-batching-mamba-triton-conv1d
        inference-dynamic-batching-max-requests=1 inference-dynamic-batching-max-requests-override=1
        inference-dynamic-batching-max-tokens=1 inference-dynamic-batching-max-tokens-override=1
        inference-dynamic-batching-num-cuda-graphs=1 inference-dynamic-batching-paused-buffer-size-gb=1
        inference-dynamic-batching-prefix-caching=1
        inference-dynamic-batching-prefix-caching-coordinator-policy=1
        inference-dynamic-batching-prefix-caching-eviction-policy=1
        inference-dynamic-batching-prefix-caching-mamba-gb=1
        inference-dynamic-batching-prefix-caching-routing-alpha=1
        inference-dynamic-batching-sampling-backend=1
        inference-dynamic-batching-track-generated-token-events
        inference-dynamic-batching-track-paused-request-events
        inference-dynamic-batching-unified-memory-level=1 inference-flask-server-logging=1
        inference-fuse-tp-communication inference-logging-step-interval=1 inference-max-batch-size=1
        inference-max-requests=1 inference-max-seq-length=1 inference-mp-coordinator-port=1
        inference-rng-tracker inference-shards=1 inference-text-gen-server-logging=?
        inference-use-synchronous-zmq-collectives=? inference-wandb-logging=?
        inference-wandb-logging-step-interval=1 initialize-socket-comms mamba-inference-conv-states-dtype=1
        mamba-inference-ssm-states-dtype=1 mamba-training-ssm-states-dtype=1 max-tokens-to-oom=1
        mlp-chunks-for-prefill=1 nccl-all-reduce-for-prefill no-offset-sampling-seed-by-dp-rank
        num-samples=1 num-speculative-tokens=1 output-bert-embeddings recompute return-log-probs
        sample-input-file=1 sample-output-file=1 skip-prompt-log-probs use-flashinfer-fused-rope
        use-inference-optimized-layers use-legacy-static-engine use-same-sampling-seed-across-dp-ranks
        """,
    ),
    (
        "it is of Megatron before 2.0; docs/flags.md has the names in use",
        """
        cache-dir=1 cloze-eval data-epochs=1 data-loader=1 delim=1 epochs=1 eval-batch-size=1 eval-hf
        eval-max-preds-per-seq=1 eval-seq-length=1 eval-text-key=1 input-data-sizes-file=1
        intermediate-size=1 lazy-loader load-openai loose-json max-num-samples=1 max-preds-per-seq=1
        out-seq-length=1 overlapping-eval=1 presplit-sentences pretrained-bert resume-dataloader save-optim
        save-rng shuffle strict-lambada temperature=1 test-data=* text-key=1 top-k=1 top-p=1
        use-npy-data-loader use-tfrecords vocab=1
        """,
    ),
    (
        "it is of reinforcement learning; pretraining only is done here",
        """
        grpo-clamp-eps-lower=1 grpo-clamp-eps-upper=1 grpo-default-temperature=1 grpo-default-top-p=1
        grpo-entropy-term-weight=1 grpo-filter-groups-with-same-reward grpo-group-size=1 grpo-iterations=1
        grpo-kl-beta=1 grpo-prompts-per-step=1 langrl-env-config=1 langrl-external-server=1
        langrl-inference-server-conversation-template=1 langrl-inference-server-type=1 perform-rl-step
        refit-method=1 rl-calculate-intra-group-similarity=1 rl-consumption-granularity=1
        rl-default-temperature=1 rl-default-top-k=1 rl-default-top-p=1 rl-durable-rollout-bank
        rl-generation-batch-size=1 rl-generation-lag=1 rl-importance-sampling-truncation-coef=1
        rl-inference-expert-model-parallel-size=1 rl-inference-expert-tensor-model-parallel-size=1
        rl-inference-logprobs-is-correction=1 rl-inference-model-unified-memory-level=1
        rl-inference-parsers=* rl-inference-pipeline-model-parallel-size=1
        rl-inference-tensor-model-parallel-size=1 rl-kv-cache-management-mode=1 rl-max-inflight-requests=1
        rl-num-parallel-generation-batches=1 rl-num-parallel-generations=1
        rl-offload-inference-model-weights-when-idle=1 rl-offload-kv-cache-during-training=1
        rl-offload-optimizer-during-inference rl-parallel-generation-tasks=1 rl-partial-rollouts=1
        rl-persist-cuda-graphs=1 rl-profile rl-profile-dir=1 rl-prompts-per-eval=1
        rl-remove-kv-cache-during-training=1 rl-reset-cuda-graphs=1 rl-rollout-bank-dir=1
        rl-rollout-bank-max-bytes=1 rl-sequence-packing-algo=1 rl-sequence-packing-bin-size=1
        rl-sequence-packing-max-sequences-per-bin=1 rl-skip-bos-token=1 rl-submission-granularity=1
        rl-training-cuda-graphs=1 rl-use-sequence-packing=? rl-verify-model-weights-swap=1
        """,
    ),
)
