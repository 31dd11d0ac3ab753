"""A parameter as numbers, and what the parameters of every part of a model are made by. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, replace

from megazero.config.options.fields import UPDATE, option
from megazero.families import FAMILIES
from megazero.families.layer_kinds import MOST_LAYERS

# Laws of initial values beside the normal one (models/initialization.py).
DECAY, TIME_STEP = "decay", "time step"
# A need (options/needs.py).
TWO_BRANCHES = "not hybrid_layer_pattern: layers with a mixer and an MLP (no --hybrid-layer-pattern)"


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """The options of a model that all of its parts depend on."""

    model_family: str = option(
        "gpt", "family, which sets defaults marked 'by family'; gpt is Megatron's", choices=tuple(FAMILIES)
    )
    num_layers: int = option(MISSING, "transformer layers", low=1, high=MOST_LAYERS, required=True)
    hybrid_layer_pattern: str | None = option(
        None,
        "a letter for each layer, which has one branch alone: M Mamba-2, G gated delta net, * attention, - MLP, "
        "E experts; | between them cuts pipeline stages (default: every layer has a mixer and an MLP)",
        aliases=("hybrid-override-pattern",),
    )
    hidden_size: int = option(MISSING, "width of the residual stream", low=1, required=True)
    num_attention_heads: int = option(MISSING, "attention heads", low=1, required=True, small=8)
    normalization: str = option(MISSING, "norm layers (by family)", choices=("RMSNorm", "LayerNorm"))
    apply_layernorm_1p: bool = option(
        False, "norms multiply by 1 + weight, and weights begin at 0 (Gemma; by family)"
    )
    # Small matrices are well-conditioned in fp32 with that.
    init_method_std: float = option(0.02, "standard deviation of initial weights", above=0, small=0.03)
    use_mup: bool = option(
        False,
        "muP: what is tuned at --mup-base-hidden-size holds at --hidden-size. With m their ratio, matrices of layers "
        "begin with 1 / sqrt(m) of the deviation and learn with 1 / m of --lr and --adam-eps (sgd: all else with m "
        "times --lr), logits are divided by m, and scores of attention by the width of a head",
        resume=UPDATE,
    )
    mup_base_hidden_size: int | None = option(
        None,
        "width at which rates were tuned (default: --hidden-size)",
        low=1,
        needs="use_mup",
        small=16,
        resume=UPDATE,
    )
    mup_base_head_dim: float | None = option(
        None, "width of a head there: its root multiplies the scores (default: 1)", above=0, needs="use_mup"
    )
    mup_attn_scale_power: float = option(
        1.0, "power of a head's width that divides the scores; 0.5: as without muP", low=0, needs="use_mup"
    )

    @property
    def single_branches(self) -> bool:
        """Tell whether each layer is a mixer or a feed-forward alone."""
        return self.hybrid_layer_pattern is not None

    @property
    def branches(self) -> int:
        """Return how many branches write to the residual stream: a mixer and a feed-forward of each layer, or one."""
        return self.num_layers * (1 if self.single_branches else 2)

    @property
    def mup_width(self) -> float:
        """Return by how much the model is wider than the one that its rates were tuned for."""
        return self.hidden_size / (self.mup_base_hidden_size or self.hidden_size) if self.use_mup else 1.0

    @property
    def matrix_std(self) -> float:
        """Return the standard deviation of a layer's initial matrices, but for those that write to the stream."""
        return self.init_method_std / math.sqrt(self.mup_width)


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter as one rank without tensor parallelism holds it.

    name: within the module. cut: the dim that tensor-parallel ranks share, None if each holds the whole parameter.
    heads: the number of attention heads along that dim. If ranks outnumber heads, neighbours hold the same head.
    mean, std: the initial values are normal, or constant if std is 0; with a ``law``, of that.
    multiplies: the parameter is a matrix that multiplies every token's activations.
    experts, of_token: the first dim counts experts, so many of which multiply a token's activations; 0 and 1: none.
    sharing: how many ranks share the experts, of which these are one's.
    own_heads: a rank applies the parameter to its own heads, or channels of an MLP, alone.
    vocabulary: the rows are words, which are padded before ranks share them.
    tied: the first and the last stage of a pipeline hold one parameter: the embedding, of the head its weight.
    """

    name: str
    shape: tuple[int, ...]
    cut: int | None = None
    heads: int | None = None
    mean: float = 0.0
    std: float = 0.0
    multiplies: bool = False
    own_heads: bool = False
    vocabulary: bool = False
    tied: bool = False
    experts: int = 0
    of_token: int = 1
    sharing: int = 1
    law: str | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def of_a_token(self) -> int:
        """Return the elements that one token meets."""
        return self.numel * self.of_token // max(self.experts, 1)

    @property
    def multiply_adds(self) -> int:
        """Return the multiply-adds of one token."""
        return self.multiplies * self.of_a_token

    @property
    def vector(self) -> bool:
        """Tell whether it is a norm's, a bias or sinks, of experts a bias of each, which get no weight decay."""
        return len(self.shape) - (self.experts > 0) == 1

    @property
    def of_one(self) -> ParameterSpec:
        """Return the parameter of one expert, as a checkpoint stores it."""
        return replace(self, shape=self.shape[1:], experts=0, of_token=1, sharing=1)

    def dealt(self, ep: int) -> ParameterSpec:
        """Return the parameter as one of ``ep`` ranks that share the experts holds it."""
        if not self.experts:
            return self
        own = self.experts // ep
        return replace(self, shape=(own, *self.shape[1:]), experts=own, sharing=ep)

    def copies(self, tp: int) -> int:
        """Return how many of ``tp`` ranks in a row hold the same part of a parameter that is cut."""
        return max(1, tp // self.heads) if self.heads else 1

    def replicated(self, tp: int) -> bool:
        """Tell whether several of ``tp`` ranks hold the same elements."""
        return self.cut is None and self.sharing == 1 or self.copies(tp) > 1

    def partial(self, tp: int, sequence_parallel: bool) -> bool:
        """Tell whether the gradient on each of ``tp`` ranks is one term of a sum over them.

        Under sequence parallelism a replicated parameter sees the rank's positions only. Key/value heads that several
        ranks hold see the rank's query heads only, and norms of heads see the rank's heads only.
        """
        of_own = sequence_parallel or self.copies(tp) > 1 or self.own_heads
        return tp > 1 and self.replicated(tp) and of_own

    def exact(self, tp: int) -> bool:
        """Tell whether messages never round it, as ``zero.Traits.exact`` says."""
        return self.replicated(tp) and not self.experts

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Return the shape on each of ``tp`` ranks. Rows of words must be padded (``padded_spec``)."""
        return tuple(n * self.copies(tp) // tp if dim == self.cut else n for dim, n in enumerate(self.shape))

    def local_numel(self, tp: int) -> int:
        return math.prod(self.local_shape(tp))


def norm(
    c: Backbone,
    name: str,
    size: int | None = None,
    cut: int | None = None,
    heads: int | None = None,
    own_heads: bool = False,
) -> Iterator[ParameterSpec]:
    """Yield a norm over ``size`` elements, by default the stream's. cut, heads, own_heads: as ``ParameterSpec``'s."""
    shape = (c.hidden_size if size is None else size,)
    weight = ParameterSpec(f"{name}.weight", shape, cut, heads, own_heads=own_heads)
    yield replace(weight, mean=0.0 if c.apply_layernorm_1p else 1.0)
    if c.normalization == "LayerNorm":
        yield replace(weight, name=f"{name}.bias")


def column(
    c: Backbone,
    name: str,
    rows: int,
    bias: bool,
    heads: int | None = None,
    cut: int | None = 0,
    columns: int | None = None,
) -> Iterator[ParameterSpec]:
    """Yield a linear whose rows tensor-parallel ranks share, or with ``cut`` None each holds. columns: its input's
    width, by default the stream's."""
    shape = (rows, columns or c.hidden_size)
    yield ParameterSpec(f"{name}.weight", shape, cut, heads, std=c.matrix_std, multiplies=True)
    if bias:
        yield ParameterSpec(f"{name}.bias", (rows,), cut, heads)


def convolution(name: str, channels: int, kernel: int, bias: bool) -> Iterator[ParameterSpec]:
    """Yield a convolution of each channel, which tensor-parallel ranks share, over ``kernel`` tokens. Its deviation
    is that of torch's and Megatron's uniform values: with a matrix's, states would begin as good as empty."""
    yield ParameterSpec(f"{name}.weight", (channels, 1, kernel), 0, std=1 / math.sqrt(3 * kernel))
    if bias:
        yield ParameterSpec(f"{name}.bias", (channels,), 0)


def row(c: Backbone, name: str, columns: int, bias: bool) -> Iterator[ParameterSpec]:
    """Yield a linear whose columns tensor-parallel ranks share, and whose output they add up.

    It writes to the residual stream, so its std is divided by the root of how many do (Radford et al. 2019, section
    2.3; Megatron's default).
    """
    std = c.matrix_std / math.sqrt(c.branches)
    yield ParameterSpec(f"{name}.weight", (c.hidden_size, columns), 1, std=std, multiplies=True)
    if bias:
        yield ParameterSpec(f"{name}.bias", (c.hidden_size,))
