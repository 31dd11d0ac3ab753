"""Fill in the middle: what is cut, put together again, is the text; draws in Megatron's order; one text a sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megazero.config.options.sections import DataConfig
from megazero.data.build import build_dataset, whole_blend
from megazero.data.fim import TOKENS, FillInTheMiddle
from megazero.data.gpt import SampleSpec
from megazero.data.indexed import IndexedWriter
from megazero.data.tokenizer import HuggingFaceTokenizer
from tests.messages import refused

MARKS = ["<|endoftext|>", *(f"<fim_{name}>" for name in TOKENS[:4]), "<file>"]
EOD, PREFIX, MIDDLE, SUFFIX, PAD, FILE = range(6)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    """One token for each letter, and two for pairs of them, so that cuts change the tokens beside them."""
    letters = {letter: 6 + i for i, letter in enumerate("abcdefgh")}
    words = {mark: i for i, mark in enumerate(MARKS)} | letters | {"ab": 14, "cd": 15}
    made = tokenizers.Tokenizer(models.BPE(words, [("a", "b"), ("c", "d")]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split("|", "isolated"), decoders.Fuse()
    made.add_special_tokens(MARKS)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return HuggingFaceTokenizer(path)


def fim(tokenizer: HuggingFaceTokenizer, **options: Any) -> FillInTheMiddle:
    return FillInTheMiddle.of(DataConfig(fim_data=True, **options), tokenizer)


def restored(tokenizer: HuggingFaceTokenizer, document: list[int]) -> tuple[str, bool]:
    """Return the text that a document was, and whether its suffix stands first."""
    if PREFIX not in document:
        return tokenizer.decode(document), False
    middle, suffix = document.index(MIDDLE), document.index(SUFFIX)
    if suffix == 1:
        return tokenizer.decode([*document[middle + 1 :], *document[2:middle]]), True
    pieces = document[1:suffix], document[middle + 1 :], document[suffix + 1 : middle]
    return "".join(map(tokenizer.decode, pieces)), False


def test_documents_are_cut_and_all_of_their_text_is_there(tokenizer: HuggingFaceTokenizer) -> None:
    words = ["abcdefgh", "cdab", "hgfedcba"]
    text = np.array([t for w in words for t in [*tokenizer.encode(w), EOD]] + [PAD] * 30, np.int64)
    orders = set()
    for sample in range(40):
        changed = fim(tokenizer, fim_rate=1.0)(text, 7, sample)
        assert changed.dtype == np.int64 and len(changed) == len(text)
        ends = np.flatnonzero(changed == EOD)
        documents = [part[part != EOD].tolist() for part in np.split(changed, ends + 1)]
        found = [restored(tokenizer, document) for document in documents[:3]]
        assert [word for word, _ in found] == words
        orders.update(last for _, last in found)
        again = fim(tokenizer, fim_rate=1.0)(text, 7, sample)
        assert (changed == again).all()
    assert orders == {True, False}
    assert (fim(tokenizer, fim_rate=0.0)(text, 7, 0) == text).all()
    cut = [fim(tokenizer, fim_rate=0.25)(text[:7], 7, sample) for sample in range(400)]
    assert 60 < sum(PREFIX in changed for changed in cut) < 140


def test_draws_have_megatrons_order(tokenizer: HuggingFaceTokenizer) -> None:
    """Is it cut, where, and is the suffix first."""
    text = np.array(tokenizer.encode("abcdefgh"), np.int64)
    for sample in range(20):
        random = np.random.RandomState([3, sample])
        changed = fim(tokenizer)(np.append(text, [PAD] * 0), 3, sample).tolist()
        if not random.binomial(1, 0.5):
            assert changed == text.tolist()
            continue
        low, high = sorted(random.randint(0, 9, 2))
        first, middle, last = (
            tokenizer.encode(t) for t in ("abcdefgh"[:low], "abcdefgh"[low:high], "abcdefgh"[high:])
        )
        spm = [PREFIX, SUFFIX, *last, MIDDLE, *first, *middle]
        psm = [PREFIX, *first, SUFFIX, *last, MIDDLE, *middle]
        assert changed == (spm if random.binomial(1, 0.5) else psm)[: len(text)]


def test_files_of_a_document(tokenizer: HuggingFaceTokenizer) -> None:
    text = np.array([*tokenizer.encode("abab"), FILE, *tokenizer.encode("cdcd"), *[PAD] * 9], np.int64)
    options = {
        "fim_rate": 1.0,
        "fim_split_sample": "<file>",
        "fim_fragment_rate": 1.0,
        "fim_no_prefix": "abab",
    }
    changed = fim(tokenizer, **options)(text, 1, 1).tolist()
    assert changed[:3] == text[:3].tolist() and changed[3] == PREFIX
    with refused("--fim-split-sample <repo>", "--fim-pad-token x"):
        fim(tokenizer, fim_split_sample="<repo>", fim_pad_token="x")


def test_samples_are_changed_where_they_are_read(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "data", dtype=np.uint16) as writer:
        for _ in range(8):
            writer.add_document(np.array([*tokenizer.encode("abcdefgh" * 4), EOD]))
    change = fim(tokenizer, fim_rate=1.0)
    made = {
        changed: build_dataset(
            "train",
            whole_blend([str(tmp_path / "data")]),
            SampleSpec(16, 1, tokenizer.info, change=change if changed else None),
            8,
        )
        for changed in (True, False)
    }
    for index in range(8):
        plain, sample = made[False][index], made[True][index]
        assert plain["tokens"].shape == sample["tokens"].shape and PREFIX in sample["tokens"]
        assert (sample["tokens"][1:] == sample["labels"][:-1]).all()
        assert json.dumps(made[True][index]["tokens"].tolist()) == json.dumps(sample["tokens"].tolist())
