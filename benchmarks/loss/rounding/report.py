"""The page."""

from benchmarks.results import PAGES

PAGE = PAGES / "rounding_trained.md"


def page(rows):
    return ""
