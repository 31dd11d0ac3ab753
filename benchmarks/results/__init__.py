"""The data that the pages of docs were written from, one file for each program that measures."""

from __future__ import annotations

from pathlib import Path

RESULTS = Path(__file__).resolve().parent
DOCS = RESULTS.parents[1] / "docs"
PAGES = DOCS / "results"  # what was measured, for readers


def data_of(folder: Path) -> Path:
    """Return where the data of a folder's pages lie: RESULTS for the folders of docs, else the folder itself."""
    return RESULTS if folder.resolve().is_relative_to(DOCS) else folder
