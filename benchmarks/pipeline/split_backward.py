"""A backward split into I and W, torch's way and ours, against a whole one: recomputes, time and memory.

    python -m benchmarks.pipeline.split_backward [--layers 4] [--rounds 7]

torch: ``stage_backward_input`` and ``stage_backward_weight`` of torch.distributed.pipelining, which its zero-bubble
schedules run. Ours: ``tp.DeferredGradients``. One process; contestants take turns. Writes its section of
docs/results/pipeline.md (--out: another folder).
"""

from __future__ import annotations

import argparse
import statistics
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import harness
from benchmarks.results import PAGES
from benchmarks.steps import Shape, llama
from megazero.models import Decoder
from megazero.tp import DeferredGradients, TensorParallel

TITLE = "Split backward: torch's and ours"
RECOMPUTE = ("none", "selective", "full")
NAMES = ("B", "torch's I and W", "our I and W")
HEADER = [
    *(
        "recompute",
        "backward",
        "layer runs in I",
        "in W",
        "attention runs in I",
        "in W",
        "hooks that see a gradient",
    ),
    *("CPU ms", "over B", "most MB", "MB between I and W", "gradients"),
]
TEXT = """    python -m benchmarks.pipeline.split_backward

{layers} layers of hidden {hidden} (ffn {ffn}, {heads} heads), {sequence} x {batch} tokens, fp32, one thread.
B is a whole backward, I and W are its halves: gradients of the input and of the weights. torch's are
`stage_backward_input` and `stage_backward_weight` of its pipelining; ours defers the linears' weight gradients
(`tp/deferred.py`). A forward of the stack precedes every backward and is not counted.

- *Runs*: how often the backward computes a layer, and its attention alone, per layer. torch's W walks the graph
  once for each of a layer's nine parameters.
- *Hooks*: how many parameters' post-accumulate hooks, on which ZeRO engines depend, see a gradient in `.grad`. Ours
  run for norms; the executor passes the other gradients to the engine.
- *Over B*: ratio of medians (least to most round by round).
- *Most MB*: the largest sum of tensors alive during the backward, activations and new gradients, without weights,
  counted op by op.
- *Gradients*: the largest relative difference from B's.

{rounds} rounds, in turn; {setting}.

{table}
"""


