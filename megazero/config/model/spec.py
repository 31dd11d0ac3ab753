"""The description of a model: its modules with their parameters, products and collectives. No torch.

A model is an embedding, layers of one or several kinds, and a head. The decoder checks that it is built as this says.
Placements, initial values, FLOPs, the planner and ``verify`` read sizes here and nowhere else.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from megazero.config.model.mixers import MIXERS, Mixer
from megazero.config.model.parameters import ParameterSpec, column, norm, row
from megazero.config.model.section import ModelConfig
from megazero.families.layer_kinds import DENSE, EXPERTS, NOTHING, LayerKind, layer_kinds
from megazero.pp.partition import StageSpec
from megazero.products import fits_fp8

# The numbers of xIELU where they begin: behind softplus, and a half for the second, both factors are 0.8.
XIELU = (("alpha_p", math.log(math.expm1(0.8))), ("alpha_n", math.log(math.expm1(0.3))))
EMBEDDING, LAYER, HEAD = "embedding", "layer", "head"  # kinds of modules; other layers are "layer 2", ...


def is_layer(kind: str) -> bool:
    return kind not in (EMBEDDING, HEAD)


@dataclass(frozen=True)
class ModuleSpec:
    """The embedding, a kind of layer, or the head.

    inputs, outputs: elements of a token that its tensor-parallel linears take in, and that they add up.
    """

    kind: str
    parameters: tuple[ParameterSpec, ...]
    inputs: int
    outputs: int

    @cached_property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)

    @cached_property
    def matrices(self) -> int:
        """Return the elements of the matrices."""
        return sum(p.numel for p in self.parameters if p.multiplies)

    @cached_property
    def multiply_adds(self) -> int:
        """Return the multiply-adds of one token: elements of the matrices, of experts of those that it goes to."""
        return sum(p.multiply_adds for p in self.parameters)


class Elements(NamedTuple):
    """Numbers of one token: in the residual stream, which sequence parallelism cuts, and inside attention and MLP,
    which tensor parallelism cuts."""

    stream: int
    inner: int


class Fed(NamedTuple):
    """What a layer's MLP, or experts, and their norms are of it: activations that ranks add up, multiply-adds and
    elements moved, as a backward that computes them again repeats them, and elements kept."""

    sums: int
    multiply_adds: int
    moved: Elements
    kept: Elements


class LargeLinears(NamedTuple):
    """The linears of a layer that are multiplied in fp8.

    columns: how many inputs [s, b, h] column-parallel ones have. rows, outputs: elements of a token that go into
    row-parallel ones, and come out of column-parallel ones; ranks cut both. written: elements that come out of
    row-parallel ones. widest: the most that comes out of those of one input. matrices: elements of the weights, each
    of which is a multiply-add of a token.
    """

    columns: int = 0
    rows: int = 0
    outputs: int = 0
    written: int = 0
    widest: int = 0
    matrices: int = 0


@dataclass(frozen=True)
class LayerSpec(ModuleSpec):
    """A kind of layer.

    moved: elements that a forward reads and writes beside the matrices. kept: elements that autograd keeps for the
    backward, with a fused attention kernel. gradients: elements that the backward holds at once; none is cut along
    the stream. fed: its second half. rereads_output: the backward reads the last output itself. places: the numbers
    of the layers.
    """

    moved: Elements
    kept: Elements
    gradients: Elements
    mixer: Mixer
    fed: Fed
    experts: bool = False
    rereads_output: bool = False
    rereads_experts: bool = False
    places: tuple[int, ...] = ()

    @property
    def linears(self) -> Iterator[ParameterSpec]:
        """The matrices of column- and row-parallel linears, which multiply as a run's products do."""
        matrices = (p for p in self.parameters if p.multiplies and p.cut is not None and not p.experts)
        return (p for p in matrices if self.mixer.in_fp8 or not p.name.startswith("attention."))

    def in_fp8(self, least: int | None, part: str = "") -> LargeLinears:
        """Return the linears that are multiplied in fp8 (products/fp8.py), none if ``least`` is None.

        part: what their names begin with.
        """
        found, by_input = LargeLinears(), dict[tuple[str, int | None], list[tuple[int, ...]]]()
        for p in self.linears:
            if p.name.startswith(part):
                by_input.setdefault((p.name.rsplit(".", 2)[0], p.cut), []).append(p.shape)
        for (_, cut), shapes in by_input.items():
            if least is None or not fits_fp8(shapes, least):
                continue
            out, into, columns = sum(n for n, _ in shapes), shapes[0][1], cut == 0
            found = LargeLinears(
                columns=found.columns + columns,
                rows=found.rows + into * (not columns),
                outputs=found.outputs + out * columns,
                written=found.written + out * (not columns),
                widest=max(found.widest, out),
                matrices=found.matrices + out * into,
            )
        return found


