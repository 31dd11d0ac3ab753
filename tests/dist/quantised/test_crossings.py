"""Two sub-axes across nodes: OS or G between a node's ranks and all of them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from megazero import zero
from megazero.mesh.levels import INTER, INTRA
from tests.dist.pool import by_case
from tests.dist.quantised.cases import Q4, Q8, Case, several
from tests.dist.quantised.test_bits import after_updates, assert_agreed
from tests.dist.quantised.test_quantised import against_the_bound


@dataclass(frozen=True)
class Factors(Case):
    """``letters`` are P, G, OS themselves."""

    def shards(self, world: int) -> tuple[int, ...]:
        return tuple(map(int, self.letters))


WHOLE = zero.Codecs(weights=Q8, gradients={INTRA: Q8, INTER: Q4})
DELTA = zero.Codecs(weights=Q4, delta=True, gradients={INTER: Q4})
# On 4 nodes of one rank. 112: OS, then replicas. 122: G with every micro-batch, then replicas. 124: G, then OS.
CASES = [Factors(x, 1, codecs, micro_batches=2) for x in ("112", "122", "124") for codecs in (WHOLE, DELTA)]


def test_sums_across_two_axes_are_within_the_bound():
    for case, worst in by_case(4, several, against_the_bound, CASES):
        assert 0.3 < max(worst) <= 1, (case, worst)


@pytest.mark.slow
def test_replicas_beyond_the_optimizers_shards_are_equal():
    assert_agreed(by_case(4, several, after_updates, CASES, 4))
