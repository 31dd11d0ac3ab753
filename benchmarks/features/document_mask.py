"""Attention that stays within documents (--reset-attention-mask) or windows against plain causal attention: time and
memory of a step.

    python -m benchmarks.features.document_mask [--lengths 4096 8192] [--documents 512 1024 4096] [--rounds 7]

Forward and backward of one micro-batch of a small Llama-like decoder, on CUDA in bf16 where there is a GPU, else on
one CPU thread in fp32. Documents are of about so many tokens, half to one and a half times as many; --windows adds
layers with windows, --backends others than auto. The contestants take turns; ratios to plain causal attention are of
the rounds, median (least to most). Memory is the peak above what lay there before the step, of one more step each: on
CUDA what is allocated, on a CPU what torch's profiler sees allocated.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch

from benchmarks import harness
from megazero.models import Decoder, make_model
from megazero.models.positions import Documents

SIZES = {
    "model_family": "llama",
    "num_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "vocab_size": 8192,
}


def documents_of(length: int, batch: int, document: int, device: torch.device) -> Documents:
    """Return made-up documents of ``document`` tokens on average, with both flags' fields."""
    generator, starts = torch.Generator().manual_seed(0), torch.zeros(batch, length, dtype=torch.int64)
    for row in starts:
        end = 0
        while end < length:
            first = end
            end += int(torch.randint(document // 2, document * 3 // 2 + 1, (), generator=generator))
            row[first:end] = first
    return Documents((torch.arange(length) - starts).to(device), starts)


def step(decoder: Decoder, tokens: torch.Tensor, documents: Documents | None) -> None:
    """Run a forward and a backward. Tables of documents are made again, as for every micro-batch."""
    decoder(tokens, tokens, documents=documents).sum().backward()


def most_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes that a step holds above those before it."""
    if device.type == "cuda":
        return harness.peak_bytes(run)
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    held = most = 0
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def main() -> None:
    options = harness.parser(
        __doc__,
        lengths=[4096, 8192],
        documents=[512, 1024, 4096],
        windows=([0], "of the layers; 0: none"),
        backends=(["auto"], "--attention-backend"),
        tokens=(8192, "of a micro-batch"),
        rounds=7,
        recompute="none",
    ).parse_args()
    torch.set_num_threads(1)
    device = harness.device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for length in options.lengths:
        batch = max(1, options.tokens // length)
        tokens = torch.randint(0, SIZES["vocab_size"], (batch, length), device=device)

        def decoder(window: int, backend: str, length: int = length) -> Decoder:
            model = make_model(**SIZES, seq_length=length, sliding_window=window or None)
            made = Decoder(model, recompute=options.recompute, attention_backend=backend, dtype=dtype)
            made.initialize(0)
            return made.to(device)

        steps = {"plain causal": partial(step, decoder(0, "auto"), tokens, None)}
        for backend in options.backends:
            for window in options.windows:
                model = decoder(window, backend)
                within = f"windows of {window}, " if window else ""
                for document in (0, *options.documents) if window else options.documents:
                    packed = documents_of(length, batch, document, device) if document else None
                    name = f"{backend}: {within}{f'documents of {document}' if document else 'no documents'}"
                    steps[name] = partial(step, model, tokens, packed)
        turns = {name: partial(harness.own_seconds, each, device) for name, each in steps.items()}
        found = harness.take_turns(turns, options.rounds)
        peaks = {name: most_bytes(each, device) for name, each in steps.items()}
        print(f"{batch} x {length} tokens, {device.type}, recompute {options.recompute}")
        plain = next(iter(steps))
        for name, seconds in found.items():
            ratio = harness.spread(harness.ratios(seconds, found[plain]), 2)
            print(
                f"  {name}: {1e3 * statistics.median(seconds):.0f} ms, {ratio} of plain; "
                f"{peaks[name] / 2**20:.0f} MiB, {peaks[name] / peaks[plain]:.2f} of plain"
            )


if __name__ == "__main__":
    harness.start(main)
