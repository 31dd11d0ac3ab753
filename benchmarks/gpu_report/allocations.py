"""What comm/, zero/ and the codecs allocate in steady steps, and how often the host waits for the device in one.

The engine runs as one rank of 2 nodes of 2, or of 2 such pipeline stages (lone_rank.py). On CUDA the allocator's
history is read, on a CPU torch's profiler, with the Python stack of every allocation: results of operations, what
they need inside, and storages that grow. An allocation belongs to the innermost function of megazero in its stack.

Not ours, and not counted: gradients and activations, which autograd makes; what torch's optimizer makes inside its
own step; and up to 8 bytes that an operation on a CPU takes for a Python number while it runs. Counted apart, as
``parameters``, are storages that are released and made anew: the gathered parameters where P > 1 (as in FSDP2), and
the P copy of lifetime 'step'. Views that the backward saved keep a storage, so its memory cannot be another buffer's.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_report import loops
from benchmarks.gpu_report.loops import Size, Step
from benchmarks.gpu_report.record import Record
from benchmarks.gpu_report.setting import ROOT, Setting, free
from benchmarks.lone_rank import lone_rank
from megazero import zero
from megazero.config import resolve_shards

SIZE = Size("0.1B", layers=8, hidden=768, ffn=2048, heads=12, sequence=1024)
# Its matrices are above the number of elements up to which parameters are always sent exactly.
SMALL = Size("small", layers=2, hidden=128, ffn=256, heads=4, vocabulary=512, sequence=16)
FIRST, LAST = 5, 10  # the steady steps, both counted
PACKAGES = {"megazero/comm/": "comm", "megazero/zero/": "zero", "megazero/kernels/": "codecs"}
CODECS = "megazero/comm/codec.py"
PARAMETERS = "parameters"  # storages that are made anew
STORAGES = ("materialise_full", "open_refresh")
PLACES = 5  # that are told
NUMBER = 8  # bytes: a Python number as torch wraps it
Found = dict[tuple[str, str], tuple[int, int]]  # (package, place) -> allocations, bytes


def run(setting: Setting, record: Record) -> None:
    size = setting.pick(SIZE, SMALL)
    steady = LAST - FIRST + 1
    for name in cases():
        with record.attempt(preset=name) as row:
            setting.need(3)
            with stepping(name, size, setting.device) as (step, engine):
                for _ in range(1, FIRST):
                    step()
                found = (by_profiler if setting.rehearsal else by_allocator)(step, steady)
                waits = host_waits(step, steady) if not setting.rehearsal else None
                arena = engine.arena
                del step, engine
            row |= {
                **cells(found, waits, steady),
                "pool kB": arena.nbytes / 1e3,
                "its peak kB": arena.peak / 1e3,
            }
            _tell_places(name, found, waits, steady, record)
        free(setting.device)


def cases() -> dict[str, tuple[str, int]]:
    """Return name -> (policy of loops.policies(), pipeline stages)."""
    return {**{name: (name, 1) for name in loops.policies()}, "PP 2, zeropp": ("zeropp", 2)}


@contextmanager
def stepping(name: str, size: Size, device: torch.device) -> Iterator[tuple[Step, zero.Engine]]:
    """Yield a step of one of ``cases``, and its engine. Of a pipeline the last stage runs, with 2 micro-batches."""
    form, stages = cases()[name]
    preset, policy = loops.policies()[form]
    rank = 4 * stages - 1
    with lone_rank(4, 2, resolve_shards(preset, 4, 2).factors, device, rank, stages) as mesh:
        make = loops.ours if stages == 1 else loops.pipelined
        yield make(size, device, mesh=mesh, policy=policy)


def cells(found: Found, waits: Counter[str] | None, steps: int) -> dict[str, Any]:
    """Return allocations and kB by package, and host waits, of one step."""
    row: dict[str, Any] = {}
    for package in ("comm", "zero", "codecs", PARAMETERS):
        mine = [f for (own, _), f in found.items() if own == package]
        row[package] = sum(count for count, _ in mine) / steps
        row[f"{package} kB"] = sum(size for _, size in mine) / steps / 1e3
    row["host waits"] = sum(waits.values()) / steps if waits is not None else "needs CUDA"
    return row


def by_allocator(step: Step, steps: int) -> Found:
    """Read the allocations on CUDA from the history of torch's caching allocator."""
    torch.cuda.synchronize()
    history = torch.cuda.memory._record_memory_history
    history(enabled="all", context="alloc", stacks="python", max_entries=1_000_000)
    try:
        for _ in range(steps):
            step()
        (trace,) = torch.cuda.memory._snapshot()["device_traces"][:1]
    finally:
        history(enabled=None)
    found = Tally()
    for event in trace:
        if event["action"] == "alloc":
            frames = [(f["filename"], f["line"], f["name"]) for f in event.get("frames", ())]
            found.add(frames, event["size"])
    return found.found


