"""Numbers that do not fit: each is one error line with the value, the rule and the nearest legal choice."""

import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megazero.config import ConfigError, RunConfig, World, begun, make_config, parse
from megazero.config.foreign.derived import DERIVED
from megazero.config.model.section import ModelConfig
from megazero.config.nearest import around, common_divisors, multiples_around
from megazero.config.options.fields import KEPT, SHORT, fault
from megazero.config.options.needs import read_need
from megazero.config.options.optimizers import OptimizerConfig
from megazero.config.options.sections import BatchConfig
from megazero.config.read.resolve import ACCUMULATION, COMPLETIONS
from megazero.config.run import all_options, section_types, stored_values
from megazero.config.schedule.batch_sizes import BatchSizes
from megazero.config.summary import describe
from megazero.config.validate import facts, judge
from megazero.families import FAMILIES
from megazero.pp.schedules import make_schedule
from tests.sizes import SMALL
from tests.unit.config.command_lines import errors as faults
from tests.unit.config.command_lines import rows, run

BASE = {**SMALL, "hidden_size": 96, "num_attention_heads": 12}
WORLD = World(8, 4)

# What is typed, and what one of the error lines names: flags with their values, and what stands behind "nearest".
REFUSED = r"""
HEADS --tensor-model-parallel-size 5 --ffn-hidden-size 240
    -> --num-attention-heads 12; --tensor-model-parallel-size 5; 4 or 6
HEADS --num-query-groups 5 -> --num-attention-heads 12; --num-query-groups 5; 4 or 6
--hidden-size 100 --num-attention-heads 12 -> --hidden-size 100; --num-attention-heads 12; 96 or 108
--num-query-groups 3 --tensor-model-parallel-size 2 -> --num-query-groups 3; --tensor-model-parallel-size 2; 1
--tensor-model-parallel-size 4 --ffn-hidden-size 250 -> --tensor-model-parallel-size 4; --ffn-hidden-size 250; 2
--tensor-model-parallel-size 4 --sequence-parallel --seq-length 30 -> --tensor-model-parallel-size 4; 2
--kv-channels 7 -> --kv-channels 7; 6 or 8
--rotary-percent 1.5 -> --rotary-percent 1.5; 1
HEADS --rotary-percent 0.4 --position-embedding-type rope -> --rotary-percent 0.4; 0.25 or 0.5
YARN --yarn-beta-slow 40 -> --yarn-beta-slow 40; the defaults 1 and 32
YARN --rotary-base 1 -> --rotary-scaling yarn; --rotary-base 1
HEADS --rotary-scaling dynamic --position-embedding-type rope -> --rotary-scaling dynamic
HEADS --rotary-scaling longrope --position-embedding-type rope --rotary-short-factor 1,1,1,1
    -> --rotary-scaling longrope; --rotary-long-factor
HEADS --rotary-scaling longrope --position-embedding-type rope --rotary-short-factor 1,1,0,1
    -> --rotary-short-factor
--goldfish-loss --goldfish-h 600 --seq-length 512 -> --goldfish-h 600; --seq-length 512; 512
--squared-relu --swiglu -> --squared-relu; --swiglu
--qk-clip --qk-norm head -> --qk-clip; --qk-norm head
--qk-clip --compile -> --qk-clip; --compile
--log-max-attention-logit --compile -> --log-max-attention-logit; --compile
--qk-clip --qk-clip-alpha 1.5 -> --qk-clip-alpha 1.5; 1
--xielu --num-experts 4 -> --xielu; --num-experts; --squared-relu
--pad-vocab-size-to 16 -> --pad-vocab-size-to 16; 100
--pad-vocab-size-to 1001 --tensor-model-parallel-size 4
    -> --pad-vocab-size-to 1001; --tensor-model-parallel-size 4; 1000 or 1004
--seq-length 64 --max-position-embeddings 32 -> --seq-length 64; --max-position-embeddings 32; 32
--profile --profile-step-start 5 --profile-step-end 5 -> --profile-step-end 5; 6
--profile --profile-ranks 0,8 -> --profile-ranks 8; 7
--profile --profile-ranks -1 -> --profile-ranks -1; 0
--num-layers 0 -> --num-layers 0; 1
--attention-dropout 1 -> --attention-dropout 1
--hidden-dropout -0.1 -> --hidden-dropout -0.1
--num-experts 4 --moe-layer-freq 0,1 --save a -> --moe-layer-freq 0,1; --num-layers
--multi-latent-attention --position-embedding-type rope --softmax-type learnable -> --softmax-type learnable; vanilla
--multi-latent-attention --position-embedding-type rope --use-mup -> --use-mup; --multi-latent-attention
--lr 0 -> --lr 0
--seed 4294967296 -> --seed 4294967296; 4294967295
--min-lr 1 -> --min-lr 1; 0.001
--decoupled-lr 0.0001 --min-lr 0.0002 -> --decoupled-lr 0.0001; --min-lr 0.0002; 0.0001 or --decoupled-min-lr
--decoupled-lr 0.01 --decoupled-min-lr 0.5 -> --decoupled-lr 0.01; --decoupled-min-lr 0.5; 0.01
--lr-decay-style WSD -> --lr-decay-style WSD; --lr-wsd-decay-iters
--lr-warmup-init 1 -> --lr-warmup-init 1; 0.001
--lr-decay-style cosin -> --lr-decay-style cosin; cosine
--lr-decay-samples 5 -> --lr-decay-samples; --lr-decay-iters
--lr-warmup-iters 5 --lr-warmup-fraction 0.1 -> --lr-warmup-fraction
--train-samples 5 -> --train-samples; --train-iters
--no-mock-data -> --data-path; --mock-data; --train-data-path
--no-mock-data --data-path 1 b c -> --data-path
--no-mock-data --data-path -1 b -> --data-path
--split 1,x -> --split; 969,30,1
--split 0,0,0 -> --split; 969,30,1
--tokenizer-type HuggingFaceTokenizer -> --tokenizer-type HuggingFaceTokenizer; --tokenizer-model
--save x --save-interval 10 --save-retain-interval 25 -> --save-interval 10; --save-retain-interval 25; 20 or 30
--global-batch-size 40 -> --global-batch-size 40; 32 or 48
--global-batch-size 64 --rampup-batch-size 24,8,100 -> --rampup-batch-size; 16 or 32
--global-batch-size 64 --rampup-batch-size 16,32,100 -> --global-batch-size 64; --rampup-batch-size; 24 or 48
--global-batch-size 64 --rampup-batch-size 80,16,100 -> --global-batch-size 64; --rampup-batch-size; 64
--global-batch-size 64 --rampup-batch-size 16,16 -> --rampup-batch-size 16,16
--optimizer muon --optimizer-impl apex -> --optimizer-impl apex
--optimizer lion --optimizer-impl triton -> --optimizer-impl triton; auto
--step-batch-size-schedule 0:8 1M:16 -> --step-batch-size-schedule; 16
--step-batch-size-schedule 1K:16 2K:32 -> --step-batch-size-schedule 1K:16; 0:16
--step-batch-size-schedule 0:16 1K -> --step-batch-size-schedule 1K
--step-batch-size-schedule 0:16 1K:0 -> --step-batch-size-schedule 1K:0; 1K:1
--step-batch-size-schedule 0:16 1K:32 1001:48 -> --step-batch-size-schedule 0:16; 1001:48
--step-batch-size-schedule 0:16 1M:32 --global-batch-size 64 -> --global-batch-size 64; 32
--step-batch-size-schedule 0:16 --rampup-batch-size 16,16,100 -> --step-batch-size-schedule; --rampup-batch-size
--data-stages {"until":24} {} -> --data-stages: until 24; 16 or 32
--data-stages {"until":16,"global-batch-size":24} {} -> --data-stages; 16 or 32
--data-stages {"until":160} {} -> --data-stages; 160; leave it out
--data-stages {"until":16} -> --data-stages; leave until out
--data-stages {} {} -> --data-stages; until
--data-stages {"until":16} {"until":16} {} -> --data-stages; until 17
--data-stages {"untill":16} {} -> --data-stages; until
--data-stages {"until":0} {} -> --data-stages; until 0
--data-stages {"data-path":[1,"a","b"]} -> --data-stages; PREFIX
--data-stages until=16 -> --data-stages until=16; JSON
--data-stages [16] -> --data-stages [16]; seq-length
--data-stages {"seq-length":64} -> --data-stages: seq-length 64; --seq-length 64
--data-stages {"until":16,"seq-length":22} {} CP --tensor-model-parallel-size 2 --sequence-parallel --cp-comm-type
    all_gather -> --data-stages: --seq-length 22; --context-parallel-size 2 x --tensor-model-parallel-size 2; 20 or 24
--data-stages {"until":16,"seq-length":24} {} --step-batch-size-schedule 0:16
    -> --step-batch-size-schedule; --data-stages
--eval-tasks piqa -> --eval-tasks piqa; --tokenizer-type
--eval-tasks-limit 5 -> --eval-tasks-limit 5; --eval-tasks
--eval-interval 4 --eval-tasks-interval 6 -> --eval-tasks-interval 6; --eval-interval 4; 4 or 8
--data-stages {"until":16,"global-batch-size":32} {} --rampup-batch-size 16,16,64 --global-batch-size 32
    -> --rampup-batch-size; --data-stages
--eval-global-batch-size 40 -> --eval-global-batch-size 40; 32 or 48
--zero-shard 2,4,6 -> 2,4,8
--zero-shard 2,2 -> P,G,OS
--zero-stage 2 --zero-preset ddp -> --zero-stage; --zero-preset; ddp; zero2
--zero-shard 2,2,2 --zero-stage 3 -> --zero-shard 2,2,2; --zero-stage
--zero-stage 2 --zero-preset hpz -> --zero-stage 2; --zero-preset
--zero-stage 2 --zero-hpz-partition-size 4
    -> --zero-stage; --zero-hpz-partition-size 4; --zero-preset hpz without --zero-stage
--zero-preset zero3 --zero-hpz-partition-size 4
    -> --zero-preset; --zero-hpz-partition-size 4; --zero-preset hpz without --zero-stage
--zero-preset zeropp --zero-hpz-partition-size 8 -> --zero-hpz-partition-size 4
--zero-stage 2 --zero-preset zeropp -> --zero-stage 2; --zero-preset
--zero-preset zero2 --zero-params-lifetime use -> step
--zero-preset hpz --tensor-model-parallel-size 4 -> zero3
--ranks-per-node 3 -> 2
--ranks-per-node 2 --tensor-model-parallel-size 4 -> --tensor-model-parallel-size 4; 2
--tensor-model-parallel-size 3 -> --tensor-model-parallel-size 3; 2 or 4
--weight-decay -1 -> --weight-decay -1; 0.01
--weight-decay -.5e-1 -> --weight-decay -0.05
--weight-decay nan -> --weight-decay
--weight-decay 1e400 -> --weight-decay
--load x --exit-on-missing-checkpoint --allow-fresh-start -> --allow-fresh-start; --exit-on-missing-checkpoint
--load x --save x --finetune --zero-exact-numel 0
    -> --zero-exact-numel; --zero-quantized-weights; --zero-quantized-gradients
--allow-fresh-start -> --allow-fresh-start; --load
--zero-weight-bits 8 -> --zero-weight-bits 8; --zero-quantized-weights
--zero-gradient-bits 4 -> --zero-gradient-bits 4; --zero-quantized-gradients
--zero-gradient-bits-intra-node 8 -> --zero-gradient-bits-intra-node 8; --zero-quantized-gradients
--zero-gradient-transform hadamard -> --zero-gradient-transform hadamard; --zero-quantized-gradients
--zero-block-size 64 -> --zero-block-size 64; --zero-quantized-weights; --zero-quantized-gradients
--zero-exact-numel 0 -> --zero-exact-numel 0; --zero-quantized-weights; --zero-quantized-gradients
PP --num-layers 1 --decoder-last-pipeline-num-layers 1 -> --pipeline-model-parallel-size 2; 1 ranks, or 2 layers
--num-layers 8 PP --num-virtual-stages-per-pipeline-rank 6
    -> --pipeline-model-parallel-size 2; 5 stages per rank, or 10 layers
PP --pipeline-model-parallel-layout Et*3|tmL -> --pipeline-partition Et*3|tmL; --mtp-num-layers 0; Et*3|tL
PP --pipeline-model-parallel-layout Et|t*3L --mtp-num-layers 2
    -> --pipeline-partition Et|t*3L; --mtp-num-layers 2; Et|t*3mmL
PP --pipeline-model-parallel-layout Et*3m|tL -> --pipeline-partition Et*3m|tL; balanced
--mtp-num-layers 1 --position-embedding-type learned_absolute
    -> --mtp-num-layers 1; --position-embedding-type learned_absolute; --position-embedding-type rope
--mtp-num-layers 64 --seq-length 64 -> --mtp-num-layers 64; --seq-length 64; 63
--mtp-num-layers 1 --hybrid-layer-pattern M*- -> --mtp-num-layers 1; --hybrid-layer-pattern M*-; 0
PP --pipeline-model-parallel-layout Et|(t|)*2tt -> --pipeline-partition Et|(t|)*2tt; balanced
PP --pipeline-model-parallel-layout Et|t|ttL -> --pipeline-model-parallel-size 2; 2,2
--num-layers 8 PP --num-layers-per-virtual-pipeline-stage 3
    -> --num-layers 8; --pipeline-model-parallel-size 2; --num-layers-per-virtual-pipeline-stage 3; 2 or 4
PP --num-layers 9 --num-layers-per-virtual-pipeline-stage 3
    -> --num-layers-per-virtual-pipeline-stage 3; --num-virtual-stages-per-pipeline-rank
PP --num-layers-per-virtual-pipeline-stage 2 --num-virtual-stages-per-pipeline-rank 2
    -> --num-layers-per-virtual-pipeline-stage 2; --num-virtual-stages-per-pipeline-rank 2
PP --num-virtual-stages-per-pipeline-rank 2 --pipeline-schedule zb-h1 -> --pipeline-schedule zb-h1; interleaved
PP --pipeline-schedule interleaved -> --pipeline-schedule interleaved; 1f1b
PP --pipeline-schedule zbh1 -> --pipeline-schedule zbh1; zb-h1
PP --pipeline-partition even -> --pipeline-partition even; balanced
PP --pipeline-partition unifrm -> --pipeline-partition unifrm; uniform
--num-layers 8 PP --pipeline-partition 4,5 -> --pipeline-model-parallel-size 2; 4,4
PP --pipeline-partition 3,3,2 -> --pipeline-model-parallel-size 2; 2,2
--num-layers 8 PP --num-layers-per-virtual-pipeline-stage 4 --pipeline-partition uniform
    -> --num-layers-per-virtual-pipeline-stage 4; --pipeline-partition; --num-virtual-stages-per-pipeline-rank 1
PP --num-virtual-stages-per-pipeline-rank 2 --decoder-first-pipeline-num-layers 1
    -> --decoder-first-pipeline-num-layers 1; --pipeline-partition with the layers of all 4 stages
--num-layers 8 PP --decoder-first-pipeline-num-layers 8 -> --pipeline-model-parallel-size 2; 7
PP --global-batch-size 12 -> --global-batch-size 12; 8 or 16
PP --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 24 -> --global-batch-size 24; 16 or 32
PP --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 64 --rampup-batch-size 24,8,100
    -> --rampup-batch-size; 16 or 32
--pipeline-model-parallel-size 3 -> 9
PP --zero-params-lifetime gathered -> resident
--zero-preset zeropp --zero-weight-bits 3 -> --zero-weight-bits 3; 4
--zero-preset zeropp --zero-gradient-bits 2 -> --zero-gradient-bits 2; 4
--zero-preset zeropp --zero-gradient-bits-intra-node 2 -> --zero-gradient-bits-intra-node 2; 4
--zero-preset zeropp --zero-block-size 100 -> --zero-block-size 100; 128
--zero-preset zeropp --zero-block-size 4 -> --zero-block-size 4; 8
--zero-preset zeropp --zero-block-size 4096 -> --zero-block-size 4096; 2048
--zero-preset zeropp --zero-exact-numel -1 -> --zero-exact-numel -1
--zero-preset zeropp --zero-gradient-transform dct -> --zero-gradient-transform dct
--zero-preset zeropp --zero-quantized-weights-delta --no-zero-quantized-weights
    -> --zero-quantized-weights-delta; --no-zero-quantized-weights
--zero-preset zero3 --zero-quantized-weights-delta
    -> --zero-preset; --zero-quantized-weights-delta; --zero-preset zeropp
--zero-shard 4,4,4 --zero-quantized-weights-delta -> --zero-quantized-weights-delta; --zero-preset zeropp
--zero-preset zeropp --zero-quantized-weights-delta --zero-params-lifetime step
    -> --zero-quantized-weights-delta; resident
--zero-preset zeropp --zero-hpz-partition-size 4 --tensor-model-parallel-size 2 -> --zero-hpz-partition-size 2
CP --cp-comm-type a2a p2p -> --cp-comm-type a2a; a2a
CP --cp-comm-type a3a -> --cp-comm-type a3a; a2a
CP --cp-comm-type a2a+p2p -> --context-parallel-size 2; --cp-comm-type a2a+p2p; 2 1
CP --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2,2
    -> --context-parallel-size 2; --cp-comm-type a2a+p2p; --hierarchical-context-parallel-sizes; 2 1
LONG --ranks-per-node 2 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4,2
    -> --hierarchical-context-parallel-sizes 4; 2 4
CP --cp-comm-type all_gather --attention-backend cudnn
    -> --context-parallel-size; --attention-backend cudnn; flash, math, flex
--context-parallel-size 8 --attention-backend efficient
    -> --context-parallel-size; --attention-backend efficient; flash, math, flex
CP --cp-comm-type all_gather --seq-length 30 -> --context-parallel-size 2; --seq-length 30; 28 or 32
CP PP --use-tp-pp-dp-mapping -> --context-parallel-size 2; --use-tp-pp-dp-mapping; leave that out
CP --seq-length 31 -> --context-parallel-size 2; --seq-length 31; 30 or 32
CP --seq-length 30 --tensor-model-parallel-size 2 --sequence-parallel
    -> --context-parallel-size 2; --seq-length 30; --tensor-model-parallel-size 2; 28 or 32
CP --model-family qwen3_next --kv-channels 8
    -> --context-parallel-size 2; 1
--model-family qwen3_next --kv-channels 8 --linear-num-value-heads 24
    -> --linear-num-value-heads 24; --linear-num-key-heads 16; 16 or 32
--model-family qwen3_next --kv-channels 8 --tensor-model-parallel-size 4 --linear-num-key-heads 2
    -> --linear-num-key-heads 2; --tensor-model-parallel-size 4; 2
--model-family qwen3_next --kv-channels 8 --linear-attention-freq 0,1 -> --linear-attention-freq 0,1; --num-layers
--hybrid-layer-pattern M+-- -> --hybrid-layer-pattern M+--; --multi-latent-attention; M--
--hybrid-layer-pattern M*-/*-/*- -> --hybrid-layer-pattern M*-/*-/*-; --multi-latent-attention; M*-
--hybrid-layer-pattern | -> --hybrid-layer-pattern; M, G or *
--hybrid-layer-pattern M*- --num-layers 4 -> --hybrid-layer-pattern M*-; --num-layers 4; --num-layers 3
--hybrid-layer-pattern EE --num-layers 2 --num-experts 4 -> --hybrid-layer-pattern EE; M, G or *
--hybrid-layer-pattern M-E* -> --hybrid-layer-pattern M-E*; --num-experts
--hybrid-layer-pattern M-M* --num-experts 4 -> --num-experts 4; --hybrid-layer-pattern M-M*; E
--hybrid-layer-pattern M-M* --transformer-block-type parallel -> --transformer-block-type parallel; sequential
--hybrid-layer-pattern M-M* --mamba-num-groups 3 -> --mamba-num-heads 2; --mamba-num-groups 3; 3
--hybrid-layer-pattern M-M* --mamba-num-groups 2 --tensor-model-parallel-size 4
    -> --mamba-num-groups 2; --tensor-model-parallel-size 4; 2
CP --hybrid-layer-pattern M-M* --mamba-num-groups 2 -> --context-parallel-size 2; 1
--hybrid-layer-pattern M-|M* --mamba-num-groups 2 PP --pipeline-partition 1,3
    -> --pipeline-partition 1,3; M-|M*; 2,2
--is-hybrid-model -> --is-hybrid-model; --hybrid-layer-pattern
--spec other_module stack_spec -> --spec; --hybrid-layer-pattern
CP --num-attention-heads 9 --kv-channels 4 --cp-comm-type a2a
    -> --context-parallel-size 2; --cp-comm-type; 1 or 3, or any with --cp-comm-type all_gather
--context-parallel-size 4 --num-attention-heads 12 --num-query-groups 6 --kv-channels 4 --cp-comm-type a2a
    -> --context-parallel-size 4; --cp-comm-type; 3 or 6, or any with --cp-comm-type all_gather
--context-parallel-size 3 --num-attention-heads 6 --kv-channels 4 --seq-length 30 -> --context-parallel-size 3; 4
LONG --cp-gather-bits 8 --cp-comm-type a2a -> --cp-gather-bits 8; --cp-comm-type
LONG --context-parallel-size 1 --cp-gather-bits 8 -> --cp-gather-bits 8; --context-parallel-size
LONG --context-parallel-size 4 --cp-gather-bits 8 -> --cp-gather-bits 8; leave it out
LONG --cp-gather-bits 4 -> --cp-gather-bits 4; 8
--fp8-format e4m3 --fp8-min-size 16 -> --fp8-format e4m3; --bf16
--bf16 --fp8-recipe rowwise -> --fp8-recipe rowwise; --fp8-format
--bf16 --fp8-min-size 16 -> --fp8-min-size 16; --fp8-format
--bf16 --fp8-format e4m3 -> --fp8-min-size 2048; 64
--bf16 --fp8-format e5m2 --fp8-min-size 16 -> --fp8-format e5m2; e4m3; hybrid
--bf16 --fp8-format e4m3 --fp8-min-size 16 --fp8-recipe delayed -> --fp8-recipe delayed; tensorwise
--bf16 --fp8-format e4m3 --fp8-min-size 16 --no-fp8-wgrad -> --no-fp8-wgrad; --fp8-recipe rowwise
EIGHT --expert-model-parallel-size 3 -> --expert-model-parallel-size 3; 4
EIGHT --expert-model-parallel-size 8 -> --expert-model-parallel-size 8; 4
EIGHT --moe-dispatch-across-nodes exact -> --moe-dispatch-across-nodes exact; --expert-model-parallel-size
EIGHT --expert-model-parallel-size 4 --moe-dispatch-across-nodes int8 -> --moe-dispatch-across-nodes int8; no
--moe-dispatch-across-nodes int8 -> --moe-dispatch-across-nodes int8; --expert-model-parallel-size
--ckpt-step 10 -> --ckpt-step 10; --load
--load hf:x --ckpt-step 10 -> --ckpt-step 10; --load
EIGHT --expert-model-parallel-size 8 --moe-dispatch-across-nodes int8 --hidden-size 36
    -> --moe-dispatch-across-nodes int8; --hidden-size 36; --hidden-size 32 or 40, or exact
EIGHT --expert-model-parallel-size 2 --tensor-model-parallel-size 4 --sequence-parallel
    -> --expert-model-parallel-size 2; --tensor-model-parallel-size 4; 4
--expert-model-parallel-size 2 -> --expert-model-parallel-size 2; --num-experts
EXPERTS --moe-router-topk 13 -> --num-experts 12; 12
EXPERTS --moe-router-topk 1 -> --moe-router-topk; --moe-router-pre-softmax; --moe-aux-loss-coeff
EXPERTS --moe-router-enable-expert-bias -> --moe-router-enable-expert-bias; --moe-router-score-function
EXPERTS --moe-router-group-topk 2 -> --moe-router-group-topk; --moe-router-num-groups
EXPERTS --moe-router-num-groups 5 --moe-router-group-topk 1 -> --num-experts 12; 4 or 6
EXPERTS --moe-router-num-groups 2 --moe-router-group-topk 4 -> --moe-router-group-topk 4; 2
EXPERTS --moe-router-num-groups 4 --moe-router-group-topk 3 -> --moe-router-group-topk 3; 2
EXPERTS --moe-router-topk 5 --moe-router-num-groups 4 --moe-router-group-topk 1 -> --moe-router-group-topk 1; 2
EXPERTS --moe-shared-expert-intermediate-size 33 --tensor-model-parallel-size 2 --sequence-parallel
    -> --tensor-model-parallel-size 2; 1
EXPERTS --tensor-model-parallel-size 2 -> --num-experts; --tensor-model-parallel-size; --sequence-parallel
--checkpoint-activations --recompute-granularity selective -> --checkpoint-activations; --recompute-granularity
--recompute-activations --checkpoint-activations -> --checkpoint-activations; --recompute-granularity
--use-rotary-position-embeddings --position-embedding-type learned_absolute
    -> --use-rotary-position-embeddings; --position-embedding-type
--layernorm-epsilon 1e-6 --norm-epsilon 1e-5 -> --layernorm-epsilon 1e-6; --norm-epsilon
--position-embedding-type learned_absolute --no-position-embedding
    -> --position-embedding-type; --no-position-embedding
--position-embedding-type yarn --use-rope-scaling -> --position-embedding-type yarn; --rotary-scaling
--fim-rate 0.5 -> --fim-rate 0.5; --fim-data
--fim-data -> --fim-data; --mock-data
--chats -> --chats; --mock-data
--no-mock-data --data-path x --chats -> --chats; --reset-attention-mask
--mup-output-mult 0.5 -> --mup-output-mult; --logits-scaling
--tokenizer-type TokenizerFromFileWithFIM --tokenizer-model t -> --tokenizer-type TokenizerFromFileWithFIM
--hybrid-context-parallel -> --hybrid-context-parallel; --context-parallel-size
--num-experts 8 --moe-loss-coeff 0.01
    -> --moe-loss-coeff 0.01; --moe-router-load-balancing-type; --moe-aux-loss-coeff
--num-experts 8 --moe-router-load-balancing-type quantile_balancing
    -> --moe-router-load-balancing-type quantile_balancing; --moe-aux-loss-coeff
EIGHT --moe-router-load-balancing-type sinkhorn
    -> --moe-router-load-balancing-type sinkhorn; --moe-router-topk 1; --moe-router-score-function sigmoid
EIGHT --moe-router-load-balancing-type sinkhorn --moe-router-topk 1 --moe-router-topk-scaling-factor 2
    -> --moe-router-load-balancing-type sinkhorn; --moe-router-topk-scaling-factor
EIGHT --moe-router-load-balancing-type sinkhorn --moe-router-topk 1 --moe-router-enable-expert-bias
    -> --moe-router-load-balancing-type sinkhorn; --moe-router-enable-expert-bias
EIGHT --moe-router-load-balancing-type aux_loss sinkhorn --moe-aux-loss-coeff 0.1 0.1
    -> --moe-router-load-balancing-type aux_loss sinkhorn; aux_loss
EIGHT --moe-router-load-balancing-type aux_loss aux_loss --moe-aux-loss-coeff 0.1 0.1
    -> --moe-router-load-balancing-type aux_loss aux_loss; aux_loss
EIGHT --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1
    -> --moe-router-load-balancing-type aux_loss seq_aux_loss; --moe-aux-loss-coeff 0.1; 0.1,0.1
--num-experts 8 --moe-router-dtype fp64 -> --moe-router-dtype fp64; --moe-router-score-function
--num-experts 8 --moe-expert-capacity-factor 1.5 -> --moe-expert-capacity-factor 1.5
EIGHT --expert-tensor-parallel-size 3 -> --expert-model-parallel-size 3; 4
--num-experts 1 8 -> --num-experts
--extra-vocab-size 100 -> --extra-vocab-size 100; --vocab-size
--dataloader-type cyclic -> --dataloader-type cyclic
--use-flash-attn --attention-backend math -> --use-flash-attn; --attention-backend
--data-impl cached -> --data-impl cached
--glu-activation reglu -> --glu-activation reglu; --swiglu; --geglu
--window-size 7,1 -> --window-size 7,1; 127,0
--window-size 7,0 --sliding-window 7 -> --window-size 7,0; --sliding-window 8
--sliding-window 7 --window-attn-skip-freq 1,0 -> --window-attn-skip-freq 1,0; --num-layers
--sliding-window 7 --window-attn-skip-freq 0 -> --window-attn-skip-freq 0; 1, or leave it out
--sliding-window 7 --window-attn-skip-freq 1,0,2,0 -> --window-attn-skip-freq 1,0,2,0
--sliding-window 7 --window-attn-skip-freq [1,0 -> --window-attn-skip-freq
--sliding-window 7 --window-attn-skip-freq [print()] -> --window-attn-skip-freq
--geglu --swiglu -> --geglu; --swiglu
--quick-geglu --swiglu -> --quick-geglu; --swiglu
--activation-func-clamp-value 0 -> --activation-func-clamp-value 0
--softmax-type sink -> --softmax-type; learnable
--main-grads-dtype fp16 -> --main-grads-dtype fp16
--no-pipeline-parallel PP -> --no-pipeline-parallel; --pipeline-model-parallel-size
--tensorboard-queue-size -> --tensorboard-queue-size
--no-bias-gelu-fusion 1 -> --no-bias-gelu-fusion
--layernorm-epsilon x -> --layernorm-epsilon x
--group-query-attention -> --group-query-attention; --num-query-groups
--train-tokens 0 --global-batch-size 16 -> --train-tokens 0
--lr-warmup-tokens 100 --global-batch-size 16 -> --lr-warmup-tokens; --lr-decay-tokens; --lr-warmup-samples
--tensorboard-queue 5 -> --tensorboard-queue; --tensorboard-queue-size
--rampup-seq-length 8 32 8 10 -> --rampup-seq-length; --data-stages
OUTER --outer-replicas 3 -> --outer-replicas; --outer-meet
--outer-bits 4 -> --outer-bits 4; --outer-meet
--outer-delay 1 -> --outer-delay 1; --outer-meet
OUTER --train-iters 9 -> --train-iters 9; --outer-meet; --train-samples
OUTER --outer-meet here -> --outer-meet here; local:2
OUTER --outer-ranks 12 -> --outer-ranks 12; 16
OUTER --data-stages {"until":16,"seq-length":16} {} -> --data-stages; --outer-meet; one seq-length
OUTER --outer-name a -> --outer-meet local:2; --outer-name
OUTER --skip-train-iteration-range 2-3 -> --skip-train-iteration-range; --outer-meet
OUTER --outer-min-lr 0.1 -> --outer-min-lr; --outer-lr-decay-style linear
OUTER --outer-optimizer average --outer-lr 0.5 -> --outer-lr 0.5; --outer-optimizer
OUTER --outer-rounding nearest -> --outer-rounding nearest; --outer-bits
OUTER --loss-policy outer -> --loss-policy outer; --loss-policy exact
OUTER --zero-preset zeropp -> --outer-meet; --no-zero-quantized-weights-delta
OUTER --outer-delay 4 -> --outer-delay 4; --outer-interval 4; 3
--eval-iters -2 -> --eval-iters -2
--eval-iters 0 --log-interval 0 -> --log-interval 0; 1
--sliding-window 0 -> --sliding-window 0
"""
# What is typed, and what one note names: the option that changes nothing, and what would give it an effect.
NOTED = """
--adam-beta1 0.5 --optimizer sgd -> --adam-beta1 0.5; --optimizer
--decoupled-min-lr 0.0001 -> --decoupled-min-lr 0.0001; --decoupled-lr
--sgd-momentum 0.5 -> --sgd-momentum 0.5; --optimizer
--lion-beta1 0.8 -> --lion-beta1 0.8; --optimizer
--lion-beta2 0.5 --optimizer sgd -> --lion-beta2 0.5; --optimizer
--apply-wd-to-qk-layernorm -> --apply-wd-to-qk-layernorm; --qk-norm
--qk-clip-threshold 50 -> --qk-clip-threshold 50; --qk-clip
--qk-clip-alpha 0.3 -> --qk-clip-alpha 0.3; --qk-clip
--goldfish-k 4 -> --goldfish-k 4; --goldfish-loss
--goldfish-h 13 -> --goldfish-h 13; --goldfish-loss
--ademamix-alpha 8 -> --ademamix-alpha 8; --optimizer
--ademamix-beta3 0.9999 --optimizer muon -> --ademamix-beta3 0.9999; --optimizer
--adam-eps 1e-06 --optimizer lion -> --adam-eps 1e-06; --optimizer
--muon-momentum 0.5 -> --muon-momentum 0.5; --optimizer
--muon-nesterov --optimizer sgd -> --muon-nesterov; --optimizer
--muon-scale-mode shape_scaling -> --muon-scale-mode shape_scaling; --optimizer
--muon-extra-scale-factor 0.2 --optimizer lion -> --muon-extra-scale-factor 0.2; --optimizer
--muon-fp32-matmul-prec high -> --muon-fp32-matmul-prec high; --optimizer
--profile-step-end 20 -> --profile-step-end 20
--save-interval 5 -> --save-interval 5
--no-load-optim -> --no-load-optim; --load
--finetune -> --finetune; --load
--rotary-base 500000 --position-embedding-type learned_absolute -> --rotary-base 500000; --position-embedding-type
--rotary-scaling-factor 2 -> --rotary-scaling-factor 2
--glu-linear-offset 1 --squared-relu -> --glu-linear-offset 1; --swiglu; --quick-geglu
--activation-func-clamp-value 7 --squared-relu -> --activation-func-clamp-value 7; --swiglu; --quick-geglu
--rotary-high-freq-factor 2 YARN -> --rotary-high-freq-factor 2; --rotary-scaling
--yarn-beta-fast 8 --rotary-scaling llama3 --position-embedding-type rope -> --yarn-beta-fast 8; --rotary-scaling
--yarn-mscale 0.5 --rotary-attention-factor 1.5 YARN -> --yarn-mscale 0.5; --rotary-attention-factor
--lr-wsd-decay-iters 5 -> --lr-wsd-decay-iters 5; --lr-decay-style
--wandb-exp-name x -> --wandb-exp-name x; --wandb-project
--save x --save-keep-last 2 -> --save-keep-last 2; --save-interval
--save x --async-save -> --async-save; --save-interval
--tokenizer-model x -> --tokenizer-model x; --tokenizer-type
--data-cache-path x -> --data-cache-path x; --data-path; --mock-data
--min-lr 0.0001 --lr-decay-style constant -> --min-lr 0.0001; --lr-decay-style
--eval-interval 5 --eval-iters 0 -> --eval-interval 5; --eval-iters
--lr-warmup-init 0.0001 -> --lr-warmup-init 0.0001
--exit-on-missing-checkpoint -> --exit-on-missing-checkpoint; --load
--loss-policy int8 -> --loss-policy int8; --zero-preset
--num-experts 4 --disable-bias-linear --moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type none
    -> --moe-router-load-balancing-type; --moe-aux-loss-coeff
--num-experts 1 --moe-router-topk 4 -> --num-experts; --moe-router-topk 4
--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1 -> --moe-router-enable-expert-bias; --num-experts
--save x --save-interval 0 --save-keep-last 2 -> --save-interval; --save-keep-last 2
--tokenizer-type NullTokenizer --tokenizer-model x -> --tokenizer-type; --tokenizer-model x
--pipeline-schedule 1f1b -> --pipeline-schedule 1f1b; --pipeline-model-parallel-size
--use-tp-pp-dp-mapping -> --use-tp-pp-dp-mapping; --pipeline-model-parallel-size
--pipeline-partition uniform -> --pipeline-partition uniform; --pipeline-model-parallel-size
--num-layers-per-virtual-pipeline-stage 2
    -> --num-layers-per-virtual-pipeline-stage 2; --pipeline-model-parallel-size
--num-virtual-stages-per-pipeline-rank 1 -> --num-virtual-stages-per-pipeline-rank 1; --pipeline-model-parallel-size
--decoder-first-pipeline-num-layers 2 -> --decoder-first-pipeline-num-layers 2; --pipeline-model-parallel-size
--decoder-last-pipeline-num-layers 2 -> --decoder-last-pipeline-num-layers 2; --pipeline-model-parallel-size
--moe-router-score-function sigmoid -> --moe-router-score-function sigmoid; --num-experts
EXPERTS --moe-router-score-function sigmoid --moe-router-pre-softmax
    -> --moe-router-pre-softmax; --moe-router-score-function
EXPERTS --moe-router-num-groups 4 -> --moe-router-num-groups; --moe-router-group-topk
EXPERTS --moe-router-load-balancing-type seq_aux_loss -> --moe-router-load-balancing-type; --moe-aux-loss-coeff
--moe-aux-loss-coeff 0.01 -> --moe-aux-loss-coeff 0.01; --num-experts
--moe-per-layer-logging -> --moe-per-layer-logging; --num-experts
EXPERTS --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.01
    -> --moe-aux-loss-coeff 0.01; --moe-router-load-balancing-type
EXPERTS --moe-router-score-function sigmoid --moe-router-bias-update-rate 0.01
    -> --moe-router-bias-update-rate 0.01; --moe-router-enable-expert-bias
--bf16 --loss-scale 12 -> --loss-scale; --fp16
--hysteresis 3 -> --hysteresis 3; --fp16
--fp16 --loss-scale 12 --hysteresis 3 -> --hysteresis; --loss-scale
"""


