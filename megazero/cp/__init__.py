"""Context parallelism: ranks that share samples, each with its own part of every sequence."""

from megazero.cp.context import ContextParallel
from megazero.cp.exchange import gather, summed, swap, swap_back

__all__ = ["ContextParallel", "gather", "summed", "swap", "swap_back"]
