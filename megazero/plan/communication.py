"""The bytes that one rank sends in a step, from sizes alone.

Pure. zero/plan.py says what moves for a unit; here are the sums over a step, and what layers and stages send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb
from typing import NamedTuple

from megazero.comm.wire import Codecs, Coding, filled
from megazero.config import RunConfig
from megazero.config.layout.context import gather_coding
from megazero.config.layout.outer import EXACT_BITS, feedback, keeps_momentum, outer_coding, planned_replicas
from megazero.config.layout.wire import dispatch_coding
from megazero.config.model.mixers import Mixer
from megazero.config.model.section import ModelConfig
from megazero.config.model.spec import HEAD, LayerSpec, ModuleSpec, model_spec
from megazero.config.options.optimizers import OptimizerConfig
from megazero.config.options.sections import GLOBAL_AUX, SEQUENCE_AUX, OuterConfig
from megazero.mesh.grid import AxisSpec, Grid
from megazero.mesh.levels import INTRA
from megazero.plan.gathers import Copies, Segment, gathers
from megazero.pp.partition import StageSpec
from megazero.pp.schedules import Action, Kind, Schedule, sends
from megazero.products import operand_bytes
from megazero.zero.plan import EXCHANGE, Hop, Hops, UnitCut, UnitPlan

Bytes = Counter[tuple[str, str]]  # by kind of hop and link
NUMBER = 4  # bytes of a number of rows, or of the largest number of a tensor
SCALARS = 2 * 8  # squared norm, order hash; fp64
OF_ROUNDING = 6 * 8  # where messages are quantised: two sums of squares for weights and gradients, two counts
EXPERT_SCALARS = 4 * 8  # of mixtures of experts: two losses, the worst load, its layer
COUNT = 4  # bytes of an expert's tokens in a block of samples
LOAD = 8  # and in a step


@dataclass(frozen=True)
class UnitShape:
    """The sizes of one unit.

    coded, exact: how many elements the whole unit's regions have, padding included; exact is 0 where nothing is
    quantised. partial: how many elements of this rank's OS slice have gradients that tensor-parallel ranks sum. tied:
    the pipeline's other end holds the unit too. apart: how many data-parallel neighbours hold other elements: of
    experts that ranks share. Then the unit lies on the axes of experts.
    """

    coded: int
    exact: int
    quantised: bool
    partial: int = 0
    tied: bool = False
    apart: int = 1

    @property
    def elements(self) -> int:
        return self.coded + self.exact

    def plan(self, cut: UnitCut, formats: Formats) -> UnitPlan[Coding]:
        """Return what moves for the unit on axes that cut it so."""
        codecs = formats.codecs if self.quantised else Codecs[Coding]()
        return UnitPlan(self.coded, self.exact, cut, codecs, formats.width, formats.sums)


def axes_of(apart: int, grid: Grid) -> tuple[AxisSpec, ...]:
    """Return the data-parallel axes, innermost first, of what ``apart`` neighbours hold other elements of."""
    return grid.data_axes if apart == 1 else grid.expert_axes


@dataclass(frozen=True)
class Formats:
    """The formats of hops, and what an exact element takes.

    width: the bytes of a parameter. sums: the bytes of a sum of gradients.
    """

    width: int
    sums: int
    codecs: Codecs[Coding] = Codecs()

    @classmethod
    def of(cls, codecs: Codecs[Coding], width: int, sums: int | None = None) -> Formats:
        """Return a run's formats. By default sums have at least 4 bytes."""
        return cls(width, sums or max(width, 4), codecs)


def model_state(
    units: Sequence[UnitShape],
    grid: Grid,
    formats: Formats,
    copies: Copies,
    program: Sequence[Segment],
    micro_batches: int,
    updates: Sequence[Hop[Coding]] = (),
) -> Bytes:
    """Return the bytes of a step in which every unit is updated: of its hops, and of sums and scalars beside them.

    updates: the hops of matrices to their owners, which the updates take back.
    """
    out: Bytes = Counter()

    def take(hops: Iterable[Hop[Coding]], times: int = 1) -> None:
        for hop in hops:
            out[hop.kind, hop.axis.link] += times * hop.sent

    plans = {
        unit: unit.plan(UnitCut.of(axes_of(unit.apart, grid), copies.whole_gradients), formats)
        for unit in set(units)
    }
    # Of experts, all that is left of P may be one rank: they are not gathered then.
    sizes = [plans[unit].ahead_bytes if plans[unit].cut.p else 0 for unit in units]
    moves = any(plan.gather for plan in plans.values())
    gathered = gathers(copies, program, sizes) if moves else Counter[int]()
    for index, unit in enumerate(units):
        plan = plans[unit]
        take(plan.refresh)
        take(plan.gather, gathered[index])
        take(plan.reduction(False), micro_batches - 1)
        take(plan.reduction(True, micro_batches == 1))
        take([plan.ends(grid.axis("pp"))] if unit.tied else [])
    take(updates, 2)
    partial = sum(unit.partial for unit in units)
    out["tp", INTRA] += (grid.tp - 1) * partial * formats.sums
    told = SCALARS + OF_ROUNDING * (not formats.codecs.exact)
    for link, rows in grid.rows_sent.items():
        out["scalar", link] += rows * told
    return +out