class ModelSpec:
    """The modules of a model. They are made when they are asked for: layers do not need the vocabulary.

    ep: how many ranks share the experts, of which layers have one's.
    """

    def __init__(self, config: ModelConfig, ep: int = 1) -> None:
        self.config, self.ep = config, ep

    @cached_property
    def embedding(self) -> ModuleSpec:
        c = self.config
        parameters = (*_positions(c), _words(c, "tokens.weight"))
        return ModuleSpec(EMBEDDING, parameters, inputs=0, outputs=c.hidden_size)

    @cached_property
    def head(self) -> ModuleSpec:
        c = self.config
        weight = replace(_words(c, "weight"), tied=not c.untie_embeddings_and_output_weights, multiplies=True)
        # It projects every prediction, and calls the embedding for all but the first.
        inputs, outputs = self.predictions * c.hidden_size, c.mtp_num_layers * c.hidden_size
        return ModuleSpec(HEAD, (weight, *norm(c, "norm")), inputs, outputs)

    @property
    def predictions(self) -> int:
        """How many tokens ahead training predicts."""
        return 1 + self.config.mtp_num_layers

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The kinds of layers, by their first places.

        Layers of one kind have the same parameters and sizes; windows and rotary positions may differ.
        """
        places: dict[LayerSpec, list[int]] = {}
        for (choices, further), numbers in _by_choices(self.config).items():
            layer = _layer(self.config, choices)
            layer = _further(self.config, layer) if further else layer
            own = tuple(p.dealt(self.ep) for p in layer.parameters)
            places.setdefault(replace(layer, parameters=own), []).extend(numbers)
        first, *others = (replace(each, places=tuple(sorted(numbers))) for each, numbers in places.items())
        return (first, *(replace(each, kind=f"{LAYER} {i}") for i, each in enumerate(others, start=2)))

    @cached_property
    def by_place(self) -> tuple[LayerSpec, ...]:
        """The kind of every layer, those that predict further tokens included."""
        kinds = {place: kind for kind in self.layers for place in kind.places}
        return tuple(kinds[i] for i in self.config.all_layers)

    @cached_property
    def modules(self) -> Mapping[str, ModuleSpec]:
        """The modules by kind, in the order of use."""
        return {module.kind: module for module in (self.embedding, *self.layers, self.head)}

    @cached_property
    def layer_matrices(self) -> int:
        """The elements of all layers' matrices."""
        return sum(len(kind.places) * kind.matrices for kind in self.layers)

    @cached_property
    def multiply_adds(self) -> int:
        """The multiply-adds of one token in all layers, those of pairs of tokens aside."""
        return sum(len(kind.places) * (kind.multiply_adds + kind.mixer.work.token) for kind in self.layers)

    def of_stage(self, stage: StageSpec) -> Iterator[tuple[str, ModuleSpec]]:
        """Yield the modules of a pipeline stage with their names, in the order of use. What the head calls of others
        counts as its own."""
        if stage.embedding:
            yield EMBEDDING, self.embedding
        yield from ((f"layers.{i}", self.by_place[i]) for i in stage.layers)
        if stage.head:
            yield HEAD, self.head

    def held(self, stages: Iterable[StageSpec]) -> dict[str, ParameterSpec]:
        """Return the parameters of stages by name, in the order of ``named_parameters``: tied ones once."""
        stages, named = list(stages), dict[str, ParameterSpec]()
        first = [(EMBEDDING, self.embedding)] * any(stage.embeds for stage in stages)
        for name, module in (*first, *(pair for stage in stages for pair in self.of_stage(stage))):
            embedded = name == HEAD and any(p.tied for p in named.values())
            named |= {f"{name}.{p.name}": p for p in module.parameters if not (p.tied and embedded)}
        return named

    @cached_property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """All parameters by name."""
        return self.held([StageSpec(0, 0, self.config.all_layers, True, True, self.config.mtp_num_layers)])


