#!/usr/bin/env python
"""Turn raw text into Megatron's .bin/.idx. The text is in JSON lines, text files or directories of them.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model spm.model --append-eod --workers 8

writes data/corpus_text_document.{bin,idx,meta.json}. If it was interrupted, the same command continues it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megazero.config.options.data_inputs import GPT2BPE, TOKENIZERS, tokenizer_type
from megazero.data.preprocess import Job, preprocess
from megazero.data.text import find_inputs
from megazero.log.safe_stream import guard_streams
from megazero.log.terminal import SafeConsole


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, help="files, globs or directories (one document a text file)")
    add("--pattern", default="*", help="which files of a directory to take, such as '*.py'")
    add("--output-prefix", required=True, help="outputs are called PREFIX_KEY_document.bin and .idx")
    add("--json-keys", nargs="+", default=["text"], help="keys of the JSON lines to take, a dataset each")
    add("--tokenizer-type", choices=tuple(TOKENIZERS), help=f"default with --vocab-file: {GPT2BPE}")
    add("--tokenizer-model", help=".model file, or tokenizer.json or a directory that holds it")
    add("--vocab-file", help="vocab.json of the GPT2BPETokenizer")
    add("--merge-file", help="merges.txt of the GPT2BPETokenizer")
    add("--vocab-size", type=int, help="of the NullTokenizer")
    add("--append-eod", action="store_true", help="end every document with the end-of-document token")
    add("--workers", type=int, default=1, help="processes; the output does not depend on it")
    add("--skip-bad-lines", action="store_true", help="leave lines out that are not JSON, and count them")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console, began = SafeConsole(), time.monotonic()
    try:
        if options.workers < 1:
            raise ValueError(f"--workers {options.workers}: at least 1")
        given = [name for name, value in vars(options).items() if value is not None]
        kind = tokenizer_type(options.tokenizer_type, given)
        if kind is None:
            raise ValueError(
                f"--tokenizer-type is required: {', '.join(TOKENIZERS)}; {GPT2BPE} with --vocab-file"
            )
        job = Job(
            files=find_inputs(options.input, options.pattern),
            json_keys=tuple(options.json_keys),
            tokenizer_type=kind,
            tokenizer_model=options.tokenizer_model,
            vocab_size=options.vocab_size,
            append_eod=options.append_eod,
            skip_bad_lines=options.skip_bad_lines,
            vocab_file=options.vocab_file,
            merge_file=options.merge_file,
        )
        columns = (TextColumn("tokenizing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("chunks", total=None)
            outputs, counts = preprocess(
                job,
                options.output_prefix,
                workers=options.workers,
                say=bar.console.print,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
    except ValueError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    skipped = f", {counts.skipped} bad lines left out" if counts.skipped else ""
    console.print(
        f"{counts.documents} documents, {counts.tokens} tokens{skipped}, {time.monotonic() - began:.1f} s"
    )
    print("\n".join(outputs))
    return 0


if __name__ == "__main__":
    guard_streams()
    sys.exit(main())
