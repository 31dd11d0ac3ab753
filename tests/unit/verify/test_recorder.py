"""Rounding errors that verify records, of one unit and without ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megazero.comm.codec import Blockwise
from megazero.verify import recorder
from megazero.verify.recorder import Recorder
from megazero.zero.rounding import WEIGHTS

BLOCK, N = 64, 128


@pytest.mark.parametrize("padded", [0, 1, BLOCK, BLOCK + 1, N])
def test_errors_of_padding_do_not_count_where_a_transform_mixes_them(
    monkeypatch: pytest.MonkeyPatch, padded: int
) -> None:
    """The last slice of a small unit may be padding alone."""
    layout = SimpleNamespace(
        pieces=lambda _: [SimpleNamespace(numel=N)], gaps=lambda _: [(N - padded, N)] if padded else []
    )
    unit: Any = SimpleNamespace(
        name="unit",
        layout=layout,
        axes=SimpleNamespace(os=1),
        dtype=torch.float32,
        sum_dtype=torch.float32,
    )
    exact = torch.ones(N)
    sent = exact.clone()
    sent[N - padded :] = 1e3
    monkeypatch.setattr(recorder, "used_weights", lambda _: sent)
    noted = Recorder.__new__(Recorder)
    noted.rounded, noted._held = {}, {}
    noted._note_rounding(unit, Blockwise(8, BLOCK, hadamard=BLOCK), WEIGHTS, exact, sent)
    (note,) = noted.rounded.values()
    assert note.elements == N and note.worst == 0.0
