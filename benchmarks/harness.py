"""What the benchmarks share: their command lines, ranks, turns, statistics and pages.

A program measures in a function that every rank runs, and ``run`` returns what rank 0 found:

    def compare(rounds: int) -> dict[str, list[float]]:
        return take_turns({name: lambda: measure(step, 1)[0] for name, step in ...}, rounds)

    for lab in labs_at(options.rates):
        found = run(compare, options.rounds, lab=lab)
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from benchmarks.results import DOCS
from megazero.files import exclusive, replacing
from tests.netlab.lab import Lab, LabUnavailable, interface_bytes, parse_link

ROOT = Path(__file__).resolve().parents[1]
T = TypeVar("T")

# -- command lines ---------------------------------------------------------------------------------------


def parser(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Make an option for each default, of the default's type. A list takes several words, a bool none. A type in
    place of a default is a required option. A pair is a default and its help."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for name, given in defaults.items():
        default, text = given if isinstance(given, tuple) else (given, "")
        flag = "--" + name.replace("_", "-")
        if isinstance(default, bool):
            made.add_argument(flag, action="store_true", help=text)
            continue
        several, required = isinstance(default, list), isinstance(default, type)
        kind = default if required else type(default[0] if several else default)
        kind = Path if issubclass(kind, Path) else kind
        shown = " ".join(map(str, default)) if several else default
        made.add_argument(
            flag,
            type=kind,
            default=None if required else default,
            nargs="+" if several else None,
            required=required,
            help=text if required else f"{text} (default: {shown})".lstrip(),
        )
    return made


def start(main: Callable[[], int | None]) -> None:
    """Run a program. Its exit status is 2 where links cannot be shaped."""
    try:
        sys.exit(main())
    except LabUnavailable as error:
        print(error, file=sys.stderr)
        sys.exit(2)


# -- ranks -----------------------------------------------------------------------------------------------


def labs_at(rates: Sequence[str], nodes: int = 2) -> Iterator[Lab]:
    """Yield one lab of nodes at each rate ('1gbit', '1gbit+20ms') in turn. Raises ValueError for a bad rate before
    anything is measured."""
    for rate in rates:
        parse_link(rate)
    with Lab(nodes) as lab:
        for rate in rates:
            lab.shape(rate)
            yield lab


def run(
    function: Callable[..., Any],
    *arguments: Any,
    ranks: int = 2,
    lab: Lab | None = None,
    world: bool = True,
    timeout: float | None = None,
    echo: bool = False,
    environ: Mapping[str, str] | None = None,
) -> Any:
    """Run ``function(*arguments)`` in new processes of one thread each, and return what rank 0 returns. Both are
    JSON.

    ranks: processes, with ``lab`` of each node. world: they share a process group of gloo, on GPUs with NCCL, too;
    else they only have torchrun's environment. timeout: seconds. Raises RuntimeError with what the ranks printed."""
    environ = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", **(environ or {})}
    module = ".".join(Path(inspect.getfile(function)).relative_to(ROOT).with_suffix("").parts)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        words = [__file__, module, function.__name__, json.dumps(arguments), str(file), "world" * world]
        if lab is not None:
            done = lab.run(words, ranks_per_node=ranks, environ=environ, timeout=timeout, echo=echo)
            code, said = done.returncode, "\n".join(done.outputs)
        else:
            launcher = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={ranks}",
            ]
            here = subprocess.run(
                [*launcher, *words],
                env={**os.environ, **environ},
                stdout=None if echo else subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout,
            )
            code, said = here.returncode, here.stdout or ""
        if code:
            where = f" at {lab.rate}" if lab is not None else ""
            raise RuntimeError(f"{module}.{function.__name__}{where}: return code {code}\n{said}")
        return json.loads(file.read_text())


def run_rank(module: str, name: str, arguments: str, file: str, world: str) -> None:
    """Run one rank of ``run``."""
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if world:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    found = getattr(importlib.import_module(module), name)(*json.loads(arguments))
    if os.environ["RANK"] == "0":
        Path(file).write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a trainer's watch has threads that its own program alone joins


def ranks_per_node() -> int:
    return int(os.environ["LOCAL_WORLD_SIZE"])


def device() -> torch.device:
    """Return this rank's device."""
    cuda = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


# -- what a contestant learns ------------------------------------------------------------------------------


class Taken(NamedTuple):
    """What a contestant's step returns: this rank's loss, detached, and the norm of the gradients before they are
    clipped, a DTensor under FSDP2. What losses are divided by is the same for all that are compared."""

    loss: torch.Tensor
    norm: Any


class Learned(NamedTuple):
    """The loss of a contestant's first step and of a later one, and the norm of the first one's gradients."""

    first: float
    last: float
    norm: float


NORMS = 1.1  # how far from the median a norm may be, as a factor: in 2 bits it is 1.07 times the exact one


