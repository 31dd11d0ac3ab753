"""Checks of Megatron's messages (``megazero.patches.checks``): the gradients and weights of its buckets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_core_patch.options import PatchOptions
from megazero.patches.checks import Differences, compare_replicas
from megazero.patches.two_hops import TwoHops
from megazero.zero.rounding import GRADIENTS, WEIGHTS

Check = Callable[[], None]  # to be called when the messages have arrived


class MessageChecks(Differences):
    """Compares what arrived with what Megatron's own collectives give, and ranks' parameters with each other."""

    def __init__(self, options: PatchOptions) -> None:
        super().__init__("megatron_core_patch")
        self.first_steps = options.zero_verify_first_steps
        self.interval = options.zero_checksum_interval

    def gradients(
        self, bucket: Any, hops: TwoHops, updates: int, reduce: Any, group: Any, op: Any
    ) -> list[Check]:
        """Reduce a copy of the bucket's gradients exactly, now; return what compares. ``updates``: made so far."""
        if updates >= self.first_steps:
            return []
        whole = bucket.grad_data.clone()
        exact = whole.view(len(hops.ranks), -1)[hops.index]
        reduce(exact, whole, op=op, group=group)
        sent = bucket.grad_data.view(len(hops.ranks), -1)[hops.index]
        return [lambda: self.note(GRADIENTS, updates + 1, sent, exact, group)]

    def weights(self, bucket: Any, hops: TwoHops, updates: int, gather: Any, group: Any) -> list[Check]:
        """Gather a copy of the bucket's parameters exactly, now; return what compares and what takes checksums."""
        checks: list[Check] = []
        if updates <= self.first_steps:
            exact = bucket.param_data.clone()
            gather(exact, exact.view(len(hops.ranks), -1)[hops.index].clone(), group=group)
            checks.append(lambda: self.note(WEIGHTS, updates, bucket.param_data, exact))
        if self.interval and updates % self.interval == 0:
            checks.append(lambda: compare_replicas(self.patch, bucket.param_data, updates, group))
        return checks