@dataclass(frozen=True)
class OuterFormat:
    """What outer steps keep and send.

    config: the options. sums: the bytes of an element of an anchor, of a residual, and of what is sent exactly.
    """

    config: OuterConfig
    sums: int

    @classmethod
    def of(cls, outer: OuterConfig, sums: int) -> OuterFormat | None:
        """Return the format of a run, or None if it takes no outer steps."""
        return cls(outer, sums) if outer.outer_meet else None

    @property
    def replicas(self) -> int:
        return planned_replicas(self.config)

    @property
    def momentum(self) -> bool:
        return keeps_momentum(self.config)

    @property
    def feedback(self) -> bool:
        return feedback(self.config) > 0

    def message(self, plan: UnitPlan[Coding]) -> int:
        """Return the bytes of a rank's message of a unit, which goes to every other replica."""
        width = self.sums if self.config.outer_bits == EXACT_BITS else 2
        return plan.message(plan.cut.ranks[-1], outer_coding(self.config), width, self.sums)


def matrix_width(optimizer: OptimizerConfig, width: int) -> int:
    """Return the bytes of an element of a matrix on its way to its owner; ``width``: of a parameter's."""
    return 2 if optimizer.muon_fp32_matmul_prec == "medium" else max(width, 4)


def update_hops(held: float, axes: Sequence[AxisSpec], width: int) -> Hops[Coding]:
    """Return the hops of matrices over these axes to their owners; their updates take as many back.

    held: the elements of them that a rank holds. width: the bytes of an element of the messages. Bytes are means over
    the ranks, and of owners that hold no more of a matrix than others do: at most what is sent, since near owners are
    chosen (mesh/dealing.py).
    """
    sent = (int(held * width * (axis.size - 1) / axis.size) for axis in axes)
    return tuple(Hop("update", EXCHANGE, i, axes[i - 1], None, each) for i, each in enumerate(sent, 1))


# -- activations ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Activation:
    """The activation [length, samples, hidden] of a micro-batch between layers. An element has ``width`` bytes.

    length: the tokens of a context-parallel rank.
    """

    length: int
    samples: int
    hidden: int
    width: int
    tp: int = 1
    sequence_parallel: bool = False

    @classmethod
    def of(cls, config: RunConfig, width: int) -> Activation:
        """Return a run's activation."""
        model, size = config.model, config.batch.micro_batch_size
        tp = config.parallel.tensor_model_parallel_size
        sharded = config.parallel.sequence_parallel and tp > 1
        return cls(config.own_length, size, model.hidden_size, width, tp, sharded)

    @property
    def own_tokens(self) -> int:
        """The tokens that this rank has between the linears of layers."""
        return self.length * self.samples // (self.tp if self.sequence_parallel else 1)

    @property
    def whole(self) -> int:
        return self.length * self.samples * self.hidden * self.width

    @property
    def sent(self) -> int:
        """The bytes of a message between stages. Where it can be cut, this is one tensor-parallel rank's part."""
        elements = self.whole // self.width
        return elements // self.tp * self.width if elements % self.tp == 0 else self.whole

    def summed(self, elements: int) -> int:
        """Return the bytes that a rank sends in a sum of so many elements of a token over tensor-parallel ranks: a
        ring's all-reduce, or with sequence parallel one half of it.
        """
        share = (self.tp - 1) * self.length * self.samples * elements * self.width // self.tp
        return share if self.sequence_parallel else 2 * share


def pipeline(schedule: Schedule, grid: Grid, rank: int, activation: Activation) -> Bytes:
    """Return the bytes of messages between stages.

    Where the messages are cut, the receivers gather them inside their tensor-parallel group.
    """
    out: Bytes = Counter()
    own, line = grid.axis("pp").index(rank), grid.axis("pp").ranks(rank)
    for (source, target), messages in sends(schedule, grid.pp).items():
        if source == own:
            out["pp", grid.link(rank, line[target])] += len(messages) * activation.sent
        elif target == own and not activation.sequence_parallel and activation.sent < activation.whole:
            out["tp", INTRA] += len(messages) * (grid.tp - 1) * activation.sent
    return out


