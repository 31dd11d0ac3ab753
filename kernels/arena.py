"""Transient buffers in memory that is reused from step to step.

A steady step takes and closes the same buffers in the same order, so after its first steps an arena asks torch for no
more memory. It holds as much as was in use at one time; gaps between buffers may add a little.

On CUDA an arena keeps the memory of each stream apart, as torch's caching allocator does. A buffer belongs to the
stream that is current when it is taken. Its frame may be closed when that stream comes after all that reads or writes
the buffer: the next one to have the memory is of the same stream, and so comes after that, too. There are two cases:

- what writes and reads it is enqueued on that one stream (a chain of hops, an operation's reference);
- another stream used it, and since then the owner's stream has waited for an event of that stream.

No event is recorded or asked for here, and no host waits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import cached_property
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

ALIGN = 512  # bytes, as torch's caching allocator: kernels and collectives read 16 at a time or more

Take = Callable[[int, torch.dtype], torch.Tensor]
Bound = TypeVar("Bound")


class Arena:
    """The memory of one engine's transient buffers. One thread at a time uses it."""

    def __init__(self) -> None:
        self.regions: dict[object, _Region] = {}

    def frame(self, device: torch.device) -> Frame:
        """Return a new frame, in which buffers on this device are taken."""
        return Frame(self, device)

    def region(self, device: torch.device) -> _Region:
        """Return the memory of the stream that is current."""
        home = home_of(device)
        if home not in self.regions:
            self.regions[home] = _Region(device)
        return self.regions[home]

    @property
    def nbytes(self) -> int:
        """How many bytes are held, in use or not."""
        return sum(region.held for region in self.regions.values())

    @property
    def used(self) -> int:
        """How many bytes are in use."""
        return sum(region.used for region in self.regions.values())

    @property
    def peak(self) -> int:
        """The most bytes that were in use at one time, added up over streams."""
        return sum(region.peak for region in self.regions.values())


class Frame:
    """Buffers of one arena and stream that come free together. It is a context manager, which closes at its end."""

    def __init__(self, arena: Arena, device: torch.device) -> None:
        self.arena, self.device = arena, device
        self._taken: list[tuple[_Block, int]] = []

    @cached_property
    def _region(self) -> _Region:
        """The memory of the stream that was current when the first buffer was taken."""
        return self.arena.region(self.device)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer [numel] with any content, which belongs to the stream of the frame's first one."""
        size = numel * dtype.itemsize
        block, start = self._region.take(_aligned(size))
        self._taken.append((block, start))
        return block.buffer(start, size, dtype)

    def bind(
        self, numel: int, dtype: torch.dtype, key: object, make: Callable[[torch.Tensor], Bound]
    ) -> Bound:
        """Take a buffer, and return what ``make`` makes of it: views, say, which steady steps need not make again.

        The same object comes for the same place and ``key`` as long as the memory is there.
        """
        buffer = self.take(numel, dtype)
        block, start = self._taken[-1]
        place = start, numel, dtype, key
        if place not in block.bound:
            block.bound[place] = make(buffer)
        return block.bound[place]

    def close(self) -> None:
        """Let others have the memory. See the module on when this may be. A closed frame may be closed again."""
        while self._taken:
            self._region.free(*self._taken.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Block:
    """One piece of memory. ``taken`` has the (start, end) of the parts in use, in order."""

    def __init__(self, size: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # else nothing could be written to it outside of that mode
            self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.taken: list[tuple[int, int]] = []
        self._buffers: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self.bound: dict[tuple[int, int, torch.dtype, object], Any] = {}

    def buffer(self, start: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the buffer of these bytes, the same tensor each time: steady steps take the same ones."""
        key = start, size, dtype
        if key not in self._buffers:
            with torch.inference_mode(False):
                self._buffers[key] = self.memory[start : start + size].view(dtype)
        return self._buffers[key]

    def hole(self, size: int) -> tuple[int, int] | None:
        """Return the place in ``taken`` and the start of the first hole of this size."""
        start = 0
        for place, (low, high) in enumerate(self.taken):
            if low - start >= size:
                return place, start
            start = high
        return (len(self.taken), start) if self.memory.numel() - start >= size else None


class _Region:
    """The memory of one stream. While it grows it has several blocks. When nothing is in use they become one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.blocks: list[_Block] = []
        self.used = self.peak = 0
        self.wanted = 0  # bytes of the one block that is to hold all

    @property
    def held(self) -> int:
        return sum(block.memory.numel() for block in self.blocks)

    def take(self, size: int) -> tuple[_Block, int]:
        """Take the first hole of this size, else new memory. Return its block and start."""
        if not self.used and len(self.blocks) > 1:
            self.blocks.clear()
        for block in self.blocks:
            found = block.hole(size)
            if found is not None:
                place, start = found
                break
        else:
            block, place, start = self._grow(size), 0, 0
        block.taken.insert(place, (start, start + size))
        self.used += size
        self.peak = max(self.peak, self.used)
        return block, start

    def free(self, block: _Block, start: int) -> None:
        place = bisect_left(block.taken, (start, 0))
        low, high = block.taken.pop(place)
        self.used -= high - low

    def _grow(self, size: int) -> _Block:
        if not self.used:
            self.blocks.clear()
        # Of one block, behind its last buffer: gaps before that were too small.
        end = self.blocks[0].taken[-1][1] if len(self.blocks) == 1 else self.used
        self.wanted = max(self.wanted, end + size)
        self.blocks.append(_Block(size if self.blocks else self.wanted, self.device))
        return self.blocks[-1]


def view_of(buffer: Tensor, make: Callable[..., Any], *asked: Any) -> Any:
    """Return make(buffer, *asked), a view or a tuple of views. It is kept with the buffer as long as that is there.

    Steady steps take the same tensors, so they find the views; to make one takes the host 1 to 3 us. Views are
    detached: one that autograd knew would keep its buffer, and that the view.
    """
    key = (make, *asked)
    try:
        return vars(buffer)["_views"][key]
    except KeyError:
        pass
    with torch.inference_mode(False):  # else nothing could be written to them outside of that mode
        views = make(buffer, *asked)
        found = views.detach() if isinstance(views, Tensor) else tuple(view.detach() for view in views)
    vars(buffer).setdefault("_views", {})[key] = found
    return found


def part_of(buffer: Tensor, span: slice) -> Tensor:
    """Return buffer[span] by ``view_of``."""
    part: Tensor = view_of(buffer, Tensor.narrow, 0, span.start, span.stop - span.start)
    return part


def home_of(device: torch.device) -> object:
    """Return a stream's identity: on CUDA the device's current stream."""
    return (device, torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else device


def _aligned(size: int) -> int:
    return max(1, -(-size // ALIGN)) * ALIGN


# Of the operations' torch references, which close what they take. A few MB for each stream: they go by chunks.
SCRATCH = Arena()
