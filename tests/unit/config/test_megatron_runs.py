"""Published runs: what a command line resolves to equals what Megatron's own rules make of it.

The rules are written here once more, from Megatron's sources, and read the words of the command line by themselves:
nothing of the parser is used for what is expected. Spellings are today's, and made-up tokens stand for the data.
"""

from __future__ import annotations

import math
import types
from typing import Any

import pytest

from megazero.config import RunConfig, World, parse
from megazero.config.model.spec import parameter_count
from megazero.train.data.datasets import tokenizer_info, with_vocabulary
from megazero.train.schedule.learning_rate import LearningRate
from megazero.train.schedule.run_length import run_length
from megazero.train.state.progress import Progress

GPT2 = "--vocab-size 50257"
LLAMA = (
    "--disable-bias-linear --normalization RMSNorm --swiglu --position-embedding-type rope --attention-dropout 0 "
    "--hidden-dropout 0 --untie-embeddings-and-output-weights"
)
EARLY = (
    "--lr 0.00015 --min-lr 1.0e-5 --lr-decay-style cosine --lr-decay-iters 320000 --lr-warmup-fraction .01"
)
# run: (data-parallel ranks, command line, parameters as published or printed by Megatron, or None)
RUNS: dict[str, tuple[int, str, int | None]] = {
    "NVIDIA GPT 345M": (
        2,
        "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings "
        f"1024 --micro-batch-size 4 --global-batch-size 8 --train-iters 500000 --fp16 {EARLY} {GPT2}",
        354_871_296,
    ),
    "NVIDIA GPT-3 175B": (
        8,
        "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --num-layers 96 --hidden-size 12288 "
        "--num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 "
        "--global-batch-size 1536 --rampup-batch-size 16 16 5859375 --train-samples 146484375 --lr-decay-samples "
        "126953125 --lr-warmup-samples 183105 --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --weight-decay 0.1 "
        f"--adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --fp16 {GPT2}",
        None,
    ),
    "NVIDIA GPT 15B": (
        16,
        "--tensor-model-parallel-size 8 --sequence-parallel --disable-bias-linear --micro-batch-size 4 "
        "--global-batch-size 1152 --train-samples 19531250 --untie-embeddings-and-output-weights "
        "--position-embedding-type rope --rotary-percent 0.5 --squared-relu --num-layers 32 --hidden-size 6144 "
        "--num-attention-heads 48 --group-query-attention --num-query-groups 8 --seq-length 4096 "
        "--max-position-embeddings 4096 --attention-dropout 0.0 --hidden-dropout 0.0 --weight-decay 0.1 "
        "--lr-decay-samples 19492187 --lr-warmup-samples 39062 --lr 0.00045 --min-lr 4.5e-05 --lr-decay-style cosine "
        "--init-method-std 0.0134 --bf16 --vocab-size 256000",
        None,
    ),
    "NVIDIA Llama 3 8B": (
        8,
        f"--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 {LLAMA} "
        "--group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings "
        "8192 --rotary-base 1000000 --rotary-percent 1.0 --init-method-std 0.0134 --micro-batch-size 1 "
        "--global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples "
        "3906252 --lr 0.00015 --min-lr 0.00001 --lr-decay-style cosine --bf16 --vocab-size 128256",
        8_030_261_248,
    ),
    "Swiss AI Llama 3 8B": (
        128,
        f"--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 {LLAMA} "
        "--group-query-attention --num-query-groups 8 --max-position-embeddings 8192 --rotary-base 500000 "
        "--use-rope-scaling --rope-scaling-factor 8 --make-vocab-size-divisible-by 128 --weight-decay 0.1 "
        "--micro-batch-size 1 --global-batch-size 128 --train-iters 500 --seed 28 --init-method-std 0.008944 "
        "--lr 0.00022 --min-lr 0.000022 --lr-decay-style cosine --lr-warmup-iters 200 --bf16 --seq-length 8192 "
        "--reset-position-ids --reset-attention-mask --eod-mask-loss --vocab-size 131072",
        None,
    ),
    "Apertus 8B": (
        128,
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 21504 --num-attention-heads 32 --group-query-attention "
        "--num-query-groups 8 --max-position-embeddings 4096 --position-embedding-type rope --rotary-base 500000 "
        "--use-rope-scaling --rope-scaling-factor 8 --make-vocab-size-divisible-by 128 --normalization RMSNorm "
        "--xielu --qk-layernorm --qknorm-impl apex --untie-embeddings-and-output-weights --attention-dropout 0.0 "
        "--hidden-dropout 0.0 --disable-bias-linear --weight-decay 0.1 --clip-grad 0.1 --optimizer ademamix "
        "--ademamix-alpha 8 --ademamix-beta3 0.9999 --ademamix-beta3-warmup 100000 --ademamix-alpha-warmup 100000 "
        "--micro-batch-size 2 --global-batch-size 1024 --train-iters 500 --seed 28 --init-method-std 0.008944 --lr "
        "0.00011 --min-lr 0.000011 --lr-decay-style cosine --lr-warmup-iters 200 "
        "--bf16 --seq-length 4096 --reset-position-ids --reset-attention-mask "
        "--eod-mask-loss --goldfish-loss --goldfish-k 50 --goldfish-h 50 --vocab-size 131072",
        8_053_338_176,
    ),
    "LUMI 71B": (
        16,
        f"--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --ffn-hidden-size 28672 {LLAMA} --seq-length "
        "5120 --max-position-embeddings 5120 --micro-batch-size 1 --global-batch-size 1024 --train-samples 585937500 "
        "--bf16 --init-method-std 0.0048 --seed 42 --group-query-attention --num-query-groups 8 --adam-eps 1e-5 "
        "--lr 3.2e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-decay-samples 585937500 --lr-warmup-samples 2048000 "
        "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --sequence-parallel "
        "--num-layers-per-virtual-pipeline-stage 2 --vocab-size 128000",
        None,
    ),
    "LUMI without a width": (
        8,
        f"--num-layers 24 --hidden-size 1024 --num-attention-heads 16 {LLAMA} --seq-length 4096 "
        "--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 1024 --train-samples 732421875 "
        "--init-method-std 0.015 --bf16 --lr 2.5e-4 --min-lr 2e-5 --lr-decay-style cosine --lr-warmup-samples "
        f"7324218 {GPT2}",
        None,
    ),
    "BigCode 1B, multi-query": (
        16,
        "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --group-query-attention --num-query-groups 1 "
        "--init-method-std 0.02209 --seq-length 8192 --max-position-embeddings 8192 --attention-dropout 0.1 "
        "--hidden-dropout 0.1 --micro-batch-size 1 --global-batch-size 128 --lr 0.0004 --min-lr 0.00004 "
        "--train-iters 1000000 --lr-decay-iters 1000000 --lr-decay-style cosine --lr-warmup-iters 2000 "
        "--weight-decay .1 --adam-beta2 .95 --bf16 --vocab-size 49152",
        None,
    ),
    "BigScience 1B3, SwiGLU with biases": (
        4,
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --num-layers 24 --hidden-size 2048 "
        "--num-attention-heads 16 --ffn-hidden-size 5456 --swiglu --seq-length 2048 --max-position-embeddings 2048 "
        "--micro-batch-size 8 --global-batch-size 512 --rampup-batch-size 32 32 2_000_000 --train-samples 73_242_187 "
        f"--fp16 --lr 2e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-samples 183_105 {GPT2}",
        None,
    ),
}


