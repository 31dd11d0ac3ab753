"""Where megazero and Megatron differ in what a flag means, by hand. tools/megatron_page.py prints it."""

from __future__ import annotations

# (flag, what Megatron does, what megazero does, why)
DIFFERENCES: list[tuple[str, str, str, str]] = [
    # Defaults, which tests/unit/test_megatron_defaults.py compares.
    (
        "--eval-interval",
        "default unset: no evaluation while it trains (0.16; 1000 in older releases and in BLOOM's fork)",
        "default 1000",
        "what published scripts were written for",
    ),
    (
        "--optimizer",
        "default adam",
        "default adamw",
        "two names of one update: Megatron's adam decouples weight decay; --optimizer adam is taken",
    ),
    (
        "--muon-tp-mode",
        "default blockwise (0.16; duplicated in newer releases): each tensor-parallel rank steps its part by itself",
        "default distributed",
        "a layout does not change the training; duplicated is the same update, computed on every rank",
    ),
    (
        "--swiglu with --optimizer muon",
        "gate and up are one matrix, which is orthogonalised as one",
        "two matrices, as queries, keys and values are",
        "they are two linears of one input, and checkpoints hold them apart",
    ),
    (
        "--deepspeed with --deepspeed_config",
        "DeepSpeed's engine clips gradients and scales losses by its file alone, whatever --clip-grad and "
        "--loss-scale say; the optimizer and its schedule are Megatron's, whatever the file's `optimizer` and "
        "`scheduler` say",
        "the same, with a note for each value that gives way. A file without `gradient_clipping` means 1.0",
        "that is DeepSpeed's default since June 2026; before it was 0, so published runs without the key were not "
        'clipped: `"gradient_clipping": 0` repeats them',
    ),
    (
        "--use_bias",
        "(epfLLM) without it linear layers have no biases",
        "linear layers of family gpt have biases without it; --disable-bias-linear leaves them out",
        "the flags of other forks say the opposite, and one default holds for all",
    ),
    (
        "--sliding_window_size, --sliding-window",
        "(epfLLM, MindSpeed) X tokens before the query and its own: what flash attention makes of the window",
        "X tokens, the query's own included, as in Hugging Face's config.json",
        "the model that is exported is the one that was trained; X + 1 repeats theirs",
    ),
    (
        "--z-loss-strength, --use-z-loss",
        "(LLM-jp, Swallow) validation losses include the z-loss, too; --use-z-loss is 1e-4",
        "the same in training; evaluations report the loss without it",
        "a validation loss is compared with other runs'",
    ),
    (
        "--override-opt_param-scheduler",
        "at a resume, flags of the schedule that are not the checkpoint's are an error; with this flag the flags "
        "decide, with --use-checkpoint-opt_param-scheduler the checkpoint",
        "flags decide, with a note of what they change; with --use-checkpoint-opt_param-scheduler the checkpoint",
        "a longer run has another decay, which is no mistake",
    ),
    (
        "--recompute-granularity",
        "default unset",
        "default none",
        "two names of the same: nothing is recomputed",
    ),
    (
        "--split",
        "default unset, which means 969,30,1 with --data-path",
        "default 969,30,1",
        "the same",
    ),
    # Meanings.
    (
        "--model-family",
        "no such flag",
        "gpt is Megatron's architecture and dropout; other families are presets, without dropout",
        "one word for a family's choices; flags override it",
    ),
    (
        "--max-position-embeddings",
        "is required",
        "--seq-length where it is not given",
        "it is a size of the model for learned positions alone",
    ),
    (
        "--num-query-groups",
        "is ignored without --group-query-attention",
        "takes effect by itself, with a note where it is not said in full",
        "a number that is given is meant",
    ),
    (
        "--group-query-attention",
        "without --num-query-groups means one group in older releases, and no groups in 0.16",
        "is an error that asks for --num-query-groups",
        "releases disagree",
    ),
    (
        "--openai-gelu",
        "(its default is off) GELU by tanh where the fused kernel does not compute it so already",
        "on by default, in the cases in which Megatron's kernel computes it so",
        "one option for the form that is computed",
    ),
    (
        "--swiglu",
        "without --ffn-hidden-size: 8/3 x hidden, rounded down to a multiple of 64",
        "the same; rounded up in families other than gpt",
        "Llama's own code rounds up",
    ),
    (
        "--disable-bias-linear, --no-bias-gelu-fusion",
        "GELU is exact; with biases, the fused kernel computes the tanh form",
        "the same; `--openai-gelu` and `--no-openai-gelu` say it, and a checkpoint keeps its form",
        "the two forms differ by at most 5e-4",
    ),
    (
        "--make-vocab-size-divisible-by",
        "the rows that pad the vocabulary are drawn, trained, saved, and part of the softmax",
        "they are zero, not in the softmax, and not saved",
        "the loss does not depend on the tensor-parallel size, and a checkpoint loads on any",
    ),
    (
        "--pad-vocab-size-to",
        "(BLOOM's fork) must be a multiple of --make-vocab-size-divisible-by, whose default counts",
        "must be one of the tensor-parallel size, and of that flag where it is given",
        "a size that is asked for is not contradicted by a default",
    ),
    (
        "--rampup-batch-size",
        "with --train-samples only; a batch that the ranks cannot share ends the run when it comes",
        "with --train-iters, too; the run saves and stops before such a batch, and says so at the start; the full "
        "batch is checked at once",
        "only the batch in use must divide, so that a run can go on with other ranks",
    ),
    (
        "--train-samples",
        "the last batches of a ramp-up may go past it",
        "is not exceeded",
        "a length is a length",
    ),
    (
        "--eod-mask-loss",
        "the loss is the mean over micro-batches of their means",
        "the mean over the tokens that count in the global batch, as with --calculate-per-token-loss",
        "the gradient does not depend on the micro-batch size",
    ),
    (
        "--eval-iters",
        "validation and test data are evaluated at the end of the run, too",
        "validation data are, at every --eval-interval",
        "a run that goes on has no end",
    ),
    (
        "--save",
        "needs --save-interval",
        "saves at the end and at exits without it",
        "what was trained is not lost",
    ),
    (
        "--load",
        "the flags say the architecture, or with --use-checkpoint-args the checkpoint does, whatever the flags say",
        "the checkpoint says what the flags do not; what they say otherwise is an error",
        "a script cannot continue another model by mistake",
    ),
    (
        "--use-distributed-optimizer",
        "without it every rank holds all states of the optimizer",
        "states are sharded by default (--zero-preset zero1)",
        "the same update in less memory; --zero-preset ddp is Megatron's",
    ),
    (
        "--zero-stage",
        "(DeepSpeed) at stage 0 with --bf16 the optimizer shards its states all the same",
        "the same: preset zero1, with a note",
        "BLOOM was trained so",
    ),
    (
        "--seed",
        "weights and dropout depend on the layout",
        "they do not",
        "a layout can be checked against one rank",
    ),
    (
        "--lr-decay-tokens with a warm-up in samples",
        "the decay starts from the warm-up's tokens only if an iteration ends exactly with it",
        "the decay always begins where the warm-up ends",
        "Megatron-DeepSpeed's curve has a jump otherwise",
    ),
    (
        "--recompute-method block, --recompute-num-layers",
        "say how many layers are recomputed, and how many at once",
        "with --recompute-granularity full every layer is recomputed by itself",
        "the numbers are the same; the memory is that of uniform with 1",
    ),
    (
        "--no-save-optim, --no-save-rng",
        "leave states out of checkpoints",
        "change nothing: a checkpoint holds everything",
        "every checkpoint can be resumed; --finetune loads weights alone",
    ),
    (
        "--grad-reduce-in-bf16",
        "sums gradients over ranks in bf16",
        "changes nothing: sums are in fp32",
        "formats of messages are --zero-quantized-gradients and its kin",
    ),
    (
        "--no-check-for-nan-in-loss-and-grad",
        "without it a gradient that is NaN ends the run",
        "changes nothing: the step is skipped on every rank and counted, and ten in a row end the run",
        "what a pretraining of weeks wants; a loss that is NaN ends the run, as there",
    ),
    (
        "--skip-train-iteration-range",
        "(BLOOM's fork) draws one micro-batch for each iteration of the range, and does not count the iterations",
        "takes all samples of the iterations and counts both, as Megatron-LM with --iterations-to-skip, another name "
        "of it here",
        "the samples named are those that are left out, and a resume goes on behind them",
    ),
    (
        "--tokenizer-type",
        "SentencePieceTokenizer adds <CLS>, <SEP>, <EOD> and <MASK> and ends documents with <EOD>; Llama2Tokenizer "
        "puts the beginning-of-sequence token before each document",
        "both are the SentencePiece model as it is, whose end-of-sequence token ends documents",
        "the vocabulary is the model's; data that Megatron preprocessed with them is preprocessed again",
    ),
]
