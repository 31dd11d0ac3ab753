"""Records what happens on a rank during a step.

It keeps hashes of the tensors that forwards read and stages pass on, the rank's slices, and the rounding of messages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megazero.comm.codec import Blockwise, Codec
from megazero.comm.peers import Peers
from megazero.mesh.mesh import all_gather_flat
from megazero.models import Decoder
from megazero.pp.executor import Pipeline
from megazero.train.expert_balance import ExpertBalance, StepBalance
from megazero.train.parallelize import MicroBatch
from megazero.zero import Engine, StepPart
from megazero.zero.gather import used_weights
from megazero.zero.rounding import WEIGHTS
from megazero.zero.scalars import NOTHING, Rows, Sums
from megazero.zero.slices import Slice
from megazero.zero.unit import Unit

KEYS = "gathered keys and values"


@dataclass(frozen=True)
class UnitSlice:
    """A rank's compact OS slice of one unit: ``values`` has the shape [n/OS].

    Each of ``ranges`` is (parameter, first flat element of the rank's own tensor, last + 1, position in ``values``).
    The rest of ``values`` is padding.
    """

    unit: str
    part: int
    ranges: tuple[tuple[str, int, int, int], ...]
    values: np.ndarray

    def pieces(self) -> Iterator[tuple[str, int, np.ndarray]]:
        """Yield (parameter, first flat element, values) of each range."""
        for name, low, high, at in self.ranges:
            yield name, low, self.values[at : at + high - low]


@dataclass
class StepRecord:
    """What one rank saw of a step. Gradients are divided and not clipped.

    read: maps a parameter to the hash of what the step's first forward read. passed: maps (what, stage, micro-batch)
    to a hash; ``what`` says 'sent' or 'got', and 'activation' or 'gradient'. routing: maps (layer, micro-batch) to
    the experts of each token, [s, b, k], at the rank's own positions; plain: to those that a balance loss counts,
    where they are others. biases: of routers, by name, before the step. balance: what the step told of its experts;
    loads: the tokens that they got, [layers with experts, experts]. traffic: maps 'kind_link_bytes' to the bytes
    sent in the step.
    """

    loss: float = 0.0
    norm: float = 0.0
    masters: list[UnitSlice] = field(default_factory=list)
    gradients: list[UnitSlice] = field(default_factory=list)
    read: dict[str, str] = field(default_factory=dict)
    passed: dict[tuple[str, str, int, int], str] = field(default_factory=dict)
    routing: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    plain: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    biases: dict[str, np.ndarray] = field(default_factory=dict)
    balance: StepBalance | None = None
    loads: np.ndarray | None = None
    traffic: dict[str, int] = field(default_factory=dict)


@dataclass
class RoundingRecord:
    """The rounding of all messages of one kind and format.

    elements counts their elements. worst is the largest |error| / bound of an element. error and norm are sums of
    squares.
    """

    elements: int = 0
    worst: float = 0.0
    error: float = 0.0
    norm: float = 0.0


class Recorder(StepPart):
    """Takes part in the engine's steps, and hooks on the decoder and the pipeline. They fill the record ``step``."""

    def __init__(self, decoder: Decoder, engine: Engine, pipeline: Pipeline) -> None:
        self.engine, self.decoder, self.step = engine, decoder, StepRecord()
        self.rounded: dict[tuple[str, str], RoundingRecord] = {}
        self._held: dict[str, Tensor] = {}  # R of units whose refreshes send differences
        self._batches: list[int] = []
        self._open: Sequence[MicroBatch] = ()
        self._raw: list[UnitSlice] = []
        names = {id(p): name for name, p in decoder.named_parameters()}
        for module in (m for part in decoder.parts() for m in part):
            module.register_forward_pre_hook(lambda m, _: self._note_read(m, names))  # after the engine's own
        self._watch_stages(pipeline)
        engine.join(self)
        for unit in engine.units:
            if unit.delta:
                self._held[unit.name] = used_weights(unit)
        engine.observe_rounding(self._note_rounding)
        decoder.cp.observers.append(self._note_keys)

    def open(self, batches: Sequence[MicroBatch]) -> None:
        """Begin the record of a step that has these micro-batches, which take up their decisions."""
        self.step, self._batches = StepRecord(), [id(batch) for batch in batches]
        self._open = batches
        self.step.biases = {name: b.numpy().copy() for name, b in self.decoder.named_buffers()}
        self.step.masters = slices(self.engine, lambda unit: unit.master.value)

    def close(self, loss: float, norm: float) -> StepRecord:
        """End the record after the step, and return it."""
        step, engine = self.step, self.engine
        scale = 1.0 / engine.divisor
        step.gradients = [
            UnitSlice(s.unit, s.part, s.ranges, s.values.astype(np.float64) * scale) for s in self._raw
        ]
        step.loss, step.norm, step.traffic = loss, norm, engine.traffic.take()
        for m, batch in enumerate(self._open):
            for layer, decision in (batch.decisions or {}).items():
                for kept, chosen in ((step.routing, decision.experts), (step.plain, decision.plain)):
                    if chosen is not None:
                        kept[layer, m] = chosen.unflatten(0, (-1, len(batch.tokens))).numpy().copy()
        if part := engine.part(ExpertBalance):
            step.balance, step.loads = part.last, part.loads.numpy().copy()
        self._raw = []
        return step

    # -- what the engine tells ---------------------------------------------------------------------

    def read(self, rows: Rows, sums: Sums) -> Mapping[str, Any]:
        self._raw = slices(self.engine, _gradient)
        return NOTHING

    def updated(self, made: bool) -> None:
        if not made:
            self._raw = []

    # -- hooks -----------------------------------------------------------------------------------

    def _note_read(self, module: torch.nn.Module, names: dict[int, str]) -> None:
        for p in module.parameters():
            name = names[id(p)]
            if name not in self.step.read:
                self.step.read[name] = fingerprint(p)

    def _watch_stages(self, pipeline: Pipeline) -> None:
        forward = pipeline.forward

        def watched(stage: Any, x: Tensor | None, batch: Any) -> Tensor:
            """Run the stage, and hash the messages it got and sent, forward and backward."""
            if id(batch) not in self._batches:
                return forward(stage, x, batch)
            m, passed = self._batches.index(id(batch)), self.step.passed
            if x is not None:
                passed["got", "activation", stage.index, m] = fingerprint(x)
                x.register_hook(
                    lambda g: passed.update({("sent", "gradient", stage.index, m): fingerprint(g)})
                )
            y = forward(stage, x, batch)
            if not stage.head:
                passed["sent", "activation", stage.index, m] = fingerprint(y)
                y.register_hook(
                    lambda g: passed.update({("got", "gradient", stage.index, m): fingerprint(g)})
                )
            return y

        pipeline.forward = watched

    def _note_rounding(self, unit: Unit, codec: Codec, kind: str, exact: Tensor, sent: Tensor) -> None:
        assert isinstance(codec, Blockwise)
        coded, value, whole, block = exact, None, None, codec.form.block
        if kind == WEIGHTS:  # of the coded region alone; differences to R are what was rounded
            n = unit.layout.pieces(unit.axes.os)[0].numel
            held, coded, sent = self._held.get(unit.name), exact[:n].view(1, -1), sent[:n].view(1, -1)
            value = used_weights(unit)[:n].view(1, -1)
            if held is not None:
                self._held[unit.name] = used_weights(unit)
                coded = coded.to(unit.dtype).to(unit.sum_dtype) - held[:n].view(1, -1)
                sent = sent - held[:n].view(1, -1)
            if codec.transform:
                # It mixes the errors of padding, which was cleared since, with others. A slice may be padding alone.
                whole = torch.ones(n // block, dtype=torch.bool)
                for low, high in unit.layout.gaps(unit.axes.os):
                    whole[low // block : -(-high // block)] = False
        self._note(kind, codec, sent, coded, value, unit.dtype, whole)

    def _note_keys(self, codec: Blockwise, own: Tensor, arrived: Tensor, peers: Peers) -> None:
        """Compare what arrived of other ranks' keys and values with what they were, which each tells once more."""
        exact = torch.empty_like(arrived)
        all_gather_flat(exact.view(-1), own.reshape(-1), group=peers.group)
        others = [rank for rank in range(peers.size) if rank != peers.rank]
        coded, sent = exact[others].flatten(0, 1), arrived[others].flatten(0, 1)
        self._note(KEYS, codec, sent, coded, sent, own.dtype)

    def _note(
        self,
        kind: str,
        codec: Blockwise,
        sent: Tensor,
        coded: Tensor,
        value: Tensor | None,
        dtype: torch.dtype,
        whole: Tensor | None = None,
    ) -> None:
        """Add what messages [rows, elements] lost.

        value: what they become in ``dtype``, which rounds once more, by half a unit of its last place; None: they
        stay as they are. whole: the blocks whose errors count [blocks]; None: all.
        """
        block, mixes = codec.form.block, codec.transform.size if codec.transform else 0
        error = (sent.double() - coded.double()).unflatten(1, (-1, block))
        bound = codec.error_bound(coded).double().unsqueeze(-1) / max(mixes, 1)
        if value is not None:
            place = 0.51 * torch.finfo(dtype).eps * value.abs().double().unflatten(1, (-1, block))
            bound = bound + (
                place.amax(-1, keepdim=True) if mixes else place
            )  # a mixed error has its block's mean
        worst = codec.mixed(error).abs() / bound.clamp(min=1e-300)
        if whole is not None:
            worst = worst.where(whole.view(*worst.shape[:2], 1), 0.0)
        note = self.rounded.setdefault((kind, rounded_name(codec.form.bits, block, mixes)), RoundingRecord())
        note.elements += error.numel()
        note.worst = max(note.worst, float(worst.max()))
        note.error += float(error.square().sum())
        note.norm += float(coded.double().square().sum())


def slices(engine: Engine, values: Any) -> list[UnitSlice]:
    """Return this rank's compact OS slice of every unit.

    ``values(unit)`` returns a tensor [n/OS] of a dtype that numpy knows.
    """
    out = []
    for unit in engine.units:
        ranges = tuple((s.name, low, high, at) for s, low, high, at in unit.layout.ranges(unit.axes.os))
        out.append(UnitSlice(unit.name, unit.part, ranges, values(unit).detach().clone().numpy()))
    return out


def _gradient(unit: Unit) -> Tensor:
    assert unit.gradients.grad is not None
    return torch.cat(
        [r.view(-1) for r in Slice(unit.layout, unit.gradients.grad, unit.axes.g).rows(unit.axes.os, 1)]
    )


def rounded_name(bits: int, block: int, mixes: int) -> str:
    return f"INT{bits}, blocks of {block}" + (f", Hadamard transform of {mixes}" if mixes else "")


def fingerprint(x: Tensor) -> str:
    """Return a hash of the bits of ``x``, which has any shape and dtype.

    A copy is hashed, because a storage that numpy has seen cannot be resized again.
    """
    return digest(x.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy())


def digest(values: np.ndarray) -> str:
    """Return a hash of the bits of an array: ``fingerprint`` of a tensor of the same bits is equal."""
    return hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest()
