"""Rounding errors that verify records, of one unit and without ranks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megazero.comm.codec import Blockwise
from megazero.comm.peers import Peers
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


@pytest.mark.parametrize("signs", [0, 1])
def test_keys_that_arrive_are_compared_with_what_they_were(
    monkeypatch: pytest.MonkeyPatch, signs: int
) -> None:
    """Of rank 0 of two. The other encodes with the signs of a seed, and 0 is the right one."""
    codec = Blockwise(8, hadamard=128)
    exact = torch.randn(2, 2, 256, generator=torch.Generator().manual_seed(1))
    arrived = exact.clone()
    codec.decode(replace(codec, seed=signs).encode(exact[1]), arrived[1])
    monkeypatch.setattr(recorder, "all_gather_flat", lambda out, own, group: out.copy_(exact.view(-1)))
    noted = Recorder.__new__(Recorder)
    noted.rounded = {}
    noted._note_keys(codec, exact[0], arrived, Peers(None, 0, 2))
    ((kind, name), note) = next(iter(noted.rounded.items()))
    assert kind == recorder.KEYS and name == "INT8, blocks of 128, Hadamard transform of 128"
    assert note.elements == 512
    assert note.worst > 2 if signs else 0.5 < note.worst <= 1
