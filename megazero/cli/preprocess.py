"""The command ``megazero preprocess``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megazero.config import ConfigError, run_with_arguments
from megazero.config.options.data_inputs import GPT2BPE, TOKENIZERS, tokenizer_type
from megazero.config.options.fields import option
from megazero.data.indexed import IndexedDataset, mask_prefix
from megazero.data.preprocess import Job, preprocess
from megazero.data.text import find_inputs, only_text
from megazero.data.tokenizer import Tokenizer
from megazero.log.terminal import SafeConsole

USAGE = """usage: megazero preprocess --input PATH ... --output-prefix PREFIX [flags below]
       megazero preprocess --input corpus.jsonl --output-prefix data/corpus --append-eod --workers 8 \\
           --tokenizer-type SentencePieceTokenizer --tokenizer-model data/spm.model

Turns text into Megatron's token files, PREFIX_KEY_document.bin, .idx and .meta.json for each key: here
data/corpus_text_document.*. With --chats each line is a conversation; PREFIX_chats_document.mask.* says what the loss
counts. Prints their prefixes, which --data-path takes. The same command continues work that was interrupted. Exit
status 0: the files are written; 2: a flag or a file is wrong.
"""


@dataclass(frozen=True)
class PreprocessOptions:
    """The flags of the command."""

    input: tuple[str, ...] = option(
        MISSING, "JSON lines, text files (one document each), globs or directories", required=True
    )
    output_prefix: str = option(MISSING, "beginning of the output files' names", required=True)
    pattern: str = option("*", "files to read in a directory, such as '*.py'")
    skip_binary: bool = option(
        False, "leave out files that are neither UTF-8 text nor JSON lines, and report their number"
    )
    chats: bool = option(
        False,
        "lines are conversations, 'messages' or 'prompt' and 'completion', in the tokenizer's chat template",
    )
    json_keys: tuple[str, ...] = option(("text",), "keys of the JSON lines; each gives a dataset")
    tokenizer_type: str | None = option(
        None, f"tokenizer (default with --vocab-file: {GPT2BPE})", choices=tuple(TOKENIZERS)
    )
    tokenizer_model: str | None = option(
        None, "SentencePiece's .model, tokenizer.json, or a folder that has one"
    )
    vocab_file: str | None = option(None, f"vocab.json of the {GPT2BPE}")
    merge_file: str | None = option(None, f"merges.txt of the {GPT2BPE}")
    vocab_size: int | None = option(None, "vocabulary of the NullTokenizer", low=1)
    append_eod: bool = option(False, "end every document with the end-of-document token")
    workers: int = option(1, "processes that tokenize; the output is the same for any number", low=1)
    skip_bad_lines: bool = option(
        False, "leave out lines that are not JSON or lack a key, and report their number"
    )


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 if the files are written, 2 if something is wrong."""
    return run_with_arguments("preprocess", argv, USAGE, PreprocessOptions, _preprocess)


def _preprocess(options: PreprocessOptions) -> int:
    console, began = SafeConsole(), time.monotonic()
    job = _job(options, console.print)
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
    skipped = f", {counts.skipped} bad lines left out" if counts.skipped else ""
    seconds = time.monotonic() - began
    counted = f" ({counts.counted} of them count in the loss)" if job.chats else ""
    console.print(f"{counts.documents} documents, {counts.tokens} tokens{counted}{skipped}, {seconds:.1f} s")
    if job.chats:
        console.print(_shown(outputs[0], job.tokenizer()), markup=False, highlight=False, soft_wrap=True)
    print("\n".join(outputs))
    return 0


def _job(options: PreprocessOptions, say: Callable[[str], None]) -> Job:
    """Return the work that the flags describe. Raises ValueError."""
    given = [name for name, value in vars(options).items() if value is not None]
    kind = tokenizer_type(options.tokenizer_type, given)
    if kind is None:
        raise ConfigError(
            [f"--tokenizer-type is required: {', '.join(TOKENIZERS)}; {GPT2BPE} with --vocab-file"]
        )
    if options.chats and (options.append_eod or options.json_keys != ("text",)):
        raise ConfigError(
            [
                "--chats with --append-eod or --json-keys: it has its own ends and its own keys; leave these out"
            ]
        )
    return Job(
        files=only_text(find_inputs(options.input, options.pattern), options.skip_binary, say),
        json_keys=options.json_keys,
        tokenizer_type=kind,
        tokenizer_model=options.tokenizer_model,
        vocab_size=options.vocab_size,
        append_eod=options.append_eod,
        skip_bad_lines=options.skip_bad_lines,
        vocab_file=options.vocab_file,
        merge_file=options.merge_file,
        chats=options.chats,
    )


def _shown(prefix: str, tokenizer: Tokenizer) -> str:
    """Return the first conversation as text, with what the loss counts in double brackets."""
    ids = IndexedDataset(prefix).get(0)
    counted = IndexedDataset(mask_prefix(prefix)).get(0).astype(bool)
    edges = np.flatnonzero(np.diff(counted)) + 1
    parts = zip(np.split(ids, edges), np.split(counted, edges), strict=True)
    texts = [(tokenizer.decode(part.tolist()), mask[0]) for part, mask in parts]
    return "the first of them, what counts in [[ ]]:\n" + "".join(f"[[{t}]]" if c else t for t, c in texts)
