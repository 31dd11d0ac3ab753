"""What a folder's files make of its tokenizer is one thing: for import, training, resume, export and the check."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers

from megazero.checkpoint import store
from megazero.config import ConfigError, World, begun, make_config
from megazero.convert import conversions
from megazero.convert.check import Line
from megazero.convert.command import main
from megazero.convert.export import finish, write_folder
from megazero.convert.source import Source
from megazero.convert.tokenizer import RunTokenizer, compare_encodings
from megazero.data.tokenizer import load_tokenizer
from megazero.data.tokenizer_files import load_run_tokenizer
from megazero.data.tokenizer_settings import TokenizerSettings
from megazero.train.generate import Sampling, generate, load_text_model
from tests.hugging_face import publish_tokenizer, save_model, train_byte_level, train_sentencepiece
from tests.sizes import TINY
from tests.unit.data.test_gpt2_tokenizer import train
from tests.unit.train.test_seams import run

END = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
TOOL = {"content": "<tool>", "lstrip": True, "rstrip": False, "normalized": False, "special": False}
CHAT = {"<|im_start|>": 264, "<|im_end|>": 265}
TEXTS = ("low lower", "  low", "x <tool> y", "<|im_start|>low<|im_end|>", "a<pad>b", "<|endoftext|>", "low\n")
# The files beside a tokenizer.json of 264 ids, how many ids there are with them, and the end of document.
SETTINGS = {
    "nothing": ({}, 264, 0),
    "added_tokens.json": (
        {"tokenizer_config": {**END, "eos_token": "<|im_end|>"}, "added_tokens": CHAT},
        266,
        265,
    ),
    "added_tokens_decoder": ({"tokenizer_config": {**END, "added_tokens_decoder": {"264": TOOL}}}, 265, 0),
    "a token of a role": ({"tokenizer_config": {**END, "pad_token": "<pad>"}}, 265, 0),
    "a space before": (
        {"tokenizer_config": {**END, "tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}},
        264,
        0,
    ),
    "texts spell": ({"tokenizer_config": {**END, "split_special_tokens": True}}, 264, 0),
    "generation_config.json": ({"generation_config": {"eos_token_id": [7, 8]}}, 264, 7),
    "config.json": ({"config": {"model_type": "llama", "eos_token_id": 9}}, 264, 9),
}


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return train_byte_level(vocab_size=264)


@pytest.mark.parametrize("name", SETTINGS)
def test_ids_are_those_of_the_files_together(name: str, byte_level: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    beside, size, eod = SETTINGS[name]
    folder = publish_tokenizer(tmp_path / "a", byte_level, **{"config": {"model_type": "llama"}, **beside})
    kept = load_tokenizer("HuggingFaceTokenizer", folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert (kept.info.vocab_size, kept.info.eod) == (size, eod)
    for text in TEXTS:
        assert kept.encode(text) == theirs.encode(text, add_special_tokens=False), text
    assert compare_encodings(
        RunTokenizer("HuggingFaceTokenizer", kept, {}), lambda text: [], TEXTS
    ).wrong == [*TEXTS]
    assert TokenizerSettings.beside(folder / "tokenizer.json").end in (-1, eod)
    alone = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    other = name not in ("nothing", "generation_config.json", "config.json")
    assert (kept.info.fingerprint != alone) == other  # which data of other ids would not pass


def test_files_that_do_not_agree_are_refused(byte_level: Tokenizer, tmp_path: Path) -> None:
    folder = publish_tokenizer(tmp_path / "a", byte_level, tokenizer_config=END, added_tokens={"<tool>": 999})
    with pytest.raises(ValueError, match="'<tool>' has id 999 in .* and 264 by tokenizer.json"):
        load_tokenizer("HuggingFaceTokenizer", folder)
    for name, text in {
        "added_tokens": "[]",
        "tokenizer_config": '{"added_tokens_decoder": {"264": "<tool>"}}',
    }.items():
        broken = publish_tokenizer(tmp_path / name, byte_level)
        (broken / f"{name}.json").write_text(text)
        with pytest.raises(ValueError, match=f"{name}' are damaged"):
            load_tokenizer("HuggingFaceTokenizer", broken)
    train_sentencepiece(tmp_path / "tokenizer.model")
    (tmp_path / "added_tokens.json").write_text('{"<tool>": 300}')
    with pytest.raises(
        ValueError, match="add 1 tokens, such as '<tool>': they are read with a tokenizer.json only"
    ):
        load_tokenizer("SentencePieceTokenizer", tmp_path)


@pytest.fixture
def published(byte_level: Tokenizer, tmp_path: Path) -> Path:
    """A model with more rows than its tokenizer has ids, as Qwen's. Only config.json gives bos_token_id."""
    folder = save_model(tmp_path / "hf", vocab_size=280, bos_token_id=5)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return publish_tokenizer(folder, byte_level, tokenizer_config={**END, "pad_token": "<pad>"})


