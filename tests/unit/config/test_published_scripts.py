"""Command lines of published scripts, shrunk in their sizes: legal, or refused for what is not built."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from megazero.config import ConfigError, World, begun, parse
from tests.published_runs import PUBLISHED, command_line

SIZES = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
)
DATA = "--data-path corpus_text_document --split 949,50,1 --vocab-size 50257 "
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

FILES = {"DATA": "corpus_text_document", "VOCAB": "v", "MERGES": "m", "TOKENIZER": "t", "SENTENCEPIECE": "s"}
ITERATIONS = 40
RESOLVED: dict[str, dict[str, object]] = {
    "NVIDIA GPT-3 175B": {"lr_warmup_fraction": 0.001, "params_dtype": "fp16"},
    "NVIDIA GPT 76B, 2021": {"recompute_granularity": "full"},
    "LUMI 71B": {"normalization": "RMSNorm", "recompute_granularity": "selective"},
    "DeepSpeed Llama": {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": "s"},
    "DeepSpeed GPT 1.3B, dense": {"train_samples": 320, "lr_decay_samples": 320, "lr_warmup_samples": 16},
}
# Words that a script has besides, and what is refused of them.
REFUSED = {
    ("NVIDIA GPT-3 175B", "--error-injection-rate 1"): ["--error-injection-rate"],
    ("BigScience Megatron-DeepSpeed, bf16", "--position-embedding-type alibi --use-bnb-optimizer"): [
        *("--position-embedding-type alibi", "--use-bnb-optimizer"),
    ],
    ("DeepSpeed GPT 1.3B, dense", "--num-experts 128 --disable-bias-linear --sequence-parallel"): [
        *("--moe-loss-coeff 0.01", "--moe-train-capacity-factor"),
    ],
    ("DeepSpeed GPT 1.3B, dense", "--cpu-optimizer"): ["--cpu-optimizer"],
    (LLAMA3, "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max"): [
        *("--fp8-amax-history-len", "--fp8-amax-compute-algo"),
    ],
    (LLAMA3, "--context-parallel-size 2 --hybrid-context-parallel"): ["--hybrid-context-parallel"],
    (STARCODER, "--tokenizer-type TokenizerFromFileWithFIM"): ["TokenizerFromFileWithFIM"],
}


def words_of(run: str, folder: Path) -> list[str]:
    return command_line(run, FILES, folder, ITERATIONS) if run in PUBLISHED else run.split()


@pytest.mark.parametrize("run", PUBLISHED)
def test_a_published_run_is_legal(run: str, tmp_path: Path) -> None:
    config = begun(parse(words_of(run, tmp_path), World(PUBLISHED[run].ranks, PUBLISHED[run].ranks)))
    assert {name: config.get(name) for name in RESOLVED.get(run, {})} == RESOLVED.get(run, {})


def test_scripts_of_today_and_of_a_fork_are_legal() -> None:
    wanted: Iterable[tuple[str, dict[str, object]]] = (
        (LLAMA3, {"num_query_groups": 2, "position_embedding_type": "rope", "lr_decay_samples": 1949218748}),
        (
            STARCODER,
            {"num_query_groups": 1, "recompute_granularity": "selective", "wandb_entity": "e"},
        ),
    )
    for line, expected in wanted:
        config = begun(parse(line.split()))
        assert {name: config.get(name) for name in expected} == expected


@pytest.mark.parametrize("run, more", REFUSED, ids=[more.split()[0] for _, more in REFUSED])
def test_what_is_not_built_is_refused_by_name(run: str, more: str, tmp_path: Path) -> None:
    given = words_of(run, tmp_path)
    for word in more.split():  # words that the script has with another value
        if word.startswith("--") and word in given:
            at = given.index(word)
            del given[at : at + 2]
    with pytest.raises(ConfigError) as caught:
        begun(parse([*given, *more.split()], World(4, 4) if run in PUBLISHED else None))
    assert len(caught.value.errors) == len(REFUSED[run, more])
    for part in REFUSED[run, more]:
        assert any(part in error and "not built here" in error for error in caught.value.errors), part


# Megatron-LM's functional test gpt3_mcore_te_tp1_pp2_cp4_a2a_p2p, and what radixark/miles gives Megatron on 8 GPUs.
# Words that say nothing of a layout are left out.
LONG = {
    "hierarchical": (
        "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --micro-batch-size 4 --global-batch-size 32 "
        "--seq-length 1024 --max-position-embeddings 1024 --train-iters 50 --lr-decay-iters 320000 --tokenizer-type "
        "NullTokenizer --vocab-size 50257 --mock-data --distributed-backend nccl --lr 0.00015 --lr-decay-style "
        "cosine --min-lr 1.0e-5 --weight-decay 1e-2 --clip-grad 1.0 --lr-warmup-fraction .01 --transformer-impl "
        "transformer_engine --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 "
        "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2 "
        "--sequence-parallel --hidden-dropout 0.0 --attention-dropout 0.0 --no-gradient-accumulation-fusion "
        "--attention-softmax-in-fp32 --use-mcore-models --ckpt-format torch_dist --dist-ckpt-strictness log_all "
        "--bf16 --attention-backend flash --async-save --use-persistent-ckpt-worker"
    ),
    "a2a": (
        "--num-layers 36 --hidden-size 4096 --num-attention-heads 32 --group-query-attention "
        "--num-query-groups 8 --seq-length 32768 --max-position-embeddings 40960 --vocab-size 151936 "
        "--swiglu --normalization RMSNorm --tensor-model-parallel-size 2 --sequence-parallel "
        "--pipeline-model-parallel-size 1 --context-parallel-size 4 --cp-comm-type a2a "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --optimizer adam "
        "--lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 "
        "--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 "
        "--attention-softmax-in-fp32 --attention-backend flash --micro-batch-size 1 --global-batch-size 8 "
        "--train-iters 10 --mock-data --bf16"
    ),
}


# What Megatron's parse_args and validate_args make of them: data-parallel size, --sequence-parallel, width of the MLP
# and of a head, groups that share keys.
MEGATRON = {
    "hierarchical": (1, False, 2048, 64, 8),
    "a2a": (1, True, 10880, 128, 8),
}


@pytest.mark.parametrize(
    ("name", "ranks", "levels"),
    [
        ("hierarchical", 8, (2, 2)),
        ("a2a", 8, (4, 1)),
    ],
)
def test_scripts_of_long_sequences(name: str, ranks: int, levels: tuple[int, int]) -> None:
    world = World(ranks, 8)
    config = parse(LONG[name].split(), world)
    parallel = config.parallel
    assert config.context_levels(world) == levels
    model = config.model
    found = (
        config.data_parallel_size(world),
        parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1,
    )
    assert (*found, model.ffn_hidden_size, model.kv_channels, model.num_query_groups) == MEGATRON[name]
    # As Megatron counts: data-parallel size = world / (tp x pp x cp), and a rank has 1/cp of a sequence.
    shared = parallel.context_parallel_size
    assert config.data_parallel_size(world) * parallel.model_ranks * shared == ranks
    assert config.own_length * shared == config.model.seq_length
