"""Attention that stays within documents (--reset-attention-mask) against plain causal attention: time of a step.

    python benchmarks/document_mask.py [--lengths 512 2048] [--rounds 7] [--recompute none]

Forward and backward of one micro-batch of a small Llama-like decoder, on CUDA in bf16 where there is a GPU, else on
one CPU thread in fp32. Documents end every ``--document`` tokens or so. The contestants take turns; ratios are of the
rounds, median (least to most). ``mask``: bytes of the one mask that all layers of a micro-batch share.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

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
    _settle(tokens.device)
    began = clock()
    decoder(tokens, tokens, documents=fresh).sum().backward()
    _settle(tokens.device)
    return clock() - began


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--tokens", type=int, default=2048, help="of a micro-batch")
    parser.add_argument("--document", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--recompute", default="none")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for length in options.lengths:
        batch = max(1, options.tokens // length)
        decoder = Decoder(make_model(**SIZES, seq_length=length), recompute=options.recompute, dtype=dtype)
        decoder.initialize(0)
        decoder.to(device)
        tokens = torch.randint(0, 8192, (batch, length), device=device)
        documents = documents_of(length, batch, options.document, device)
        rounds = []
        for _ in range(options.rounds + 1):
            plain, within = (step_seconds(decoder, tokens, d) for d in (None, documents))
            rounds.append((plain, within))
        ratios = [within / plain for plain, within in rounds[1:]]  # the first round warms up
        plain, within = (statistics.median(column) for column in zip(*rounds[1:], strict=True))
        print(
            f"{batch} x {length} tokens, {device.type}, {options.recompute}: plain causal {1e3 * plain:.0f} ms, "
            f"within documents {1e3 * within:.0f} ms, ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to "
            f"{max(ratios):.2f}); mask {batch * length**2 * dtype.itemsize / 2**20:.0f} MiB"
        )


if __name__ == "__main__":
    main()
