"""Host time of a step: what the engine adds to a plain eager loop, beside FSDP2, without a card.

    python -m benchmarks.features.host_time [--only zero3 plain] [--rounds 9]

One rank of a cluster steps a decoder of ``--layers`` layers and tiny tensors, so a step's time is the host's:
Python, torch's dispatch and the little that operations compute on a CPU. The engine takes its CUDA paths. Streams,
events and collectives do nothing, and kernels of megazero's own are not launched; their numbers stand in the table.
Seconds are of one thread, so that others on the machine count little. Contestants take turns; ratios are taken round
by round. ``FSDP2, patched`` is over two nodes of half the ranks, with int8 weights and int4 gradients. Prints the
table of docs/develop/decisions.md.
"""

from __future__ import annotations

import importlib
import pkgutil
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # the backend "fake"
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp2_patch.patch
import megazero.kernels
from benchmarks import harness, lone_rank
from benchmarks.steps import AdamW, Shape, Step, decoder, engine_step, policies, torch_step
from megazero import zero
from megazero.config import resolve_shards
from megazero.kernels import arena
from megazero.mesh import objects
from megazero.mesh.grid import AxisSpec
from megazero.mesh.levels import INTER, INTRA
from megazero.mesh.mesh import Axis
from megazero.models import Decoder
from megazero.patches.options import MessageOptions, read_words
from megazero.patches.two_hops import TwoHops
from megazero.zero.elementwise import OnePassAdamW

CPU = torch.device("cpu")
RANKS = 8  # of a node
PLAIN, PATCHED = "plain loop", "FSDP2, patched"
# Preset -> nodes. zero3 gathers nothing ahead but the next module: so small a model would be gathered once per step.
PRESETS = {"zero1": 1, "zero3": 1, "hpz": 2, "zeropp": 2}


class Event:
    """Does nothing, and counts as not reached."""

    def __init__(self, **_: object) -> None:
        pass

    def record(self, stream: object = None) -> None:
        COUNTS["events"] += 1

    def query(self) -> bool:
        return False


class Stream:
    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: object) -> None:
        COUNTS["waits"] += 1

    def wait_stream(self, other: object) -> None:
        COUNTS["waits"] += 1

    def __enter__(self) -> None:
        CURRENT.append(self)

    def __exit__(self, *_: object) -> None:
        CURRENT.pop()


class Silence(lone_rank.Echo):
    """A communicator that moves nothing."""

    def gather(self, out: torch.Tensor, own: torch.Tensor) -> lone_rank.Landed:
        COUNTS["collectives"] += 1
        return lone_rank.Landed()

    @staticmethod
    def exchange(out: torch.Tensor, sent: torch.Tensor, *_: object) -> lone_rank.Landed:
        COUNTS["collectives"] += 1
        return lone_rank.Landed()


class Kernel:
    """A Triton kernel that is not launched."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*_: object, **__: object) -> None:
            COUNTS["kernels"] += 1

        return launch


COUNTS: Counter[str] = Counter()
CURRENT = [Stream()]  # the current stream is the last one


@contextmanager
def no_device() -> Iterator[None]:
    """Let streams, events, collectives and own kernels do nothing but count."""
    with ExitStack() as stack:
        current = patch.multiple(torch.cuda, Event=Event, current_stream=lambda device=None: CURRENT[-1])
        stack.enter_context(current)
        stack.enter_context(patch.object(arena, "home_of", lambda device: CURRENT[-1]))
        stack.enter_context(patch.object(torch.cuda, "stream", lambda stream: stream))
        stack.enter_context(patch.object(lone_rank, "Echo", Silence))
        for found in pkgutil.iter_modules(megazero.kernels.__path__):
            module = importlib.import_module(f"megazero.kernels.{found.name}")
            if hasattr(module, "_kernel"):
                stack.enter_context(patch.object(module, "_kernel", Kernel()))
                stack.enter_context(patch.object(module, "use_kernel", lambda *_: True))
        yield


class Launches(TorchDispatchMode):
    """Counts operations of torch that run a kernel on a card: those that return tensors other than views."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = [each for each in func._schema.returns if "Tensor" in str(each.type)]
        views = any(each.alias_info is not None and not each.alias_info.is_write for each in made)
        name = func._schema.name.removeprefix("aten::")
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        if (made and not views or writes) and not name.startswith(("empty", "new_empty", "_unsafe_view")):
            COUNTS["operations"] += 1
        return func(*args, **(kwargs or {}))


def ours(shape: Shape, preset: str, stack: ExitStack) -> Step:
    """Return a step of one rank of a preset, as a run has it: the update in one pass, norms without weight decay."""
    nodes = PRESETS[preset]
    known = {**policies(), "zero3": ("zero3", zero.Policy(prefetch_bytes=0))}
    policy = known[preset][1]
    if not policy.codecs.exact:
        policy = replace(policy, exact_numel=shape.hidden)  # norms, as a run's default of a larger model
    factors = resolve_shards(preset, RANKS * nodes, (RANKS,)).factors
    mesh = stack.enter_context(lone_rank.lone_rank(RANKS * nodes, RANKS, factors, CPU))
    update = partial(OnePassAdamW, lr=1e-4, weight_decay=0.1)  # which a run on a card has
    step, engine = engine_step(shape, mesh, policy=policy, traits=undecayed, optimizer=update)
    for lane in engine.lanes:
        lane.streams = [Stream(), Stream()]
    return step


