"""What mixes the tokens of a layer, as numbers: what every mixer says of itself, and to whom. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from megazero.config.model.parameters import ParameterSpec


class Heads(NamedTuple):
    """The heads of attention. Its kernels keep a number in fp32 for each token and query head.

    number: those of queries. groups: those of keys and values, which they share. width: of one of queries or keys.
    values: of one of values. rotated: channels that rotary positions are for, of which they turn --rotary-percent.
    scale: the factor of scores.
    """

    number: int
    groups: int
    width: int
    values: int
    rotated: int
    scale: float


class Exchanged(NamedTuple):
    """Elements of a token that a rank exchanges with those that share samples.

    there: those that it gives to swap heads for sequence. back: those of the output that it receives for it.
    gathered: of each tensor that groups of ranks gather, those that a rank has after the swap.
    """

    there: int
    back: int
    gathered: tuple[int, ...]


@dataclass(frozen=True)
class Mixer(ABC):
    """What mixes the tokens of a layer of the model ``c``. Numbers are those of one rank without tensor parallelism.

    A mixer is a class here, a row of MIXERS, and a module of the same parameters in megazero/models/mixers, which
    needs torch. A layer's choice is ``LayerKind.mixer`` (families/layer_kinds.py).

    In attention queries meet keys. A mixer in which none meet says otherwise what it computes (``pair``) and what
    ranks exchange (``exchanged``).

    module: 'module:name' of the module, which is imported when a decoder is built. Its arguments are those of
        ``SoftmaxAttention``.
    rules: yield what is wrong with its options, an error each, in any decoder.
    names: what Hugging Face calls its modules, where a family does not say otherwise (families/family.py).
    megatron: the same of Megatron.
    """

    c: Any

    module: ClassVar[str]
    rules: ClassVar[tuple[Callable[[Any], Iterator[str]], ...]] = ()
    names: ClassVar[Mapping[str, str | tuple[str, int]]] = {}
    megatron: ClassVar[Mapping[str, str | tuple[str, int]]] = {}

    @classmethod
    def derived(cls, done: Mapping[str, Any]) -> dict[str, Any]:
        """Return what other options decide of its own where nothing is said, None for what is not known yet."""
        return {}

    @property
    @abstractmethod
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """The parameters, which begin with "attention.", in the order of ``named_parameters``."""

    @property
    @abstractmethod
    def moved(self) -> int:
        """Elements of a token that a forward reads and writes beside the matrices, the residual stream's left out."""

    @property
    @abstractmethod
    def kept(self) -> int:
        """Elements of a token that autograd keeps for the backward, the residual stream's left out."""

    @property
    @abstractmethod
    def heads(self) -> Heads:
        """What kernels of attention see."""

    @property
    def norm_sums(self) -> int:
        """Numbers of a token that its norms add up over tensor-parallel ranks."""
        return 0

    @property
    def pair(self) -> int:
        """Multiply-adds of a token for each token that it sees."""
        return self.heads.number * (self.heads.width + self.heads.values)

    @property
    def out(self) -> int:
        """Elements of a token that its output linear multiplies."""
        return self.heads.number * self.heads.values

    @property
    @abstractmethod
    def cut(self) -> dict[str, int]:
        """What ranks share evenly, by flag: tensor-parallel ranks, and of one's share those that swap heads."""

    @property
    def copied(self) -> dict[str, int]:
        """The same of which several ranks hold copies where they are more."""
        return {}

    def exchanged(self, tp: int, ranks: int) -> Exchanged:
        """Return what a rank exchanges if ``tp`` share heads, and ``ranks`` of these that have other tokens swap.

        Where ranks outnumber keys and values, each has a copy of those of its queries.
        """
        heads = self.heads
        gathered = tuple(max(heads.groups // tp, ranks) * width for width in (heads.width, heads.values))
        return Exchanged(heads.number * heads.width // tp + sum(gathered), self.out // tp, gathered)

    @property
    @abstractmethod
    def words(self) -> str:
        """What the start of a run says of it."""
