"""The loss in chunks of tokens (--loss-chunk-tokens), whole and by torch's linear_cross_entropy: memory and time.

    python -m benchmarks.features.loss_chunks [--tokens 8192] [--vocabulary 131072] [--chunks 1024 2048]

Forward and backward of a decoder's head alone, norm, projection and loss, on one CPU thread in fp32. Peak memory is
what a process of its own had resident above what it had before the step, beside the planner's formula of the head
(plan/activations.py). Seconds are of the process, so that others on the machine do not count: at these sizes of one
step, and at --turn-tokens and --turn-vocabulary of --rounds in which all take turns, median (least to most). glibc is
told to return what is freed at once, as in planning/memory.py. Prints the table of docs/guide/training.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks import harness
from megazero.config import RunConfig, World, make_config
from megazero.config.model.spec import HEAD
from megazero.models.decoder import Head
from megazero.ops.memory import peak_memory, resident_memory
from megazero.plan.activations import MicroBatchActivations
from megazero.plan.units import WIDTHS
from megazero.tp import TensorParallel

WHOLE, TORCH = 0, -1  # in place of the tokens of a chunk: all at once, and torch's linear_cross_entropy
NAMES = {WHOLE: "whole", TORCH: "torch's linear_cross_entropy"}
CPU = torch.device("cpu")
Sizes = tuple[int, int, int]  # tokens, hidden, vocabulary


def config_of(sizes: Sizes) -> RunConfig:
    """Return the configuration of a Llama with this head."""
    tokens, hidden, vocabulary = sizes
    values = {"model_family": "llama", "num_layers": 1, "hidden_size": hidden, "vocab_size": vocabulary}
    values |= {"num_attention_heads": hidden // 64, "seq_length": tokens, "params_dtype": "fp32"}
    values |= {"micro_batch_size": 1, "train_iters": 1, "lr": 1e-4, "mock_data": True}
    return make_config(values, World(1, 1))


def formula(sizes: Sizes, chunk: int) -> float:
    """Return the planner's bytes of the head at the peak of a step."""
    config = config_of(sizes)
    activations = MicroBatchActivations(config, WIDTHS["fp32"], True)
    return activations.moments(config.stages(), 1, chunk or None)[HEAD]["head"]


def make_step(sizes: Sizes, chunk: int) -> Callable[[], tuple[float, float]]:
    """Return what computes the loss and its gradients, and returns the process's seconds and the norm of the weight's
    gradient."""
    head = Head(config_of(sizes).model, TensorParallel(), None, 0.0, chunk or None, dtype=torch.float32)
    torch.manual_seed(0)
    torch.nn.init.normal_(head.weight, std=0.02)
    torch.nn.init.ones_(head.norm.weight)
    x = torch.randn(sizes[0], 1, sizes[1]).requires_grad_()
    labels = torch.randint(0, sizes[2], (1, sizes[0]))
    weights = torch.ones(labels.shape)

    def loss() -> torch.Tensor:
        if chunk != TORCH:
            return head(x, labels, weights)
        automatic = torch.nn.LinearCrossEntropyOptions()
        rows, target = head.norm(x).flatten(0, 1), labels.flatten()
        return F.linear_cross_entropy(rows, head.weight, target, reduction="sum", options=automatic)

    def step() -> tuple[float, float]:
        seconds = harness.step_seconds(lambda: loss().backward(), CPU, clock=time.process_time)
        norm = float(torch.linalg.vector_norm(head.weight.grad))
        x.grad = head.weight.grad = None
        return seconds, norm

    return step


def once(sizes: Sizes, chunk: int) -> tuple[float, float]:
    """Return the seconds of the first step of a process, and the bytes that it added to the resident size."""
    make_step((64, 64, 256), chunk)()  # loads what torch loads at first use
    step, before = make_step(sizes, chunk), resident_memory(CPU)
    return step()[0], peak_memory(CPU) - before


def in_turns(sizes: Sizes, chunks: Sequence[int], rounds: int) -> list[list[float]]:
    """Return the seconds of each round of each."""
    taken = harness.take_turns({NAMES.get(c, str(c)): make_step(sizes, c) for c in chunks}, rounds)
    harness.require_gradients({name: turns[0][1] for name, turns in taken.items()})
    return [[seconds for seconds, _ in turns] for turns in taken.values()]


def main() -> None:
    options = harness.parser(
        __doc__,
        tokens=8192,
        hidden=512,
        vocabulary=131072,
        chunks=[1024, 2048, 4096],
        turn_tokens=2048,
        turn_vocabulary=32768,
        rounds=5,
    ).parse_args()
    chunks = [WHOLE, *reversed(options.chunks)] + [TORCH] * hasattr(F, "linear_cross_entropy")
    run = partial(harness.run, ranks=1, world=False, environ={"MALLOC_MMAP_THRESHOLD_": "65536"})
    sizes = (options.tokens, options.hidden, options.vocabulary)
    small = (options.turn_tokens, options.hidden, options.turn_vocabulary)
    fit = [chunk for chunk in chunks if chunk < small[0]]  # a larger chunk has all tokens
    turns = dict(zip(fit, run(in_turns, small, fit, options.rounds), strict=True))
    rows, whole = [], None
    for chunk in chunks:
        seconds, peak = run(once, sizes, chunk)
        whole = whole or seconds
        expected = f"{formula(sizes, chunk) / 2**20:.0f}" if chunk != TORCH else ""
        ratio = harness.of_medians(turns[chunk], turns[WHOLE]) if chunk in turns else ""
        name = NAMES.get(chunk, f"{chunk} tokens")
        rows.append([name, f"{peak / 2**20:.0f}", expected, f"{seconds:.1f} ({seconds / whole:.2f})", ratio])
    header = ["logits at once", "peak MiB", "formula MiB", "seconds (of whole)"]
    header.append(f"{small[0]} tokens, vocabulary {small[2]}: time of whole")
    print(f"one thread of {harness.setting()}\n\n{harness.table(header, rows)}")


if __name__ == "__main__":
    harness.start(main)
