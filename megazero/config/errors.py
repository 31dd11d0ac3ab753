"""The one exception for everything that is wrong with a configuration."""

from __future__ import annotations

from collections.abc import Sequence

# Errors of a wrong path. Other OSErrors of a file that the user names come from the storage and keep their number.
WRONG_PATH = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


class ConfigError(ValueError):
    """Every error that was found, at once.

    ``errors`` has a line for each, with the value, the rule and the nearest legal choice.
    """

    def __init__(self, errors: Sequence[str]) -> None:
        self.errors = tuple(errors)
        count = len(self.errors)
        head = f"{count} configuration error{'s' if count > 1 else ''}:"
        super().__init__("\n".join([head, *(f"  - {line}" for line in self.errors)]))