@pytest.mark.parametrize(("typed", "named"), rows(REFUSED))
def test_what_cannot_be_is_refused_with_what_can(typed, named):
    """Flags anywhere in the line; other words where the nearest choice stands, if there is one."""

    def told(line, word):
        return word in (line if word.startswith("--") else line.rpartition("nearest")[2])

    found = faults(typed)
    assert any(all(told(line, word) for word in named) for line in found), found


@pytest.mark.parametrize(("typed", "named"), rows(NOTED))
def test_what_has_no_effect_is_noted(typed, named):
    notes = run(typed).notes
    assert any(all(word in note for word in named) for note in notes), notes


def test_columns_and_completions_name_what_is_there():
    known = all_options().keys() | facts(make_config(BASE))
    needs = {text for option in all_options().values() for text in option.needs}
    assert len(needs) > 40 and {need.name for text in needs for need in read_need(text)[0]} <= known
    assert not any(fault(o, o.small) for o in all_options().values() if o.small not in (KEPT, SHORT))
    named = {name for each in COMPLETIONS for name in (*each.reads, *each.writes)}
    assert named <= {*all_options(), *DERIVED, ACCUMULATION}


def errors(world=WORLD, **changes):
    with pytest.raises(ConfigError) as caught:
        begun(make_config({**BASE, **changes}, world), world)
    return "\n".join(caught.value.errors)


