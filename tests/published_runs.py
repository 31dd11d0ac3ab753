"""Flags of published runs, as their scripts give them, and sizes for a small run of each, which trains
(tests/dist/train/test_published_runs.py). For --train-weighted-split-paths and its kin stands --train-data-path.

Sources: NVIDIA's Megatron-LM, BigScience's scripts, DeepSpeed's fork, BigCode's and LUMI's. {DATA}, {VOCAB},
{MERGES}, {TOKENIZER}, {SENTENCEPIECE}, {DEEPSPEED} and {DIR} stand for files of the run.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.sizes import PUBLISHED as SMALL

# Loss scaling, as all of these files have it.
SCALING = {"loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1}
# DeepSpeed's own examples share it.
DEEPSPEED_FP16 = {
    "zero_optimization": {"stage": 0},
    "gradient_clipping": 1.0,
    "prescale_gradients": True,
    "fp16": {"enabled": True, **SCALING, "initial_scale_power": 11},
}


@dataclass(frozen=True)
class Published:
    """A script's flags, sizes that replace its own over tests.sizes.PUBLISHED, ranks, and its DeepSpeed file."""

    flags: str
    sizes: str
    ranks: int
    deepspeed: dict[str, Any] = field(default_factory=dict)


PUBLISHED: dict[str, Published] = {
    "LUMI 71B": Published(
        flags=(
            "--tokenizer-type GPT2BPETokenizer --vocab-file {VOCAB} --merge-file {MERGES} --bf16 "
            "--disable-bias-linear --init-method-std 0.0048 --make-vocab-size-divisible-by 128 "
            "--no-gradient-accumulation-fusion --normalization RMSNorm --seed 42 "
            "--untie-embeddings-and-output-weights --use-flash-attn --swiglu --attention-dropout 0 "
            "--hidden-dropout 0 --no-query-key-layer-scaling --use-rotary-position-embeddings "
            "--no-bias-dropout-fusion --group-query-attention --optimizer adam --adam-beta1 0.9 --adam-beta2 "
            "0.95 --adam-eps 1e-5 --lr 3.2e-4 --min-lr 3e-5 --lr-decay-style cosine --clip-grad 1.0 "
            "--weight-decay 1e-1 --use-distributed-optimizer --sequence-parallel --save {DIR}/checkpoint --load "
            "{DIR}/checkpoint --log-interval 1 --save-interval 1000 --eval-interval 4000 --tensorboard-dir "
            "{DIR}/tensorboard-dir --tensorboard-queue-size 5 --log-timers-to-tensorboard "
            "--log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard --train-data-path {DATA} "
            "--valid-data-path {DATA} --dataloader-type single --num-workers 1 --recompute-activations"
        ),
        sizes=(
            "--ffn-hidden-size 192 --num-query-groups 2 --tensor-model-parallel-size 2 "
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --train-samples "
            "{SAMPLES} --lr-decay-samples {SAMPLES} --lr-warmup-samples 16"
        ),
        ranks=4,
    ),
    "NVIDIA GPT 76B, 2021": Published(
        flags=(
            "--activations-checkpoint-method uniform --DDP-impl local --data-path {DATA} --vocab-file {VOCAB} "
            "--merge-file {MERGES} --log-interval 5 --lr 0.0001 --min-lr 0.00001 --lr-decay-style cosine "
            "--lr-warmup-fraction 0.01 --split 969,30,1 --eval-interval 1000 --clip-grad 1.0 --fp16 "
            "--loss-scale 8192"
        ),
        sizes=(
            "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 "
            "--num-layers-per-virtual-pipeline-stage 1 --train-iters {ITERS} --lr-decay-iters {ITERS}"
        ),
        ranks=4,
    ),
    "NVIDIA GPT-3 175B": Published(
        flags=(
            "--weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 "
            "--fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --data-path "
            "{DATA} --vocab-file {VOCAB} --merge-file {MERGES} --split 949,50,1 --log-interval 100 "
            "--save-interval 10000 --eval-interval 1000 --save {DIR}/checkpoint --load {DIR}/checkpoint "
            "--tensorboard-dir {DIR}/tensorboard-dir"
        ),
        sizes=(
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --rampup-batch-size 4 4 16 "
            "--train-iters {ITERS} --lr-decay-iters {ITERS}"
        ),
        ranks=4,
    ),
    "BigCode, several languages": Published(
        flags=(
            "--save {DIR}/checkpoint --load {DIR}/checkpoint --train-data-path 0.3 {DATA} 1 {DATA} "
            "1 {DATA} 1 {DATA} --valid-data-path {DATA} --test-data-path {DATA} --vocab-file {VOCAB} --merge-file "
            "{MERGES} --data-impl mmap --split 949,50,1 --distributed-backend nccl --lr 0.00015 --min-lr 1.0e-5 "
            "--lr-decay-style cosine --weight-decay 1e-2 --clip-grad 1.0 --lr-warmup-fraction .01 "
            "--checkpoint-activations --log-interval 100 --save-interval 10000 --eval-interval 1000 --fp16"
        ),
        sizes=("--train-iters {ITERS} --lr-decay-iters {ITERS}"),
        ranks=4,
    ),
    "BigScience Megatron-DeepSpeed, bf16": Published(
        flags=(
            "--loss-scale 12 --lr 6.0e-4 --min-lr 6.0e-5 --lr-decay-style cosine --log-interval 1 "
            "--eval-interval 10 --data-path {DATA} --vocab-file {VOCAB} --merge-file {MERGES} --save-interval "
            "1000 --split 98,2,0 --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 "
            "--init-method-std 0.006 --bf16 --checkpoint-activations --save {DIR}/checkpoint --load "
            "{DIR}/checkpoint --universal-checkpoint --override-lr-scheduler "
            "--tensorboard-dir {DIR}/tensorboard-dir --deepspeed "
            "--deepspeed_config={DEEPSPEED} --zero-stage=0 --deepspeed-activation-checkpointing"
        ),
        sizes=(
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --train-iters {ITERS} "
            "--lr-decay-iters {ITERS} --lr-warmup-iters 2"
        ),
        ranks=4,
        deepspeed={
            "steps_per_print": 1,
            "zero_optimization": {"stage": 0},
            "bf16": {"enabled": True},
            "fp16": {"enabled": False, **SCALING, "initial_scale_power": 12},
            "wall_clock_breakdown": True,
        },
    ),
    "BigScience 350M, rotary": Published(
        flags=(
            "--position-embedding-type rotary --vocab-file {VOCAB} --merge-file {MERGES} --loss-scale 12 "
            "--clip-grad 1.0 --fp16 --checkpoint-activations --optimizer adam --adam-beta1 0.9 --adam-beta2 "
            "0.999 --adam-eps 1e-8 --lr 3e-4 --min-lr 1e-5 --lr-decay-style cosine --clip-grad 1.0 "
            "--weight-decay 1e-1 --exit-duration-in-mins 1190 --log-interval 200 --save-interval 1500 "
            "--eval-interval 1000 --tensorboard-dir {DIR}/tensorboard-dir --tensorboard-queue-size 5 "
            "--log-timers-to-tensorboard --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard "
            "--save {DIR}/checkpoint --load {DIR}/checkpoint --data-path {DATA} --data-impl mmap --split "
            "949,50,1 --distributed-backend nccl --deepspeed --deepspeed_config {DEEPSPEED} --zero-stage 1 "
            "--deepspeed-activation-checkpointing"
        ),
        sizes=(
            "--ffn-hidden-size 256 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
            "--rampup-batch-size 4 4 16 --train-samples {SAMPLES} --lr-decay-samples {SAMPLES} "
            "--lr-warmup-samples 16"
        ),
        ranks=4,
        deepspeed={
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 1},
            "fp16": {"enabled": True, **SCALING, "initial_scale_power": 12},
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
        },
    ),
    "DeepSpeed GPT 1.3B, dense": Published(
        flags=(
            "--override-opt_param-scheduler --adam-beta1 0.9 --adam-beta2 0.95 --moe-expert-parallel-size 1 "
            "--num-experts 1 --moe-loss-coeff 0.01 --moe-train-capacity-factor 1.0 --moe-eval-capacity-factor "
            "1.0 --moe-min-capacity 4 --init-method-std 0.014 --exit-duration-in-mins 30000000 --lr 2.0e-4 "
            "--min-lr 2.0e-5 --lr-decay-style cosine --split 98,2,0 --log-interval 10 --eval-interval 100 "
            "--save-interval 1000 --weight-decay 0.1 --clip-grad 1.0 --hysteresis 2 --num-workers 0 --fp16 "
            "--load {DIR}/checkpoint --save {DIR}/checkpoint --tensorboard-queue-size 1 "
            "--log-timers-to-tensorboard --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard "
            "--tensorboard-dir {DIR}/tensorboard-dir --checkpoint-activations --vocab-file {VOCAB} --merge-file "
            "{MERGES} --data-path {DATA} --data-impl mmap --deepspeed --deepspeed_config {DEEPSPEED} "
            "--deepspeed-activation-checkpointing"
        ),
        sizes=(
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --rampup-batch-size 4 4 16 "
            "--train-tokens {TOKENS} --train-samples 439453125 --lr-decay-tokens {TOKENS} "
            "--lr-warmup-tokens 1024"
        ),
        ranks=4,
        deepspeed={
            "steps_per_print": 10,
            **DEEPSPEED_FP16,
            "bf16": {"enabled": False},
            "curriculum_learning": {
                "enabled": False,
                "curriculum_type": "seqlen",
                "min_difficulty": 80,
                "max_difficulty": 2048,
                "schedule_type": "fixed_linear",
                "schedule_config": {"total_curriculum_step": 110138, "difficulty_step": 8},
            },
            "wall_clock_breakdown": False,
        },
    ),
    "DeepSpeed Llama": Published(
        flags=(
            "--save {DIR}/checkpoint --load {DIR}/checkpoint --data-path 1 {DATA} --data-impl mmap "
            "--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model {SENTENCEPIECE} --split 949,50,1 "
            "--distributed-backend nccl --lr 3e-4 --lr-decay-style cosine --min-lr 3e-5 --weight-decay 0.1 "
            "--clip-grad 1 --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --log-interval 1 --save-interval "
            "10000 --eval-interval 1000 --bf16 --no-query-key-layer-scaling --attention-dropout 0 "
            "--hidden-dropout 0 --use-rotary-position-embeddings --untie-embeddings-and-output-weights --swiglu "
            "--normalization rmsnorm --disable-bias-linear --zero-stage=0 --deepspeed_config={DEEPSPEED} "
            "--deepspeed"
        ),
        sizes=(
            "--ffn-hidden-size 192 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
            "--train-iters {ITERS} --lr-warmup-iters 2"
        ),
        ranks=4,
        deepspeed={},
    ),
    "DeepSpeed GPT 1.3B, zero bubble": Published(
        flags=(
            "--override-opt_param-scheduler --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.013 "
            "--exit-duration-in-mins 30000000 --lr 2.0e-4 --min-lr 1.0e-6 --lr-decay-style cosine --split "
            "949,50,1 --log-interval 1 --eval-interval 10100 --save-interval 10100 --weight-decay 0.1 "
            "--clip-grad 1.0 --hysteresis 2 --num-workers 0 --fp16 --seed 1234 --load {DIR}/checkpoint --save "
            "{DIR}/checkpoint --no-async-tensor-model-parallel-allreduce --tensorboard-queue-size 1 "
            "--log-timers-to-tensorboard --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard "
            "--tensorboard-dir {DIR}/tensorboard-dir --log-optimizer-states-to-tensorboard --vocab-file {VOCAB} "
            "--merge-file {MERGES} --data-path {DATA} --data-impl mmap --deepspeed --deepspeed_config "
            "{DEEPSPEED} --zero-stage 0 --enable-zbh1-pipeline --enable-zbh1-exact-semantics"
        ),
        sizes=(
            "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --train-tokens {TOKENS} "
            "--train-samples 292968750 --lr-decay-tokens {TOKENS} --lr-warmup-tokens 1024"
        ),
        ranks=4,
        deepspeed={
            "steps_per_print": 1,
            **DEEPSPEED_FP16,
            "wall_clock_breakdown": False,
        },
    ),
}


def command_line(name: str, files: Mapping[str, str], folder: Path, iterations: int) -> list[str]:
    """The words of a small run in ``folder``. files: what stands in braces."""
    run = PUBLISHED[name]
    batch = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
    (folder / "ds.json").write_text(json.dumps({**run.deepspeed, **(batch if run.deepspeed else {})}))
    fill = {**files, "DIR": str(folder), "DEEPSPEED": f"{folder}/ds.json"}
    fill |= {"ITERS": str(iterations), "SAMPLES": str(8 * iterations), "TOKENS": str(8 * 64 * iterations)}
    words = shlex.split(f"{run.flags} {SMALL} {run.sizes} --device cpu --log-dir {{DIR}}/logs")
    for key, value in fill.items():
        words = [word.replace(f"{{{key}}}", value) for word in words]
    return words