def inside_modules(
    config: RunConfig,
    stages: Sequence[StageSpec],
    actions: Sequence[Action],
    grid: Grid,
    activation: Activation,
    rows: ExpertRows | None = None,
) -> Bytes:
    """Return the bytes of collectives inside modules, and of the sums that balance experts after each step.

    rows: those of a layer and micro-batch that go to experts on other ranks; None: they are not counted.
    """
    spec, out = model_spec(config.model), Counter[tuple[str, str]]()
    held = {stage.index: Counter(module.kind for _, module in spec.of_stage(stage)) for stage in stages}
    forwards = Counter(a.stage for a in actions if a.kind == Kind.FORWARD)
    backwards = Counter(a.stage for a in actions if a.kind in (Kind.BACKWARD, Kind.INPUT))
    for kind, module in spec.modules.items():
        both = module_bytes(config, module, grid, activation, rows)
        for sent, passes in zip(both, (forwards, backwards), strict=True):
            times = sum(held[stage][kind] * number for stage, number in passes.items())
            for hop, size in sent.items():
                out[hop] += int(times * size)
    if mixtures := sum(layer.experts for layer in spec.by_place):
        for link, numbers in grid.rows_sent.items():
            out["scalar", link] += numbers * EXPERT_SCALARS
        for link, size in grid.added_up(mixtures * (config.model.num_experts or 0) * LOAD).items():
            out["scalar", link] += size
    return +out


def module_bytes(
    config: RunConfig, module: ModuleSpec, grid: Grid, activation: Activation, rows: ExpertRows | None
) -> tuple[Bytes, Bytes]:
    """Return the bytes of collectives in a module's forward and in its backward, of one micro-batch."""
    out = Bytes(), Bytes()
    for sent, size in zip(out, module_sums(config, module, activation), strict=True):
        sent["tp", INTRA] += size
    if not isinstance(module, LayerSpec):
        return out
    exchanges = layer_exchanges(config, module.mixer, grid, activation) if grid.cp > 1 else ([], [])
    for sent, made in zip(out, exchanges, strict=True):
        for exchange in made:
            for link, others in exchange.others.items():
                sent["cp", link] += exchange.row * others
    if module.experts:
        out[0].update(_balance(config, grid, activation))
        moved = expert_rows(config, module, grid, activation, rows) if rows is not None else ({}, {})
        for sent, by_link in zip(out, moved, strict=True):
            sent.update({("ep", link): size for link, size in by_link.items()})
    return out


def _balance(config: RunConfig, grid: Grid, activation: Activation) -> Bytes:
    """Return the bytes of what balances a layer's experts in its forward (moe/): ranks with the same samples add up
    counts, and then those of a round, or they gather scores."""
    kinds, experts, out = config.training.balance_weights, config.model.num_experts or 0, Bytes()
    if config.training.sinkhorn:
        row = activation.own_tokens * experts * max(NUMBER, activation.width)
        out["tp", INTRA] += (grid.tp - 1) * row
        row *= grid.tp
        for axis in grid.cp_axes:
            for link, ranks in grid.others(axis).items():
                out["cp", link] += row * ranks
            row *= axis.size
    elif kinds:
        counts = (config.batch.micro_batch_size if SEQUENCE_AUX in kinds else 1) * experts * COUNT
        out["tp", INTRA] += 2 * (grid.tp - 1) * counts // grid.tp
        for axis in grid.cp_axes:
            for link, ranks in grid.others(axis).items():
                out["cp", link] += counts * ranks
    if GLOBAL_AUX in kinds:
        for axis in grid.round_axes:
            out["scalar", axis.link] += 2 * (axis.size - 1) * experts * LOAD // axis.size
    return out


class ContextExchange(NamedTuple):
    """An exchange of context-parallel ranks along ``axis``, in which each sends ``row`` bytes to each of the others,
    of whom so many lie beyond each link. gathers: all receive the same; else each its own, summed or not. coded: how
    many elements of a row are quantised.
    """

    axis: AxisSpec
    others: dict[str, int]
    row: int
    gathers: bool = False
    coded: int = 0


