"""The command ``megazero convert``: checkpoints to folders of Hugging Face and back, checked."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megazero.convert.options import read_options

if TYPE_CHECKING:
    from megazero.convert.export import ExportProgress
    from megazero.convert.importing import Published
    from megazero.convert.source import Source


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 is good, 1 a check does not hold, 2 nothing was converted."""
    try:
        options = read_options(sys.argv[1:] if argv is None else argv)
    except SystemExit as ended:  # argparse's --help, or its word on a wrong command line
        return int(ended.code or 0)
    run = {"to-hf": _to_hf, "from-hf": _from_hf, "check": _check, "flags": _flags}[options.command]
    try:
        return run(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _to_hf(options: argparse.Namespace) -> int:
    from megazero.convert.export import finish, write_folder
    from megazero.convert.importing import Published

    source = _source(options, options.weights or "trained", options.dtype)
    with _progress() as progress:
        partial = write_folder(
            source,
            options.folder,
            shard_bytes=options.shard_size,
            tokenizer=options.tokenizer,
            progress=progress,
        )
        good = options.no_check or _compared(source, Published.open(partial), options, progress)
    if not good:
        print(f"'{partial}' is not the checkpoint's model, and was not renamed", file=sys.stderr)
        return 1
    print(finish(partial))
    return 0


def _from_hf(options: argparse.Namespace) -> int:
    from megazero.convert.importing import Published, write_checkpoint
    from megazero.convert.source import Source

    with _progress() as progress:
        published = Published.open(options.folder, options.accept_field)
        progress.say("writing", 0)
        path = write_checkpoint(published, options.checkpoint)
        options.tokenizer = None
        good = options.no_check or _compared(Source(path), published, options, progress)
    print(path)
    return 0 if good else 1


def _check(options: argparse.Namespace) -> int:
    from megazero.checkpoint.reading import verify
    from megazero.convert.export import converted_weights
    from megazero.convert.importing import Published

    weights = options.weights or converted_weights(options.folder)
    with _progress() as progress:
        source = _source(options, weights, None)
        progress.say("checking the checkpoint", 0)
        verify(source.path)
        return (
            0
            if _compared(source, Published.open(options.folder, options.accept_field), options, progress)
            else 1
        )


def _flags(options: argparse.Namespace) -> int:
    from megazero.convert.card import flag_text, yaml_text

    text = yaml_text if options.yaml else flag_text
    print(text(options.folder, options.accept_field))
    return 0


def _source(options: argparse.Namespace, weights: str, dtype: str | None) -> Source:
    from megazero.checkpoint.store import find_checkpoint
    from megazero.convert.source import DTYPES, Source

    return Source(
        find_checkpoint(options.checkpoint, options.ckpt_step), weights, DTYPES[dtype] if dtype else None
    )


def _compared(
    source: Source, published: Published, options: argparse.Namespace, progress: ExportProgress
) -> bool:
    """Print the outcome of every check. Returns whether all of them hold."""
    from megazero.convert.check import compare

    good = True
    for line in compare(source, published, options.tokenizer, lambda what: progress.say(what, 0)):
        verdict = {True: "  holds", False: "  DOES NOT HOLD", None: ""}[line.good]
        print(f"{line.what:<30}{line.figure}{verdict}", flush=True)
        good = good and line.good is not False
    return good


@contextmanager
def _progress() -> Iterator[ExportProgress]:
    """Show the current work on stderr and, while writing, how much is done."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    from megazero.convert.export import ExportProgress

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("", total=None)

        def say(what: str, total: int) -> None:
            if not console.is_terminal:
                console.print(what, highlight=False)
            bars.reset(task, description=what, total=total or None)

        yield ExportProgress(say, lambda count: bars.advance(task, count))


if __name__ == "__main__":
    sys.exit(main())
