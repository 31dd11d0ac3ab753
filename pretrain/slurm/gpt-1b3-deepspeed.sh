#!/bin/bash
# GPT-3 1.3B of Megatron-DeepSpeed, whose JSON file says stage, precision and batch: 2 nodes of 8 GPUs.
#   VOCAB=vocab.json MERGES=merges.txt DATA_PATH=PREFIX pretrain/slurm/gpt-1b3-deepspeed.sh [FLAGS]
# FLAGS replace those below, and what the file says. SUBMIT starts the run; pretrain.sbatch adds --save, --load and
# --log-dir, and goes on until the last iteration.
# LAUNCH, and where a virtual environment is entered: docs/guide/slurm.md.
set -eu
missing=""
for name in VOCAB MERGES DATA_PATH; do [ -n "${!name:-}" ] || missing+="${missing:+ and }$name"; done
[ -z "$missing" ] || { echo "$0: set $missing, as its first lines say" >&2; exit 2; }
SUBMIT=${SUBMIT:-sbatch --job-name=gpt-1b3 --nodes=2 pretrain/slurm/pretrain.sbatch}
DEEPSPEED=${DEEPSPEED:-pretrain/slurm/gpt-1b3-deepspeed.json}

SIZES=(--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048
    --tensor-model-parallel-size 2 --train-tokens 300_000_000_000 --train-samples 146_484_864
    --lr-decay-tokens 260_000_000_000 --lr-warmup-tokens 375_000_000)
OPTIMIZER=(--lr 2.0e-4 --min-lr 2.0e-5 --lr-decay-style cosine --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --init-method-std 0.014 --override-opt_param-scheduler)
DATA=(--data-path $DATA_PATH --data-impl mmap --split 98,2,0 --vocab-file "$VOCAB" --merge-file "$MERGES")
OUTPUT=(--log-interval 10 --save-interval 1000 --save-keep-last 3 --eval-interval 100 --eval-iters 10)

$SUBMIT --deepspeed --deepspeed_config "$DEEPSPEED" --fp16 --checkpoint-activations \
    --deepspeed-activation-checkpointing "${SIZES[@]}" "${OPTIMIZER[@]}" "${DATA[@]}" "${OUTPUT[@]}" "$@"
