"""The hash of what a rank issued tells orders apart."""

from __future__ import annotations

from itertools import permutations
from typing import Any

from megazero.zero.agreement import IssueHash


def test_every_collective_and_its_place_count() -> None:
    """Ranks that issued others in the middle of a step would have met in different ones, or summed other units."""

    units: Any = [object(), object()]

    def hashed(*issued: str) -> int:
        out = IssueHash(units)
        for deed, place, *how in issued:
            out.add(deed, units[int(place)], "".join(how))
        taken = out.take()
        assert out.take() == 0, "a step begins anew"
        return taken

    orders = [*permutations(("g0", "g1", "r1True", "r0True"))]
    assert len({hashed(*order) for order in orders}) == len(orders)
    assert len({hashed("g0"), hashed("g1", "g0"), hashed("g0", "g0"), hashed("r0False", "g0")}) == 4
    assert hashed(*("g0",) * 10_000) == float(hashed(*("g0",) * 10_000)) < 2**32, "exact in a float64"
