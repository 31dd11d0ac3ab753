"""Records: what one rank holds of one parameter, as views of its own flat buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod

import torch

from megazero.checkpoint.boxes import Box, gaps
from megazero.checkpoint.placement import Placement


@dataclass(frozen=True)
class SliceRecord:
    """The flat range [start, stop) of a local tensor, once per kind of value kept for it.

    placement: where the local tensor lies in the stored one.
    start, stop: flat indices into the row-major local tensor. An empty range is legal.
    tensors: map a kind ('weights', 'master', 'exp_avg', ...) to a contiguous 1-D tensor of ``stop - start``
        elements, of any dtype and device. Saving reads it, loading writes it in place.
    stored: maps a kind to the dtype it is stored in, where that is not its tensor's. Saving converts box by box as
        it writes, so that no second copy of a tensor is held. Loading ignores it.
    make: returns the flat tensor of a kind when it is written, for tensors that are not held in memory. Their entries
        in ``tensors`` are on the meta device and give length and dtype. Loading ignores it.
    owner: whether this rank writes the range. Every stored element needs one owner. Replicas (of
        data-parallel ranks, tied parameters) have ``owner=False`` and load all the same.
    """

    placement: Placement
    start: int
    stop: int
    tensors: Mapping[str, torch.Tensor]
    owner: bool = True
    stored: Mapping[str, torch.dtype] = field(default_factory=dict)
    make: Callable[[str], torch.Tensor] | None = None

    def __post_init__(self) -> None:
        elements = prod(self.placement.local_shape)
        if not 0 <= self.start <= self.stop <= elements:
            raise ValueError(
                f"record of '{self.placement.name}': range [{self.start}, {self.stop}) does not lie in the "
                f"local tensor of {elements} elements {self.placement.local_shape}"
            )
        for kind, tensor in self.tensors.items():
            if "/" in kind or not kind:
                raise ValueError(f"record of '{self.placement.name}': '{kind}' cannot name a kind (no '/')")
            if tensor.shape != (self.stop - self.start,) or not tensor.is_contiguous():
                raise ValueError(
                    f"record of '{self.placement.name}': '{kind}' must be contiguous, of shape "
                    f"({self.stop - self.start},); it is {tuple(tensor.shape)}, stride {tensor.stride()}"
                )

    def view(self, kind: str, box: Box) -> torch.Tensor:
        """Return the box as the stored tensor sees it: a view of the flat tensor, maybe transposed."""
        first = box.offset - self.start
        view = self.tensors[kind][first : first + prod(box.shape)].view(box.shape)
        return view.t() if self.placement.transposed else view

    def zero_padding(self, kind: str) -> None:
        """Zero the local rows that no stored row fills."""
        for low, high in gaps(self.placement, self.start, self.stop):
            self.tensors[kind][low - self.start : high - self.start].zero_()


def stored_name(kind: str, name: str) -> str:
    """Return the name under which a checkpoint holds one kind of a stored tensor."""
    return f"{kind}/{name}"


def split_name(stored: str) -> tuple[str, str]:
    """Return the (kind, name) of a name that ``stored_name`` made."""
    kind, _, name = stored.partition("/")
    return kind, name