def words(line: str) -> dict[str, list[str]]:
    """The values after each flag."""
    found: dict[str, list[str]] = {}
    for word in line.split():
        if word.startswith("--"):
            found[word[2:]] = []
        else:
            found[next(reversed(found))].append(word)
    return found


class Megatron:
    """Megatron's rules (core_v0.16.1)."""

    def __init__(self, line: str) -> None:
        self.said = words(line)

    def text(self, name: str, default: Any = None) -> Any:
        return self.said[name][0] if self.said.get(name) else default

    def number(self, name: str, default: Any = None) -> Any:
        return float(self.text(name).replace("_", "")) if name in self.said else default

    def whole(self, name: str, default: Any = None) -> Any:
        return int(self.text(name).replace("_", "")) if name in self.said else default

    def architecture(self) -> dict[str, Any]:
        said, hidden, heads = self.said, self.whole("hidden-size"), self.whole("num-attention-heads")
        narrow = int((4 * hidden * 2 / 3) / 64) * 64 if "swiglu" in said else 4 * hidden
        return {
            "num_layers": self.whole("num-layers"),
            "hidden_size": hidden,
            "ffn_hidden_size": self.whole("ffn-hidden-size", narrow),
            "num_attention_heads": heads,
            "num_query_groups": self.whole("num-query-groups") if "group-query-attention" in said else heads,
            "kv_channels": self.whole("kv-channels", hidden // heads),
            "position_embedding_type": self.text("position-embedding-type", "learned_absolute"),
            "rotary_base": self.number("rotary-base", 10000),
            "rotary_percent": self.number("rotary-percent", 1.0),
            "rotary_scaling": "llama3" if "use-rope-scaling" in said else "none",
            "normalization": self.text("normalization", "LayerNorm"),
            "norm_epsilon": 1e-5,
            "swiglu": "swiglu" in said,
            "squared_relu": "squared-relu" in said,
            "xielu": "xielu" in said,
            "qk_norm": "head" if "qk-layernorm" in said else "none",
            "add_bias_linear": "disable-bias-linear" not in said,
            "untie_embeddings_and_output_weights": "untie-embeddings-and-output-weights" in said,
            # bias_gelu in one kernel is its tanh form; without biases, or without that kernel, it is exact
            "openai_gelu": not {"disable-bias-linear", "no-bias-gelu-fusion"} & set(said)
            or bool({"openai-gelu", "swiglu", "squared-relu", "xielu"} & set(said)),
            "attention_dropout": self.number("attention-dropout", 0.1),
            "hidden_dropout": self.number("hidden-dropout", 0.1),
            "init_method_std": self.number("init-method-std", 0.02),
        }

    def vocabulary(self) -> int:
        size = self.whole("vocab-size") + (
            self.text("tokenizer-type") == "NullTokenizer"
        )  # its end of documents
        multiple = self.whole("make-vocab-size-divisible-by", 128) * self.whole(
            "tensor-model-parallel-size", 1
        )
        return self.whole("pad-vocab-size-to", math.ceil(size / multiple) * multiple)

    def parameters(self) -> int:
        a = types.SimpleNamespace(**self.architecture())
        h, ffn, bias = a.hidden_size, a.ffn_hidden_size, a.add_bias_linear
        q, kv = a.num_attention_heads * a.kv_channels, a.num_query_groups * a.kv_channels
        norm = h * (1 if a.normalization == "RMSNorm" else 2)
        up = ffn * (2 if a.swiglu else 1)  # gate and value are one linear
        linears = ((h, q + 2 * kv), (q, h), (h, up), (ffn, h))
        layer = sum(into * out + bias * out for into, out in linears) + 2 * norm
        layer += 2 * a.kv_channels * (a.qk_norm == "head") + 2 * a.xielu
        learned = a.position_embedding_type == "learned_absolute"
        positions = self.whole("max-position-embeddings") * h if learned else 0
        tables = self.vocabulary() * h * (1 + a.untie_embeddings_and_output_weights)
        return tables + positions + a.num_layers * layer + norm

    def batch(self, consumed: int) -> int:
        target = self.whole("global-batch-size")
        if "rampup-batch-size" not in self.said:
            return target
        start, increment, samples = (int(word.replace("_", "")) for word in self.said["rampup-batch-size"])
        if consumed > samples:
            return target
        return start + int(consumed / (samples / ((target - start) // increment))) * increment

    def iterations(self) -> int:
        if "train-iters" in self.said:
            return self.whole("train-iters")
        samples, iterations, consumed = self.whole("train-samples"), 0, 0
        if "rampup-batch-size" in self.said:
            while consumed <= int(self.said["rampup-batch-size"][2].replace("_", "")) and consumed <= samples:
                consumed += self.batch(consumed)
                iterations += 1
        return iterations + (samples - consumed) // self.whole("global-batch-size")

    def schedule(self) -> tuple[float, float, float]:
        """Length, decay and warm-up, in samples where the length is."""
        unit = "iters" if "train-iters" in self.said else "samples"
        total = self.whole(f"train-{unit}")
        decay = self.whole(f"lr-decay-{unit}", total)
        fraction = self.number("lr-warmup-fraction")
        return total, decay, self.whole(f"lr-warmup-{unit}", 0) if fraction is None else fraction * decay

    def rate(self, at: float) -> float:
        (_, decay, warmup), peak, least = self.schedule(), self.number("lr"), self.number("min-lr", 0.0)
        if at <= warmup and warmup:
            return peak * at / warmup
        if at > decay:
            return least
        done = (at - warmup) / (decay - warmup)
        cosine = self.text("lr-decay-style", "linear") == "cosine"
        return least + (peak - least) * (0.5 * (math.cos(math.pi * done) + 1) if cosine else 1 - done)


def resolved(ranks: int, line: str) -> RunConfig:
    of = Megatron(line)
    size = ranks * of.whole("tensor-model-parallel-size", 1) * of.whole("pipeline-model-parallel-size", 1)
    config = parse([*line.split(), "--mock-data"], World(size, min(size, 8)))
    return with_vocabulary(config, tokenizer_info(config))


@pytest.mark.parametrize("run", RUNS)
def test_a_published_run_resolves_to_what_megatron_trains(run: str) -> None:
    ranks, line, published = RUNS[run]
    of, config = Megatron(line), resolved(ranks, line)
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    assert {name: getattr(model, name) for name in of.architecture()} == of.architecture()

    padded = model.padded_vocab_size(tp)
    assert padded == of.vocabulary()
    assert parameter_count(model, padded) == of.parameters()
    assert published in (None, of.parameters())

    dtype = next((name for name in ("fp16", "bf16") if name in of.said), "fp32")
    assert config.precision.params_dtype == dtype
    micro = of.whole("micro-batch-size")
    assert (config.batch.micro_batch_size, config.batch.global_batch_size) == (micro, of.batch(10**12))
    assert config.optimizer.weight_decay == of.number("weight-decay", 0.01)

    length = run_length(config, ranks, Progress())
    assert length.last_iteration == of.iterations()
    steps = (0, 10**5, 10**6, 3 * 10**6, 9_765_624, 9_765_626, 10**8)
    assert [length.batch_sizes.batch_size(at) for at in steps] == [of.batch(at) for at in steps]
    assert length.batch_sizes.micro_batches(10**8) * micro * ranks == of.batch(10**12)

    lengths, rate = config.lr_lengths, LearningRate.of(config)
    assert (lengths.total, lengths.decay, lengths.warmup) == of.schedule()
    marks = [int(share * lengths.decay) for share in (0, 1e-4, 0.003, 0.02, 0.5, 0.99)] + [lengths.decay + 1]
    assert [rate(at) for at in marks] == pytest.approx([of.rate(at) for at in marks], rel=1e-12)
