"""Attention that stays within documents (--reset-attention-mask) against plain causal attention: time of a step.

    python benchmarks/document_mask.py [--lengths 512 2048] [--rounds 7] [--recompute none]

Forward and backward of one micro-batch of a small Llama-like decoder, on CUDA in bf16 where there is a GPU, else on
one CPU thread in fp32. Documents end every ``--document`` tokens or so. The contestants take turns; ratios are of the
rounds, median (least to most). ``mask``: bytes of the one mask that all layers of a micro-batch share.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from benchmarks.gpu_report.setting import wait
from megazero.data.gpt import document_fields
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
    """Both flags' fields of made-up documents of about ``document`` tokens."""
    ends = torch.rand(batch, length, generator=torch.Generator().manual_seed(0)) < 1 / document
    fields = document_fields(ends.numpy(), reset_position_ids=True, reset_attention_mask=True)
    ids, starts = (torch.from_numpy(fields[n]).to(device) for n in ("position_ids", "document_starts"))
    return Documents(ids, starts)


def step_seconds(decoder: Decoder, tokens: torch.Tensor, documents: Documents | None) -> float:
    """Of a forward and a backward; the mask is made anew, as for every micro-batch. On a CPU seconds of this process,
    so that others on the machine do not count."""
    clock = time.perf_counter if tokens.is_cuda else time.process_time
    fresh = documents and Documents(documents.position_ids, documents.starts)
    wait(tokens.device)
    began = clock()
    decoder(tokens, tokens, documents=fresh).sum().backward()
    wait(tokens.device)
    return clock() - began


def main() -> None:
    options = harness.parser(
        __doc__,
        lengths=[512, 2048],
        tokens=(2048, "of a micro-batch"),
        document=256,
        rounds=7,
        recompute="none",
    ).parse_args()
    torch.set_num_threads(1)
    device = harness.device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for length in options.lengths:
        batch = max(1, options.tokens // length)
        decoder = Decoder(make_model(**SIZES, seq_length=length), recompute=options.recompute, dtype=dtype)
        decoder.initialize(0)
        decoder.to(device)
        tokens = torch.randint(0, 8192, (batch, length), device=device)
        forms = {"plain": None, "within": documents_of(length, batch, options.document, device)}
        turns = {name: partial(step_seconds, decoder, tokens, documents) for name, documents in forms.items()}
        found = harness.take_turns(turns, options.rounds)
        plain, within = (1e3 * statistics.median(seconds) for seconds in found.values())
        ratio = harness.spread(harness.ratios(found["within"], found["plain"]), 2)
        print(
            f"{batch} x {length} tokens, {device.type}, {options.recompute}: plain causal {plain:.0f} ms, within "
            f"documents {within:.0f} ms, ratio {ratio}; mask {batch * length**2 * dtype.itemsize / 2**20:.0f} MiB"
        )


if __name__ == "__main__":
    harness.start(main)
