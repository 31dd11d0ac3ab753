"""What a message is. Flags choose it, the planner counts it, codecs encode it; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

# Elements that share a scale, by bits. Squared error relative to the values' (1M normal; 1M of Student's t with 4
# degrees, heavy-tailed as gradients are) against bytes per element all in:
#   8 bits  bf16 scales  64: 1.031  3.6e-5 8.2e-5   128: 1.016  4.3e-5 1.2e-4   256: 1.008  4.9e-5 1.7e-4
#           fp32 scales 128: 1.031  4.2e-5 1.2e-4   256: 1.016  4.9e-5 1.7e-4
#   4 bits  bf16 scales  32: 0.563  9.5e-3 1.7e-2    64: 0.531  1.2e-2 2.6e-2   128: 0.516  1.4e-2 3.8e-2
#           fp32 scales  64: 0.563  1.2e-2 2.6e-2   128: 0.531  1.4e-2 3.8e-2
# At equal bytes bf16 scales in blocks half as large win; rounding them up costs 1% of it at 4 bits, 1.5% at 8.
DEFAULT_BLOCK = {8: 128, 4: 64, 2: 64}
ALIGN = 16  # bytes: messages and exact regions start at multiples of it


@dataclass(frozen=True)
class Coding:
    """A quantised format of ``bits`` bits, in which ``block`` elements share a scale (0: the default for the bits).

    hadamard: the number of elements that a Hadamard transform mixes before they are encoded; with 0, none does.
    Gradients of 4 bits or fewer want one of 64: what a run sends by default is in config/layout/wire.py.
    """

    bits: int
    block: int = 0
    hadamard: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", self.block or DEFAULT_BLOCK.get(self.bits, 64))

    def message_bytes(self, n: int, exact: int = 0) -> int:
        """Return the bytes of a message of n elements, whole blocks, and ``exact`` bytes that are sent as they are.

        Digits with scales (kernels/format.py), and what is exact, are each filled up.
        """
        return filled(n * self.bits // 8 + 2 * n // self.block, ALIGN) + filled(exact, ALIGN)


@dataclass(frozen=True)
class Sparse:
    """The format that sends the KEPT largest of each CHUNK elements (comm/topk.py): 0.0205 bytes an element."""

    CHUNK: ClassVar[int] = 4096
    KEPT: ClassVar[int] = 64
    CHUNK_BYTES: ClassVar[int] = 84
    FEEDBACK: ClassVar[float] = 0.95  # the share of what was left out that is added to the next message

    def coded_bytes(self, n: int) -> int:
        return -(-n // self.CHUNK) * self.CHUNK_BYTES

    def message_bytes(self, n: int, exact: int = 0) -> int:
        """Return the bytes of a message as ``Coding.message_bytes`` does; the last chunk may be shorter."""
        return filled(self.coded_bytes(n), ALIGN) + filled(exact, ALIGN)


def filled(size: int, multiple: int) -> int:
    """Return the least multiple that is not below ``size``."""
    return -(-size // multiple) * multiple


class MessageFormat(Protocol):
    """A format of messages: a Coding, or the codec that encodes it."""

    def message_bytes(self, n: int, exact: int = 0) -> int:
        """Return the bytes of a message of n elements and of ``exact`` bytes that are sent as they are."""
        ...


Format = TypeVar("Format", bound=MessageFormat)


@dataclass(frozen=True)
class Codecs(Generic[Format]):
    """The formats of messages.

    None is exact: identity, in the parameters' dtype or, for sums of gradients, in at least fp32.
    weights: the format of the refresh; the gathers inside P send what was received.
    gradients: the formats of reductions by class of link (mesh/levels.py); those over other links are exact.
    delta: the refresh sends master - R instead of the master. R is the P copy that every receiver holds (see
        zero/weights.py). The gathers inside P then send R in the parameters' dtype. This takes effect where P < OS.
    """

    weights: Format | None = None
    gradients: Mapping[str, Format] = field(default_factory=dict, hash=False)
    delta: bool = False

    @property
    def codings(self) -> list[Format]:
        """Return the formats that are not exact."""
        return [*([] if self.weights is None else [self.weights]), *self.gradients.values()]

    @property
    def exact(self) -> bool:
        """Whether nothing is rounded."""
        return not self.codings


def mixes(format: MessageFormat | None) -> bool:
    """Whether a format mixes padding with values (kernels/hadamard.py), so that it is cleared after decoding."""
    return isinstance(format, Coding) and format.hadamard > 0


def quantised(codecs: Codecs[Any]) -> Iterator[Coding]:
    """Yield the formats that quantise."""
    return (each for each in codecs.codings if isinstance(each, Coding))
