"""Files that list the data: their words replace the option that names the file. Also checks that the data exists."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from megazero.bounded import read_bytes
from megazero.config.errors import WRONG_PATH, ConfigError
from megazero.config.options.data_inputs import (
    DATA_WORDS,
    SPLITS,
    missing_file,
    parse_data_path,
    parse_weighted_splits,
)
from megazero.config.options.fields import show
from megazero.config.run import RunConfig, all_options

Words = Mapping[str, tuple[str, ...]]  # by the name of the option that they are the value of


def _groups(name: str) -> Callable[[str], Words]:
    """Return a reader of groups: quoted as in a shell, or one a line, which a comma at its end continues."""

    def read(text: str) -> Words:
        lines = re.sub(r",\s*\n", ", ", text).splitlines()
        bare = [line.strip() for line in lines if line.strip()]
        return {name: tuple(shlex.split(text) if re.search("['\"]", text) else bare)}

    return read


# What the file of an option holds.
READERS: Mapping[str, Callable[[str], Words]] = {
    f"{split}_weighted_split_paths_path": _groups(f"{split}_weighted_split_paths") for split in SPLITS
}


def read_data_files(values: dict[str, Any], notes: list[str]) -> list[str]:
    """Put the words of the files that ``values`` names where they belong, with a note for each file.

    Returns an error line for each file that cannot be used, whose option then stays.
    """
    errors = []
    for name, read in READERS.items():
        path = values.get(name)
        if path is None:
            continue
        flag = all_options()[name].flag
        try:
            text = read_bytes(path).decode("utf-8")
            words = {key: value for key, value in read(text).items() if value}
            for key, value in words.items():
                DATA_WORDS[key](value)  # here, so that its error names the file
        except WRONG_PATH as error:
            errors.append(f"{flag} {path} cannot be read: {error.strerror or error}")
            continue
        except ValueError as error:  # of JSON, of an open quote and of bytes that are no text, too
            errors.append(f"{flag} {path}: {error}")
            continue
        twice = [all_options()[key].flag for key in words if values.get(key)]
        if twice or not words:
            excluded = f"and {' and '.join(twice)} exclude each other; leave one out"
            errors.append(f"{flag} {path} {excluded if twice else 'names no data'}")
            continue
        del values[name]
        values |= words
        notes += [f"{flag} {path}: {all_options()[key].flag} {show(value)}" for key, value in words.items()]
    return errors


def refuse_missing_data(config: RunConfig) -> None:
    """Raise ConfigError with a line for each data set of the run that is not there, before anything is written."""
    data = config.data
    parts = SPLITS if config.training.eval_iters else SPLITS[:1]
    prefixes = parse_data_path(data.data_path)[0]
    for part in parts:
        prefixes += parse_data_path(getattr(data, f"{part}_data_path"))[0]
        groups = parse_weighted_splits(getattr(data, f"{part}_weighted_split_paths")).values()
        prefixes += [prefix for blend in groups for prefix in blend.prefixes]
    missing = list(filter(None, map(missing_file, dict.fromkeys(prefixes))))
    if missing:
        raise ConfigError(missing)