@lru_cache(maxsize=64)
def model_spec(config: ModelConfig) -> ModelSpec:
    """Return the description of the model with its true vocabulary."""
    return ModelSpec(config)


@lru_cache(maxsize=64)
def padded_spec(config: ModelConfig, tp: int, ep: int = 1) -> ModelSpec:
    """Return the description of the model with the vocabulary that ``tp`` ranks share, and the experts of one of
    ``ep``."""
    return ModelSpec(replace(config, vocab_size=config.padded_vocab_size(tp)), ep)


# -- parameters ------------------------------------------------------------------------------------------


def _words(c: ModelConfig, name: str) -> ParameterSpec:
    shape, tied = (c.vocabulary, c.hidden_size), c.embeds_at_both_ends
    return ParameterSpec(name, shape, 0, std=c.init_method_std, vocabulary=True, tied=tied)


def _positions(c: ModelConfig) -> Iterator[ParameterSpec]:
    if c.position_embedding_type == "learned_absolute":
        yield ParameterSpec("positions", (c.max_position_embeddings, c.hidden_size), std=c.init_method_std)


# -- layers ----------------------------------------------------------------------------------------------


def _by_choices(c: ModelConfig) -> dict[tuple[LayerKind, bool], list[int]]:
    """Return the numbers of layers by what they choose, and whether they predict further tokens."""
    found: dict[tuple[LayerKind, bool], list[int]] = {}
    for index, choices in enumerate(layer_kinds(c, c.all_layers)):
        found.setdefault((choices, index >= c.num_layers), []).append(index)
    return found


def _layer(c: ModelConfig, choices: LayerKind) -> LayerSpec:
    """Describe a layer (models/layer.py). Its parameters are in the order of ``named_parameters``."""
    norms, h = c.norms_of(choices), c.hidden_size
    mixer, mlp = MIXERS[choices.mixer](c), FEED_FORWARDS[choices.feed_forward](c)
    mixes, feeds = (int(branch != NOTHING) for branch in (choices.mixer, choices.feed_forward))
    blocks = (
        ("input_norm", mixer.parameters()),
        ("attention_output_norm", ()),
        ("mlp_norm", mlp.parameters),
        ("mlp_output_norm", ()),
    )
    parameters = tuple(
        p for name, block in blocks for p in (*(norm(c, name) if name in norms else ()), *block)
    )
    # The input of each norm and of each branch.
    streams = max(2 * (mixes + feeds), mixes + feeds + len(norms))
    # The mixer has linears that ranks share, and the MLP, of experts the shared ones.
    shared = c.moe_shared_expert_intermediate_size is not None
    last_read = choices.experts and (not shared or c.moe_shared_expert_gate)
    reads_output = c.hidden_dropout > 0 or norms[-1].endswith("output_norm")
    # What nothing reads is not computed again.
    read = reads_output or (choices.experts and (shared or c.add_bias_linear))
    again = [
        p
        for p in mlp.parameters
        if reads_output or (p.experts and read) or not p.name.endswith("down_proj.weight")
    ]
    # The inputs of MLP and of its output's norm; of a parallel block it keeps the residual instead, too.
    inside = h * (("mlp_norm" in norms) + ("mlp_output_norm" in norms) - c.parallel_block)
    sums = feeds * int(not choices.experts or shared)
    return LayerSpec(
        LAYER,
        parameters,
        inputs=mixer.work.taken + h * sums,
        outputs=h * mixes + h * sums,
        moved=Elements(5 * h * (mixes + feeds), mixer.work.moved + mlp.moved),
        kept=Elements(streams * h + mixer.work.latents, mixer.work.kept + mlp.kept),
        gradients=Elements(2 * h, mlp.gradients),
        mixer=mixer,
        fed=Fed(
            sums,
            sum(p.multiply_adds for p in again),
            moved=Elements(5 * h * feeds, mlp.moved),
            kept=Elements(inside, mlp.kept),
        ),
        experts=choices.experts,
        rereads_output=reads_output or last_read,
        rereads_experts=reads_output or shared,
    )