def test_an_imported_run_resumes_with_unchanged_flags(published: Path, tmp_path: Path) -> None:
    """With the tokenizer named or not; the vocabulary stays the model's."""
    wanted = (
        "seq_length",
        "micro_batch_size",
        "global_batch_size",
        "lr",
        "mock_data",
        "device",
        "eval_iters",
    )
    values = {**{name: TINY[name] for name in wanted}, "log_dir": str(tmp_path / "logs"), "train_iters": 1}
    named = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(published)}
    for number, said in enumerate(({}, named)):
        save = {"save": str(tmp_path / f"run{number}"), **said}
        began = run({**values, **save, "load": f"hf:{published}"})
        again = run({**values, **save, "load": save["save"], "train_iters": 2})
        assert began.model.vocab_size == again.model.vocab_size == 280
        assert began.data.tokenizer_type == again.data.tokenizer_type == "HuggingFaceTokenizer"
        saved = store.latest(save["save"])
        assert saved and store.read_manifest(saved).step == 2
    out = finish(write_folder(Source(saved), tmp_path / "out"))
    told = json.loads((out / "config.json").read_text())
    assert (told["bos_token_id"], told["eos_token_id"], told["vocab_size"]) == (5, 2, 280)


def test_a_folder_without_a_tokenizer_keeps_its_ids(tmp_path: Path) -> None:
    """And what says how transformers trains the model: converted, and trained and resumed."""
    folder = save_model(tmp_path / "hf", bos_token_id=7, eos_token_id=5, attention_dropout=0.1)
    config = json.loads((folder / "config.json").read_text())
    config |= {"router_aux_loss_coef": 0.02, "output_router_logits": True, "_name_or_path": "org/model"}
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["from-hf", str(folder), str(tmp_path / "converted"), "--no-check"]) == 0
    words = ("seq_length", "micro_batch_size", "global_batch_size", "lr", "mock_data", "device", "eval_iters")
    values = {**{name: TINY[name] for name in words}, "log_dir": str(tmp_path / "logs")}
    values["save"] = str(tmp_path / "trained")
    run({**values, "load": f"hf:{folder}", "train_iters": 1})
    run({**values, "load": values["save"], "train_iters": 2})
    kept = (
        "bos_token_id",
        "eos_token_id",
        "router_aux_loss_coef",
        "output_router_logits",
        "attention_dropout",
    )
    for root in ("converted", "trained"):
        assert main(["to-hf", str(tmp_path / root), str(tmp_path / "out" / root), "--no-check"]) == 0
        told = json.loads((tmp_path / "out" / root / "config.json").read_text())
        assert {name: told.get(name) for name in kept} == {name: config[name] for name in kept}
        assert "_name_or_path" not in told
        ids = "generation_config.json"
        assert (tmp_path / "out" / root / ids).read_bytes() == (folder / ids).read_bytes()


def test_a_null_tokenizer_counts_its_end_of_document(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "hf")
    values = {
        "load": f"hf:{folder}",
        **{n: TINY[n] for n in ("seq_length", "micro_batch_size", "lr", "mock_data")},
    }
    null = {**values, "train_iters": 1, "tokenizer_type": "NullTokenizer"}
    world = World(1, 1)
    assert (
        begun(make_config({**null, "vocab_size": 50}, world), world).model.vocab_size == 50
    )  # and one: 51 rows
    with pytest.raises(ConfigError, match="--vocab-size 51 is not the model of"):
        begun(make_config({**null, "vocab_size": 51}, world), world)


def test_sampling_draws_no_row_without_a_token(published: Path, tmp_path: Path, monkeypatch) -> None:
    assert main(["from-hf", str(published), str(tmp_path / "ck"), "--no-check"]) == 0
    model = load_text_model(tmp_path / "ck")
    monkeypatch.setattr(
        model.decoder, "full_logits", lambda ids: torch.arange(280.0).expand(1, ids.shape[1], 280)
    )
    assert generate(model, "low", 1, Sampling(temperature=0)) == "low<pad>"


def refused(words: list[str], tmp_path: Path, status: int) -> None:
    """The import ends with ``status`` and leaves nothing."""
    assert main(words) == status
    assert not list(tmp_path.glob("ck*"))


