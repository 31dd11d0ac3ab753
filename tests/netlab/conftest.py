"""The fixture ``netlab``: labs for a test, closed after it; the test is skipped where they cannot be made."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.netlab.lab import Lab, LabUnavailable


@pytest.fixture
def netlab() -> Iterator[Callable[..., Lab]]:
    """netlab(nodes=2, rate="200mbit") -> Lab."""
    with ExitStack() as stack:

        def make(nodes: int = 2, rate: str | None = None, **racks: Any) -> Lab:
            try:
                return stack.enter_context(Lab(nodes, rate, **racks))
            except LabUnavailable as error:
                pytest.skip(f"no lab: {error}")

        yield make
