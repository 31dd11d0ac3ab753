"""The training runs of compare_commits.py: few and tiny, together most of what changes the bits of a training."""

from __future__ import annotations

from dataclasses import dataclass

ITERATIONS, MIDDLE = 8, 4
COMMON = f"""
    --num-layers 2 --hidden-size 64 --num-attention-heads 8 --ffn-hidden-size 96 --seq-length 24
    --vocab-size 203 --make-vocab-size-divisible-by 2 --micro-batch-size 1 --global-batch-size 8
    --lr 1e-2 --lr-decay-style cosine --lr-warmup-iters 2 --train-iters {ITERATIONS}
    --mock-data --eval-iters 0 --device cpu
"""
LLAMA = "--model-family llama --num-query-groups 4"
NODES = "--ranks-per-node 2"
# The norms alone are as small, so that all other messages across nodes are quantised.
QUANTISED = f"--bf16 --zero-preset zeropp --zero-exact-numel 100 {NODES} {LLAMA}"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"


@dataclass(frozen=True)
class Case:
    """ranks: gloo processes. flags: over COMMON. resume: the other commit's checkpoint of the middle is resumed,
    too. The flags must be known to both commits.
    """

    ranks: int
    flags: str
    resume: bool = False

    def words(self, folder: str) -> list[str]:
        """The command line of the whole run, its checkpoints and metrics in ``folder``."""
        words = f"{COMMON} {self.flags}" + (f" --save-interval {MIDDLE}" if self.resume else "")
        return [*words.split(), "--save", folder, "--log-dir", folder]


CASES = {
    "one rank, fp32": Case(1, f"--model-family gpt --clip-grad 0.5 {DROPOUT}"),
    "zero3, bf16": Case(4, f"--bf16 --zero-preset zero3 --zero-chunk-numel 8192 {LLAMA}"),
    "hpz, bf16": Case(4, f"--bf16 --zero-preset hpz {NODES} {LLAMA}"),
    "zeropp": Case(4, QUANTISED, resume=True),
    "zeropp, INT8 weights, stochastic": Case(
        4, f"{QUANTISED} --no-zero-quantized-weights-delta --zero-gradient-rounding stochastic"
    ),
    "zeropp, feedback": Case(4, f"{QUANTISED} --zero-gradient-rounding feedback", resume=True),
    "mics, bloom, ramp-up": Case(
        4, f"--zero-preset mics --model-family bloom --rampup-batch-size 4 4 16 {NODES}"
    ),
    "zero1 x TP 2, sequence parallel": Case(
        4, f"--bf16 --zero-preset zero1 --tensor-model-parallel-size 2 --sequence-parallel {LLAMA}"
    ),
    # Nodes of one rank: state, activations and the sums of the pipeline's ends cross nodes. zeropp is zero1 there.
    "zeropp's formats x PP 2, 1f1b, tied": Case(
        4,
        "--bf16 --zero-preset zero1 --zero-quantized-weights-delta --zero-quantized-gradients "
        f"--zero-exact-numel 100 --ranks-per-node 1 {LLAMA} --pipeline-model-parallel-size 2 "
        "--pipeline-schedule 1f1b --no-untie-embeddings-and-output-weights",
    ),
    "zero2 x TP 2 x PP 2, zb-h1, recompute": Case(
        4,
        "--bf16 --zero-preset zero2 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        f"--pipeline-schedule zb-h1 --recompute-granularity full {DROPOUT} {LLAMA}",
        resume=True,
    ),
}
