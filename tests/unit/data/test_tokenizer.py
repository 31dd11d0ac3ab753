"""Tokenizers: lossless training, end of document, errors; and that data needs no torch until batches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megazero.data.text import stdlib_sources
from megazero.data.tokenizer import load_tokenizer
from megazero.data.tokenizer_training import sample_lines, train_tokenizer
from tests.messages import refused


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return sample_lines(map(str, stdlib_sources()), limit_bytes=1 << 20)


@pytest.fixture(scope="module")
def model(lines: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spm") / "spm.model"
    train_tokenizer(lines, path, vocab_size=1500)
    return path


def test_sentencepiece_gives_sources_back(model: Path) -> None:
    tokenizer = load_tokenizer("SentencePieceTokenizer", model)
    texts = [path.read_text("utf-8") for path in stdlib_sources()[::10]]
    texts += ["", " ", "\n", "\n\n  x\n", "  lead and trail  ", "\tdef f():\n\treturn 'é漢🙂'\r\n", "a\0b"]
    tokens = 0
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.info.vocab_size for i in ids) and tokenizer.info.eod not in ids
        tokens += len(ids)
    assert tokens < sum(map(len, texts)) / 2.5  # more than bytes: it compresses
    assert tokenizer.info.vocab_size == 1500 and len(tokenizer.info.fingerprint) == 64


def test_training_is_deterministic(lines: list[str], model: Path, tmp_path: Path) -> None:
    train_tokenizer(lines, tmp_path / "again.model", vocab_size=1500)
    assert (tmp_path / "again.model").read_bytes() == model.read_bytes()


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_vocabulary_limits_name_a_size_that_works(lines: list[str], tmp_path: Path, model_type: str) -> None:
    some = lines[:300]
    for size, words in ((10**5, "nearest that works is "), (100, "use at least ")):
        with pytest.raises(ValueError, match=words) as error:
            train_tokenizer(some, tmp_path / "x.model", vocab_size=size, model_type=model_type)
        nearest = int(str(error.value).split(words)[1].split()[0])
        train_tokenizer(some, tmp_path / "x.model", vocab_size=nearest, model_type=model_type)


def test_a_bad_line_is_named_with_the_flag_of_its_key(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"a": "1"}\n{"b": "2"}\n')
    with refused("bad.jsonl, line 2", "'a'", "'b'", "--json-key"):
        sample_lines([str(tmp_path / "bad.jsonl")], "a")


def test_a_sample_is_thinned_by_bytes(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("漢字\n" * 300)
    assert len(sample_lines([str(tmp_path / "text")], limit_bytes=600)) == 100


def test_stdlib_sources() -> None:
    files = stdlib_sources()
    assert files == sorted(files) and len(files) > 300
    assert not [f for f in files if {"test", "tests", "site-packages"} & set(f.parts)]


def hugging_face(directory: Path, *, special: str = "</s>") -> Path:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world\n", "some text"], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory / "tokenizer.json"


def test_hugging_face(tmp_path: Path) -> None:
    file = hugging_face(tmp_path)
    tokenizer = load_tokenizer("HuggingFaceTokenizer", file)
    assert tokenizer.info == load_tokenizer("HuggingFaceTokenizer", tmp_path).info
    assert tokenizer.info.eod == 1
    assert tokenizer.decode(tokenizer.encode("hello\n  wörld")) == "hello\n  wörld"
    hugging_face(tmp_path, special="<stop>")
    with pytest.raises(ValueError, match="no end of document"):
        load_tokenizer("HuggingFaceTokenizer", tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<stop>"}}))
    assert load_tokenizer("HuggingFaceTokenizer", tmp_path).info.eod == 1


def test_null_and_errors(tmp_path: Path) -> None:
    null = load_tokenizer("NullTokenizer", vocab_size=10)
    assert null.encode("1 2 9") == [1, 2, 9] and null.decode([3, 4]) == "3 4"
    assert (null.info.vocab_size, null.info.eod) == (11, 10)
    with refused("token 11", "0..10"):
        null.encode("1 11")
    with refused("5 12", "The "):
        null.encode("The ")
    (tmp_path / "x").write_text("nonsense")
    for kind, model, message in (
        ("NullTokenizer", None, "needs its vocab size"),
        ("SentencePieceTokenizer", None, "needs its tokenizer model"),
        ("SentencePieceTokenizer", tmp_path / "none", "No such file"),
        ("SentencePieceTokenizer", tmp_path / "x", "is not a SentencePiece model"),
        ("HuggingFaceTokenizer", tmp_path, "cannot read tokenizer .*tokenizer.json"),
        ("HuggingFaceTokenizer", tmp_path / "x", "is not a tokenizer.json"),
    ):
        with pytest.raises(ValueError, match=message):
            load_tokenizer(kind, model)


def test_data_imports_no_torch() -> None:
    code = "import sys, megazero.data; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
