"""The folders that a run writes: made before anything else, or refused with what to do."""

from __future__ import annotations

from pathlib import Path

from megazero.config.errors import WRONG_PATH, ConfigError
from megazero.config.run import RunConfig, all_options


def make_folders(config: RunConfig) -> None:
    """Make the folders of --save and --log-dir. Raises ConfigError with a line for each that cannot be one.

    Other errors of the storage (full, stale) keep their number.
    """
    named = {"save": config.checkpoint.save, "log_dir": config.logging.log_dir}
    errors = []
    for name, folder in ((name, Path(folder)) for name, folder in named.items() if folder is not None):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, *WRONG_PATH) as error:
            errors.append(f"{all_options()[name].flag} {folder} {_why(folder, error)}")
    if errors:
        raise ConfigError(errors)


def _why(folder: Path, error: OSError) -> str:
    """Say what is in the way, and the nearest folder that is."""
    above = next(path for path in (folder, *folder.parents) if path.exists() or path == path.parent)
    if above.is_dir():
        return f"cannot be made: {error.strerror} in {above}; name a folder where this user may write"
    what = "is a file" if above == folder else f"lies below {above}, which is a file"
    return f"{what}; a folder is needed: name another, or move the file away"
