"""Context parallelism: ranks that share samples, each with its own part of every sequence."""

from megazero.cp.context import ContextParallel
from megazero.cp.exchange import swap, swap_back

__all__ = ["ContextParallel", "swap", "swap_back"]
