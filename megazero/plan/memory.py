"""This module says what a rank's memory holds at the peak of a step, item by item, in bytes.

Model states follow zero/unit.py: the P copy as it was received, gradients summed in at least fp32 over G, and over OS
the master weights with the optimizer's moments. Activations are what autograd keeps of models/layer.py with a fused
attention kernel (the counts of Korthikanti et al. 2022, section 4, for these layers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod

from megazero.config import RunConfig
from megazero.config.model import ModelConfig
from megazero.config.parameters import parameter_count
from megazero.config.shards import Shards
from megazero.config.wire import Wire
from megazero.mesh.grid import INTER, Grid
from megazero.plan.communication import EXCHANGE, Formats, UnitShape, gradient_hops, message
from megazero.plan.units import WIDTHS, RankUnits

# Of all that is allocated: what the allocator's blocks leave unused between tensors of unequal sizes.
ALLOCATOR_MARGIN = 0.06
MOMENTS = {"adamw": 2, "sgd": 1}  # fp32 values beside each master weight
CHUNK_LOGITS = 1 << 26  # elements of logits that the loss widens at once on a GPU (tp/cross_entropy.py)
GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """The bytes of each item."""

    parameters: float
    gradients: float
    optimizer: float
    residuals: float
    gathered: float
    staging: float
    activations: float
    head: float
    margin: float

    @property
    def model_states(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.residuals

    @property
    def total(self) -> float:
        return sum(getattr(self, f.name) for f in fields(self))

    def items(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class States:
    """How the model state of a rank lies: what memory and bytes ask of a layout."""

    grid: Grid
    shards: Shards
    formats: Formats
    feedback: bool
    prefetch_bytes: int
    pending_reductions: int = 2

    @property
    def g(self) -> int:
        """How many ranks share the gradients that are accumulated."""
        return 1 if self.shards.whole_gradients else self.shards.g

    def copy_bytes(self, unit: UnitShape) -> float:
        """Return the bytes of the P copy."""
        p, _, os = self.shards.factors
        coded = self.formats.weights is not None and unit.quantised and not self.formats.delta
        if not coded:
            own = self.formats.sums == self.formats.width and (p == os or self.shards.lifetime == "resident")
            inside = (
                unit.elements / os if own and not self.formats.delta else 0.0
            )  # the master is a part of it
            return (unit.elements / p - inside) * self.formats.width
        if p == 1:
            return unit.elements * self.formats.width  # decoded at once
        width = self.formats.width
        return os / p * message(self.formats.weights, unit.coded // os, unit.exact // os, width, width)

    def full_bytes(self, unit: UnitShape) -> float:
        return unit.elements * self.formats.width

    def ahead_bytes(self, unit: UnitShape) -> float:
        """Return what a gather ahead of use adds, as zero/unit.py's gather_bytes."""
        if self.shards.p > 1:
            return self.full_bytes(unit)
        if self.formats.weights is None or not unit.quantised:
            return 0.0
        width, os = self.formats.width, self.shards.os
        return os * message(self.formats.weights, unit.coded // os, unit.exact // os, width, width)

    def gather_messages(self, unit: UnitShape) -> float:
        """Return the bytes of the passing messages of a refresh and gather: none where they are the parameters."""
        if self.formats.weights is None or not unit.quantised:
            return 0.0
        p, _, os = self.shards.factors
        parts = p if self.formats.delta and p < os else 1  # with differences, a gather's are the parameters
        width = self.formats.width
        messages = (
            os / parts * message(self.formats.weights, unit.coded // os, unit.exact // os, width, width)
        )
        if not (self.formats.delta and p < os):
            return messages
        return messages + unit.elements / os * (width + self.formats.sums)  # the difference that is encoded

    def reduction_messages(self, unit: UnitShape, micro_batches: int) -> float:
        """Return the most bytes that a reduction's hop has at once: sent, received, and their sum for the next."""
        hops = gradient_hops(
            unit, self.grid.data_axes, self.formats, micro_batches, self.shards.whole_gradients
        )
        most, left = 0.0, float(unit.elements)
        for at, hop in enumerate(hops):
            if hop.operation != EXCHANGE:
                break
            coded = unit.quantised and bool((self.formats.gradients or {}).get(hop.axis.link))
            own = hop.sent / (
                hop.axis.size - 1
            )  # exact rows are sent from where they lie, the own one with them
            passing = 2 * hop.sent if coded else hop.sent + (own if hop.axis.size > 2 else 0.0)
            left /= hop.axis.size
            goes_on = hop.every and at + 1 < len(hops) and hops[at + 1].every
            most = max(most, passing + (left * self.formats.sums if goes_on else 0.0))
        return most


def model_states(units: RankUnits, states: States, optimizer: str) -> dict[str, float]:
    """Return the bytes of parameters, gradients, optimizer and residuals on one rank."""
    g, os = states.g, states.shards.os
    elements = units.elements
    sums = states.formats.sums
    residuals = 0.0
    if states.feedback:
        crossing = _crossing(states.grid)
        residuals = sum(n * u.elements for u, n in units.counts if u.quantised) * sums / crossing
    return {
        "parameters": sum(n * states.copy_bytes(u) for u, n in units.counts),
        "gradients": elements / g * sums,
        "optimizer": elements / os * max(states.formats.width, 4) * (1 + MOMENTS[optimizer]),
        "residuals": residuals,
    }


def checkpoint_bytes(model: ModelConfig, dtype: str, optimizer: str, wire: Wire) -> int:
    """Return the bytes of a checkpoint's tensors, on all ranks together (zero/records.py: save_records).

    Generators and descriptions, some KB for each rank, are left out. Else as ``saved_width``.
    """
    return parameter_count(model) * saved_width(dtype, optimizer, wire)


def saved_width(dtype: str, optimizer: str, wire: Wire) -> int:
    """Return the bytes that a checkpoint has for each parameter. ``dtype`` is that of the parameters."""
    width, sums = WIDTHS[dtype], max(WIDTHS[dtype], 4)
    master = sums if width != sums or wire.delta else 0
    return width + master + (MOMENTS[optimizer] + wire.feedback) * sums


def _crossing(grid: Grid) -> int:
    """Return how many ranks share the slice that first crosses nodes."""
    inside = [a.size for a in grid.data_axes if a.link != INTER]
    return prod(inside)


STREAMS = 2  # of each lane (comm/lane.py); the pool of passing buffers keeps each one's memory apart


def buffers(units: RankUnits, states: States, micro_batches: int) -> dict[str, float]:
    """Return the bytes of gathered parameters, and of the pool of passing buffers (kernels/arena.py).

    The pool holds, for each stream, the most that was in use at one time: on the compute stream staging, on those of
    the lanes what a chain of gathers, or of reductions, has at its widest.
    """
    shapes = [u for u, _ in units.counts]
    gathered, width = 0.0, states.formats.width
    if states.shards.p > 1:  # the module in use, the next one, and what fits into the bound beyond them
        full = units.elements * width
        two = sum(
            sorted((n for n, several in units.modules for _ in range(min(several, 2))), reverse=True)[:2]
        )
        held = full if states.shards.keep_gathered else two * width + states.prefetch_bytes
        gathered = min(held, full)
    chains = max(map(states.gather_messages, shapes)) + max(
        states.reduction_messages(u, micro_batches) for u in shapes
    )
    waiting = 1 + states.pending_reductions if states.g > 1 else 0
    # At most: a parameter's gradient as autograd makes it, and a unit's staging.
    raw = max(u.elements for u in shapes) * width
    return {"gathered": gathered, "staging": (1 + waiting) * raw + STREAMS * chains}


@dataclass(frozen=True)
class LayerActivations:
    """Bytes of one micro-batch and layer. kept: to its backward. working: beside that while it is computed back."""

    kept: float
    working: float


def layer_activations(config: RunConfig, width: int) -> LayerActivations:
    """Return what a layer keeps for its backward on one rank."""
    model, size, tp = config.model, config.batch.micro_batch_size, config.parallel.tensor_model_parallel_size
    assert size and model.seq_length
    tokens = size * model.seq_length
    stream = model.hidden_size / (tp if config.parallel.sequence_parallel else 1)
    q, kv = model.query_projection_size / tp, model.kv_projection_size / tp
    ffn, heads = model.ffn_hidden_size / tp, model.num_attention_heads / tp
    # Each norm's input and output; rotated q, k, v; attention's output and, laid out anew, o_proj's input;
    # up (and gate, silu(gate)) and down's input.
    matrices = 4 * stream + 3 * q + 2 * kv + (4 if model.swiglu else 2) * ffn
    masks = 2 * stream if model.hidden_dropout else 0.0
    whole = tokens * (width * matrices + masks + 4 * heads)
    gradients = tokens * width * (2 * ffn + 2 * model.hidden_size)
    if config.training.recompute_granularity == "full":
        return LayerActivations(tokens * width * stream, whole + gradients)
    if config.training.recompute_granularity == "selective":
        core = tokens * (width * q + 4 * heads)
        return LayerActivations(whole - core, core + gradients)
    return LayerActivations(whole, gradients)


def activations(
    config: RunConfig, width: int, layers_of_parts: Sequence[int], peak: int, embedding: bool, head: bool
) -> dict[str, float]:
    """Return the bytes of activations and of the head on the rank that holds these parts.

    peak: the most forwards of one part and micro-batch whose backward has not ended.
    """
    model, size, tp = config.model, config.batch.micro_batch_size, config.parallel.tensor_model_parallel_size
    assert size and model.seq_length
    tokens = size * model.seq_length
    layer = layer_activations(config, width)
    stream = tokens * width * model.hidden_size / (tp if config.parallel.sequence_parallel else 1)
    kept = peak * (sum(layers_of_parts) / len(layers_of_parts) * layer.kept + stream) + layer.working
    if config.parallel.pipeline_model_parallel_size > 1:
        kept += 4 * stream  # messages under way, both directions
    if model.position_embedding_type == "alibi" or config.data.reset_attention_mask:
        heads = model.num_attention_heads / tp if model.position_embedding_type == "alibi" else 1
        masks = size if config.data.reset_attention_mask else 1
        kept += width * masks * heads * model.seq_length**2
    rows = model.padded_vocab_size(tp) / tp
    logits = tokens * rows
    wide = min(logits, max(CHUNK_LOGITS, rows)) * 8 + logits * width if head else 0.0
    return {"activations": kept, "head": wide + (2 * stream if head else 0.0)}


def rank_memory(parts: Sequence[dict[str, float]]) -> Memory:
    """Put the items together and add the allocator's margin."""
    items = {name: size for part in parts for name, size in part.items()}
    return Memory(**items, margin=ALLOCATOR_MARGIN * sum(items.values()))
