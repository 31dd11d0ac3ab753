"""The directories under a save root, and the order of steps that keeps every kill harmless.

SAVE/iter_0000100                      is a checkpoint, if its manifest is there and agrees
SAVE/.iter_0000100.partial-1a2b3c4d    is being written; readers ignore it, the next save removes it
SAVE/.iter_0000100.replaced-1a2b3c4d   is the old one while a new one of its step takes its place
SAVE/.iter_0000100.removed-1a2b3c4d    is being deleted by retention
SAVE/iter_0000120.superseded           was left behind when the run resumed from an older one. It is loaded only by
                                       its name, and never deleted. The next is .superseded.2
SAVE/.trial                            is a small one: a run that starts finds out whether it can save

One job at a time saves into a root. Nothing else under the root is ever touched.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

from megazero.bounded import read_json
from megazero.checkpoint.errors import CheckpointError
from megazero.checkpoint.manifest import (
    MANIFEST_FILE,
    STATE_FILE,
    Manifest,
    check_sizes,
    has_sizes,
    open_manifest,
    read_manifest,
    write_manifest,
)
from megazero.files import appears, decoded

logger = logging.getLogger(__name__)

TRIAL = ".trial"
_NAME = re.compile(r"iter_(\d{7,})")
_ANY = re.compile(r"iter_(\d{7,})(?:\.superseded(?:\.\d+)?)?")
_HIDDEN = re.compile(r"\.(iter_\d{7,})\.(partial|replaced|removed)-[0-9a-f]{8}")


@dataclass(frozen=True)
class Retention:
    """Which older checkpoints stay after a save. The one just saved always does.

    ``keep_last``: how many of the most recently saved ones stay; None keeps all. ``interval`` keeps the first at or
    after each of its multiples permanently (at the multiple itself nothing may have been saved). None means no such
    rule.
    """

    keep_last: int | None = None
    interval: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("keep_last", self.keep_last), ("interval", self.interval)):
            if value is not None and value < 1:
                raise ValueError(f"retention {name} is {value}; it must be at least 1, or None to do without")


def checkpoint_name(step: int) -> str:
    return f"iter_{step:07d}"


Look = Callable[[Path], Manifest | None]  # which folders count: ``described`` or ``complete``


def described(path: Path) -> Manifest | None:
    """Return the manifest of ``path`` if it is there and whole, else None.

    It reads no other file, so every rank of a large run can call it. Raises OSError if the storage does not answer,
    as ``complete`` does: a checkpoint that cannot be read now is not missing.
    """
    try:
        return read_manifest(path)
    except CheckpointError:
        return None


def complete(path: Path) -> Manifest | None:
    """Return the manifest of ``path`` if its files are all there with their sizes, else None. No tensor is read."""
    try:
        return open_manifest(path)
    except CheckpointError:
        return None


def checkpoints(root: str | os.PathLike, before: float = inf, look: Look = complete) -> list[Path]:
    """Return the checkpoints under ``root`` of steps below ``before``, oldest first in order of saving.

    The order is that of saving, not of steps: after a roll-back to step 80 the newest is the 90 that was saved since,
    not the 120 of the abandoned run. They are found by listing the folder; no tracker file is trusted.
    """
    found = []
    for path in _entries(Path(root)):
        if (_NAME.fullmatch(path.name) or _stands_in(path)) and (manifest := look(path)) is not None:
            found.append((manifest.serial, manifest.step, path))
    return [path for _, step, path in sorted(found) if step < before]


def latest(root: str | os.PathLike, before: float = inf, look: Look = complete) -> Path | None:
    """Return the newest checkpoint under ``root`` of a step below ``before``, or None when there is none."""
    found = checkpoints(root, before, look)
    return found[-1] if found else None


def named(folder: str | os.PathLike, step: int | None = None) -> Path | None:
    """Return the named checkpoint, or None if the newest in ``folder`` is meant.

    ``folder``, if it is a checkpoint's own, or ``step`` names it. It may be incomplete: a named checkpoint is loaded
    or is an error. Raises CheckpointError if there is none of that step.
    """
    root = Path(folder)
    if _ANY.fullmatch(root.name) or (root / MANIFEST_FILE).is_file():
        if step is not None and (manifest := described(root)) is not None and manifest.step != step:
            raise CheckpointError(f"'{root}' is the checkpoint of step {manifest.step}, not of {step}")
        return root
    if step is None:
        return None
    found = root / checkpoint_name(step)
    aside = [path for path in _entries(root) if path.name.startswith(f".{found.name}.") and _stands_in(path)]
    if aside or found.is_dir():
        return [*aside, found][0]
    left = [path.name for path in _entries(root) if path.name.startswith(f"{found.name}.")]
    others = [int(name[1]) for path in _entries(root) if (name := _NAME.fullmatch(path.name))]
    near = sorted(others, key=lambda other: abs(other - step))[:2]
    cures = [f"nearest: {' or '.join(map(str, sorted(near)))}"] if near else []
    cures += [f"name the folder '{root / name}' to take what was superseded" for name in left]
    raise CheckpointError("; ".join([f"'{root}' holds no checkpoint of step {step}", *cures]))


def find_checkpoint(folder: str | os.PathLike[str], step: int | None = None) -> Path:
    """Return the checkpoint that is ``named``, else the newest complete one in ``folder``.

    Raises CheckpointError if there is none.
    """
    found = named(folder, step) or latest(folder)
    if found is None:
        raise CheckpointError(
            f"'{folder}' holds no complete checkpoint. Name the folder that was given to --save in training, or one "
            "of its iter_* folders"
        )
    return found


def stated(path: Path) -> dict[str, Any]:
    """Return a checkpoint's state.json without comparing its checksum, so every rank of a large run may call it.

    Raises CheckpointError if it is absent or damaged, and OSError if the storage does not answer.
    """
    file = path / STATE_FILE
    try:
        return dict(decoded(read_json(file)))
    except (FileNotFoundError, ValueError, TypeError) as error:
        raise CheckpointError(f"'{file}' cannot be read ({error}); load an older checkpoint") from error


def supersede(root: Path, origin: Path) -> list[Path]:
    """Rename the checkpoints under ``root`` that a run resumed from ``origin`` leaves behind. Returns the new names.

    Renamed are those of a later step and those saved after ``origin``, or all if ``origin`` lies elsewhere. This
    run's history stays, and so does a folder that is no checkpoint of megazero.
    """
    start, here = read_manifest(origin), os.path.realpath(origin.parent) == os.path.realpath(root)
    _clean(root)  # or what a killed save put aside would take the place of what is renamed
    renamed = []
    for path in reversed(_entries(root)):
        name = _NAME.fullmatch(path.name)
        if name is None or not any((path / file).exists() for file in (MANIFEST_FILE, STATE_FILE)):
            continue
        manifest = described(path)
        since = not here or manifest is not None and manifest.serial > start.serial
        if int(name[1]) > start.step or since:
            aside = f"{path.name}.superseded"
            names = (path.with_name(aside + (f".{number}" if number > 1 else "")) for number in count(1))
            renamed.append(path.rename(next(name for name in names if not name.exists())))
    if renamed:
        fsync_directory(root)
    return renamed


def in_the_way(root: Path, after: int, last: int) -> list[Path]:
    """Return the folders with a checkpoint's name, of the steps above ``after`` up to ``last``, that are none.

    ``prepare`` would refuse to save there.
    """
    named = ((path, _NAME.fullmatch(path.name)) for path in sorted(root.glob("iter_*")))
    steps = ((path, int(name[1])) for path, name in named if name)
    return [path for path, step in steps if after < step <= last and not (path / MANIFEST_FILE).exists()]


def prepare(root: Path, step: int, overwrite: bool) -> Path:
    """Check that step ``step`` may be saved, clean up after a killed save, and make the directory to write in."""
    final = root / checkpoint_name(step)
    if final.exists() or final.is_symlink():
        if not overwrite:
            raise CheckpointError(
                f"'{final}' exists already and was kept; ask for overwriting, or save elsewhere"
            )
        if not (final / MANIFEST_FILE).exists():
            raise CheckpointError(f"'{final}' is not a checkpoint of megazero and was kept; move it away")
    new_root = not root.exists()
    root.mkdir(parents=True, exist_ok=True)
    if new_root:
        fsync_directory(root.parent)
    _clean(root)
    temporary = _hidden(final, "partial")
    temporary.mkdir()
    return temporary


def commit(temporary: Path, final: Path, manifest: Manifest, tick: Callable[[], None] = lambda: None) -> None:
    """Make ``temporary`` the checkpoint ``final``: write the manifest last, then rename once.

    A checkpoint already at ``final`` is moved aside first and deleted after. If the process is killed in between, the
    next look finds it where it was put (``checkpoints``). tick: called while files of other nodes are not there yet.
    """
    appears(lambda: has_sizes(temporary, manifest), temporary, tick)
    check_sizes(temporary, manifest)  # as this rank sees them: catches directories that are not shared
    others = [described(path) for path in _entries(final.parent) if _ANY.fullmatch(path.name)]
    serial = max((other.serial for other in others if other is not None), default=-1) + 1
    write_manifest(temporary, replace(manifest, serial=serial))
    fsync_directory(temporary)
    aside = _hidden(final, "replaced") if final.exists() else None
    if aside is not None:
        os.rename(final, aside)
    os.rename(temporary, final)
    fsync_directory(final.parent)
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)  # saved by now; the next save tries again


def retain(root: Path, saved: Path, rule: Retention) -> None:
    """Delete the complete checkpoints that ``rule`` does not keep, but never ``saved``.

    A directory that cannot be deleted is reported in the log, as the save itself has succeeded.
    """
    if rule.keep_last is None:
        return
    found = checkpoints(root)
    steps = {path: int(name[1]) for path in found if (name := _NAME.fullmatch(path.name))}
    needed = {saved, *(_firsts(steps, rule.interval) if rule.interval else ())}
    for path in found[: -rule.keep_last]:
        if path in needed or path not in steps:
            continue
        try:
            doomed = _hidden(path, "removed")
            os.rename(path, doomed)  # a kill inside rmtree must not leave half a checkpoint by its name
            shutil.rmtree(doomed)
        except OSError as error:
            logger.warning("old checkpoint '%s' could not be removed: %s", path, error)


def _firsts(steps: Mapping[Path, int], interval: int) -> Iterator[Path]:
    """Yield the first path whose step is at or after a multiple of ``interval``, for each multiple but 0."""
    reached = 0
    for path in sorted(steps, key=steps.__getitem__):
        if steps[path] // interval > reached:
            reached = steps[path] // interval
            yield path


def fsync_directory(path: Path) -> None:
    """Make the directory's entries durable (POSIX: renames are not until their directory is synced)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _clean(root: Path) -> None:
    """Remove the leftovers of killed saves, and ``restore``.

    A file that a hanging writer has open may not go yet, as on NFS: the next save tries again.
    """
    for path in leftovers(root):
        shutil.rmtree(path, ignore_errors=True)
    restore(root)


def restore(root: Path) -> None:
    """Give a checkpoint that was moved aside and not replaced its name again."""
    for path in _entries(root):
        if _stands_in(path) and not (final := root / path.name.split(".")[1]).exists():
            os.rename(path, final)


def leftovers(root: str | os.PathLike) -> list[Path]:
    """Return the leftovers of killed saves under ``root``. The next save removes them."""
    return [path for path in _entries(Path(root)) if _HIDDEN.fullmatch(path.name) and not _stands_in(path)]


def _stands_in(path: Path) -> bool:
    """Return whether ``path`` is a checkpoint that was moved aside and has no replacement."""
    hidden = _HIDDEN.fullmatch(path.name)
    if hidden is None or hidden[2] != "replaced":
        return False
    return complete(path.with_name(hidden[1])) is None and complete(path) is not None


def _entries(root: Path) -> list[Path]:
    try:
        with os.scandir(root) as found:
            return sorted(root / entry.name for entry in found if entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _hidden(final: Path, state: str) -> Path:
    return final.with_name(f".{final.name}.{state}-{secrets.token_hex(4)}")
