"""Finds out what autograd is doing, from inside a hook of the graph that it runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator
from typing import Any

import torch


def brings_gradients(params: Container[int]) -> bool:
    """Whether autograd runs a backward, judged from the graph behind the hook.

    params: the ids of Parameters. ``torch.autograd.grad`` passes by all of them that are in the graph; a
        graph without
    any is taken for a backward's.
    """
    passed = False
    for leaf in _leaves(torch._C._current_autograd_node()):
        if id(leaf.variable) in params:
            if _accumulates(leaf):
                return True
            passed = True
    return not passed


def _leaves(root: Any) -> Iterator[Any]:
    """Yield the graph's accumulators of gradients, nearest first."""
    seen, queue = {root}, deque([root])
    while queue:
        node = queue.popleft()
        if isinstance(node, torch._C._functions.AccumulateGrad):  # type: ignore[attr-defined]
            yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                queue.append(following)


def _accumulates(leaf: Any) -> bool:
    """Whether autograd, as it runs now, adds to the leaf's gradient."""
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # what torch says of a leaf whose gradient torch.autograd.grad returns
        return False
