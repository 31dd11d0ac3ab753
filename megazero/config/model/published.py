"""Folders as Hugging Face publishes models, as --load names them."""

from __future__ import annotations

from pathlib import Path

CONFIG_FILE = "config.json"


def is_published(load: str | None) -> bool:
    """Tell whether --load names a folder of Hugging Face."""
    return load is not None and load.startswith("hf:")


def published_folder(load: str) -> Path:
    """Return the folder of ``hf:DIR``."""
    return Path(load.removeprefix("hf:"))
