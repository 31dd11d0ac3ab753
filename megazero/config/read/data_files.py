"""Files with BLOOM's groups of data: their words replace the option that names the file. Data must exist."""

from __future__ import annotations

import re
import shlex
from typing import Any

from megazero.bounded import read_bytes
from megazero.config.errors import WRONG_PATH, ConfigError
from megazero.config.options.data_inputs import DATA_WORDS, SPLITS
from megazero.config.options.data_sources import data_kind
from megazero.config.options.fields import show
from megazero.config.run import RunConfig, all_options


def _groups(text: str) -> tuple[str, ...]:
    """Return the groups of a file: quoted as in a shell, or one a line, which a comma at its end continues."""
    if re.search("['\"]", text):
        return tuple(shlex.split(text))
    lines = re.sub(r",\s*\n", ", ", text).splitlines()
    return tuple(line.strip() for line in lines if line.strip())


def read_data_files(values: dict[str, Any], notes: list[str]) -> list[str]:
    """Put the groups of the files that ``values`` names where they belong, with a note for each file.

    Returns an error line for each file that cannot be used, whose option then stays.
    """
    errors = []
    for name in (f"{split}_weighted_split_paths" for split in SPLITS):
        path, option = values.get(f"{name}_path"), all_options()[name]
        if path is None:
            continue
        named = f"{all_options()[f'{name}_path'].flag} {path}"
        try:
            groups = _groups(read_bytes(path).decode("utf-8"))
            DATA_WORDS[name](groups)  # here, so that its error names the file
        except WRONG_PATH as error:
            errors.append(f"{named} cannot be read: {error.strerror or error}")
        except ValueError as error:  # of an open quote and of bytes that are no text, too
            errors.append(f"{named}: {error}")
        else:
            if values.get(name):
                errors.append(f"{named} and {option.flag} exclude each other; leave one out")
            elif not groups:
                errors.append(f"{named} names no data")
            else:
                del values[f"{name}_path"]
                values[name] = groups
                notes.append(f"{named}: {option.flag} {show(groups)}")
    return errors


def refuse_missing_data(config: RunConfig) -> None:
    """Raise ConfigError with a line for each data set of the run that is not there, before anything is written."""
    splits = SPLITS if config.training.eval_iters else SPLITS[:1]
    if missing := list(data_kind(config.data).missing(config.data, splits)):
        raise ConfigError(missing)
