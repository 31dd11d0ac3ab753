"""Warns if quantised messages do not pay: if coding takes more of a step than it saves on the links.

Coding is timed where it happens (comm/codec.py: Blockwise.spent), over some steps. The time of the messages, and of
exact ones in their place, is their bytes over the rate of a gather on the same ranks, measured once. Both times are
this rank's. It runs on CPUs only: on CUDA coding runs beside other kernels, and the host's clock does not see it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from megazero.comm.codec import Blockwise, Codec
from megazero.comm.hops import Traffic, start_gather
from megazero.mesh.grid import INTER, INTRA
from megazero.mesh.mesh import Axis
from megazero.mesh.waiting import waiting
from megazero.train.callbacks.callback import Callback, TrainedStep
from megazero.zero import Engine

WARM_UP, LAST = 4, 10  # steps of a start: the last that does not count, and the last that does
SAMPLE = 2**16  # elements of the message by which formats are compared
ROUNDS, BYTES = 3, 2**20  # of the gather by which a link is timed
UNCODED = {
    INTER: "--no-zero-quantized-gradients sends them exactly",
    INTRA: "without --zero-gradient-bits-intra-node they are sent exactly",
}


class Coded(NamedTuple):
    """Messages in one format. codecs: the units' own. hops: the names of their bytes in traffic, each with its link.

    width: the bytes of an element that is sent exactly. before: seconds of coding in the warm-up.
    """

    what: str
    codecs: tuple[Blockwise, ...]
    hops: tuple[tuple[str, str], ...]
    width: int
    cure: str
    before: float

    @property
    def growth(self) -> float:
        """The factor by which exact messages are larger."""
        return SAMPLE * self.width / self.codecs[0].message_numel(SAMPLE)

    def compare(self, sent: Mapping[str, int], rates: Mapping[str, float], steps: int) -> str | None:
        """Return a warning if coding costs more than it saves.

        sent: bytes of so many steps, by hop. rates: bytes/s, by link.
        """
        coding = (_spent(self.codecs) - self.before) / steps
        took = sum(sent[hop] / steps / rates[link] for hop, link in self.hops)
        if coding <= took * (self.growth - 1):
            return None
        size = sum(sent[hop] for hop, _ in self.hops) / steps / 1e6
        return (
            f"coding {self.what} takes {1e3 * coding:.1f} ms of a step, more than it saves on this link: their "
            f"{size:.2f} MB take {1e3 * took:.1f} ms, {size * self.growth:.2f} MB would take "
            f"{1e3 * took * self.growth:.1f}; {self.cure}"
        )


class CodecCosts(Callback):
    """Counts coding and bytes from step WARM_UP to LAST of this start, and judges once."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.steps = engine, 0
        self.axes = [axis for axis in engine.mesh.data_axes if axis.size > 1]
        on = engine.mesh.device.type == "cpu" and self.axes and not engine.policy.codecs.exact
        self.last = LAST if on else 0
        self.formats: list[Coded] = []
        self.sent = Counter[str]()

    def after_step(self, step: TrainedStep) -> None:
        for line in self.take(step.traffic):
            self.run.warn(line)

    def take(self, traffic: Mapping[str, int]) -> list[str]:
        """Return warnings after the step that decides. Collective there.

        traffic: the bytes that this rank sent in the step, by hop (comm/hops.py: Traffic.take).
        """
        if self.steps >= self.last:
            return []
        self.steps += 1
        if self.steps == WARM_UP:
            self.formats = list(self._formats())
        elif self.steps > WARM_UP:
            self.sent.update(traffic)
        if self.steps < self.last:
            return []
        rates = {axis.link: gather_rate(axis) for axis in self.axes}
        found = (coded.compare(self.sent, rates, LAST - WARM_UP) for coded in self.formats)
        return [line for line in found if line]

    def _formats(self) -> Iterator[Coded]:
        units, delta = self.engine.units, self.engine.policy.codecs.delta
        links = dict.fromkeys(axis.link for axis in self.axes)
        width, sums = units[0].dtype.itemsize, units[0].sum_dtype.itemsize
        unsummed = units[0].axes.g > 0 or self.engine.micro_batches == 1

        def made(
            what: str, codecs: Iterable[Codec | None], hops: Iterable[tuple[str, str]], width: int, cure: str
        ) -> Iterator[Coded]:
            coded = tuple(codec for codec in codecs if isinstance(codec, Blockwise))
            if coded:
                yield Coded(what, coded, tuple(hops), width, cure, _spent(coded))

        kinds = ("refresh",) if delta else ("refresh", "gather")
        hops = [(f"{kind}_{link}_bytes", link) for kind in kinds for link in links]
        cure = "--no-zero-quantized-weights sends them exactly"
        yield from made("weights", (u.codecs.weights for u in units), hops, width, cure)
        for link in links:
            exact = width if unsummed and link == self.axes[0].link else sums
            what, hop = f"gradients {'across' if link == INTER else 'inside'} nodes", f"reduce_{link}_bytes"
            codecs = [u.codecs.gradients(link) for u in units]
            yield from made(what, codecs, [(hop, link)], exact, UNCODED[link])


def _spent(codecs: Iterable[Blockwise]) -> float:
    return sum(codec.spent[0] for codec in codecs)


@waiting
def gather_rate(axis: Axis) -> float:
    """Return the bytes per second that this rank sends in a run's gather over an axis, on a CPU. Collective."""
    part = torch.zeros(BYTES // axis.size, dtype=torch.uint8)
    whole, traffic, seconds = part.new_empty(part.numel() * axis.size), Traffic(), []
    for _ in range(1 + ROUNDS):  # the first one connects
        began = time.perf_counter()
        start_gather(axis, whole, part, "gather", traffic).wait()
        seconds.append(time.perf_counter() - began)
    return part.numel() * (axis.size - 1) / min(seconds[1:])