def _further(c: ModelConfig, layer: LayerSpec) -> LayerSpec:
    """Describe such a layer that predicts a further token (models/multi_token.py)."""
    h = c.hidden_size
    projection = column(c, "eh_proj", h, bias=False, cut=None, columns=2 * h)
    own = (*norm(c, "enorm"), *norm(c, "hnorm"), *projection, *norm(c, "output_norm"))
    # The inputs of three norms and of the projection, of which the norms' outputs are copied.
    return replace(
        layer,
        parameters=(*layer.parameters, *own),
        moved=layer.moved._replace(stream=layer.moved.stream + 12 * h),
        kept=layer.kept._replace(stream=layer.kept.stream + 5 * h),
    )


class Block(NamedTuple):
    """An MLP: its parameters, and the inner elements of a token that are moved, kept, and gradients."""

    parameters: tuple[ParameterSpec, ...] = ()
    moved: int = 0
    kept: int = 0
    gradients: int = 0


def _mlp(c: ModelConfig, name: str = "mlp", width: int | None = None) -> Block:
    ffn, bias, learnt = width or c.ffn_hidden_size, c.add_bias_linear, XIELU if c.xielu else ()
    parameters = [
        *(column(c, f"{name}.gate_proj", ffn, bias) if c.gated_mlp else ()),
        *column(c, f"{name}.up_proj", ffn, bias),
        *row(c, f"{name}.down_proj", ffn, bias),
        *(ParameterSpec(f"{name}.activation.{n}", (1,), mean=x, own_heads=True) for n, x in learnt),
    ]
    # Up (and gate, f(gate)) and down's input. Of other gates than SiLU and GELU a sigmoid, and clamped gate and up.
    moved, kept = (5, 4) if c.gated_mlp else (2, 2)
    if c.quick_geglu:
        moved, kept = moved + 5, kept + 1
    if c.activation_func_clamp_value is not None:
        moved, kept = moved + 4, kept + 2
    return Block(tuple(parameters), moved * ffn, kept * ffn, gradients=2 * ffn)


