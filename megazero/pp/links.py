"""Point-to-point messages between the stages of one pipeline.

Sends do not block. Receives are posted in the order in which the sender computes (schedules.py: sends). Some are
posted ahead of use, but none before this rank has issued the actions that it must not delay (timeline.py:
post_after). This has three effects. The messages from one rank to another match by their order alone, as NCCL needs
it. What waits for the whole device waits for no own action. A message is there when a stage asks for it, if the link
was fast enough.

On gloo a send or receive cannot be asked whether it is done. So a thread for each peer and direction waits for it,
and the stage waits for the thread and lets the engine's chains move on meanwhile. On CUDA the stream does the
waiting, between two events where it is timed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm.hops import Traffic
from megazero.comm.timing import Waits
from megazero.mesh.levels import short
from megazero.mesh.mesh import Mesh
from megazero.mesh.waiting import waiting
from megazero.pp.schedules import Message

AHEAD = 2  # receives posted per peer beyond the one that is waited for
POLL_S = 0.0005  # how often the engine's chains are looked at while a stage waits


class Links:
    """This rank's messages with the other pipeline ranks. All of a step have one shape, and all one dtype.

    ``shape`` and ``dtype`` are those of a message as it travels. ``poll`` is called while the host waits, and returns
    True if there is more for it to do. ``waits`` times each of these waits, and those of the stream.
    """

    def __init__(
        self,
        mesh: Mesh,
        dtype: torch.dtype,
        traffic: Traffic,
        poll: Callable[[], bool],
        waits: Waits,
    ) -> None:
        self.mesh, self.dtype, self.traffic = mesh, dtype, traffic
        self.shape: tuple[int, ...] = ()
        self.poll, self.waits = poll, waits
        self.threads: dict[tuple[str, int], ThreadPoolExecutor] = {}
        self.expected: dict[int, deque[Message]] = {}  # by source, not posted yet
        self.after: Mapping[Message, int] = {}  # own actions to be issued before a receive is posted
        self.issued = 0  # own actions of this step
        self.posted: dict[int, dict[Message, tuple[Tensor, Any]]] = {}  # by source, not asked for yet
        self.sent: deque[tuple[Tensor, int, Any]] = deque()  # with the target
        self.aborted = False

    @waiting
    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Send a number each way between these pipeline ranks. This is collective and comes before the first message.

        NCCL makes a pair's communicator at its first message, and the two ranks wait for each other in that. If each
        began with the receive that its own schedule posts first, they would wait in a ring. Here all have one order.
        """
        token, own = torch.zeros(1, device=self.mesh.device), self.mesh.pp.index
        for low, high in sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]}):
            for source, target in ((low, high), (high, low)):
                group, ranks = self._group(source, target), self.mesh.pp.ranks
                if own == source:
                    dist.send(token, ranks[target], group=group)
                elif own == target:
                    dist.recv(token, ranks[source], group=group)

    def open(
        self, shape: Sequence[int], expected: Mapping[int, Sequence[Message]], after: Mapping[Message, int]
    ) -> None:
        """Begin a step or an evaluation, whose messages have this shape. Raises RuntimeError after ``abort``.

        ``expected`` holds the messages to receive, by source rank, in the order of sending. ``after`` says for each
        message how many own actions must be issued before its receive may be posted (timeline.py: post_after).
        """
        if self.aborted and self.mesh.pp.size > 1:
            raise RuntimeError(
                "a step of this pipeline was broken off, and messages match by order alone: what was on its way "
                "would be taken for this step's; start the ranks anew"
            )
        self.shape = tuple(shape)
        self.expected = {source: deque(messages) for source, messages in expected.items()}
        self.posted = {source: {} for source in expected}
        self.after, self.issued = after, 0
        self._post_all()

    def advance(self) -> None:
        """Note that one more own action is issued: its kernels are launched and its message is on its way."""
        self.issued += 1
        self._post_all()

    def send(self, tensor: Tensor, target: int) -> None:
        """Send ``tensor`` to the pipeline rank ``target``. It is contiguous and has the links' shape and dtype."""
        assert tensor.shape == self.shape and tensor.dtype == self.dtype, (tensor.shape, self.shape)
        peer = self.mesh.pp.ranks[target]
        self.traffic.add("pp", self.mesh.grid.link(self.mesh.rank, peer), tensor.nbytes)
        work = dist.isend(tensor, peer, group=self._group(self.mesh.pp.index, target))
        self.sent.append((tensor, target, self._watched("send", target, work)))
        while self.sent and _is_done(self.sent[0][2]):
            self._finish_oldest()

    def receive(self, message: Message, source: int) -> Tensor:
        """Return the message's tensor, of the links' shape and dtype, when it may be used on the current stream."""
        self._post(source, message)
        tensor, work = self.posted[source].pop(message)
        self._post(source)
        self._wait(work, source)
        return tensor

    def close(self) -> None:
        """Wait until all sends have ended."""
        while self.sent:
            self._finish_oldest()

    def abort(self) -> None:
        """Forget an interrupted step. Messages in flight are not waited for, so no other step may follow."""
        self.aborted = True
        self.expected.clear()
        self.posted.clear()
        self.sent.clear()

    # -- parts -----------------------------------------------------------------------------------

    def _group(self, source: int, target: int) -> Any:
        pp = self.mesh.pp
        return pp.gather_group if target > source else pp.reduce_group

    def _post_all(self) -> None:
        for source in self.expected:
            self._post(source)

    def _post(self, source: int, wanted: Message | None = None) -> None:
        """Post receives that may be posted by now, until AHEAD are posted and ``wanted`` is among them."""
        expected, posted = self.expected[source], self.posted[source]
        while (
            expected
            and self.after[expected[0]] <= self.issued
            and (len(posted) < AHEAD or wanted is not None and wanted not in posted)
        ):
            message = expected.popleft()
            tensor = torch.empty(self.shape, dtype=self.dtype, device=self.mesh.device)
            peer = self.mesh.pp.ranks[source]
            work = dist.irecv(tensor, peer, group=self._group(source, self.mesh.pp.index))
            posted[message] = tensor, self._watched("receive", source, work)

    def _watched(self, direction: str, other: int, work: Any) -> Any:
        """Return something to wait for. On gloo it is a future whose thread waits for the work."""
        if self.mesh.device.type == "cuda":
            return work
        key = direction, other
        if key not in self.threads:
            self.threads[key] = ThreadPoolExecutor(1, thread_name_prefix=f"pipeline {direction} {other}")
        return self.threads[key].submit(work.wait)

    def _finish_oldest(self) -> None:
        _, target, work = self.sent[0]
        self._wait(work, target)
        self.sent.popleft()

    def _wait(self, work: Any, other: int) -> None:
        if _is_done(work):
            _finish(work)
            return
        peer = self.mesh.pp.ranks[other]
        link = short(self.mesh.grid.link(self.mesh.rank, peer))
        with self.waits(f"exposed_pipeline_{link}"):
            if isinstance(work, Future):
                # Not result(timeout): work that ends as a look at it does would seem to have timed out itself.
                while self.poll() and not wait([work], POLL_S).done:
                    pass
            _finish(work)


def _is_done(work: Any) -> bool:
    return work.done() if isinstance(work, Future) else work.is_completed()


def _finish(work: Any) -> None:
    """Wait for the end, on CUDA on the current stream. Raises what the message failed with."""
    if isinstance(work, Future):
        work.result()
    else:
        work.wait()
