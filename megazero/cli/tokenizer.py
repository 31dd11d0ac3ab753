"""The command ``megazero tokenizer``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import MISSING, dataclass

from megazero.config import run_with_arguments
from megazero.config.options.fields import option
from megazero.data.text import find_inputs, only_text
from megazero.data.tokenizer_training import SAMPLE_BYTES, sample_lines, train_tokenizer
from megazero.log.terminal import SafeConsole

USAGE = """usage: megazero tokenizer --input PATH ... --vocab-size N --model-prefix PREFIX [flags below]
       megazero tokenizer --input corpus/ --vocab-size 8000 --model-prefix data/spm

Trains a SentencePiece tokenizer, writes PREFIX.model and prints its name, which --tokenizer-model takes. Decoding
gives every text back byte for byte. Exit status 0: the model is written; 2: a flag or a file is wrong.
"""


@dataclass(frozen=True)
class TokenizerOptions:
    """The flags of the command."""

    input: tuple[str, ...] = option(MISSING, "JSON lines, text files, globs or directories", required=True)
    vocab_size: int = option(MISSING, "number of pieces", required=True, low=1)
    model_prefix: str = option(MISSING, "name of the model without .model", required=True)
    pattern: str = option("*", "files to read in a directory, such as '*.py'")
    skip_binary: bool = option(
        False, "leave out files that are neither UTF-8 text nor JSON lines, and report their number"
    )
    json_key: str = option("text", "key of the JSON lines that holds the text")
    model_type: str = option("bpe", "algorithm", choices=("bpe", "unigram"))
    character_coverage: float = option(
        0.9995, "share of the characters that get pieces; the others are spelt in bytes", above=0, high=1
    )
    sample_bytes: int = option(SAMPLE_BYTES, "bytes of text to train on, taken evenly from the input", low=1)
    threads: int = option(2, "threads that train", low=1)


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 if the model is written, 2 if something is wrong."""
    return run_with_arguments("tokenizer", argv, USAGE, TokenizerOptions, _train)


def _train(options: TokenizerOptions) -> int:
    console, began = SafeConsole(), time.monotonic()
    files = only_text(find_inputs(options.input, options.pattern), options.skip_binary, console.print)
    model = f"{options.model_prefix}.model"
    with console.status(f"reading {len(files)} files") as status:
        lines = sample_lines(files, options.json_key, options.sample_bytes)
        megabytes = sum(map(len, lines)) / 1e6
        status.update(f"training {options.vocab_size} pieces ({options.model_type}) on {megabytes:.1f} MB")
        train_tokenizer(
            lines,
            model,
            vocab_size=options.vocab_size,
            model_type=options.model_type,
            character_coverage=options.character_coverage,
            threads=options.threads,
        )
    console.print(f"{options.vocab_size} pieces from {megabytes:.1f} MB in {time.monotonic() - began:.1f} s")
    print(model)
    return 0