def legal(world=WORLD, **changes):
    config = make_config({**BASE, **changes}, world)
    assert not judge(config, world).errors
    return config


def test_nearest_arithmetic():
    assert around(common_divisors(12), 5) == "4 or 6"
    assert around(common_divisors(12), 13) == "12"
    assert common_divisors(12, 18) == [1, 2, 3, 6]
    assert multiples_around(27, 6) == "24 or 30"
    assert multiples_around(4, 6) == "6"


def test_required_options_are_all_named_at_once():
    with pytest.raises(ConfigError) as caught:
        make_config({})
    text = str(caught.value)
    for flag in ("num-layers", "hidden-size", "num-attention-heads", "seq-length", "micro-batch-size", "lr"):
        assert f"--{flag} is required" in text
    assert "exactly one of --train-iters and --train-samples" in text
    assert "exactly one of --data-path and --mock-data" in text


@pytest.mark.parametrize("name", [opt.name for opt in all_options().values() if opt.required])
@pytest.mark.parametrize("world", [None, WORLD])
def test_what_stands_in_for_a_missing_option_is_not_judged(name: str, world: World | None) -> None:
    split = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}
    assert errors(world, **split, **{name: None}) == f"--{name.replace('_', '-')} is required"


def test_a_configuration_that_holds_has_the_types_that_it_states() -> None:
    for family in FAMILIES:
        config = legal(model_family=family)
        for section in section_types():
            for each in dataclasses.fields(getattr(config, section)):
                value = getattr(getattr(config, section), each.name)
                assert value is not None or str(each.type).endswith("| None"), each.name
    for section in (ModelConfig, OptimizerConfig, BatchConfig):
        with pytest.raises(TypeError, match="missing"):  # one without what a run needs cannot be made
            section()


