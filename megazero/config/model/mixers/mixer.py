"""What mixes the tokens of a layer, as numbers: what every mixer says of itself. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from megazero.config.model.parameters import ParameterSpec

CHUNK = (
    64  # tokens whose products are matrices where they meet in a state; between chunks there is that alone
)
Names = Mapping[str, str | tuple[str, int]]


class Heads(NamedTuple):
    """The heads that kernels of attention see.

    number: those of queries. groups: those of keys and values, which they share. width: of a query, of a key and, as
    kernels see it, of a value. rotated: channels with rotary positions, of which --rotary-percent turn. scale: of
    scores.
    """

    number: int
    groups: int
    width: int
    rotated: int
    scale: float


class TokenWork(NamedTuple):
    """What the mixer of one token costs, the matrices and the residual stream aside.

    moved: elements that a forward reads and writes. kept: elements that autograd keeps for the backward. pair: the
    multiply-adds with one other token. out: elements that the output linear takes. taken: those that the first
    column-parallel linears take. core: elements that its core makes and keeps, which selective recompute drops, less
    those that it keeps instead.
    norm_sums: numbers that norms add up over tensor-parallel ranks.
    shared: elements that every tensor-parallel rank has of whole sequences, and makes its heads' keys and values of:
    ``expanded`` elements, by ``expansion`` multiply-adds, in its core. latents: elements that are kept of what
    sequence parallelism alone cuts.
    token: the multiply-adds with a state, in place of other tokens. wide: numbers in at least fp32 that the core
    keeps beside ``kept`` and ``core``. gated: those that a norm behind it keeps.
    """

    moved: int
    kept: int
    pair: int
    out: int
    taken: int
    core: int
    norm_sums: int = 0
    shared: int = 0
    expanded: int = 0
    expansion: int = 0
    latents: int = 0
    token: int = 0
    wide: int = 0
    gated: int = 0


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
    """What mixes the tokens of a layer of the model ``c``: a row of MIXERS, and a module with the same parameters in
    megazero/models/mixers, which needs torch. Numbers are those of one rank without tensor parallelism.

    module: 'module:name' of the module, which is imported when a layer is built, with SoftmaxAttention's arguments.
    rules: report what is wrong with its options in any decoder.
    rotated_by: the flag of how many channels positions turn.
    in_fp8: its linears multiply as a run's products do; else plainly.
    names, megatron: what Hugging Face calls its modules, where a family does not say otherwise, and what Megatron.
    groups: as TensorNames has them, of these names.
    """

    c: Any

    module: ClassVar[str]
    rules: ClassVar[tuple[Callable[[Any], Iterator[str]], ...]] = ()
    rotated_by: ClassVar[str] = "--kv-channels"
    in_fp8: ClassVar[bool] = True
    names: ClassVar[Names] = {}
    groups: ClassVar[Mapping[str, str]] = {}
    megatron: ClassVar[Names] = {}

    @classmethod
    def derived(cls, done: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the options ``done`` decide of its own, where nothing is said."""
        return {}

    @abstractmethod
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Return the parameters, "attention." before each name, in the order of ``named_parameters``."""

    @property
    @abstractmethod
    def heads(self) -> Heads | None:
        """Return the heads of attention, or None if tokens meet in a state, not in pairs."""

    @property
    @abstractmethod
    def work(self) -> TokenWork: ...

    @property
    @abstractmethod
    def words(self) -> str:
        """What a run says of it at its start."""

    @abstractmethod
    def shared(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return, by flag, what tensor-parallel ranks share evenly, and then those that swap heads; and of what
        several of these ranks hold copies where they are more."""

    def score_rows(self, alpha: float) -> Mapping[str, tuple[tuple[int, float], ...]]:
        """Return, by linear that makes scores, the parts of each of its heads: how many rows, and the power that they
        take of a factor of the scores (--qk-clip). alpha: that of queries; of keys it is 1 - alpha."""
        return {}

    def exchanged(self, tp: int, ranks: int) -> Exchanged:
        """Return what a rank exchanges if ``tp`` share the heads, and then ``ranks`` swap them for sequence."""
        heads = self.heads
        if heads is None:
            return Exchanged(0, 0, ())
        gathered = tuple(max(heads.groups // tp, ranks) * width for width in (heads.width, heads.width))
        return Exchanged(heads.number * heads.width // tp + sum(gathered), self.work.out // tp, gathered)


class Nothing(Mixer):
    """No mixer: the layer is a feed-forward alone."""

    module = words = ""

    def parameters(self) -> tuple[ParameterSpec, ...]:
        return ()

    heads, work = None, TokenWork(0, 0, 0, 0, 0, 0)

    def shared(self) -> tuple[dict[str, int], dict[str, int]]:
        return {}, {}
