#!/bin/bash
# BLOOM 176B with the flags of its own script: 384 GPUs as 8 replicas of 12 pipeline stages of 4 tensor-parallel ranks.
#   TOKENIZER=DIR TRAIN="WEIGHT PREFIX WEIGHT PREFIX ..." VALID=PREFIX pretrain/slurm/bloom-176b.sh [FLAGS]
# TRAIN and VALID name whole data sets (docs/guide/training.md, Data). FLAGS replace those below. SUBMIT
# starts the run; pretrain.sbatch adds --save, --load and --log-dir, and goes on until the last iteration.
# LAUNCH, and where a virtual environment is entered: docs/guide/slurm.md.
set -eu
missing=""
for name in TOKENIZER TRAIN VALID; do [ -n "${!name:-}" ] || missing+="${missing:+ and }$name"; done
[ -z "$missing" ] || { echo "$0: set $missing, as its first lines say" >&2; exit 2; }
SUBMIT=${SUBMIT:-sbatch --job-name=bloom-176b --nodes=48 pretrain/slurm/pretrain.sbatch}

SIZES=(--num-layers 70 --hidden-size 14336 --num-attention-heads 112 --seq-length 2048 --max-position-embeddings 2048
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 12 --pad-vocab-size-to 250880
    --micro-batch-size 2 --global-batch-size 2048 --rampup-batch-size 192 16 9_765_625
    --train-samples 220_000_000 --lr-decay-samples 200_000_000 --lr-warmup-samples 183_105)
# The first line is for exports to Hugging Face: --model-family bloom, which has no dropout by itself; Megatron's is 0.1.
MODEL=(--model-family bloom --attention-dropout 0.1 --hidden-dropout 0.1
    --embed-layernorm --position-embedding-type alibi --init-method-std 0.0048 --sync-tp-duplicated-parameters
    --pp-partition-method "type:transformer|embedding" --bf16 --seed 42 --checkpoint-activations
    --abort-on-unmet-fused-kernel-constraints)
OPTIMIZER=(--optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --lr 6e-5 --min-lr 6e-6
    --lr-decay-style cosine --clip-grad 1.0 --weight-decay 1e-1 --zero-stage 0)
DATA=(--tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$TOKENIZER"
    --train-data-path $TRAIN --valid-data-path $VALID
    --data-impl mmap --distributed-backend nccl)
OUTPUT=(--log-interval 1 --save-interval 100 --save-keep-last 3 --eval-interval 1000 --eval-iters 1
    --exit-duration-in-mins 5990)

$SUBMIT "${SIZES[@]}" "${MODEL[@]}" "${OPTIMIZER[@]}" "${DATA[@]}" "${OUTPUT[@]}" "$@"
