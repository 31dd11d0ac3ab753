"""Seconds of a rank's own work: a micro-batch's operations, and the coding of messages.

Matrix products run at a share of the device's peak, but not faster than their weights are read. Everything else takes
the time of the bytes it moves. Measured modules scale these times. Multiply-adds are those of
config/model/spec.py, counted here as the kernels execute them. Coding takes the time of the bytes that are read and
written.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

from megazero.config import RunConfig
from megazero.config.model.attention import BAND, needs_mask, planned
from megazero.config.model.spec import (
    EMBEDDING,
    HEAD,
    LAYER,
    LargeLinears,
    LayerSpec,
    ModuleSpec,
    is_layer,
    padded_spec,
)
from megazero.config.options.cluster import Cluster, MeasuredLayer
from megazero.families.layer_kinds import layer_kinds
from megazero.mesh.grid import Grid
from megazero.mesh.levels import INTER, INTRA
from megazero.plan.communication import (
    Activation,
    ContextExchange,
    even_rows,
    expert_rows,
    has_loss_chunks,
    layer_exchanges,
    module_sums,
)
from megazero.plan.seconds import Collectives
from megazero.plan.units import WIDTHS
from megazero.pp.schedules import Kind

ATTENTION_BACKWARD = 2.5  # of its forward: fused kernels compute the scores once more
# Per element of an optimizer slice: the norm reads 4, the clip reads and writes 8, the update reads 16 and writes 12.
UPDATE_BYTES = 40
# Bytes of an element that is converted to fp8: it is read for its largest number, read and written; in a backward
# written transposed, too.
CONVERTED, TURNED = 5, 2
COMPILED = 0.5  # of the bytes of a layer's operations that are no products, where a compiler joins them
# How often a forward reads and writes the logits. A backward counts as two: a compiler's passes are written by the
# product, read by the loss, and read and written by its gradient.
LOGITS, COMPILED_LOGITS = 3, 4 / 3
CODEC_SHARE = 0.5  # of the memory's rate, where a cluster file has no rate of codecs


class Spent(NamedTuple):
    """Seconds of an action: of compute, of recompute, and in messages of tensor parallelism, of context parallelism
    and of rows on their way to experts and back."""

    compute: float = 0.0
    recompute: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    experts: float = 0.0


class ModuleTimes(NamedTuple):
    """The seconds of one module for one micro-batch.

    backward: that of the inputs alone. weight: seconds of the weights' gradients.
    """

    forward: Spent
    backward: Spent
    weight: float = 0.0

    def spent(self, kind: Kind) -> Spent:
        """Return what an action of this kind takes for the module."""
        if kind == Kind.FORWARD:
            return self.forward
        if kind == Kind.WEIGHT:
            return Spent(self.weight)
        weight = self.weight if kind == Kind.BACKWARD else 0.0
        return self.backward._replace(compute=self.backward.compute + weight)


class Sizes(NamedTuple):
    """The size of a forward of one module and micro-batch on a rank.

    matrices, attention, other: operations. core: those of matrices inside the core that selective recompute repeats.
    moved: bytes beside the matrices. weights: elements of the matrices. fed: the shares of matrices and of moved that
    a recompute of the MLP repeats.
    """

    matrices: float
    attention: float
    moved: float
    weights: float
    other: float = 0.0
    products: int = 0
    keys: float = 0.0
    core: float = 0.0
    fed: tuple[float, float] = (0.0, 0.0)

    @property
    def operations(self) -> float:
        return self.matrices + self.attention + self.other


class Compute:
    """The seconds of a run's modules on one rank of a cluster."""

    def __init__(
        self, config: RunConfig, cluster: Cluster, collectives: Collectives, grid: Grid | None = None
    ) -> None:
        """grid: where the ranks lie, if messages of context parallelism and rows of experts have seconds. Raises
        ValueError if the cluster's devices do not compute in the run's dtype.
        """
        self.grid = grid
        # The activations of base layouts that share this, by all else that they are.
        self.known: dict[Any, Any] = {}
        self.config, self.cluster, self.collectives = config, cluster, collectives
        device, dtype = cluster.device, config.precision.params_dtype
        self.width = WIDTHS[dtype]
        self.matrix_rate = device.peak(dtype) * device.matmul_efficiency
        self.large_rate = device.peak(config.precision.product) * device.matmul_efficiency
        self.memory_rate = device.memory_gbytes_per_s * 1e9
        self.layer_rate = (
            self.memory_rate * device.memory_efficiency / (COMPILED if config.training.compile else 1)
        )
        self.attention_rate = device.peak(dtype) * (device.attention_efficiency or device.matmul_efficiency)
        self.codec_rate = (device.codec_gbytes_per_s or device.memory_gbytes_per_s * CODEC_SHARE) * 1e9
        self.activation = Activation.of(config, self.width)
        self.tp, self.sharded = self.activation.tp, self.activation.sequence_parallel
        self.tokens = config.batch.micro_batch_size * config.own_length
        self.spec = padded_spec(config.model, self.tp, config.parallel.expert_model_parallel_size)
        layers = {layer.kind: self._layer(layer) for layer in self.spec.layers}
        self.sizes = {EMBEDDING: self._embedding(), **layers, HEAD: self._head()}
        self.times = {kind: self._module(kind, sizes) for kind, sizes in self.sizes.items()}
        self.action_seconds = {
            name: {kind: sum(t.spent(kind)) for kind in Kind} for name, t in self.times.items()
        }

    def update(self, elements: float) -> float:
        """Return the seconds of the norm and the optimizer's update of this many elements."""
        rate = self.cluster.device.update_gbytes_per_s
        return elements * UPDATE_BYTES / (self.memory_rate if rate is None else rate * 1e9)

    def moved(self, size: float) -> float:
        """Return the seconds in which a codec, or a sum, reads and writes this many bytes."""
        return size / self.codec_rate

    def decoded(self, elements: float) -> float:
        """Return the seconds in which so many elements of parameters, or of keys and values, are decoded."""
        return self.moved(elements * 1.5 * self.width)

    def summed(self, elements: float, sums: int) -> float:
        """Return the seconds in which an exchange of so many elements of gradients is coded, decoded and summed.

        sums: the bytes of a sum.
        """
        return self.moved(elements * (self.width + sums) / 2)

    def _layer(self, layer: LayerSpec) -> Sizes:
        model, tp, tokens = self.config.model, self.tp, self.tokens
        length, documents = model.seq_length, self.config.data.reset_attention_mask
        kinds = layer_kinds(model, layer.places)
        # Keys of a query. With a mask kernels compute the hidden half, too; documents' lengths are not known.
        choice, on_host = self.config.training.attention_backend, self.cluster.on_host
        groups = 1 if self.grid is None else self.grid.cp_keys
        backend = planned(model, choice, documents, 8 * self.width, on_host, groups > 1)
        dense = needs_mask(model, backend, documents)
        windows = [length / 2 if kind.window is None else kind.window + BAND for kind in kinds]
        keys = length if dense else sum(min(length / 2, each) for each in windows) / len(kinds)
        work = layer.mixer.work
        core = 2 * tokens * groups * work.expansion / tp
        matrices = 2 * tokens * layer.multiply_adds / tp + core * (groups - 1) / groups
        attention, keys = 2 * tokens * (keys * work.pair + work.token) / tp, keys if work.pair else 0.0
        moved, again = (
            each.stream / (tp if self.sharded else 1) + each.inner / tp
            for each in (layer.moved, layer.fed.moved)
        )
        products = sum(p.multiplies for p in layer.parameters)
        weights = sum(p.local_numel(tp) for p in layer.parameters if p.multiplies)
        fed = layer.fed.multiply_adds / layer.multiply_adds, again / moved
        moved *= tokens * self.width
        return Sizes(matrices, attention, moved, weights, 0.0, products, keys, core, fed)

    def _head(self) -> Sizes:
        model, tp, tokens = self.config.model, self.tp, self.spec.predictions * self.tokens
        rows, weights = model.padded_vocab_size(tp) / tp, self.spec.head.multiply_adds / tp
        passes = COMPILED_LOGITS if self.config.training.compile else LOGITS
        moved = tokens * self.width * (passes * rows + 2 * model.hidden_size)
        return Sizes(2 * tokens * weights, 0.0, moved, weights, products=1)

    def _embedding(self) -> Sizes:
        elements = self.tokens * self.config.model.hidden_size
        return Sizes(0.0, 0.0, 3 * elements * self.width, 0.0, elements)

    def _module(self, kind: str, sizes: Sizes) -> ModuleTimes:
        matrices, attention, moved, weights = sizes[:4]
        into, out, busy = self._tensor_parallel(kind)
        rows, (rate, rate_of_weights) = self._measured(kind), self._rates(kind)
        if rows:
            forward, backward = self._stretched(rows, sizes, rate)
            if rows[0].tp > 1:  # their collectives were measured with them
                into, out = min(into, forward), min(out, backward)
                # Where ranks share processors, times are those of processors, and waits are none of them.
                crowd = self.cluster.cores.crowd * busy if self.cluster.cores else 1.0
                forward, backward = forward - into * min(crowd, 1.0), backward - out * min(crowd, 1.0)
            operations = max(matrices + attention, 1.0)
            product, core = forward * matrices / operations, forward * attention / operations
            of_weights = min(product, backward / 2)  # their half of the backward
        else:
            device = self.cluster.device
            read = weights * self.width / self.memory_rate
            product, of_weights = (
                max(matrices / each, read) + sizes.products * device.product_us * 1e-6
                for each in (rate, rate_of_weights)
            )
            ramp = 1 + device.attention_half_keys / sizes.keys if sizes.keys else 1.0
            core = attention / self.attention_rate * ramp
            rest = moved / (
                self.layer_rate if is_layer(kind) else self.memory_rate * device.memory_efficiency
            )
            there, back = (each / self.layer_rate for each in self._converted(kind))
            forward = product + core + rest + there
            backward = product + of_weights + 2 * rest + ATTENTION_BACKWARD * core + back
        fed = product * sizes.fed[0] + (forward - product - core) * sizes.fed[1]
        again = {"full": forward, "selective": core + product * sizes.core / max(matrices, 1.0), "mlp": fed}
        repeated = again.get(self.config.training.recompute_granularity, 0.0) if is_layer(kind) else 0.0
        if kind == HEAD and has_loss_chunks(self.config):  # the backward scales and reduces
            return ModuleTimes(Spent(forward + backward, tensor=into), Spent(tensor=out))
        swaps, exchanged = (
            each(self.spec.modules[kind]) for each in (self._context_parallel, self._expert_parallel)
        )
        first, then = (Spent(0.0, 0.0, *sides) for sides in zip((into, out), swaps, exchanged, strict=True))
        backward -= of_weights
        return ModuleTimes(
            first._replace(compute=forward), then._replace(compute=backward, recompute=repeated), of_weights
        )

    def _large(self, kind: str) -> LargeLinears:
        module = self.spec.modules[kind]
        least = self.config.precision.fp8_least
        return module.in_fp8(least) if isinstance(module, LayerSpec) else LargeLinears()

    def _rates(self, kind: str) -> tuple[float, float]:
        """Return the operations per second of a module's matrices, and of the gradients of its weights."""
        large, precision = self._large(kind).matrices, self.config.precision
        if not large:
            return self.matrix_rate, self.matrix_rate
        share = large / self.spec.modules[kind].multiply_adds
        rate = 1 / (share / self.large_rate + (1 - share) / self.matrix_rate)
        return rate, self.matrix_rate if precision.fp8_recipe == "rowwise" else rate

    def _converted(self, kind: str) -> tuple[float, float]:
        """Return the bytes in which a forward and a backward convert to fp8."""
        large, tp = self._large(kind), self.tp
        inputs = self.tokens * (large.columns * self.config.model.hidden_size + large.rows / tp)
        outputs = self.tokens * (large.written + large.outputs / tp)
        weights = large.matrices / tp
        return CONVERTED * (inputs + weights), (CONVERTED + TURNED) * (outputs + weights) + TURNED * inputs

    def _measured(self, kind: str) -> list[MeasuredLayer]:
        """Return what was measured of a module on as many tensor-parallel ranks, or else on one.

        Measured layers stand for layers of every kind. Where only layers were measured, they stand for the head, too.
        """
        module = LAYER if is_layer(kind) else kind
        rows = [row for row in self.cluster.layers if row.module == module]
        if not rows and kind == HEAD:
            rows = [row for row in self.cluster.layers if row.module == LAYER]
        return [row for row in rows if row.tp == self.tp] or [row for row in rows if row.tp == 1]

    def _stretched(self, rows: Sequence[MeasuredLayer], sizes: Sizes, rate: float) -> tuple[float, float]:
        """Return the seconds of a forward and of a backward.

        Operations and bytes give a module's time. The ratio of measured to computed time is interpolated between
        measured modules. Bytes count only if every row has them.
        """
        known = all(row.forward_bytes for row in rows)

        def time(operations: float, moved: float) -> float:
            return operations / rate + (moved / self.memory_rate if known else 0.0)

        points = []
        for row in rows:
            by_size = time(row.forward_flops, row.forward_bytes)
            points.append((by_size, row.forward_seconds / by_size, row.backward_seconds / by_size))
        own = time(sizes.operations, sizes.moved)
        forward, backward = _between(sorted(points), own)
        return forward * own, backward * own

    def _tensor_parallel(self, kind: str) -> tuple[float, float, float]:
        """Return the seconds of a module's collectives over tensor-parallel ranks, forward and backward, and the
        processors that a rank's part of them keeps busy.
        """
        if self.tp == 1:
            return 0.0, 0.0, 0.0
        each = self.activation.summed(self.activation.hidden)
        operation = "gather" if self.sharded else "sum"
        one, busy, _ = self.collectives.cost(operation, self.tp, 1, each)
        forward, backward = module_sums(self.config, self.spec.modules[kind], self.activation)
        return forward / each * one, backward / each * one, busy / one

    def _expert_parallel(self, module: ModuleSpec) -> tuple[float, float]:
        """Return the seconds in which a layer's rows go to their experts and back, forward and backward, if every
        rank's go to all experts alike."""
        grid = self.grid
        if grid is None or grid.ep == 1 or not isinstance(module, LayerSpec) or not module.experts:
            return 0.0, 0.0
        rows = even_rows(self.config, grid, self.activation)
        both = expert_rows(self.config, module, grid, self.activation, rows)
        forward, backward = (
            sum(
                self.collectives.of_axis("exchange", axis, int(sent[axis.link])).seconds
                for axis in grid.ep_axes
                if axis.size > 1
            )
            for sent in both
        )
        return forward, backward

    def _context_parallel(self, module: ModuleSpec) -> tuple[float, float]:
        """Return the seconds of a layer's swaps and gathers, forward and backward. Of a swap across nodes what
        crosses counts, at the rate of the slowest link.
        """
        grid = self.grid
        if grid is None or grid.cp == 1 or not isinstance(module, LayerSpec):
            return 0.0, 0.0
        both = layer_exchanges(self.config, module.mixer, grid, self.activation)
        forward, backward = (sum(map(self._exchange, exchanges)) for exchanges in both)
        return forward, backward

    def _exchange(self, exchange: ContextExchange) -> float:
        """Return the seconds of an exchange, and those in which gathered keys and values are encoded and decoded."""
        decoded = self.decoded(exchange.coded * exchange.axis.size)
        return decoded + self._sent(exchange)

    def _sent(self, exchange: ContextExchange) -> float:
        axis, near = exchange.axis, 1 + exchange.others.get(INTRA, 0)
        operation = "gather" if exchange.gathers else "exchange"
        if self.collectives.link_of(axis) not in (INTRA, INTER):
            return self.collectives.of_axis(operation, axis, exchange.row * (axis.size - 1)).seconds
        counted = exchange.row * (axis.size - near or axis.size - 1)
        nodes = axis.size // near
        return self.collectives.cost(operation, axis.size, nodes, counted).seconds


def _between(points: Sequence[tuple[float, float, float]], at: float) -> tuple[float, float]:
    """Return the two values at ``at``, of points (place, value, value) by place; beyond them, the nearest's."""
    place = bisect_left(points, (at, 0.0, 0.0))
    if place in (0, len(points)):
        _, first, second = points[min(place, len(points) - 1)]
        return first, second
    low, high = points[place - 1], points[place]
    share = (at - low[0]) / (high[0] - low[0])
    return low[1] + share * (high[1] - low[1]), low[2] + share * (high[2] - low[2])
