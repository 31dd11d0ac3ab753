"""Host memory in which a snapshot stays as it is while the training goes on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from megazero.checkpoint.manifest import to_json
from megazero.checkpoint.saving import Snapshot

_ALIGNED = 64  # bytes: that of any dtype, and of a cache line


class Staging:
    """Copies of what one rank saves, in one buffer that is kept from save to save.

    It holds what the rank writes once: tensors that are the same memory under two kinds (the master weights are
    stored again as weights, rounded), and slices that another rank writes, take no room. With fp32 master weights and
    Adam that is 12 bytes for each parameter of the rank's slice. A buffer for CUDA tensors is page-locked.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """The bytes of host memory in use."""
        return self._buffer.nbytes

    def take(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot as it is now, on the host. The one taken before it is overwritten.

        On CUDA the copies are on the current stream, and the host waits once, for all of them.
        """
        owned = [record for record in snapshot.records if record.owner]
        own = dict(snapshot.rank_tensors)
        copies = self._copies([*(t for record in owned for t in record.tensors.values()), *own.values()])
        records = [
            replace(record, tensors={kind: copies[_place(t)] for kind, t in record.tensors.items()})
            for record in owned
        ]
        return replace(
            snapshot,
            records=records,
            state=to_json(snapshot.state, "state"),
            rank_tensors={name: copies[_place(t)] for name, t in own.items()},
        )

    def _copies(self, tensors: Iterable[torch.Tensor]) -> dict[object, torch.Tensor]:
        sources = {_place(tensor): tensor for tensor in tensors}
        sizes = [-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in sources.values()]
        devices = {tensor.device for tensor in sources.values() if tensor.is_cuda}
        self._make_room(sum(sizes), pinned=bool(devices))
        copies: dict[object, torch.Tensor] = {}
        for (place, tensor), room in zip(
            sources.items(), self._buffer.split([*sizes, self.nbytes - sum(sizes)]), strict=False
        ):
            copies[place] = room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies[place].copy_(tensor.detach(), non_blocking=True)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def _make_room(self, nbytes: int, pinned: bool) -> None:
        if self.nbytes < nbytes or pinned and not self._buffer.is_pinned():
            self._buffer = torch.empty(0, dtype=torch.uint8)  # first the old one goes
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what two tensors have in common that are the same memory, read in the same way."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
