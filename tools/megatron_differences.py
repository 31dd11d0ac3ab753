"""Where megazero and Megatron differ in what a flag means, by hand. tools/megatron_page.py prints it."""

from __future__ import annotations

# (flag, what Megatron does, what megazero does, why)
DIFFERENCES: list[tuple[str, str, str, str]] = [
    (
        "`--num-query-groups`",
        "is read only with `--group-query-attention`",
        "is always read; `--group-query-attention` alone is an error",
        "a number that is given is meant",
    ),
    (
        "`--lr-decay-tokens` with a warm-up in samples",
        "the decay starts from the warm-up's tokens only if an iteration ends exactly with it",
        "the decay always begins where the warm-up ends",
        "Megatron-DeepSpeed's curve has a jump otherwise",
    ),
    (
        "`--recompute-method block`, `--recompute-num-layers`",
        "say how many layers are recomputed, and how many at once",
        "with `--recompute-granularity full` every layer is recomputed by itself",
        "the numbers are the same; the memory is that of `uniform` with 1",
    ),
    (
        "`--no-save-optim`, `--no-save-rng`",
        "leave states out of checkpoints",
        "change nothing: a checkpoint holds everything",
        "every checkpoint can be resumed; `--finetune` loads weights alone",
    ),
    (
        "`--grad-reduce-in-bf16`",
        "sums gradients over ranks in bf16",
        "changes nothing: sums are in fp32",
        "formats of messages are `--zero-quantized-gradients` and its kin",
    ),
]
