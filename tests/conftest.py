"""Before torch is loaded: one thread for each process of the tests. Ranks compute beside one another on few cores,
and threads that spin at OpenMP's barriers take the cores from them."""

import os
from collections import Counter

import pytest

os.environ["OMP_NUM_THREADS"] = "1"


@pytest.hookimpl(tryfirst=True)  # before pytest reads -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what comes after the first n cases of a test with the mark ``first(n)``."""
    seen = Counter[tuple[str, str]]()
    for item in items:
        if (mark := item.get_closest_marker("first")) and not item.get_closest_marker("slow"):
            test = (str(item.path), getattr(item, "originalname", item.name))
            seen[test] += 1
            if seen[test] > mark.args[0]:
                item.add_marker(pytest.mark.slow)
