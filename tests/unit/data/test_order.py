"""Sample order against megatron-core 0.16.1 (its compiled helpers included), blends, splits, the cache."""

from __future__ import annotations

import math
import multiprocessing
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megazero.config.options.data_inputs import SPLITS, parse_data_path
from megazero.data import gpt as gpt_module
from megazero.data.blend import blend_order, normalize
from megazero.data.build import blends_by_share, build_dataset, split_bounds, whole_blend
from megazero.data.gpt import SampleSpec, sample_starts
from megazero.data.indexed import IndexedWriter
from megazero.data.mock import MockDataset
from megazero.data.tokenizer import TokenizerInfo, write_meta
from megazero.models.masking import Masking
from tests.messages import refused

VOCAB, EOD = 997, 7
TOKENIZER = TokenizerInfo("f" * 64, VOCAB, EOD)


def corpus(prefix: Path, documents: int, seed: int, longest: int = 90) -> str:
    random = np.random.default_rng(seed)
    with IndexedWriter(prefix, dtype="u2") as writer:
        for length in random.integers(1, longest, documents):
            writer.add_document(random.integers(0, VOCAB, length))
    return str(prefix)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("data")
    return [corpus(root / name, n, i) for i, (name, n) in enumerate({"a": 211, "b": 60, "c": 400}.items())]


def ours(
    words: list[str],
    cache: Path | None,
    *,
    split: str = "969,30,1",
    samples: tuple[int, int, int] = (100, 0, 0),
    ordered_for: tuple[int, int, int] = (0, 0, 0),
    **changes: Any,
) -> Any:
    """Train, valid and test data; None where 0 samples are asked for."""
    spec = SampleSpec(
        **{"seq_length": 32, "seed": 1234, "tokenizer": TOKENIZER, "eod_mask_loss": True, **changes}
    )
    blends = blends_by_share(words, split)
    return [
        build_dataset(name, blends[name], spec, count, ordered_for=before, cache_dir=cache) if count else None
        for name, count, before in zip(SPLITS, samples, ordered_for, strict=True)
    ]


def megatron(
    words: Sequence[Any], samples: tuple[int, int, int], split: str | None, length: int, seed: int
) -> Any:
    """Its datasets. Without a split, ``words`` has those of train, valid and test, or None."""
    gpt = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    builder = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_builder")
    pytest.importorskip("megatron.core.datasets.helpers_cpp")
    utils = pytest.importorskip("megatron.core.datasets.utils")
    config = gpt.GPTDatasetConfig(
        random_seed=seed,
        sequence_length=length,
        blend=utils.get_blend_from_list(words) if split else None,
        blend_per_split=None if split else [utils.get_blend_from_list(part) for part in words],
        split=split,
        tokenizer=types.SimpleNamespace(
            vocab_size=VOCAB, eod=EOD, pad=-1, special_tokens_dict={}, unique_identifiers={}
        ),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=True,
        create_attention_mask=False,
        path_to_cache=None,
    )
    make = builder.BlendedMegatronDatasetBuilder(gpt.GPTDataset, list(samples), lambda: True, config)
    return make.build()


def same(mine: Any, theirs: Any) -> None:
    assert len(mine) == len(theirs)
    for i in range(len(mine)):
        left, right = mine[i], theirs[i]
        for name in ("tokens", "labels", "loss_mask"):
            assert left[name].dtype == right[name].numpy().dtype
            assert np.array_equal(left[name], right[name].numpy()), (i, name)


@pytest.mark.parametrize("seed", [1, 1234])
@pytest.mark.parametrize("length", [8, 33, 512])
@pytest.mark.parametrize("train", [1, 200, 1190, 1800, 3000])
def test_gpt_order_is_megatrons(
    data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: int, length: int, seed: int
) -> None:
    monkeypatch.chdir(tmp_path)
    theirs = megatron([data[0]], (train, 20, 9), "800,150,50", length, seed)
    mine = ours(
        [data[0]], tmp_path / "c", split="800,150,50", seq_length=length, seed=seed, samples=(train, 20, 9)
    )
    for left, right in zip(mine, theirs, strict=True):
        assert np.array_equal(left.documents, right.document_index)
        assert np.array_equal(left.starts, right.sample_index)
        assert left.starts.dtype == right.sample_index.dtype
        assert np.array_equal(left.shuffle, right.shuffle_index)
        assert left.shuffle.dtype == right.shuffle_index.dtype
    for left, right in zip(mine[1:], theirs[1:], strict=True):
        same(left, right)