def learned(taken: Sequence[Taken]) -> Learned:
    """Return the means over ranks of what a contestant's steps, two at least, returned. Collective."""
    norm = taken[0].norm.full_tensor() if hasattr(taken[0].norm, "full_tensor") else taken[0].norm
    row = torch.tensor([float(taken[0].loss), float(taken[-1].loss), float(norm)], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(row := row.to(device()))
        row /= dist.get_world_size()
    return Learned(*row.tolist())


def require_training(contestants: Mapping[str, Learned]) -> None:
    """Raise RuntimeError unless each contestant's loss falls and its gradients have the others' norm: until then its
    times do not count. A compiled head without gradients was the fastest once, with the right loss."""
    for name, one in contestants.items():
        if not one.last < one.first:
            raise RuntimeError(f"{name} does not learn: loss {one.first:.5g}, later {one.last:.5g}")
    require_gradients({name: one.norm for name, one in contestants.items()})


def require_gradients(norms: Mapping[str, float]) -> None:
    """Raise RuntimeError unless each contestant's gradients have the others' norm: within NORMS of the median."""
    middle = statistics.median_high(norms.values())
    for name, norm in norms.items():
        if not middle / NORMS <= norm <= middle * NORMS or not norm:
            raise RuntimeError(f"{name} has gradients of norm {norm:.5g}, the contestants {middle:.5g}")


# -- turns -----------------------------------------------------------------------------------------------


def take_turns(
    contestants: Mapping[str, Callable[[], T]], rounds: int, warm_up: int = 1
) -> dict[str, list[T]]:
    """Return what each contestant returned in each round after the ``warm_up`` ones. Each round starts with the next
    contestant, so that nobody always follows the same one."""
    names, taken = list(contestants), {name: list[T]() for name in contestants}
    for number in range(warm_up + rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            found = contestants[name]()
            if number >= warm_up:
                taken[name].append(found)
    return taken


def measure(step: Callable[[], Any], steps: int = 1) -> tuple[float, int]:
    """Return the seconds of a step, from barrier to barrier, and the bytes that this node's interface sent in it."""
    _meet()
    sent = _sent()
    _meet()  # a rank quick to leave the first would send before its neighbour has read the interface
    began = time.perf_counter()
    for _ in range(steps):
        step()
    _meet()
    return (time.perf_counter() - began) / steps, (_sent() - sent) // steps


def measure_most(step: Callable[[], Any], steps: int = 1) -> tuple[float, int]:
    """Return what ``measure`` does, with the bytes of the node that sent most."""
    seconds, sent = measure(step, steps)
    most = torch.tensor(sent)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return seconds, int(most)


def _meet() -> None:
    wait(device())
    if dist.is_initialized():
        dist.barrier()


def _sent() -> int:
    try:
        return interface_bytes()[0]
    except ValueError:  # no lab: no interface between nodes
        return 0


def step_seconds(
    step: Callable[[], Any],
    device: torch.device,
    steps: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the seconds of a step on one device, without ranks. Launches and host waits are included."""
    wait(device)
    began = clock()
    for _ in range(steps):
        step()
    wait(device)
    return (clock() - began) / steps


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- results that are kept --------------------------------------------------------------------------------


class Store:
    """A file with one JSON line per result, so that the same command continues where it stopped."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lock = file.with_name(f".{file.name}.lock")
        self._held: ExitStack | None = None

    def claim(self) -> None:
        """Keep other processes from adding to the file until this one ends: they would repeat its work. Raises
        ValueError if another process holds the file."""
        if self._held is not None:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        held = ExitStack()
        try:
            held.enter_context(exclusive(self._lock, wait=False))
        except BlockingIOError:
            raise ValueError(
                f"{self.file}: another process adds to it; wait for its end, or name another file"
            ) from None
        self._held = held

    def append(self, record: Mapping[str, Any]) -> None:
        with nullcontext() if self._held else exclusive(self._lock):
            before = self.file.read_bytes() if self.file.exists() else b""
            with replacing(self.file) as file:  # never a line that is half there
                file.write(before + json.dumps(record).encode() + b"\n")

    def records(self) -> list[dict[str, Any]]:
        text = self.file.read_text() if self.file.exists() else ""
        return [json.loads(line) for line in text.splitlines()]


def installed(name: str) -> str:
    """Return a package's version, or 'not installed'."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


# -- statistics ------------------------------------------------------------------------------------------


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Return the median (least to most)."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def ratios(own: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return the ratios round by round."""
    return [a / b for a, b in zip(own, other, strict=True)]


def of_medians(own: Sequence[float], other: Sequence[float], digits: int = 2) -> str:
    """Return the ratio of the medians (least to most, round by round)."""
    each, whole = ratios(own, other), statistics.median(own) / statistics.median(other)
    return f"{whole:.{digits}f} ({min(each):.{digits}f} to {max(each):.{digits}f})"


# -- pages -----------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a markdown table."""
    head, *lines = ["| " + " | ".join(line) + " |" for line in (header, *rows)]
    return "\n".join([head, "|" + "---|" * len(header), *lines])


def filled(text: str) -> str:
    """Return a paragraph, wrapped at a page's width."""
    return textwrap.fill(" ".join(text.split()), 118, break_on_hyphens=False)


def setting() -> str:
    """Return what a section was measured on, in words."""
    return f"{os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}"


def section(page: Path, title: str) -> str:
    """Return the text of a section of a page. Raises ValueError if the page has no such section."""
    _, heading, rest = page.read_text(encoding="utf-8").partition(f"\n## {title}\n")
    if not heading:
        raise ValueError(f"{page} has no section {title!r}")
    return rest.partition("\n## ")[0].strip("\n")


def write_section(page: Path, title: str, text: str) -> None:
    """Replace a section's text. A page that does not exist is first copied from docs."""
    page.parent.mkdir(parents=True, exist_ok=True)
    whole = (page if page.exists() else next(DOCS.rglob(page.name))).read_text(encoding="utf-8")
    before, heading, rest = whole.partition(f"\n## {title}\n")
    if not heading:
        raise ValueError(f"{page} has no section {title!r}")
    _, following, after = rest.partition("\n## ")
    body = text.strip("\n")
    page.write_text(f"{before}{heading}\n{body}\n{following}{after}", encoding="utf-8")


if __name__ == "__main__":
    run_rank(*sys.argv[1:])
