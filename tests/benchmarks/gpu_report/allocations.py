"""What comm/, zero/ and the codecs allocate in steady steps, and how often the host waits for the device in one.

The engine runs as one rank of 2 nodes of 2 (lone_rank.py). On CUDA the allocator's history is read, with the Python
stack of every allocation; on a CPU every operation of torch is asked whether it returned new memory. An allocation
belongs to the innermost function of megazero in its stack.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megazero.config import resolve_shards
from tests.benchmarks.gpu_report import loops
from tests.benchmarks.gpu_report.lone_rank import lone_rank
from tests.benchmarks.gpu_report.loops import Size, Step
from tests.benchmarks.gpu_report.record import Record, Skip
from tests.benchmarks.gpu_report.setting import ROOT, Setting, free

SIZE = Size("0.1B", layers=8, hidden=768, ffn=2048, heads=12, sequence=1024)
FIRST, LAST = 5, 10  # the steady steps, both counted
PACKAGES = {"megazero/comm/": "comm", "megazero/zero/": "zero", "kernels/": "codecs"}
CODECS = "megazero/comm/codec.py"
Found = dict[tuple[str, str], tuple[int, int]]  # (package, place) -> allocations, bytes


def run(setting: Setting, record: Record) -> None:
    size = setting.pick(SIZE, loops.TINY)
    steady = LAST - FIRST + 1
    for name, (preset, policy) in loops.policies().items():
        with record.attempt(preset=name) as row:
            if setting.left < 3:
                raise Skip("the piece's time was over")
            factors = resolve_shards(preset, 4, 2).factors
            with lone_rank(4, 2, factors, setting.device) as mesh:
                step, _ = loops.ours(size, setting.device, mesh=mesh, policy=policy)
                for _ in range(1, FIRST):
                    step()
                found = (by_operation if setting.rehearsal else by_allocator)(step, steady)
                waits = host_waits(step, steady) if not setting.rehearsal else None
                del step
            row |= cells(found, waits, steady)
            _tell_places(name, found, waits, steady, record)
        free(setting.device)


def cells(found: Found, waits: Counter[str] | None, steps: int) -> dict[str, Any]:
    """Of one step: allocations and kB by package, host waits."""
    row: dict[str, Any] = {}
    for package in ("comm", "zero", "codecs"):
        mine = [f for (own, _), f in found.items() if own == package]
        row[package] = sum(count for count, _ in mine) / steps
        row[f"{package} kB"] = sum(size for _, size in mine) / steps / 1e3
    row["host waits"] = sum(waits.values()) / steps if waits is not None else "needs CUDA"
    return row


def by_allocator(step: Step, steps: int) -> Found:
    """CUDA: from the history of torch's caching allocator."""
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


def by_operation(step: Step, steps: int) -> Found:
    """CPU: results of operations that lie in none of their inputs. A storage that is resized is not seen."""
    found = Tally()
    with Watch(found):
        for _ in range(steps):
            step()
    return found.found


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
    """Package and place; None where megazero has no part, or the model has it."""
    for file, line, function in frames:
        if not file.startswith(str(ROOT)):
            continue
        path = file[len(str(ROOT)) + 1 :]
        if path.startswith(("megazero/", "kernels/")):
            inside = (name for top, name in PACKAGES.items() if path.startswith(top))
            package = "codecs" if path == CODECS else next(inside, None)
            return (package, f"{path}:{line} {function}") if package else None
    return None


class Watch(TorchDispatchMode):
    def __init__(self, found: Tally) -> None:
        super().__init__()
        self.tally = found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = function(*args, **(kwargs or {}))
        new = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and _storage(x) not in known]
        if new:
            self.tally.add(list(_stack()), sum(x.untyped_storage().nbytes() for x in new))
        return out


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def _stack() -> Iterator[tuple[str, int, str]]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]


def host_waits(step: Step, steps: int) -> Counter[str]:
    """By place: operations at which torch waits for the device, and calls of ``synchronize``."""
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
    return file[len(str(ROOT)) + 1 :] if file.startswith(str(ROOT)) else file


def _tell_places(
    name: str, found: Found, waits: Counter[str] | None, steps: int, record: Record, most: int = 5
) -> None:
    """Notes on where most of it is."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for (_, place), (count, size) in sorted(found.items(), key=lambda item: -item[1][1])[:most]:
        places["allocates"].append(f"{place} ({count / steps:g} times, {size / steps / 1e3:.3g} kB)")
    for place, count in (waits or Counter()).most_common(most):
        places["waits"].append(f"{place} ({count / steps:g} times)")
    for verb, where in places.items():
        record.note(f"{name} {verb} in a step at: " + "; ".join(where))