MIXTURE = {"num_experts": 4, "add_bias_linear": False}


def test_a_mixture_without_a_layer_of_experts_is_refused():
    text = errors(**MIXTURE, moe_layer_freq=(0, 0, 0, 0))
    assert "\n" not in text and "--moe-layer-freq 0,0,0,0 gives no layer the 4 experts; nearest: 1" in text
    assert "has 2 numbers for --num-layers 4" in errors(**MIXTURE, moe_layer_freq=(0, 0))


def test_a_name_that_does_not_exist_is_told_the_nearest():
    assert errors(num_layer=2) == "num_layer does not exist; nearest: num_layers"


def test_a_size_that_the_ranks_do_not_divide_by_is_one_error():
    text = errors(World(1, 1), context_parallel_size=2)
    assert "\n" not in text and "--context-parallel-size 2 over 1 data-parallel ranks" in text


def test_faults_of_unlike_kinds_come_together():
    text = errors(num_layers=0, tensor_model_parallel_size=8, global_batch_size=7, lr=-1.0, zero_preset="hpz")
    assert text.count("\n") == 3
    for part in ("--num-layers 0", "--lr -1", "--tensor-model-parallel-size", "--num-attention-heads 12"):
        assert part in text


def test_legal_configurations():
    config = legal(tensor_model_parallel_size=2, zero_preset="hpz", global_batch_size=48)
    assert config.data_parallel_size(WORLD) == 4 and config.data_ranks_per_node(WORLD) == 2
    assert config.shards(WORLD).factors == (2, 4, 4) and config.num_micro_batches(WORLD) == 6
    pretend = legal(World(4, 4), ranks_per_node=2, zero_preset="hpz")
    assert pretend.shards(World(4, 4)).factors == (2, 4, 4)
    assert legal(zero_stage=3, zero_hpz_partition_size=2).shards(WORLD).factors == (2, 8, 8)
    assert legal(zero_stage=3, zero_preset="zeropp").shards(WORLD).factors == (4, 4, 8)
    assert legal(optimizer="adam").optimizer.optimizer == "adamw"
    assert legal(global_batch_size=64, rampup_batch_size=(16, 16, 100))
    assert legal().batch.global_batch_size == 16


