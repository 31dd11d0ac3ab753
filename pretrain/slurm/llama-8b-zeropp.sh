#!/bin/bash
# A Llama 3 of 8B parameters with quantised messages between nodes: 4 nodes of 8 GPUs, data parallel alone.
#   TOKENIZER=DIR DATA_PATH=PREFIX pretrain/slurm/llama-8b-zeropp.sh [FLAGS]
# FLAGS replace those below. SUBMIT starts the run; pretrain.sbatch adds --save, --load and --log-dir, and goes on until
# the last iteration. Without the line ZERO, the flags are those of Megatron's own script for this model.
# LAUNCH, and where a virtual environment is entered: docs/guide/slurm.md.
set -eu
missing=""
for name in TOKENIZER DATA_PATH; do [ -n "${!name:-}" ] || missing+="${missing:+ and }$name"; done
[ -z "$missing" ] || { echo "$0: set $missing, as its first lines say" >&2; exit 2; }
SUBMIT=${SUBMIT:-sbatch --job-name=llama-8b --nodes=4 pretrain/slurm/pretrain.sbatch}

SIZES=(--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192
    --micro-batch-size 1 --global-batch-size 128
    --train-samples 9765625 --lr-decay-samples 9746093 --lr-warmup-samples 19531)
MODEL=(--position-embedding-type rope --rotary-base 500000 --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.0134
    --bf16 --transformer-impl transformer_engine --recompute-activations)
ZERO=(--zero-preset zeropp)
OPTIMIZER=(--lr 0.00015 --min-lr 0.00001 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2 0.95)
DATA=(--data-path $DATA_PATH --split 99,1,0 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
OUTPUT=(--log-interval 1 --save-interval 1000 --save-keep-last 3 --eval-interval 1000 --eval-iters 32)

$SUBMIT "${SIZES[@]}" "${MODEL[@]}" "${ZERO[@]}" "${OPTIMIZER[@]}" "${DATA[@]}" "${OUTPUT[@]}" "$@"