@pytest.mark.parametrize("weights", [None, (0.3, 0.5, 0.2), (7, 1, 1)])
def test_blend_order_is_megatrons(
    data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: tuple[float, ...] | None
) -> None:
    monkeypatch.chdir(tmp_path)
    words = data if weights is None else [w for pair in zip(weights, data, strict=True) for w in pair]
    words = [str(word) for word in words]
    theirs = megatron(words, (700, 30, 3), "900,80,20", 32, 5)
    mine = ours(words, tmp_path / "c", split="900,80,20", seed=5, samples=(700, 30, 3))
    for left, right in zip(mine, theirs, strict=True):
        assert np.array_equal(left.member, right.dataset_index)
        assert np.array_equal(left.sample, right.dataset_sample_index)
        same(left, right)


SPEC = gpt_module.SampleSpec(32, 5, TOKENIZER, eod_mask_loss=True)


@pytest.mark.parametrize("blends", ["alone", "weights", "sizes"])
def test_data_named_apart_is_in_megatrons_order(
    data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blends: str
) -> None:
    """--train-data-path and its kin. The weight of a data set that is alone is not read."""
    monkeypatch.chdir(tmp_path)
    a, b, c = data
    words = {
        "alone": [[a], ["0.5", b], None],
        "weights": [["0.3", a, "7", b], ["1", c, "1", a], ["2", b, "1", c]],
        "sizes": [[a, b, c], [c], [c, b, a]],
    }[blends]
    wanted = (700, 90, 31)
    theirs = megatron(words, wanted, None, SPEC.seq_length, SPEC.seed)
    for split, part, count, right in zip(("train", "valid", "test"), words, wanted, theirs, strict=True):
        assert (part is None) == (right is None)
        if part is not None:
            same(build_dataset(split, whole_blend(part), SPEC, count, cache_dir=tmp_path / "c"), right)


@pytest.mark.parametrize("members", [1, 2, 3, 17])
def test_blending_indices_are_megatrons(members: int) -> None:
    helpers = pytest.importorskip("megatron.core.datasets.helpers_cpp")
    shares = normalize(np.random.default_rng(members).random(members).tolist())
    which, sample = np.zeros(5000, np.int16), np.zeros(5000, np.int64)
    helpers.build_blending_indices(which, sample, shares, members, 5000, False)
    order = blend_order(shares, 5000)
    assert np.array_equal(order["member"], which) and np.array_equal(order["sample"], sample)


