#!/usr/bin/env python
"""Train a SentencePiece tokenizer from text files or JSON lines; the model gives text back byte for byte.

    python tools/train_tokenizer.py --input corpus/ --vocab-size 8000 --model-prefix data/spm

writes data/spm.model, to be named by --tokenizer-model.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from megazero.data.text import find_inputs
from megazero.data.tokenizer_training import SAMPLE_BYTES, sample_lines, train_tokenizer
from megazero.log.safe_stream import guard_streams
from megazero.log.terminal import SafeConsole


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, help="files, globs or directories")
    add("--pattern", default="*", help="which files of a directory to take, such as '*.py'")
    add("--json-key", default="text", help="key of JSON lines that holds the text")
    add("--vocab-size", type=int, required=True)
    add("--model-prefix", required=True, help="the model is called PREFIX.model")
    add("--model-type", default="bpe", choices=("bpe", "unigram"))
    add("--character-coverage", type=float, default=0.9995, help="the rest is spelt in bytes")
    add(
        "--sample-bytes", type=int, default=SAMPLE_BYTES, help="text to train on, taken evenly from the input"
    )
    add("--threads", type=int, default=2)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console, began = SafeConsole(), time.monotonic()
    try:
        files = find_inputs(options.input, options.pattern)
        with console.status(f"reading {len(files)} files") as status:
            lines = sample_lines(files, options.json_key, options.sample_bytes)
            megabytes = sum(map(len, lines)) / 1e6
            status.update(
                f"training {options.vocab_size} pieces ({options.model_type}) on {megabytes:.1f} MB"
            )
            train_tokenizer(
                lines,
                f"{options.model_prefix}.model",
                vocab_size=options.vocab_size,
                model_type=options.model_type,
                character_coverage=options.character_coverage,
                threads=options.threads,
            )
    except ValueError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    console.print(f"{options.vocab_size} pieces from {megabytes:.1f} MB in {time.monotonic() - began:.1f} s")
    print(f"{options.model_prefix}.model")
    return 0


if __name__ == "__main__":
    guard_streams()
    sys.exit(main())