def _experts(c: ModelConfig) -> Block:
    """Describe a mixture of experts (models/experts.py): a router, experts, and experts that every token goes to.

    Experts are stacked, and no tensor-parallel rank cuts them: under sequence parallelism it has tokens of its own.
    """
    assert c.num_experts is not None
    h, shared = c.hidden_size, c.moe_shared_expert_intermediate_size
    each, count, topk = _mlp(c, "mlp.experts", c.expert_width), c.num_experts, c.moe_router_topk
    stacked = [
        replace(p, shape=(count, *p.shape), cut=None, experts=count, of_token=topk) for p in each.parameters
    ]
    weight = ParameterSpec("mlp.router.weight", (count, h), std=c.matrix_std, multiplies=True)
    bias = replace(weight, name="mlp.router.bias", shape=(count,), multiplies=False)
    router = (weight, bias) if c.add_bias_linear else (weight,)
    beside = _mlp(c, "mlp.shared_expert", shared) if shared else Block()
    gate = ParameterSpec("mlp.shared_gate.weight", (1, h), std=c.matrix_std, multiplies=True)
    gated = (gate,) if shared and c.moe_shared_expert_gate else ()
    # Rows are laid out by expert, and by token and added: 5 h elements of each in a forward, 8 h in a backward, which
    # counts as two forwards. Its activation is multiplied by its probability, 2 w and 12 w; the one before is kept,
    # too. SwiGLU does both in one operation (kernels/weighted_swiglu.py), which keeps gate, up and its result; what
    # it moves counts as before until a card has measured it. Scores are in fp32 and indices in int64: some elements
    # of each expert and row. Behind a gate an output is kept.
    width, scores, kept_gate = c.expert_width, 2 * count + 16 * topk, h if gated else 0
    kept = 3 * width if c.plain_swiglu else each.kept + width
    return Block(
        (*router, *stacked, *beside.parameters, *gated),
        moved=topk * (each.moved + (13 * h + 14 * width) // 3) + beside.moved + scores,
        kept=topk * (h + kept) + beside.kept + scores + kept_gate,
        gradients=topk * (each.gradients + 2 * h) + beside.gradients,
    )


FEED_FORWARDS: Mapping[str, Callable[[ModelConfig], Block]] = {
    DENSE: _mlp,
    EXPERTS: _experts,
    NOTHING: lambda c: Block(),
}


def router_biases(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Map the names of the routers' biases to their shapes. They are fp32 and no parameters: steps count for them."""
    if config.num_experts is None or not config.moe_router_enable_expert_bias:
        return {}
    kinds = enumerate(layer_kinds(config, config.all_layers))
    name = "layers.{}.mlp.router.e_score_correction_bias"
    return {name.format(i): (config.num_experts,) for i, kind in kinds if kind.experts}


# -- counts ----------------------------------------------------------------------------------------------


def parameter_count(config: ModelConfig, vocabulary: int | None = None) -> int:
    """Count the parameters of the whole model, tied weights once.

    The vocabulary is the true one, or ``vocabulary`` rows, such as the padded ones that Megatron counts.
    """
    if vocabulary is not None:
        config = replace(config, vocab_size=vocabulary)
    spec = model_spec(config)
    head = sum(p.numel for p in spec.head.parameters if not p.tied)
    return spec.embedding.numel + sum(len(kind.places) * kind.numel for kind in spec.layers) + head


def active_count(config: ModelConfig) -> int:
    """Count the parameters that one token meets: of experts those that it goes to."""
    spec = model_spec(config)
    idle = sum(len(kind.places) * (p.numel - p.of_a_token) for kind in spec.layers for p in kind.parameters)
    return parameter_count(config) - idle


def training_flops(config: ModelConfig, sequence_lengths: Iterable[int], tp_size: int = 1) -> int:
    """Count the operations of forward and backward over sequences of these lengths (T is their sum):

        6 T [sum over layers of n + h V] + 3 sum over layers of m sum(length^2 - (length - window)^2)

    With layers that predict further tokens h V counts once for each, too.

    The last term is 0 in a layer without a window, or with a longer one. Here n are the multiply-adds of one token in
    a layer's matrices and in a state of its mixer, m those of two tokens in its mixer and V the padded vocabulary.
    A multiply-add counts as 2 operations, and the backward as twice the forward.
    Attention counts the causal half of its score matrix. Recompute, norms, softmax and the optimizer are left out.
    This is Megatron's accounting (Narayanan et al. 2021, section 5.1), with the causal half.
    """
    lengths, spec = list(sequence_lengths), model_spec(config)
    dense = spec.multiply_adds + spec.predictions * config.hidden_size * config.padded_vocab_size(tp_size)
    pairs = 0
    for kind in spec.layers:
        windows = Counter(choices.window for choices in layer_kinds(config, kind.places))
        pairs += kind.mixer.work.pair * sum(
            count * (length**2 - (max(0, length - window) ** 2 if window else 0))
            for window, count in windows.items()
            for length in lengths
        )
    return 6 * sum(lengths) * dense + 3 * pairs