def test_sample_starts_with_empty_documents() -> None:
    sizes = np.array([0, 3, 0, 0, 5, 0, 4, 0], np.int32)
    stream = [(d, o) for d, size in enumerate(sizes) for o in range(size)]
    starts = sample_starts(sizes, 11 // 2, 2)
    assert starts[0].tolist() == [0, 0]
    assert [tuple(row) for row in starts[1:].tolist()] == stream[2:12:2]


def test_splits_and_paths() -> None:
    bounds = split_bounds("969,30,1")
    assert bounds["train"][0] == 0.0 and bounds["valid"][0] == bounds["train"][1] == 0.969
    assert split_bounds("1")["valid"] == (1.0, 1.0)
    for bad in ("", "a,b", "1,2,3,4", "0,0,0", "-1,2"):
        with pytest.raises(ValueError, match="must be up to three shares"):
            split_bounds(bad)
    assert parse_data_path(["a", "b"]) == (["a", "b"], None)
    assert parse_data_path(["0.3", "a", "7", "b"]) == (["a", "b"], [0.3, 7.0])
    for words in (["1", "a", "b"], ["a", "1"], ["1", "a", "2"], ["0", "a"], ["-1", "a"], ["nan", "a"]):
        with pytest.raises(ValueError, match="weight"):
            parse_data_path(words)


def test_cache_is_used_and_rebuilt_when_damaged(
    data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []
    original = gpt_module.build_order

    def counted(*arguments: Any) -> Any:
        built.append(1)
        return original(*arguments)

    monkeypatch.setattr(gpt_module, "build_order", counted)

    def shuffle(**changes: Any) -> np.ndarray:
        return np.array(ours([data[0]], tmp_path, **changes)[0].shuffle)

    first = shuffle()
    assert np.array_equal(shuffle(), first) and len(built) == 1
    files = sorted(tmp_path.glob("*.npy")) + sorted(tmp_path.glob("*.json"))
    assert len(files) == 4
    for change in ({"seed": 2}, {"seq_length": 16}, {"split": "1,1,1"}, {"samples": (5000, 0, 0)}):
        shuffle(**change)
    assert len(built) == 5
    for path in files:
        whole = path.read_bytes()
        for damaged in (whole[:-3], b"", whole[:-1] + bytes([whole[-1] ^ 1]), None):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            assert np.array_equal(shuffle(), first)
            assert path.read_bytes() == whole
    assert len(built) == 5 + 4 * 4
    assert not list(tmp_path.glob(".*"))


def test_changed_data_is_not_read_through_an_old_cache(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "x", 50, 1)
    old = ours([prefix], tmp_path / "c")[0]
    corpus(tmp_path / "x", 51, 2)
    new = ours([prefix], tmp_path / "c")[0]
    assert len(new.documents) != len(old.documents)


def _build_and_log(prefix: str, cache: str, log: str) -> list[int]:
    original = gpt_module.build_order

    def counted(*arguments: Any) -> Any:
        with open(log, "a") as handle:
            handle.write("built\n")
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt_module, "build_order", counted)
        return np.array(ours([prefix], Path(cache))[0].shuffle).tolist()


def test_ranks_at_once_build_once(data: list[str], tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        arguments = (data[0], str(tmp_path / "c"), str(tmp_path / "log"))
        results = pool.starmap(_build_and_log, [arguments] * 4, chunksize=1)
    assert all(result == results[0] for result in results)
    assert (tmp_path / "log").read_text() == "built\n"


def test_a_negative_token_is_the_one_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = ours([corpus(tmp_path / "x", 50, 1)], None, split="1", seq_length=64, seed=1, samples=(9, 0, 0))[
        0
    ]
    monkeypatch.setattr(built.source, "get", lambda *_: np.array([7, -3, 9]))
    with refused("token -3"):
        built[0]


def test_bad_data_is_refused(data: list[str], tmp_path: Path) -> None:
    with refused("test", "0 of 211"):
        ours([data[0]], tmp_path, split="99,1,0", samples=(1, 1, 1))
    with pytest.raises(ValueError, match="index cache in .*data cache path"):
        (tmp_path / "file").write_text("")
        ours([data[0]], tmp_path / "file")
    prefix = corpus(tmp_path / "x", 50, 1)
    small = TokenizerInfo("0" * 64, 500, EOD)
    built = ours([prefix], None, split="1", seq_length=64, seed=1, samples=(9, 0, 0), tokenizer=small)[0]
    assert (tmp_path / "cache").is_dir()
    with pytest.raises(ValueError, match=r"holds token \d+, the tokenizer's vocabulary is 0..499"):
        [built[i] for i in range(9)]
    for field, wrong in (("vocab_size", 500), ("eod", 8), ("fingerprint", "0" * 64)):
        write_meta(prefix, TokenizerInfo(**{**vars(TOKENIZER), field: wrong}))
        with pytest.raises(ValueError, match=f"{wrong}, this run's has"):
            ours([prefix], tmp_path)


def test_blend_without_weights_is_one_epoch(data: list[str], tmp_path: Path) -> None:
    built = ours(data, tmp_path, samples=(10**6, 0, 0))[0]
    assert len(built) < 10**6  # no weights: an epoch
    with pytest.raises(IndexError):
        built[len(built)]
    with refused("99999"):
        ours(data, tmp_path, seq_length=99999)


def stream(data_set: Any, count: int) -> list[bytes]:
    return [data_set[i]["tokens"].tobytes() for i in range(count)]


@pytest.mark.parametrize("kind", ["one file", "weights", "sizes"])
def test_an_order_is_kept_while_its_epochs_reach(data: list[str], tmp_path: Path, kind: str) -> None:
    """ordered_for of an earlier call: other numbers in the same order, of train and validation data alike."""
    words = {"one file": data[:1], "weights": ["0.7", data[0], "0.3", data[1]], "sizes": data}[kind]

    def make(train: int, valid: int, before: tuple[int, int, int] = (0, 0, 0)) -> tuple:
        made = ours(words, tmp_path, samples=(train, valid, 0), split="50,50,0", ordered_for=before)
        return made[:2]

    first = make(250, 250)
    numbers = tuple(each.ordered_for for each in first)
    assert numbers == ((0, 0) if kind == "sizes" else (250, 250))
    for number in (100, 200, 240, 260):
        for one, two in zip(first, make(number, number, (*numbers, 0)), strict=True):
            assert two.ordered_for == one.ordered_for and len(two) >= number
            shorter = min(len(one), number)
            assert stream(two, shorter) == stream(one, shorter), number
    if kind != "sizes":
        fresh, kept = make(2000, 2000), make(2000, 2000, (*numbers, 0))
        for one, two, before in zip(fresh, kept, first, strict=True):
            assert two.ordered_for == 2000 and stream(one, 2000) == stream(two, 2000)
            assert stream(two, 100) != stream(before, 100)
        shorter = make(100, 100)
        assert any(stream(a, 100) != stream(b, 100) for a, b in zip(first, shorter, strict=True))


@pytest.mark.parametrize("h", [1, 4, 50])
def test_goldfish_loss_leaves_out_what_apertus_does(h: int) -> None:
    """Against whole numbers of Python, with ids so large that products go past 2^63."""
    random = np.random.default_rng(h)
    text = random.integers(0, 131072, 401)
    text[200:300] = text[50:150]  # the same text twice
    spec = gpt_module.SampleSpec(400, 1, TOKENIZER, goldfish=(4, h))
    mask = gpt_module.finish_sample(text, spec)["loss_mask"]
    numbers = torch.rand(1_000_003, generator=torch.Generator().manual_seed(2971215073)).tolist()
    for at, seen in enumerate(mask):
        key = math.prod(int(n) for n in text[1:][max(0, at - h + 1) : at + 1]) % 2**64
        key -= 2**64 * (key >= 2**63)
        assert seen == (at < h - 1 or numbers[key % 1_000_003] >= 0.25), at
    assert np.array_equal(mask[200 + h : 299], mask[50 + h : 149]) and 0.5 < mask.mean() < 0.9


@pytest.mark.parametrize("positions", [True, False])
@pytest.mark.parametrize("attention", [True, False])
def test_documents_are_megatrons(positions: bool, attention: bool) -> None:
    gpt = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    reset = {"reset_position_ids": positions, "reset_attention_mask": attention}
    spec = gpt_module.SampleSpec(40, 1, TOKENIZER, True, **reset)
    random = np.random.default_rng(0)
    for ends in ([], [0], [39], [0, 1, 2], [5, 6, 20, 38, 39], random.integers(0, 40, 9)):
        text = random.integers(EOD + 1, VOCAB, 41)
        text[ends] = EOD
        mine = gpt_module.finish_sample(text, spec)
        mask, loss_mask, ids = gpt._get_ltor_masks_and_position_ids(
            torch.from_numpy(text[:-1]), EOD, **reset, eod_mask_loss=True, create_attention_mask=True
        )
        assert np.array_equal(mine["loss_mask"], loss_mask.numpy())
        assert ("position_ids" in mine, "document_starts" in mine) == (positions, attention)
        if positions:
            assert mine["position_ids"].dtype == np.int64 and np.array_equal(
                mine["position_ids"], ids.numpy()
            )
        if attention:
            starts = torch.from_numpy(mine["document_starts"])[None]
            dense = Masking(1.0, starts=starts).dense(40, torch.zeros(()))
            assert torch.equal(dense[0].isinf(), mask)


def test_mock_data_is_deterministic_and_learnable() -> None:
    spec = SampleSpec(4000, 1234, TOKENIZER, eod_mask_loss=True)
    train, valid = MockDataset(5, 0, spec), MockDataset(3, 1, spec)
    assert (len(train), len(valid)) == (5, 3)
    sample, again = train[2], MockDataset(9, 0, spec)[2]
    assert all(np.array_equal(sample[name], again[name]) for name in sample)
    assert not np.array_equal(sample["tokens"], valid[2]["tokens"])
    tokens, labels = sample["tokens"], sample["labels"]
    assert np.array_equal(tokens[1:], labels[:-1]) and tokens.min() >= 0 and tokens.max() < VOCAB
    assert np.array_equal(sample["loss_mask"] == 0, tokens == EOD) and (tokens == EOD).any()
    inside = (tokens != EOD) & (labels != EOD)
    steps = ((labels - (labels > EOD)) - (tokens - (tokens > EOD)))[inside] % (VOCAB - 1)
    assert len(np.unique(steps)) == 1  # the next token follows from the last
