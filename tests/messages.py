"""What a message must name: the flag, the value, the cure. Its sentences are free to change."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def names(text: str, *words: str) -> None:
    """Assert that ``text`` has every word."""
    assert not (missing := [word for word in words if word not in text]), f"{missing} not in: {text}"


@contextmanager
def refused(*words: str, by: type[BaseException] = ValueError) -> Iterator[None]:
    """Assert that the block raises ``by``, and that its message has every word."""
    with pytest.raises(by) as caught:
        yield
    names(str(caught.value), *words)