class Alive(TorchDispatchMode):
    """Counts the bytes of living storages that ops have made inside. ``known`` ones are left out."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self.storages = weakref.WeakSet[Any]()
        for tensor in known:
            self.storages.add(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        return out

    def _see(self, storage: Any) -> None:
        if storage in self.storages:
            return
        self.storages.add(storage)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, storage.nbytes())

    def _gone(self, count: int) -> None:
        self.now -= count

    def take(self) -> int:
        """Return the most since the last take."""
        most, self.most = self.most, self.now
        return most


@dataclass
class Counts:
    layers: int = 0
    attention: int = 0

    def take(self) -> tuple[int, int]:
        both = self.layers, self.attention
        self.layers = self.attention = 0
        return both


class Stack(nn.Module):
    """The layers of a decoder; counts their runs."""

    def __init__(
        self, options: argparse.Namespace, recompute: str, deferred: DeferredGradients | None
    ) -> None:
        super().__init__()
        sizes = Shape(options.layers, options.hidden, options.ffn, options.heads, 64, options.sequence)
        decoder = Decoder(
            llama(sizes), TensorParallel(deferred=deferred), recompute=recompute, dtype=torch.float32
        )
        decoder.initialize(1)
        self.layers, self.deferred, self.counts = decoder.layers, deferred, Counts()
        for layer in self.layers.values():
            layer._layer = partial(self._counted, "layers", layer._layer)
            layer.attention._core = partial(self._counted, "attention", layer.attention._core)

    def _counted(self, what: str, function: Callable[..., Tensor], *args: Any) -> Tensor:
        setattr(self.counts, what, getattr(self.counts, what) + 1)
        return function(*args)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


# Each yields between I and W.
def whole(stack: Stack, x: Tensor, y: Tensor, grad: Tensor) -> Any:
    y.backward(grad)
    yield


def by_torch(stack: Stack, x: Tensor, y: Tensor, grad: Tensor) -> Any:
    _, groups = stage_backward_input([y], [grad], [x], stack.parameters())
    yield
    stage_backward_weight(stack.parameters(), groups)


def by_us(stack: Stack, x: Tensor, y: Tensor, grad: Tensor) -> Any:
    assert stack.deferred is not None
    with stack.deferred.recording(0):
        y.backward(grad)
    yield
    for parameter, gradient in stack.deferred.compute(0):
        parameter.grad = gradient


class Contestant:
    def __init__(self, name: str, recompute: str, options: argparse.Namespace) -> None:
        self.name, self.recompute = name, recompute
        self.backward = dict(zip(NAMES, (whole, by_torch, by_us), strict=True))[name]
        self.stack = Stack(options, recompute, DeferredGradients() if name == "our I and W" else None)
        generator = torch.Generator().manual_seed(1)
        size = (options.sequence, options.batch, options.hidden)
        self.x, self.grad = (torch.randn(size, generator=generator) for _ in range(2))
        self.layers = options.layers

    def _forward(self) -> tuple[Tensor, Tensor]:
        self.stack.zero_grad(set_to_none=True)
        x = self.x.clone().requires_grad_()
        return x, self.stack(x)

    def turn(self) -> float:
        """Return the CPU seconds of a backward. It has one thread, which only computes, so other programs do not
        count."""
        x, y = self._forward()
        backward = self.backward(self.stack, x, y, self.grad)
        del y
        began = time.process_time()
        for _ in backward:
            pass
        return time.process_time() - began

    def count(self) -> dict[str, Any]:
        """Count in one backward: runs (layers, attention) in I and in W, per layer; hooks that see a gradient; bytes.
        The gradients are returned, too."""
        hooked = [0]

        def hook(p: Tensor) -> None:
            hooked[0] += p.grad is not None

        handles = [p.register_post_accumulate_grad_hook(hook) for p in self.stack.parameters()]
        known = [*self.stack.parameters(), self.x, self.grad]
        runs = []
        with Alive(known) as alive:
            x, y = self._forward()
            self.stack.counts.take()
            backward = self.backward(self.stack, x, y, self.grad)
            del y
            alive.take()
            next(backward)
            between = alive.now
            runs.append(self.stack.counts.take())
            next(backward, None)
            runs.append(self.stack.counts.take())
        for handle in handles:
            handle.remove()
        runs = [tuple(n / self.layers for n in pair) for pair in runs]
        gradients = [p.grad.clone() for p in self.stack.parameters() if p.grad is not None]
        found = {"runs": runs, "hooks": hooked[0], "most": alive.take(), "between": between}
        return {**found, "gradients": gradients}


def rows(recompute: str, options: argparse.Namespace) -> list[list[str]]:
    made = [Contestant(name, recompute, options) for name in NAMES]
    counted = [contestant.count() for contestant in made]
    seconds = harness.take_turns({each.name: each.turn for each in made}, options.rounds)
    out = []
    for contestant, found in zip(made, counted, strict=True):
        took = seconds[contestant.name]
        ratio = harness.of_medians(took, seconds["B"])
        pairs = zip(found["gradients"], counted[0]["gradients"], strict=True)
        error = max(float((a - b).norm() / b.norm()) for a, b in pairs)
        split = contestant.name != "B"
        out.append(
            [
                *(recompute, contestant.name),
                *(f"{found['runs'][part][what]:g}" for what in (0, 1) for part in (0, 1)),
                f"{found['hooks']} of {len(found['gradients'])}",
                f"{statistics.median(took) * 1e3:.1f}",
                ratio if split else "",
                f"{found['most'] / 1e6:.1f}",
                f"{found['between'] / 1e6:.1f}" if split else "",
                f"{error:.1g}" if split else "",
            ]
        )
    return out


def main() -> None:
    sizes = {"layers": 4, "hidden": 256, "ffn": 688, "heads": 4, "sequence": 256, "batch": 2, "rounds": 7}
    options = harness.parser(__doc__, **sizes, out=PAGES).parse_args()
    torch.set_num_threads(1)
    every = [row for recompute in RECOMPUTE for row in rows(recompute, options)]
    said = {name: getattr(options, name) for name in sizes}
    text = TEXT.format(**said, setting=harness.setting(), table=harness.table(HEADER, every))
    print(text)
    harness.write_section(options.out / "pipeline.md", TITLE, text)


if __name__ == "__main__":
    harness.start(main)