def undecayed(name: str, parameter: torch.Tensor) -> zero.Traits:
    return zero.Traits((("weight_decay", 0.0),) if parameter.ndim == 1 else ())


def looped(shape: Shape, model: Decoder) -> Step:
    master = next(model.parameters()).dtype != torch.float32
    return torch_step(model, AdamW(model.parameters(), master), shape, CPU)


def plain(shape: Shape, stack: ExitStack) -> Step:
    return looped(shape, decoder(shape))


def sharded(shape: Shape) -> Decoder:
    """Return the model under FSDP2 over the node: every layer, then the root."""
    model, half = decoder(replace(shape, dtype=torch.float32)), torch.bfloat16
    mesh = init_device_mesh("cpu", (RANKS,))
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half))
    return model


def fsdp2(shape: Shape, stack: ExitStack) -> Step:
    """Return a step of FSDP2 with torch's own clipping and AdamW."""
    return looped(shape, sharded(shape))


def patched(shape: Shape, stack: ExitStack) -> Step:
    """Return a step of FSDP2 with ``fsdp2_patch`` on, which cuts all ranks into two nodes, with hops that move
    nothing. Other contestants of FSDP2 pass its wrappers, too."""
    model, half, here = sharded(shape), RANKS // 2, dist.get_rank()
    specs = AxisSpec("intra", "data", half, 1, INTRA), AxisSpec("inter", "data", 2, half, INTER)
    intra, inter = (
        Axis(spec, spec.index(here), spec.ranks(here), Silence(spec.size), Silence(spec.size))  # type: ignore[arg-type]
        for spec in specs
    )
    ranks = tuple(range(RANKS))
    options = read_words(MessageOptions, "int8", "int4", ranks_per_node=half, exact_numel=shape.hidden)
    stack.enter_context(lone_rank.own_collectives())
    with (
        patch.object(objects, "_exchange", lambda text, *_, **__: [text] * RANKS),
        patch.object(fsdp2_patch.patch, "cut_groups", lambda *_: {ranks: TwoHops(ranks, inter, intra)}),
    ):
        stack.callback(fsdp2_patch.patch.Fsdp2Patch(model, options).remove)
    return looped(shape, model)


BUILDERS: dict[str, Callable[[Shape, ExitStack], Step]] = {
    PLAIN: plain,
    **{preset: partial(ours, preset=preset) for preset in PRESETS},
    "FSDP2": fsdp2,
    PATCHED: patched,
}


Found = dict[str, dict[str, Any]]  # by contestant: the seconds of each round, and the counts of one step


def measure(names: list[str], layers: int, hidden: int, rounds: int, steps: int) -> Found:
    """Let contestants take turns. The process is a benchmark's own: it gets a process group that does nothing."""
    shape = Shape(layers, hidden, 2 * hidden, 4, 512, sequence=16, micro_batch=1, dtype=torch.bfloat16)
    warnings.filterwarnings("ignore", message=".*returned a view tensor.*")
    dist.init_process_group("fake", rank=1, world_size=RANKS, store=dist.HashStore())  # FSDP2's collectives
    with no_device(), ExitStack() as stack:
        made = {name: BUILDERS[name](shape, stack=stack) for name in names}  # type: ignore[call-arg]
        turn = partial(harness.step_seconds, device=CPU, steps=steps, clock=time.thread_time)
        turns = {name: partial(turn, step) for name, step in made.items()}
        seconds = harness.take_turns(turns, rounds, warm_up=2)
        return {name: {"seconds": seconds[name], "counts": counted(step)} for name, step in made.items()}


def counted(step: Step) -> Counter[str]:
    """Return what one step does, by kind."""
    COUNTS.clear()
    with Launches():
        step()
    return Counter(COUNTS)


def rows(found: Found) -> list[list[str]]:
    """Return a row for each contestant: name, ms, ms above the plain loop's, their ratio to it, and counts."""
    base, made = found[PLAIN]["seconds"], []
    for name, each in found.items():
        seconds, counts = each["seconds"], each["counts"]
        added = [(own - plain) * 1e3 for own, plain in zip(seconds, base, strict=True)]
        share = [ratio - 1 for ratio in harness.ratios(seconds, base)]
        more = [harness.spread(added, 1), harness.spread(share, 2)] if name != PLAIN else ["", ""]
        own = [
            str(counts.get(key, 0)) if name in (*PRESETS, PATCHED) else ""
            for key in ("kernels", "collectives", "events")
        ]
        made.append([name, f"{statistics.median(seconds) * 1e3:.1f}", *more, str(counts["operations"]), *own])
    return made


def main() -> None:
    options = harness.parser(
        __doc__,
        only=(list(BUILDERS), "contestants; the plain loop always"),
        layers=24,
        hidden=64,
        rounds=41,
        steps=(1, "of a turn"),
    ).parse_args()
    names = list(dict.fromkeys([PLAIN, *options.only]))
    sizes = (options.layers, options.hidden, options.rounds, options.steps)
    found = harness.run(measure, names, *sizes, ranks=1, world=False)
    header = ["", "ms", "ms added", "of the plain loop's", "operations"]
    header += ["own kernels", "collectives", "events"]
    print(f"one thread of {harness.setting()}\n\n{harness.table(header, rows(found))}")


if __name__ == "__main__":
    harness.start(main)
