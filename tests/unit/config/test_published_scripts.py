"""Command lines as published scripts have them, shrunk in their sizes: accepted, or refused for what is not built."""

import pytest

from megazero.config import ConfigError, begun, parse

SIZES = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
)
DATA = "--data-path corpus_text_document --split 949,50,1 --vocab-size 50257 "
GPT3 = (
    SIZES
    + DATA
    + (
        "--attention-backend auto --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 "
        "5859375 --train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std "
        "0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 "
        "--lr-warmup-fraction .001 --lr-decay-iters 430000 --log-interval 100 --save-interval 10000 "
        "--eval-interval 1000 --eval-iters 10 --save c --load c --tensorboard-dir t "
    )
)

LLAMA3 = (
    SIZES
    + DATA
    + (
        "--transformer-impl transformer_engine --swiglu --normalization RMSNorm --disable-bias-linear "
        "--position-embedding-type rope --no-rope-fusion --rotary-base 1000000 "
        "--use-rotary-position-embeddings --no-position-embedding --untie-embeddings-and-output-weights "
        "--group-query-attention --num-query-groups 2 --attention-dropout 0.0 --hidden-dropout 0.0 "
        "--no-masked-softmax-fusion --bf16 --grad-reduce-in-bf16 --lr 0.00015 --use-distributed-optimizer "
        "--overlap-grad-reduce --overlap-param-gather --calculate-per-token-loss --manual-gc "
        "--empty-unused-memory-level 1 --cross-entropy-loss-fusion --train-samples 1953125000 "
        "--lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --context-parallel-size 1 "
        "--micro-batch-size 1 --global-batch-size 128 --ckpt-format torch_dist --async-save --num-workers 1 "
        "--distributed-timeout-minutes 60 --tensor-model-parallel-size 1 "
    )
)

BLOOM = (
    SIZES
    + DATA
    + (
        "--pp-partition-method type:transformer|embedding --micro-batch-size 2 --rampup-batch-size 192 16 "
        "9_765_625 --global-batch-size 2048 --train-samples 220_000_000 --init-method-std 0.0048 "
        "--embed-layernorm --sync-tp-duplicated-parameters --bf16 --seed 42 --position-embedding-type alibi "
        "--checkpoint-activations --abort-on-unmet-fused-kernel-constraints --pad-vocab-size-to 50432 "
        "--optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --lr 6e-5 --min-lr 6e-6 "
        "--lr-decay-style cosine --lr-decay-samples 200_000_000 --lr-warmup-samples 183_105 --clip-grad 1.0 "
        "--weight-decay 1e-1 --log-level info --log-level-replica error --save-interval 100 "
        "--tensorboard-queue-size 5 --log-timers-to-tensorboard --log-batch-size-to-tensorboard "
        "--log-validation-ppl-to-tensorboard --data-impl mmap --distributed-backend nccl --deepspeed "
        "--zero-stage 0 --deepspeed-activation-checkpointing --partition-activations --save c --load c "
    )
)

DEEPSPEED = (
    SIZES
    + DATA
    + (
        "--override-opt_param-scheduler --micro-batch-size 4 --global-batch-size 256 --train-tokens "
        "3000000000 --train-samples 439453125 --lr-warmup-tokens 375000000 --lr-decay-tokens 260000000000 "
        "--lr 2.0e-4 --min-lr 1.0e-6 --lr-decay-style cosine --moe-expert-parallel-size 1 --num-experts 1 "
        "--moe-loss-coeff 0.01 --moe-train-capacity-factor 1.0 --moe-eval-capacity-factor 1.0 "
        "--moe-min-capacity 4 --hysteresis 2 --num-workers 0 --fp16 --tensorboard-queue-size 1 "
        "--no-pipeline-parallel --deepspeed --log-optimizer-states-to-tensorboard --no-masked-softmax-fusion "
        "--ds-sequence-parallel-size 1 --universal-checkpoint --data-impl mmap "
    )
)

