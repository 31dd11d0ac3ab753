"""What comm/, zero/ and the codecs allocate in steady steps, read from torch's profiler with the Python stack of
every allocation: results of operations, what they need inside, and storages that grow. An allocation belongs to the
innermost function of megazero in its stack. The engine runs as one rank of 2 nodes of 2, or of 2 such pipeline
stages (benchmarks/lone_rank.py).

Not ours, and not counted: gradients and activations, which autograd makes; what torch's optimizer makes inside its
own step; and up to 8 bytes that an operation takes for a Python number while it runs. Counted apart, as
``parameters``, are storages that are released and made anew: the gathered parameters where P > 1 (as in FSDP2), and
the P copy of lifetime 'step'. Views that the backward saved keep a storage, so its memory cannot be another buffer's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from benchmarks import steps
from benchmarks.lone_rank import lone_rank
from benchmarks.steps import Shape, Step, batches, engine_step, options_of, policies
from megazero import zero
from megazero.config import World, make_config, resolve_shards
from tests import ROOT

# Its matrices are above the number of elements up to which parameters are always sent exactly.
SMALL = Shape(2, 128, 256, 4, vocabulary=512, sequence=16, micro_batch=1, dtype=torch.bfloat16)
FIRST, LAST = 5, 10  # the steady steps, both counted
PACKAGES = {"megazero/comm/": "comm", "megazero/zero/": "zero", "megazero/kernels/": "codecs"}
CODECS = "megazero/comm/codec.py"
PARAMETERS = "parameters"  # storages that are made anew
STORAGES = ("materialise_full", "open_refresh")
NUMBER = 8  # bytes: a Python number as torch wraps it
Found = dict[tuple[str, str], tuple[int, int]]  # (package, place) -> allocations, bytes
CASES = {**{name: (name, 1) for name in policies()}, "PP 2, zeropp": ("zeropp", 2)}  # -> policy, stages


@contextmanager
def stepping(name: str, **options: Any) -> Iterator[tuple[Step, zero.Engine]]:
    """Yield a step of one of ``CASES``, and its engine. Of a pipeline the last stage runs, with 2 micro-batches.
    options: of ``engine_step``."""
    form, stages = CASES[name]
    preset, policy = policies()[form]
    cpu, rank = torch.device("cpu"), 4 * stages - 1
    with lone_rank(4, 2, resolve_shards(preset, 4, (2,)).factors, cpu, rank, stages) as mesh:
        if stages == 1:
            yield engine_step(SMALL, mesh, **{"policy": policy, **options})
            return
        values = {
            **options_of(SMALL),
            "micro_batch_size": 1,
            "lr": 1e-4,
            "train_iters": 10,
            "mock_data": True,
        }
        values |= {"pipeline_model_parallel_size": stages, "params_dtype": "bf16"}
        config = make_config(values, World(mesh.world_size, mesh.grid.ranks_per_node))
        yield steps.pipelined(config, mesh, batches(SMALL, cpu)[0].repeat(2, 1), 2, policy)


def allocated(step: Step, steps: int) -> Found:
    """Return what so many steps allocate: every call of torch's allocator."""
    found: Found = {}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True) as profiler:
        for _ in range(steps):
            step()
    assert profiler.profiler is not None
    for event in profiler.profiler.kineto_results.experimental_event_tree():
        _add(SimpleNamespace(children=[event]), [], None, found)
    return found


def _add(event: Any, frames: list[tuple[str, str]], call: dict[int, int] | None, found: Found) -> None:
    """Add the allocations of an event and of what it called.

    frames: (file:line, function) of the Python frames around it, innermost first. call: small allocations, by
    address, of the call of torch that the event is a part of.
    """

    def count(size: int) -> None:
        if (place := innermost(frames)) is not None and size:
            number, total = found.get(place, (0, 0))
            found[place] = (number + 1, total + size)

    for inner in event.children:
        if inner.tag == _EventType.PyCall:
            of = inner.extra_fields.callsite
            here = (f"{of.file_name}:{of.line_number}", of.function_name)
            _add(inner, [here, *frames], None, found)
        elif inner.tag != _EventType.Allocation:
            small = {} if call is None else call
            _add(inner, frames, small, found)
            if call is None:
                for size in small.values():  # not freed in the call: results
                    count(size)
        elif inner.extra_fields.alloc_size < 0:
            (call or {}).pop(inner.extra_fields.ptr, None)
        elif call is not None and inner.extra_fields.alloc_size <= NUMBER:
            call[inner.extra_fields.ptr] = inner.extra_fields.alloc_size
        else:
            count(inner.extra_fields.alloc_size)


def innermost(frames: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    """Return package and place; None if the allocation is the model's, torch's optimizer's or another program's."""
    for place, function in frames:
        path = place.removeprefix(f"{ROOT}/")
        if "torch/optim/" in path or path.startswith(("tests/", "benchmarks/")):
            return None
        if path.startswith("megazero/"):
            package = next((name for top, name in PACKAGES.items() if path.startswith(top)), None)
            package = "codecs" if path.startswith(CODECS) else package
            package = PARAMETERS if package == "zero" and function in STORAGES else package
            return (package, f"{path} {function}") if package else None
    return None