def layer_exchanges(
    config: RunConfig, mixer: Mixer, grid: Grid, activation: Activation
) -> tuple[list[ContextExchange], list[ContextExchange]]:
    """Return the exchanges in a layer's forward and in its backward.

    Queries, keys and values go to the ranks of their heads, and attention's output comes back. Where ranks outnumber
    the key/value heads, each receives a copy. With several groups the keys and values that a rank has then are
    gathered, across nodes and then inside the node, and their gradients are summed the other way round. A recompute
    repeats all, but of attention alone not the way back, which nothing reads.
    """
    heads, inside, across = grid.cp_axes
    mixed, tokens = mixer.exchanged(activation.tp, heads.size), activation.length * activation.samples
    channel = tokens * activation.width  # bytes of one over the rank's tokens
    there, back = (
        [ContextExchange(heads, grid.others(heads), channel * channels // heads.size)] * (heads.size > 1)
        for channels in (mixed.there, mixed.back)
    )
    hops = ((across, 1), (inside, across.size))  # of so many ranks' keys
    exact = [
        ContextExchange(axis, grid.others(axis), sum(mixed.gathered) * channel * size, True)
        for axis, size in hops
        if axis.size > 1
    ]
    gathers = [_coded(each, config, [n * tokens for n in mixed.gathered]) for each in exact]
    sums = [ContextExchange(each.axis, each.others, each.row) for each in exact[::-1]]
    again = {"full": [*there, *gathers, *back], "selective": [*there, *gathers]}
    repeated = again.get(config.training.recompute_granularity, [])
    return [*there, *gathers, *back], [*repeated, *back, *sums, *there]


def _coded(gather: ContextExchange, config: RunConfig, elements: Sequence[int]) -> ContextExchange:
    """Return a gather of tensors of so many elements as it is sent: across nodes perhaps in the format of
    --cp-gather-bits, each as whole blocks."""
    coding = gather_coding(config.parallel)
    if coding is None or gather.axis.link == INTRA:
        return gather
    coded = [filled(n, coding.block) for n in elements]
    row = sum(map(coding.message_bytes, coded))
    return ContextExchange(gather.axis, gather.others, row, True, sum(coded))


class ExpertRows(NamedTuple):
    """The rows of a rank in a layer's forward that leave it for experts, and those that come to it, inside the node
    and across nodes. Across, they are tokens, of which each goes once to a node."""

    sent: float
    received: float
    sent_across: float = 0
    received_across: float = 0


@lru_cache(maxsize=64)
def nodes_of_token(model: ModelConfig, nodes: int) -> float:
    """Return to how many of ``nodes``, which share the experts in their order, a token goes if all are as likely.

    A router that is limited to groups chooses among these alike, and as many experts of each that it takes.
    """
    count, k = model.num_experts or 0, model.moe_router_topk
    limited = model.moe_router_group_topk is not None
    groups, taken = (
        (model.moe_router_num_groups or 1, model.moe_router_group_topk or 1) if limited else (1, 1)
    )
    size, share, (each, more) = count // groups, count // nodes, divmod(k, taken)

    def missed(there: int) -> float:
        """Return how likely a token has none of ``there`` of a group that it takes; ``more`` have one more of it."""
        few, many = (comb(size - there, n) / comb(size, n) for n in (each, each + (more > 0)))
        return few + (many - few) * more / taken

    visited = 0.0
    for node in range(nodes):
        first, last = node * share, (node + 1) * share
        here = [max(0, min(last, (g + 1) * size) - max(first, g * size)) for g in range(groups)]
        # By how many groups are taken: the sum, over all choices of these, of how likely all are missed.
        ways = [1.0] + [0.0] * taken
        for probability in map(missed, here):
            for number in range(taken, 0, -1):
                ways[number] += ways[number - 1] * probability
        visited += 1 - ways[taken] / comb(groups, taken)
    return visited


def even_rows(config: RunConfig, grid: Grid, activation: Activation) -> ExpertRows:
    """Return the rows if every rank's go to all experts alike, as far as groups of experts allow."""
    model, (inside, across), tokens = config.model, grid.ep_axes, activation.own_tokens
    moved = tokens * model.moe_router_topk * (inside.size - 1) / inside.size
    crossing = tokens * nodes_of_token(model, across.size) * (across.size - 1) / across.size
    return ExpertRows(moved, moved, crossing, crossing)


def expert_rows(
    config: RunConfig, layer: LayerSpec, grid: Grid, activation: Activation, rows: ExpertRows
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the bytes by link that a rank sends to those that share the experts, in a layer's forward and backward.

    A row goes there with its probability, in at least fp32, and comes back without it; gradients take both ways in
    reverse. Across nodes a row goes with the probabilities of all its experts, and before, once, with their numbers.
    Before, ranks tell each other numbers of rows, which a recompute knows.
    """
    if not layer.experts:
        return {}, {}
    model, (inside, across) = config.model, grid.ep_axes
    row, value = activation.hidden * activation.width, max(activation.width, 4)
    coding = dispatch_coding(config.parallel.moe_dispatch_across_nodes, activation.hidden)
    coded = coding.message_bytes(activation.hidden) if coding else row
    recompute = config.training.recompute_granularity in ("full", "mlp")
    own, k = (model.num_experts or 0) // grid.ep, model.moe_router_topk

    def ways(sent: float, received: float, there: float, values: float, told: float) -> tuple[float, float]:
        """there: bytes of a row that leaves, and of its output's gradient. values: of those beside a row."""
        leaving, back = sent * (there + values), received * row
        again = leaving + layer.rereads_experts * back if recompute else 0
        return told + leaving + back, again + sent * there + back + received * values

    numbers = (inside.size - 1) * own * NUMBER, (across.size - 1 + rows.sent_across * k) * NUMBER
    near = ways(rows.sent, rows.received, row, value, numbers[0])
    far = ways(rows.sent_across, rows.received_across, coded, k * value, numbers[1])
    forward, backward = ({across.link: outer, INTRA: inner} for inner, outer in zip(near, far, strict=True))
    return forward, backward


def module_sums(config: RunConfig, module: ModuleSpec, activation: Activation) -> tuple[int, int]:
    """Return the bytes of a module's collectives over tensor-parallel ranks, in its forward and in its backward.

    The forward adds up outputs; under sequence parallelism it first gathers inputs, and scatters the sums. The
    backward does the same with the gradients, and under sequence parallel gathers the inputs once more.
    """
    summed, wire, hidden = activation.summed, int(activation.sequence_parallel), activation.hidden
    shared = module.mixer.work.shared if isinstance(module, LayerSpec) else 0
    gathered, agreed = _input_bytes(config, module, module.inputs, activation)
    forward = summed(module.outputs + wire * shared) + gathered + agreed
    backward = summed(module.inputs + shared + wire * module.outputs) + gathered
    if module.kind == HEAD:
        # Chunks compute the head's gradients in its forward, which has the gathered input already.
        sums = model_spec(config.model).predictions * _sums(activation, 2)
        return forward + sums, backward - gathered * has_loss_chunks(config)
    if not isinstance(module, LayerSpec):
        return forward, backward
    norms = 2 * _sums(activation, module.mixer.work.norm_sums) // activation.tp  # a ring's all-reduce
    forward, backward, repeated = forward + norms, backward + norms, 0
    # A recompute repeats the forward, or its second half, but for the last sum if nothing reads it.
    if config.training.recompute_granularity == "full":
        repeated = forward
    elif config.training.recompute_granularity == "mlp":
        inputs = module.fed.sums * hidden
        repeated = summed(inputs) + sum(_input_bytes(config, module, inputs, activation, "mlp."))
    if repeated and not module.rereads_output:
        repeated -= summed(hidden)
    return forward, backward + repeated


def _input_bytes(
    config: RunConfig, module: ModuleSpec, inputs: int, activation: Activation, part: str = ""
) -> tuple[int, int]:
    """Return the bytes of one gather of these inputs, elements of a token of the module's part, and of what ranks
    agree on before the first one."""
    if not activation.sequence_parallel:
        return 0, 0
    precision, peers, hidden = config.precision, activation.tp - 1, activation.hidden
    rounded = module.in_fp8(precision.fp8_least, part).columns if isinstance(module, LayerSpec) else 0
    each = operand_bytes(precision.product, hidden, activation.width) * activation.own_tokens
    gathered = peers * each * rounded + activation.summed(inputs - rounded * hidden)
    return gathered, 2 * peers * NUMBER // activation.tp * rounded * (precision.product == "fp8_tensorwise")


def _sums(activation: Activation, numbers: int) -> int:
    """Return the bytes of so many numbers of each token from all other tensor-parallel ranks."""
    width = max(activation.width, 4)
    return (activation.tp - 1) * numbers * activation.length * activation.samples * width


def has_loss_chunks(config: RunConfig) -> bool:
    """Return whether a micro-batch's loss takes several chunks. Where the planner is still to choose, it does not."""
    size = config.training.loss_chunk_tokens
    return isinstance(size, int) and size < config.batch.micro_batch_size * config.own_length