def test_a_schedule_of_batch_sizes_is_a_ramp_up_in_other_words():
    length = BASE["seq_length"]
    steps = [f"{samples * length}:{size}" for samples, size in ((0, 16), (34, 32), (67, 48), (100, 64))]
    said, ramp = (
        legal(step_batch_size_schedule=steps),
        legal(global_batch_size=64, rampup_batch_size=(16, 16, 100)),
    )
    assert BatchSizes.of(said, 4) == BatchSizes.of(ramp, 4) and said.batch.global_batch_size == 64
    assert legal(eval_global_batch_size=32).batch.evaluated_per_step(8) == 32
    assert legal().batch.evaluated_per_step(8) == 16


def test_without_a_world_only_sizes_that_need_it_stay_unchecked():
    assert legal(None, global_batch_size=7, zero_preset="hpz").batch.global_batch_size == 7
    assert legal(None).batch.global_batch_size is None
    assert "P = 2 does not divide G = 3" in errors(None, zero_shard=(2, 3, 4))
    assert "nearest size that fits all" in errors(None, tensor_model_parallel_size=5)


def test_data_words_and_lifetimes_that_are_legal():
    for words in (["a"], ["a", "b", "c"], ["0.3", "a", "7", "b"]):
        assert legal(mock_data=False, data_path=words).data.data_path == tuple(words)
    for split in ("100", "9/1", "98, 1.5, .5"):
        assert legal(split=split).data.split == split
    config = legal(zero_preset="zero3", zero_params_lifetime="step")
    assert config.shards(WORLD).lifetime == "use" and any("is 'use' here" in note for note in config.notes)