def test_a_tokenizer_larger_than_the_embedding_is_an_error(byte_level, tmp_path: Path, capsys) -> None:
    folder = publish_tokenizer(save_model(tmp_path / "hf"), byte_level, tokenizer_config=END)
    refused(["from-hf", str(folder), str(tmp_path / "ck")], tmp_path, 2)
    assert "has 264 ids, and the embedding 51 rows" in capsys.readouterr().err


def test_a_vocabulary_of_another_kind_is_named(tmp_path: Path, capsys) -> None:
    folder = save_model(tmp_path / "hf")
    (folder / "vocab.txt").write_text("[UNK]\n")
    assert main(["from-hf", str(folder), str(tmp_path / "ck"), "--no-check"]) == 0
    assert "vocab.txt, a WordPiece vocabulary, which is not supported" in capsys.readouterr().err


def test_a_failed_check_leaves_nothing(published: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    """Of a folder whose words are split by a rule that nobody here knows, and of an export."""
    pytest.importorskip("transformers")
    (tmp_path / "two").mkdir()
    files = train(tmp_path / "two", ["low lower 12345 lowest"], 300)
    size = len(json.loads(files[0].read_text()))
    other = save_model(tmp_path / "other", "gpt2", vocab_size=size)
    for file in files:
        file.rename(other / file.name)
    (other / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    refused(["from-hf", str(other), str(tmp_path / "ck")], tmp_path, 1)
    assert "has other ids  DOES NOT HOLD" in capsys.readouterr().out
    assert main(["from-hf", str(published), str(tmp_path / "good"), "--no-check"]) == 0
    monkeypatch.setattr(conversions, "compare", lambda *_: iter([Line("tensors", "1 of 2", False)]))
    assert main(["to-hf", str(tmp_path / "good"), str(tmp_path / "out")]) == 1
    assert not list(tmp_path.glob("out*"))


def test_a_folder_that_transformers_cannot_read_names_the_way_past_it(tmp_path: Path, capsys) -> None:
    """A Llama with GPT-2's two files and no tokenizer_config.json."""
    pytest.importorskip("transformers")
    folder = save_model(tmp_path / "hf", vocab_size=600)
    train_byte_level().model.save(str(folder))
    assert main(["from-hf", str(folder), str(tmp_path / "ck")]) == 2
    said = capsys.readouterr().err
    assert "cannot read the tokenizer" in said and "--no-check leaves the comparison out" in said
    assert main(["from-hf", str(folder), str(tmp_path / "ck"), "--no-check"]) == 0


def test_a_class_that_builds_another_tokenizer_is_named(tmp_path: Path, capsys) -> None:
    """transformers 5 replaces a Llama's normalizer. The file is followed; the folder that is written names a class
    that follows it, too. One of other ids still fails."""
    transformers = pytest.importorskip("transformers")
    alphabet = [*"lowerst", "\u2581", "<unk>", "<s>", "</s>"]
    merges = [("l", "o"), ("\u2581", "lo"), ("\u2581lo", "w"), ("lo", "w")]
    words = {word: i for i, word in enumerate([*alphabet, *(a + b for a, b in merges)])}
    made = Tokenizer(models.BPE(words, merges, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    made.decoder = decoders.Replace("\u2581", " ")
    made.add_special_tokens(["<s>", "</s>"])
    told = {"tokenizer_class": "LlamaTokenizer", "legacy": True, "eos_token": "</s>", "unk_token": "<unk>"}
    folder = publish_tokenizer(save_model(tmp_path / "hf"), made, tokenizer_config=told)
    assert main(["from-hf", str(folder), str(tmp_path / "ck")]) == 0
    printed = capsys.readouterr().out
    assert main(["to-hf", str(tmp_path / "ck"), str(tmp_path / "out")]) == 0
    if transformers.__version__ > "5":
        named = (
            r"LlamaTokenizer +of transformers 5\.\S+ gives others to \d+ of (\d+): it has another normalizer"
        )
        assert re.search(
            named + r".*follows the files\ntokenizer +\1 of \1 .* by the folder's files  holds", printed
        )
        mended = capsys.readouterr().out
        assert "LlamaTokenizer" not in mended and re.search(
            r"tokenizer +(\d+) of \1 .* by transformers .* holds", mended
        )
        assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").tokenize(" low") == [
            "\u2581",
            "\u2581low",
        ]
    values = Source(store.latest(tmp_path / "ck")).values  # type: ignore[arg-type]
    assert load_run_tokenizer(values, {}, {}).encode(" low") == [words[t] for t in ("\u2581", "\u2581low")]
    made.normalizer = normalizers.Lowercase()
    made.save(str(tmp_path / "out" / "tokenizer.json"))
    assert main(["check", str(tmp_path / "ck"), str(tmp_path / "out")]) == 1