LUMI = SIZES + (
    "--data-path 0.3 a 0.7 b --tokenizer-type PretrainedFromHF --tokenizer-name-or-path t "
    "--micro-batch-size 1 --global-batch-size 1024 --train-samples 976562500 --init-method-std 0.0048 "
    "--swiglu --use-flash-attn --no-query-key-layer-scaling --use-rotary-position-embeddings "
    "--no-async-tensor-model-parallel-allreduce --no-bias-dropout-fusion "
    "--no-gradient-accumulation-fusion --normalization rmsnorm --disable-bias-linear --bf16 "
    "--dataloader-type single --lr 1.5e-4 --min-lr 1.5e-5 --use-distributed-optimizer --log-throughput "
    "--save c --load c "
)

STARCODER = (
    SIZES
    + DATA
    + (
        "--attention-head-type multiquery --attention-softmax-in-fp32 --wandb-entity-name e "
        "--wandb-project-name p --structured-logs --structured-logs-dir s --use-flash-attn "
        "--no-gradient-accumulation-fusion --tokenizer-type TokenizerFromFile --tokenizer-file t "
        "--micro-batch-size 1 --global-batch-size 192 --train-iters 10 --lr 3e-4 --bf16 "
        "--recompute-activations --DDP-impl local --initial-loss-scale 65536 --adam-eps 1e-8 "
    )
)

EXPECTED = {  # command line, what is refused (nothing: accepted), options it must resolve to
    "GPT-3": (GPT3, (), {"lr_warmup_fraction": 0.001, "params_dtype": "fp16"}),
    "GPT-3, Megatron 2": (
        GPT3
        + "--activations-checkpoint-method uniform --num-workers 2 --DDP-impl torch --no-query-key-layer-scaling",
        (),
        {"recompute_granularity": "full"},
    ),
    "GPT-3, batch by steps": (GPT3 + "--step-batch-size-schedule 0:16", ("--step-batch-size-schedule",), {}),
    "Llama 3": (
        LLAMA3,
        (),
        {"num_query_groups": 2, "position_embedding_type": "rope", "lr_decay_samples": 1949218748},
    ),
    "Llama 3, fp8": (
        LLAMA3
        + "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather",
        ("fp8 and fp4 are not built",),
        {},
    ),
    "Llama 3, context parallel": (
        LLAMA3.replace("--context-parallel-size 1", "--context-parallel-size 2"),
        ("context",),
        {},
    ),
    "Apertus": (
        LLAMA3 + "--goldfish-loss --goldfish-k 50 --goldfish-h 50 --qk-layernorm --xielu --trigger-path t",
        ("other objectives", "other activations", "control by files"),
        {},
    ),
    "BLOOM": (
        BLOOM,
        (),
        {"recompute_granularity": "full", "embed_layernorm": True, "pad_vocab_size_to": 50432},
    ),
    "BLOOM, skipping": (
        BLOOM + "--skip-train-iteration-range 13251-14000",
        (),
        {"skip_train_iteration_range": ("13251-14000",)},
    ),
    "BLOOM, 8-bit Adam": (BLOOM + "--use-bnb-optimizer", ("--use-bnb-optimizer",), {}),
    "Megatron-DeepSpeed": (
        DEEPSPEED,
        (),
        {"train_samples": 93750016, "lr_decay_samples": 8125000000, "lr_warmup_samples": 11718750},
    ),
    "Megatron-DeepSpeed, experts": (
        DEEPSPEED.replace("--num-experts 1", "--num-experts 128"),
        ("mixtures of experts",),
        {},
    ),
    "Megatron-DeepSpeed, offload": (DEEPSPEED + "--cpu-optimizer", ("--cpu-optimizer",), {}),
    "LUMI": (
        LUMI,
        (),
        {"normalization": "RMSNorm", "tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "t"},
    ),
    "StarCoder": (
        STARCODER,
        (),
        {"num_query_groups": 1, "recompute_granularity": "selective", "wandb_entity": "e"},
    ),
    "StarCoder, middle": (
        STARCODER.replace("TokenizerFromFile ", "TokenizerFromFileWithFIM ") + "--fim-rate 0.5",
        ("fill in the middle", "TokenizerFromFileWithFIM"),
        {},
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_command_lines_of_published_scripts(name):
    line, refused, expected = EXPECTED[name]
    if refused:
        with pytest.raises(ConfigError) as caught:
            begun(parse(line.split()))
        assert len(caught.value.errors) == len(refused)
        for part in refused:
            assert any(part in error and "not built here" in error for error in caught.value.errors), part
    else:
        config = begun(parse(line.split()))
        assert {option: config.get(option) for option in expected} == expected
