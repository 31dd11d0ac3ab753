"""The sub-commands of ``megazero convert``. Each takes its options and returns the exit status."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from megazero.checkpoint.directory import TRIAL, checkpoint_name, fsync_directory
from megazero.checkpoint.reading import verify
from megazero.checkpoint.store import find_checkpoint
from megazero.config.model.published import unread_tokenizer
from megazero.convert.card import by_section, changed, flag_lines, run_options, with_effect
from megazero.convert.check import Line, compare, compare_tensors
from megazero.convert.export import ExportProgress, converted_weights, finish, write_folder
from megazero.convert.importing import Published, write_checkpoint
from megazero.convert.megatron.weights import MegatronWeights
from megazero.convert.options import CheckHf, FromHf, FromMegatron, ModelFlags, ToHf, size
from megazero.convert.source import Source
from megazero.log.terminal import SafeConsole
from megazero.models.dtypes import DTYPES

ARGUMENTS_FILE = "run.yaml"
CONTINUED = " \\\n"  # between the lines of one command


def _to_hf(options: ToHf) -> int:
    source, tokenizer = (
        _source(options, options.weights or "trained", options.dtype),
        _path(options.tokenizer),
    )
    with _progress() as progress:
        partial = write_folder(
            source,
            Path(options.folder),
            shard_bytes=size(options.shard_size),
            tokenizer=tokenizer,
            progress=progress,
        )
        good = False
        try:
            good = not options.check or _compared(source, Published.open(partial), tokenizer, progress)
        finally:
            if not good:
                shutil.rmtree(partial)
    if not good:
        print(f"'{options.folder}' was not written: it would be another model", file=sys.stderr)
        return 1
    print(finish(partial))
    return 0


def _from_hf(options: FromHf) -> int:
    def write(trial: Path, progress: ExportProgress) -> bool:
        """Write the checkpoint under ``trial``. Return whether it compares equal to the folder's model."""
        published = Published.open(Path(options.folder), options.accept_field)
        if note := unread_tokenizer(Path(options.folder)):
            progress.note(note)
        progress.say("writing", 0)
        path = write_checkpoint(published, trial, published.of_model)
        return not options.check or _compared(Source(path), published, None, progress)

    return _import(Path(options.checkpoint), write)


def _from_megatron(options: FromMegatron) -> int:
    def write(trial: Path, progress: ExportProgress) -> bool:
        """Write the checkpoint under ``trial``, and print its flags. Return whether its tensors compare equal."""
        progress.say("reading names and arguments", 0)
        folder = Path(options.folder)
        weights = MegatronWeights.open(folder, options.ckpt_step, options.flags, options.accept_field)
        for note in weights.notes:
            progress.note(note)
        family = weights.model.model_family
        sizes = {"model_family": family, "vocab_size": weights.model.vocab_size}
        given = {**sizes, **weights.arguments.options}
        said = changed(family, with_effect(given))
        progress.say("writing", 0)
        path = write_checkpoint(weights, trial, {ARGUMENTS_FILE: f"{by_section(said)}\n".encode()})
        progress.say("comparing tensors", 0)
        good = not options.check or _printed(compare_tensors(Source(path), weights))
        if good:
            print(CONTINUED.join(flag_lines(family, said)))
        return good

    return _import(Path(options.checkpoint), write)


def _import(root: Path, write: Callable[[Path, ExportProgress], bool]) -> int:
    """Write ROOT/iter_0000000 and return the exit status. ``write`` writes it into another folder and checks it.

    What does not pass the check is removed: a checkpoint of another model would be trained on.
    """
    trial, existed = root / TRIAL, root.exists()
    if found := sorted(root.glob("iter_*")):
        raise ValueError(f"'{found[0]}' exists already and was kept; name another folder, or move it away")
    shutil.rmtree(trial, ignore_errors=True)  # of an import that was killed
    final = root / checkpoint_name(0)
    try:
        with _progress() as progress:
            good = write(trial, progress)
        if good:
            (trial / final.name).rename(final)
            fsync_directory(root)
    finally:
        shutil.rmtree(trial, ignore_errors=True)
        if not existed:
            with suppress(OSError):  # it is empty unless all went well
                root.rmdir()
    if not good:
        print(f"'{root}' was not written: it would be another model", file=sys.stderr)
        return 1
    print(final)
    return 0


def _check(options: CheckHf) -> int:
    folder = Path(options.folder)
    weights = options.weights or converted_weights(folder)
    with _progress() as progress:
        source = _source(options, weights, None)
        progress.say("checking the checkpoint", 0)
        verify(source.path)
        published = Published.open(folder, options.accept_field)
        return 0 if _compared(source, published, _path(options.tokenizer), progress) else 1


def _flags(options: ModelFlags) -> int:
    found = run_options(Path(options.folder), options.accept_field)
    lines = flag_lines(str(found["model_family"]), found)
    print(by_section(found) if options.yaml else CONTINUED.join(lines))
    return 0


def _source(options: ToHf | CheckHf, weights: str, dtype: str | None) -> Source:
    return Source(
        find_checkpoint(options.checkpoint, options.ckpt_step), weights, DTYPES[dtype] if dtype else None
    )


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _compared(source: Source, published: Published, tokenizer: Path | None, progress: ExportProgress) -> bool:
    return _printed(compare(source, published, tokenizer, lambda what: progress.say(what, 0)))


def _printed(lines: Iterable[Line]) -> bool:
    """Print the outcome of every check. Returns whether all of them hold."""
    good = True
    for line in lines:
        verdict = {True: "  holds", False: "  DOES NOT HOLD", None: ""}[line.good]
        print(f"{line.what:<30}{line.figure}{verdict}", flush=True)
        good = good and line.good is not False
    return good


@contextmanager
def _progress() -> Iterator[ExportProgress]:
    """Show on stderr what is done and, of what is written, how much."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = SafeConsole()
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("", total=None)

        def say(what: str, total: int) -> None:
            if not console.is_terminal:
                console.print(what, highlight=False)
            bars.reset(task, description=what, total=total or None)

        def note(text: str) -> None:
            console.print(f"note: {text}", highlight=False, markup=False, soft_wrap=True)

        yield ExportProgress(say, lambda count: bars.advance(task, count), note)


CONVERSIONS: Mapping[str, Callable[[Any], int]] = {
    "to-hf": _to_hf,
    "from-hf": _from_hf,
    "from-megatron": _from_megatron,
    "check": _check,
    "flags": _flags,
}
