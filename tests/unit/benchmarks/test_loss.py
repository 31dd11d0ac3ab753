"""The studies of loss: statistics on known answers, which run is next, the trained model's hop and readers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.loss import page, study
from benchmarks.loss.outer_rules import Branch, Replicas, mean_of, send
from benchmarks.loss.rounding import __main__ as rounding
from benchmarks.loss.rounding import keys, model
from benchmarks.loss.rounding.formats import BLOCK, EXACT, GRADIENTS, Hop
from benchmarks.loss.rounding.text import Samples, random_text
from benchmarks.loss.rounding.training import Training
from megazero.comm.codec import Blockwise
from megazero.comm.topk import TopK
from megazero.families.layer_kinds import layer_kinds
from megazero.zero.layout import UnitLayout, make_layout
from tests.messages import refused

CPU = torch.device("cpu")


# -- the page, and which run is next -----------------------------------------------------------------------


def test_the_page_has_the_data() -> None:
    """If not: python -m benchmarks.loss.page"""
    text = page.PAGE.read_text()
    assert page.written(text) == text
    with refused("<!-- outer rules -->"):
        page.written(text.replace("<!-- outer rules -->", ""))


@pytest.mark.parametrize("groups, file", [(study.sizes(), "at_size"), (study.outer(), "outer")])
def test_the_studies_are_done(groups: list[study.Group], file: str) -> None:
    assert not list(study.left(groups, study.Store(page.RESULTS / f"loss_{file}.jsonl")))


# -- outer rules -------------------------------------------------------------------------------------------


def test_replicas_go_on_from_the_anchor_that_the_rule_has_stepped() -> None:
    anchor = torch.tensor([1.0, 2.0])
    rule = torch.optim.SGD([anchor], lr=0.5, momentum=0.9, nesterov=True)
    replicas = Replicas.__new__(Replicas)
    each = [
        SimpleNamespace(master=torch.tensor(own), weights=torch.zeros(2)) for own in ([3.0, 2.0], [1.0, 4.0])
    ]
    replicas.each = each  # type: ignore[assignment]
    replicas.meet(anchor, rule, Branch(1, 2), torch.zeros(2, 0))
    # Differences to the anchor are -1 and -1 on average; the first Nesterov step takes 1.9 of them.
    assert torch.allclose(anchor, torch.tensor([1.95, 2.95]))
    assert all(torch.equal(value, anchor) for one in each for value in (one.master, one.weights))


def test_what_a_form_loses_is_owed_and_norms_are_averaged_apart() -> None:
    codec, rows = TopK(), torch.zeros(2, 4096)
    rows[:, :65] = 1.0
    owed = torch.zeros(2, 4096)
    send(rows, owed, codec, 0.5)
    assert rows.sum(1).tolist() == [64.0, 64.0] and owed.nonzero().tolist() == [[0, 64], [1, 64]]
    send(rows.zero_(), owed, codec, 0.5)
    assert rows.nonzero().tolist() == [[0, 64], [1, 64]] and rows.sum() == 1.0 and not owed.any()
    apart = mean_of(torch.tensor([[3.0, 0.0], [0.0, 4.0]]), True)
    assert torch.allclose(apart, torch.full((2,), 3.5 / math.sqrt(2)))


# -- the trained model -------------------------------------------------------------------------------------


def two_senders(rows: int = 64) -> UnitLayout:
    shapes = {"a": (rows, 128), "b": (64,)}
    return make_layout(shapes, block=BLOCK, sizes=(2,), indices=(0,), exact=frozenset("b"))


def test_the_hop_sends_all_but_a_senders_own_part() -> None:
    layout, codec = two_senders(), Blockwise(4, 64)
    g = torch.randn(2, layout.numel, generator=torch.Generator().manual_seed(1))
    for low, high in layout.gaps(0):
        g[:, low:high] = 0
    sent = torch.empty_like(g[:, : 64 * 128])
    codec.decode(codec.encode(g[:, : 64 * 128].contiguous()), sent)
    half = 64 * 128 // 2
    expected = g.sum(0)
    expected[:half] = g[0, :half] + sent[1, :half]
    expected[half : 2 * half] = g[1, half : 2 * half] + sent[0, half:]
    assert torch.allclose(Hop(codec, layout).mean(g), expected / 2, atol=1e-7)
    assert torch.equal(Hop(GRADIENTS[EXACT], layout).mean(g), g.mean(0))


def test_flat_gradients_are_the_models_own_and_a_state_is_restored() -> None:
    samples = Samples.of(random_text(rounding.TINY, 2000), 16, CPU)
    batches = [samples.at([0, 1]), samples.at([2, 3])]
    plain, training = model.tiny(rounding.TINY), Training(model.tiny(rounding.TINY), 2, exact=512)
    found = training.gradient_of(batches)
    for tokens, labels in batches:
        plain(tokens, labels).mean().backward()
    for slot in training.layout.slots:
        grad = dict(plain.named_parameters())[slot.name].grad
        assert grad is not None
        mine = found[slot.start : slot.start + slot.numel].view(slot.shape)
        assert torch.allclose(mine, grad.float() / 2, rtol=0.05, atol=1e-3 * float(grad.abs().max()))
    training.update(found, 1e-3)
    state, ends = training.state(), []
    for _ in range(2):
        training.restore(state)
        training.update(training.gradient_of(batches), 1e-3)
        ends.append(training.master.clone())
    assert torch.equal(*ends) and not torch.equal(ends[0], state[0])


def test_each_node_attends_to_its_own_keys_as_they_are() -> None:
    """Of 8 tokens on 2 nodes the first has 0, 1, 6, 7: 0 and 1 see no keys of the other, 2 and 3 do."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(8, 1, 4, 16, generator=generator) for _ in range(3))
    decoder = model.tiny(rounding.TINY, torch.float32)
    (tables,) = (t.attention for t in decoder.positions.tables(layer_kinds(decoder.config), 8, q).values())
    codec = keys.CODECS["INT4 64"]
    out, exact = keys.attended(q, k, v, (tables,), codec, 2), keys.attend(q, k, v, tables)
    off = (out - exact).flatten(1).norm(dim=1)
    assert off[:2].tolist() == [0, 0] and (off[2:] > 1e-3).all()
    rounded = [keys.decoded(x, codec) for x in (k, v)]
    assert not torch.equal(out[2:6], keys.attend(q, *rounded, tables)[2:6])


@pytest.mark.slow
@pytest.mark.long
def test_a_rehearsal_of_all_parts_fills_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = random_text(rounding.TINY, 20_000)
    rows = [row for part in rounding.PARTS for row in rounding.rows_of(part, text, True, CPU)]
    (tmp_path / rounding.FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    for made, formats in ((page.gradients, GRADIENTS), (page.continued, GRADIENTS), (page.keys, keys.CODECS)):
        shown = made()
        assert all(f"| {name} |" in shown for name in formats if name != EXACT)
    errors = {row["format"]: row["output"] for row in rows if row["what"] == "keys" and row["layer"] == 1}
    assert 0 < errors["bf16"] < errors[keys.RUN] < errors["INT4 64 + H64"]
