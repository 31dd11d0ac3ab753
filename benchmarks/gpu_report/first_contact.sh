#!/bin/bash
# The first minutes on a card, in one command of at most 9: from the checkout's root, bash benchmarks/gpu_report/first_contact.sh
# Right or wrong first, beside each other: tests, and the trainer with a checkpoint, a resume, experts and --compile.
# Then what is timed, alone, piece by piece (python -m benchmarks.gpu_report; its piece nccl trains 4 ranks over NCCL). Each line is
# a process with a limit. With OUT set, that folder has all logs in first.tgz, packed anew after each line.
# DEVICE=cpu rehearses with tiny sizes. PIECES: another list of pieces, in their order; RIGHT=no: those alone.
set -u
DEVICE=${DEVICE:-cuda}; PY=${PY:-python3}; RESULTS=${RESULTS:-runs/first-contact}
PIECES=${PIECES:-nccl,train-experts,attention,train-1b,kernels,memory,race}
rm -rf "$RESULTS"; mkdir -p "$RESULTS"
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
save() { # without the checkpoint: packing its gigabytes took the minutes of what came next
    [ -z "${OUT:-}" ] || tar czf "$OUT/first.tgz" --exclude=./checkpoint -C "$RESULTS" . 2> /dev/null
}
trap save EXIT
one() { # name, seconds, command
    local name=$1 limit=$2 began=$SECONDS rc; shift 2
    timeout -k 3 "$limit" "$@" > "$RESULTS/$name.log" 2>&1; rc=$?
    echo "$name: status $rc, $((SECONDS - began)) s: $(grep -v '^ *$' "$RESULTS/$name.log" | tail -n 1 | cut -c1-170)"
    save
    return $rc
}
SIZES="--num-layers 12 --hidden-size 1536 --ffn-hidden-size 4096 --num-attention-heads 12 --seq-length 2048 --vocab-size 32000"
EXPERTS="--num-experts 8 --moe-ffn-hidden-size 1024 --moe-aux-loss-coeff 0.01"
[ "$DEVICE" = cuda ] || SIZES="--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 32 --vocab-size 256"
trained() { # name, seconds, flags: one rank, with every default of a run
    local name=$1 limit=$2; shift 2
    one "$name" "$limit" $PY pretrain/pretrain_gpt.py --device "$DEVICE" --log-dir "$RESULTS/$name" --model-family llama \
        $SIZES --num-query-groups 4 --mock-data --lr 1e-4 --bf16 --eval-iters 0 --log-interval 5 \
        --micro-batch-size 1 --global-batch-size 2 "$@"
}
trainer() {
    trained train 60 --train-iters 20 --save "$RESULTS/checkpoint" --async-save --save-interval 10 &&
        trained resume 60 --train-iters 25 --load "$RESULTS/checkpoint" --save "$RESULTS/checkpoint"
    rm -rf "$RESULTS/checkpoint"
    trained experts 60 $EXPERTS --train-iters 10 --save "$RESULTS/checkpoint" &&
        trained experts-resumed 60 $EXPERTS --train-iters 15 --load "$RESULTS/checkpoint"
    rm -rf "$RESULTS/checkpoint"
    [ "$DEVICE" != cuda ] || trained compile 110 --train-iters 10 --compile
}
report() { # pieces
    [ "$DEVICE" = cuda ] || set -- "$@" --rehearsal
    one "report-$1" 600 $PY -m benchmarks.gpu_report --minutes "${MINUTES:-6}" --out "$RESULTS/report" --pieces "$@"
}
if [ "${RIGHT:-yes}" = yes ]; then
    trainer &
    one tests 300 $PY -m pytest -q -m gpu -p no:cacheprovider tests/gpu
    wait
fi
report "$PIECES"