def by_profiler(step: Step, steps: int) -> Found:
    """Read the allocations on a CPU from torch's profiler: every call of its allocator."""
    found = Tally()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True) as profiler:
        for _ in range(steps):
            step()
    assert profiler.profiler is not None
    for event in profiler.profiler.kineto_results.experimental_event_tree():
        _add_allocations(SimpleNamespace(children=[event]), [], None, found)
    return found.found


def _add_allocations(
    event: Any, frames: list[tuple[str, int, str]], call: dict[int, int] | None, found: Tally
) -> None:
    """Add the allocations of an event and of what it called.

    frames: the Python frames around it, innermost first. call: small allocations, by address, of the call of torch
    that the event is a part of.
    """
    for inner in event.children:
        if inner.tag == _EventType.PyCall:
            of = inner.extra_fields.callsite
            here = (of.file_name, of.line_number, of.function_name)
            _add_allocations(inner, [here, *frames], None, found)
        elif inner.tag != _EventType.Allocation:
            small = {} if call is None else call
            _add_allocations(inner, frames, small, found)
            if call is None:
                for size in small.values():  # not freed in the call: results
                    found.add(frames, size)
        elif inner.extra_fields.alloc_size < 0:
            (call or {}).pop(inner.extra_fields.ptr, None)
        elif call is not None and inner.extra_fields.alloc_size <= NUMBER:
            call[inner.extra_fields.ptr] = inner.extra_fields.alloc_size
        else:
            found.add(frames, inner.extra_fields.alloc_size)


class Tally:
    """Allocations by the package and the place of the innermost function of megazero."""

    def __init__(self) -> None:
        self.found: Found = {}

    def add(self, frames: Sequence[tuple[str, int, str]], size: int) -> None:
        """frames: (file, line, function), innermost first."""
        place = innermost(frames)
        if place is not None and size:
            count, total = self.found.get(place, (0, 0))
            self.found[place] = (count + 1, total + size)


def innermost(frames: Sequence[tuple[str, int, str]]) -> tuple[str, str] | None:
    """Return package and place; None if the allocation is the model's, torch's optimizer's or another program's."""
    for file, line, function in frames:
        path = file.removeprefix(f"{ROOT}/")
        if "torch/optim/" in path or path.startswith(("tests/", "benchmarks/")):
            return None
        if path.startswith("megazero/"):
            inside = next((name for top, name in PACKAGES.items() if path.startswith(top)), None)
            package = "codecs" if path == CODECS else inside
            package = PARAMETERS if package == "zero" and function in STORAGES else package
            return (package, f"{path}:{line} {function}") if package else None
    return None


def host_waits(step: Step, steps: int) -> Counter[str]:
    """Count, by place, operations at which torch waits for the device and calls of ``synchronize``."""
    found: Counter[str] = Counter()
    with warnings.catch_warnings(record=True) as said, _explicit(found):
        warnings.simplefilter("always")
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(steps):
                step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for each in said:
        if "synchroniz" in str(each.message):
            found[f"{_relative(each.filename)}:{each.lineno}"] += 1
    return found


@contextmanager
def _explicit(found: Counter[str]) -> Iterator[None]:
    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            found[f"{_relative(frame.f_code.co_filename)}:{frame.f_lineno} synchronize"] += 1
            return call(*args, **kwargs)

        return run

    with ExitStack() as stack:
        for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event):
            stack.enter_context(patch.object(owner, "synchronize", counted(owner.synchronize)))
        yield


def _relative(file: str) -> str:
    """Return the path below the checkout, or below site-packages: a page names no machine's folders."""
    inside = file[len(str(ROOT)) + 1 :] if file.startswith(str(ROOT)) else file
    return re.sub(r".*(?:site|dist)-packages/", "", inside)


def _tell_places(name: str, found: Found, waits: Counter[str] | None, steps: int, record: Record) -> None:
    """Note the places where most of it happens."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for (_, place), (count, size) in sorted(found.items(), key=lambda item: -item[1][1])[:PLACES]:
        places["allocates"].append(f"{place} ({count / steps:g} times, {size / steps / 1e3:.3g} kB)")
    for place, count in (waits or Counter()).most_common(PLACES):
        places["waits"].append(f"{place} ({count / steps:g} times)")
    for verb, where in places.items():
        record.note(f"{name} {verb} in a step at: " + "; ".join(where))
