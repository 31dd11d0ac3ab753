"""What a rank spends on a unit's messages: encoding, decoding, summing, and staging gradients.

Times per element come from the cluster file if it has the codecs' times. Otherwise they follow from the bytes read
and written.
"""

from __future__ import annotations

from dataclasses import dataclass

from megazero.mesh.grid import AxisSpec
from megazero.plan.communication import Formats, UnitShape
from megazero.plan.compute import Compute


@dataclass(frozen=True)
class Coder:
    """The seconds of coding on one rank. p, os: how many ranks share the parameters and the optimizer states."""

    compute: Compute
    formats: Formats
    p: int
    os: int

    def _ns(self, bits: int, column: str) -> float:
        """Return nanoseconds for an element, those of the format with the nearest number of bits."""
        rows = self.compute.cluster.codecs
        return float(getattr(min(rows, key=lambda row: abs(row.bits - bits)), column))

    @property
    def measured(self) -> bool:
        return bool(self.compute.cluster.codecs)

    def refresh(self, unit: UnitShape, gathered: bool) -> tuple[float, float]:
        """Return the seconds before a refresh is sent, and after it arrived. gathered: a gather follows."""
        weights, elements, width = self.formats.weights, unit.elements, self.formats.width
        coded = weights is not None and unit.quantised
        if not self.measured:
            return 0.0, self.compute.moved(elements * 1.5 * width) if coded and not gathered else 0.0
        own, copy = elements / self.os, self._ns(32, "encode_ns")
        if weights is None or not coded:
            return (own * self._ns(8 * width, "encode_ns") if width < self.formats.sums else 0.0) * 1e-9, 0.0
        before = own * (self._ns(weights.bits, "encode_ns") + (2 * copy if self.formats.delta else 0.0))
        decoded = self.formats.delta or not gathered  # else the messages stay as they came
        return before * 1e-9, elements / self.p * self._ns(weights.bits, "decode_ns") * decoded * 1e-9

    def gather(self, unit: UnitShape) -> float:
        """Return the seconds after a gather arrived."""
        weights, elements = self.formats.weights, unit.elements
        if weights is None or not unit.quantised:
            return 0.0
        if not self.measured:
            return self.compute.moved(elements * 1.5 * self.formats.width)
        return 0.0 if self.formats.delta else elements * self._ns(weights.bits, "decode_ns") * 1e-9

    def exchange(self, unit: UnitShape, axis: AxisSpec, left: float, raw: bool) -> tuple[float, float]:
        """Return the seconds before and after an exchange of ``left`` elements over ``axis``.

        raw: they are one micro-batch's gradients in the parameters' dtype, not sums.
        """
        width, sums = self.formats.width, self.formats.sums
        if not self.measured:
            return 0.0, self.compute.moved(left * (width + sums) / 2)
        coding = (self.formats.gradients or {}).get(axis.link) if unit.quantised else None
        bits = coding.bits if coding else 8 * (width if raw else sums)
        others = left * (axis.size - 1) / axis.size
        before = (
            others * self._ns(bits, "encode_ns") if coding else 0.0
        )  # exact ones are sent from where they lie
        after = others * self._ns(bits, "sum_ns") + left / axis.size * self._ns(8 * sums, "sum_ns")
        return before * 1e-9, after * 1e-9

    def staged(self, unit: UnitShape, added: bool) -> float:
        """Return the seconds to take a micro-batch's gradients from autograd. added: they are added to a sum."""
        column = "sum_ns" if added else "encode_ns"
        return unit.elements * self._ns(32, column) * 1e-9 if self.measured else 0.0
