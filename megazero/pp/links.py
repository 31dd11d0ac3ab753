"""Point-to-point messages between the stages of one pipeline.

Sends do not block. Receives are posted in the order in which the sender computes (schedules.py: sends), some ahead
of use. So the messages from one rank to another match by their order alone, as NCCL needs it, and a message is there
when a stage asks for it if the link was fast enough.

On gloo a send or receive cannot be asked whether it is done: a thread for each peer and direction waits for it, and
the stage waits for the thread, letting the engine's chains move on meanwhile. On CUDA waiting is the stream's
business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm.traffic import Traffic
from megazero.mesh.mesh import Mesh
from megazero.pp.schedules import Message

AHEAD = 2  # receives posted per peer beyond the one that is waited for
POLL_S = 0.0005  # how often the engine's chains are looked at while a stage waits


class Links:
    """This rank's messages with the other pipeline ranks. All have one shape and dtype.

    shape, dtype: of a message as it travels. wait: context manager factory around host waits.
    """

    def __init__(
        self,
        mesh: Mesh,
        shape: Sequence[int],
        dtype: torch.dtype,
        traffic: Traffic,
        poll: Callable[[], None],
        timed: Callable[[str], Any],
    ) -> None:
        self.mesh, self.shape, self.dtype, self.traffic = mesh, tuple(shape), dtype, traffic
        self.poll, self.timed = poll, timed
        self.threads: dict[tuple[str, int], ThreadPoolExecutor] = {}
        self.expected: dict[int, deque[Message]] = {}  # by source, not posted yet
        self.posted: dict[Message, tuple[Tensor, Any]] = {}
        self.sent: deque[tuple[Tensor, Any]] = deque()

    def open(self, expected: Mapping[int, Sequence[Message]]) -> None:
        """Begin a step or an evaluation that receives these messages, by source rank, in the order of sending."""
        self.expected = {source: deque(messages) for source, messages in expected.items()}
        for source in self.expected:
            self._post(source, AHEAD)

    def send(self, message: Message, tensor: Tensor, target: int) -> None:
        """tensor: contiguous, of the links' shape. target: pipeline rank."""
        assert tensor.shape == self.shape and tensor.dtype == self.dtype, (tensor.shape, self.shape)
        peer = self.mesh.pp.ranks[target]
        self.traffic.add("pp", self.mesh.grid.link(self.mesh.rank, peer), tensor.nbytes)
        work = dist.isend(tensor, peer, group=self._group(self.mesh.pp.index, target))
        self._reap()
        self.sent.append((tensor, self._watched("send", target, work)))

    def receive(self, message: Message, source: int) -> Tensor:
        """The message's tensor, when it may be used on the current stream."""
        while message not in self.posted:
            self._post(source, 1)
        tensor, work = self.posted.pop(message)
        self._post(source, AHEAD - sum(1 for m in self.posted if m.source_stage == message.source_stage))
        self._wait(work, f"exposed_pipeline_{self._link(source)}")
        return tensor

    def close(self) -> None:
        """Wait until what was sent has left."""
        while self.sent:
            self._wait(self.sent[0][1], "exposed_pipeline_intra")
            self.sent.popleft()

    def abort(self) -> None:
        """Forget a step that was broken off. What is on its way is not waited for."""
        self.expected.clear()
        self.posted.clear()
        self.sent.clear()

    # -- parts -----------------------------------------------------------------------------------

    def _link(self, other: int) -> str:
        return self.mesh.grid.link(self.mesh.rank, self.mesh.pp.ranks[other]).removesuffix("_node")

    def _group(self, source: int, target: int) -> Any:
        pp = self.mesh.pp
        return pp.gather_group if target > source else pp.reduce_group

    def _post(self, source: int, count: int) -> None:
        waiting = self.expected[source]
        for _ in range(min(max(count, 0), len(waiting))):
            message = waiting.popleft()
            tensor = torch.empty(self.shape, dtype=self.dtype, device=self.mesh.device)
            peer = self.mesh.pp.ranks[source]
            work = dist.irecv(tensor, peer, group=self._group(source, self.mesh.pp.index))
            self.posted[message] = tensor, self._watched("receive", source, work)

    def _watched(self, direction: str, other: int, work: Any) -> Any:
        """Something to wait for: on gloo a future whose thread waits for the work."""
        if self.mesh.device.type == "cuda":
            return work
        key = direction, other
        if key not in self.threads:
            self.threads[key] = ThreadPoolExecutor(1, thread_name_prefix=f"pipeline {direction} {other}")
        return self.threads[key].submit(work.wait)

    def _wait(self, work: Any, item: str) -> None:
        if not isinstance(work, Future):
            work.wait()
            return
        if work.done():
            work.result()
            return
        with self.timed(item):
            while True:
                self.poll()
                try:
                    work.result(timeout=POLL_S)
                    return
                except NotYet:
                    if work.done():  # the work's own time-out, not this look at it
                        raise

    def _reap(self) -> None:
        """Let go of what has left."""

        def gone(work: Any) -> bool:
            return work.done() if isinstance(work, Future) else work.is_completed()

        while self.sent and gone(self.sent[0][1]):
            tensor, work = self.sent.popleft()
            self._wait(work, "exposed_pipeline_intra")