def test_schedule_lengths():
    span = legal(lr_warmup_fraction=0.1, lr_decay_iters=50).lr_lengths
    assert (span.unit, span.total, span.decay, span.warmup) == ("iterations", 100, 50, 5)
    span = legal(train_iters=None, train_samples=1000, lr_warmup_samples=64).lr_lengths
    assert (span.unit, span.total, span.decay, span.warmup) == ("samples", 1000, 1000, 64)


NUMBERS = st.integers(-2, 40).map(str)
WORDS = st.one_of(
    NUMBERS,
    st.floats().map(repr),
    st.sampled_from(sorted({str(word) for opt in all_options().values() for word in opt.choices})),
    st.lists(NUMBERS, max_size=4).map(",".join),
    st.text("ab-=,.1 ", max_size=4),
)
FLAGS = st.sampled_from([opt.flag for opt in all_options().values()])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(FLAGS, WORDS), max_size=6), st.integers(1, 12), st.integers(1, 12))
@example([("--lr-warmup-fraction", "1e306")], 1, 1)
@example([("--lr-warmup-fraction", "-1e308")], 1, 1)
@example([("--load", "0"), ("--model-family", "0")], 1, 2)
@example([("--pipeline-model-parallel-size", "2"), ("--num-virtual-stages-per-pipeline-rank", "2")], 4, 2)
@example([("--pipeline-model-parallel-size", "3"), ("--num-layers-per-virtual-pipeline-stage", "0")], 3, 3)
@example([("--pipeline-model-parallel-size", "2"), ("--pipeline-partition", "-1,5")], 2, 2)
@example([("--context-parallel-size", "2"), ("--tensor-model-parallel-size", "16")], 4, 2)
def test_any_command_line_gives_a_configuration_or_the_list_of_its_faults(extra, size, per_node):
    """Never another exception; what is accepted is whole on its world."""
    argv = [
        w
        for name, value in BASE.items()
        for w in (f"--{name.replace('_', '-')}", str(value))
        if value is not True
    ]
    argv += ["--mock-data", *(word for pair in extra for word in pair)]
    world = World(size, per_node)
    try:
        config = begun(parse(argv, world), world)
    except ConfigError as error:
        assert error.errors and all(error.errors)
        return
    assert config.num_micro_batches(world) >= 1 and config.shards(world) and describe(config, world)
    stages, pp = config.stages(), config.parallel.pipeline_model_parallel_size
    micro_batches = config.num_micro_batches(world)
    assert sum(len(stage.layers) for stage in stages) == config.model.num_layers
    assert make_schedule(config.pipeline_schedule, pp, len(stages) // pp, micro_batches)
    assert RunConfig.of(stored_values(config.to_dict())) == config
