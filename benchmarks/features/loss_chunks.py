"""The loss in chunks of tokens (--loss-chunk-tokens), whole and by torch's linear_cross_entropy: memory and time.

    python -m benchmarks.features.loss_chunks [--tokens 8192] [--vocabulary 131072] [--chunks 1024 2048]

Forward and backward of a decoder's head alone, norm, projection and loss, on one CPU thread in fp32. Peak memory is
what a process of its own had resident above what it had before the step, beside the planner's formula of the head
(plan/activations.py). Seconds are of the process, so that others on the machine do not count: at these sizes of one
step, and at --turn-tokens and --turn-vocabulary of --rounds in which all take turns, median (least to most). glibc is
told to return what is freed at once, as in planning/memory.py. Writes the table of docs/guide/training.md (--page:
another).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks import harness
from megazero.config import RunConfig, World, make_config
from megazero.models.decoder import Head
from megazero.ops.memory import peak_memory, resident_memory
from megazero.plan.activations import MicroBatchActivations
from megazero.plan.units import WIDTHS
from megazero.tp import TensorParallel
from megazero.train.parallelize import DTYPES

TITLE = "The loss in chunks"
WHOLE, TORCH = 0, -1  # in place of the tokens of a chunk: all at once, and torch's linear_cross_entropy
Sizes = tuple[int, int, int, str]  # tokens, hidden, vocabulary, params_dtype


def name_of(chunk: int) -> str:
    return {WHOLE: "whole", TORCH: "torch's linear_cross_entropy"}.get(chunk, f"{chunk} tokens")


def config_of(sizes: Sizes) -> RunConfig:
    """Return the configuration of a Llama with this head."""
    tokens, hidden, vocabulary, dtype = sizes
    values = {
        "model_family": "llama",
        "num_layers": 1,
        "hidden_size": hidden,
        "num_attention_heads": hidden // 64,
    }
    values |= {"seq_length": tokens, "vocab_size": vocabulary, "params_dtype": dtype, "micro_batch_size": 1}
    return make_config({**values, "train_iters": 1, "lr": 1e-4, "mock_data": True}, World(1, 1))


def formula(sizes: Sizes, chunk: int, on_host: bool) -> float:
    """Return the planner's bytes of the head at the peak of a step."""
    config = config_of(sizes)
    width = WIDTHS[config.precision.params_dtype]
    head = MicroBatchActivations(config, width, on_host).of(config.stages(), chunk or None).head
    assert head is not None
    return head


def make_step(sizes: Sizes, chunk: int, device: torch.device) -> Callable[[], tuple[float, float]]:
    """Return what computes the loss and its gradients, and returns their seconds, of this process on a CPU, and the
    norm of the weight's."""
    config = config_of(sizes)
    head = Head(
        config.model, TensorParallel(), None, 0.0, chunk or None, dtype=DTYPES[sizes[3]], device=device
    )
    torch.manual_seed(0)
    torch.nn.init.normal_(head.weight, std=0.02)
    torch.nn.init.ones_(head.norm.weight)
    x = torch.randn(sizes[0], 1, sizes[1], dtype=head.weight.dtype, device=device).requires_grad_()
    labels = torch.randint(0, sizes[2], (1, sizes[0]), device=device)
    weights = torch.ones(labels.shape, device=device)

    def loss() -> torch.Tensor:
        if chunk != TORCH:
            return head(x, labels, weights)
        automatic = torch.nn.LinearCrossEntropyOptions()
        rows, target = head.norm(x).flatten(0, 1), labels.flatten()
        return F.linear_cross_entropy(rows, head.weight, target, reduction="sum", options=automatic)

    def step() -> tuple[float, float]:
        seconds = harness.own_seconds(lambda: loss().backward(), device)
        norm = float(torch.linalg.vector_norm(head.weight.grad))
        x.grad = head.weight.grad = None
        return seconds, norm

    return step


def once(sizes: Sizes, chunk: int) -> dict[str, float]:
    """Return the seconds of the first step of a process, and the bytes that it added to the resident size."""
    device = torch.device("cpu")
    make_step((64, 64, 256, sizes[3]), chunk, device)()  # loads what torch loads at first use
    step, before = make_step(sizes, chunk, device), resident_memory(device)
    return {"seconds": step()[0], "peak": peak_memory(device) - before}


def in_turns(sizes: Sizes, chunks: Sequence[int], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round by name."""
    steps = {name_of(chunk): make_step(sizes, chunk, torch.device("cpu")) for chunk in chunks}
    taken = harness.take_turns(steps, rounds)
    harness.require_gradients({name: turns[0][1] for name, turns in taken.items()})
    return {name: [seconds for seconds, _ in turns] for name, turns in taken.items()}


def rows(
    sizes: Sizes, found: Mapping[int, Mapping[str, float]], turns: Mapping[str, Sequence[float]]
) -> list[list[str]]:
    made = []
    for chunk, one in found.items():
        expected = f"{formula(sizes, chunk, True) / 2**20:.0f}" if chunk != TORCH else ""
        seconds = f"{one['seconds']:.1f} ({one['seconds'] / found[WHOLE]['seconds']:.2f})"
        own = turns.get(name_of(chunk))  # none where a chunk has all tokens
        ratio = harness.of_medians(own, turns[name_of(WHOLE)]) if own else ""
        made.append([name_of(chunk), f"{one['peak'] / 2**20:.0f}", expected, seconds, ratio])
    return made


def main() -> int:
    options = harness.parser(
        __doc__,
        tokens=8192,
        hidden=512,
        vocabulary=131072,
        chunks=[1024, 2048, 4096],
        turn_tokens=2048,
        turn_vocabulary=32768,
        rounds=5,
        page=harness.DOCS / "guide" / "training.md",
    ).parse_args()
    chunks = [WHOLE, *reversed(options.chunks)] + [TORCH] * hasattr(F, "linear_cross_entropy")
    environ = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    run = partial(harness.run, ranks=1, world=False, environ=environ)
    sizes = (options.tokens, options.hidden, options.vocabulary, "fp32")
    small = (options.turn_tokens, options.hidden, options.turn_vocabulary, "fp32")
    found = {}
    for chunk in chunks:
        found[chunk] = run(once, sizes, chunk)
        print(name_of(chunk), found[chunk], flush=True)
    turns = run(in_turns, small, [chunk for chunk in chunks if chunk < small[0]], options.rounds)
    header = ["logits at once", "peak MiB", "formula MiB", "seconds (of whole)"]
    header.append(f"{small[0]} tokens, vocabulary {small[2]}: time of whole")
    text = harness.table(header, rows(sizes, found, turns))
    where = f"{options.tokens} tokens, hidden {options.hidden}, vocabulary {options.vocabulary}, fp32, one thread of"
    lines = f"Measured by `python -m benchmarks.features.loss_chunks`: {where} {harness.setting()}.\n\n{text}"
    print(lines)
    said = (
        harness.section(harness.DOCS / "guide" / "training.md", TITLE).partition("\nMeasured by ")[0].rstrip()
    )
    harness.write_section(options.page, TITLE, f"{said}\n\n{lines}")
    return 0


if __name__ == "__main__":
    harness.start(main)
