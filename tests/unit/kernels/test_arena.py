"""Views that are kept with a buffer."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from megazero.kernels.arena import Arena, part_of, view_of


def test_a_view_is_made_once_and_goes_with_its_buffer() -> None:
    arena = Arena()
    with arena.frame(torch.device("cpu")) as frame:
        buffer = frame.take(64, torch.float32).zero_()
    table = view_of(buffer, Tensor.view, 4, -1)
    with arena.frame(torch.device("cpu")) as frame:
        again = frame.take(64, torch.float32)
        assert view_of(again, Tensor.view, 4, -1) is table and view_of(again, Tensor.view, 2, -1) is not table
    parts = view_of(table, Tensor.split, (6, 10), 1)
    assert (
        torch.equal(parts[1], table[:, 6:]) and part_of(table, slice(1, 3)).data_ptr() == table[1:].data_ptr()
    )
    gone, kept = weakref.ref(buffer.untyped_storage()), weakref.ref(buffer)
    del buffer, again, table, parts, frame, arena
    assert kept() is gone() is None


def test_a_view_that_an_evaluation_made_can_be_written_in_training() -> None:
    buffer = torch.zeros(8)
    with torch.inference_mode():
        view_of(buffer, Tensor.view, 2, -1)
    part_of(view_of(buffer, Tensor.view, 2, -1), slice(0, 1)).fill_(1)
    assert buffer.tolist() == [1] * 4 + [0] * 4
