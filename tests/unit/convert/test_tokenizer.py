"""The tokenizer travels: in checkpoints, to generation, and to Hugging Face with the same ids."""

from __future__ import annotations

import json
import random
import re

import pytest
import torch
from tokenizers import decoders

from megazero.checkpoint import store
from megazero.checkpoint.records import SliceRecord
from megazero.config import make_config
from megazero.convert import tokenizer as tokenizers
from megazero.convert.check import compare
from megazero.convert.command import main
from megazero.convert.export import finish, write_folder
from megazero.convert.importing import Published
from megazero.convert.sentencepiece_json import differences, read_spec, spelt, to_tokenizer_json
from megazero.convert.source import Source
from megazero.data.tokenizer import load_tokenizer
from megazero.data.tokenizer_files import read_tokenizer_files
from megazero.models import Decoder
from megazero.train.generate import Sampling, generate, load_text_model
from tests.hugging_face import save_model, train_sentencepiece
from tests.sizes import SMALL
from tests.unit.data.test_gpt2_tokenizer import TRICKY, train

torch.set_num_threads(1)
KIND = "SentencePieceTokenizer"
# What other trainers' models have: a space before the text, and spaces collapsed.
USUAL = {"remove_extra_whitespaces": True, "add_dummy_prefix": True, "user_defined_symbols": []}
LLAMA = {"add_dummy_prefix": True, "user_defined_symbols": []}  # identity, byte fallback, spaces kept
MODELS = {
    "bpe": ("bpe", {}),
    "unigram": ("unigram", {}),
    "bpe, spaces removed": ("bpe", {**USUAL, "byte_fallback": False, "vocab_size": 100}),
    "unigram, spaces removed": ("unigram", {**USUAL, "byte_fallback": False, "vocab_size": 60}),
    "bpe, Llama's": ("bpe", LLAMA),
    "unigram, Llama's": ("unigram", LLAMA),
}


def texts(count=300):
    draw = random.Random(3)
    letters = "lowenidfastr LOW  \n\t.,é漢🙂<s>/"
    made = ("".join(draw.choice(letters) for _ in range(draw.randrange(60))) for _ in range(count))
    return [*tokenizers.SAMPLES, *made]


@pytest.mark.parametrize("name", MODELS)
def test_tokenizer_json_has_the_ids_of_the_sentencepiece_model(name, tmp_path):
    model_type, options = MODELS[name]
    raw = train_sentencepiece(tmp_path / "spm.model", model_type, **options).read_bytes()
    made, spec = to_tokenizer_json(raw), read_spec(raw)
    compared = [text for text in texts() if not spelt(spec, text)]
    assert len(compared) > 250
    assert not differences(raw, lambda text: made.encode(text, add_special_tokens=False).ids, compared)
    kept = load_tokenizer(KIND, tmp_path / "spm.model")
    for ids in map(kept.encode, [*compared, " \u2581\u2581 low"]):
        if spec.unknown not in ids:
            assert made.decode(ids, skip_special_tokens=False) == kept.decode(ids)


def test_the_proof_sees_a_wrong_conversion(tmp_path, monkeypatch):
    """Without spaces at a text's ends ids differ, and the folder has the model itself."""
    raw = train_sentencepiece(tmp_path / "spm.model").read_bytes()
    made = to_tokenizer_json(raw)
    from tokenizers import normalizers

    made.normalizer = normalizers.Sequence([normalizers.Strip(), made.normalizer])
    monkeypatch.setattr(tokenizers, "to_tokenizer_json", lambda _: made)
    run = tokenizers.RunTokenizer(
        KIND, load_tokenizer(KIND, tmp_path / "spm.model"), {"tokenizer.model": raw}
    )
    hub = tokenizers.hub_tokenizer(run)
    assert re.search(r"no tokenizer.json: it would give other ids to \d+ of \d+ texts, such as", hub.note)
    assert "tokenizer.json" not in hub.files and hub.files["spiece.model"] == raw


def save_run(root, kind=KIND, **files):
    """A checkpoint as training writes it, with its tokenizer, whose files are given by option."""
    tokenizer = load_tokenizer(kind, **files)
    config = make_config(
        {
            **{**SMALL, "num_layers": 2, "hidden_size": 32, "vocab_size": tokenizer.info.vocab_size},
            "tokenizer_type": kind,
            **{option: str(file) for option, file in files.items()},
        }
    )
    decoder = Decoder(config.model)
    decoder.initialize(3)
    placements = decoder.placements()
    records = [
        SliceRecord(placements[name], 0, value.numel(), {"weights": value.detach().view(-1)})
        for name, value in decoder.named_parameters()
    ]
    state = {"tokenizer": tokenizer.info.fingerprint, "consumed_samples": 7, "losses": {"lm_loss": 4.25}}
    held = read_tokenizer_files(kind, files)
    snapshot = store.Snapshot(3, records, state=state, configuration=config.to_dict(), files=held)
    return store.save(root, snapshot)


@pytest.fixture
def run(tmp_path):
    """A checkpoint whose tokenizer, with a template and settings of generation beside it, is where it was no more."""
    home = tmp_path / "home"
    home.mkdir()
    model = train_sentencepiece(home / "spm.model")
    (home / "chat_template.jinja").write_bytes("{{ messages }} é\r\n".encode())
    (home / "generation_config.json").write_bytes(b'{"temperature":0.5,   "eos_token_id": 2}')
    path = save_run(tmp_path / "run", tokenizer_model=model)
    home.rename(tmp_path / "elsewhere")
    return path


def test_a_checkpoint_generates_without_the_tokenizers_own_folder(run):
    text = generate(load_text_model(run), "low", 3, Sampling(temperature=0))
    assert text.startswith("low")


def test_an_export_has_the_tokenizer_the_template_and_a_card(run, tmp_path):
    pytest.importorskip("transformers")
    out = finish(write_folder(Source(run), tmp_path / "out"))
    lines = list(compare(Source(run), Published.open(out)))
    assert all(line.good is not False for line in lines) and any(
        "222 of 222 texts" in line.figure for line in lines
    )
    elsewhere = tmp_path / "elsewhere"
    for name, original in (
        ("tokenizer.model", "spm.model"),
        ("chat_template.jinja", "chat_template.jinja"),
        ("generation_config.json", "generation_config.json"),
    ):
        assert (out / name).read_bytes() == (elsewhere / original).read_bytes()
    told = json.loads((out / "tokenizer_config.json").read_text())
    assert told["tokenizer_class"] == "PreTrainedTokenizerFast" and told["eos_token"] == "</s>"
    card = (out / "README.md").read_text()
    assert "| tokens | 224 |" in card and "| training loss | 4.2500 |" in card and str(tmp_path) not in card
    assert "--hidden-size 32" in card


def test_another_tokenizer_is_refused(run, tmp_path, capsys):
    other = train_sentencepiece(tmp_path / "other.model", "unigram")
    words = ["to-hf", str(run), str(tmp_path / "out"), "--tokenizer", str(other)]
    assert main(words) == 2
    assert "is not the tokenizer that" in capsys.readouterr().err and not (tmp_path / "out").exists()
    right = str(tmp_path / "elsewhere" / "spm.model")
    assert main([*words[:-1], right, "--no-check"]) == 0


def test_the_check_finds_another_tokenizer_in_the_folder(run, tmp_path, capsys):
    pytest.importorskip("transformers")
    out = finish(write_folder(Source(run), tmp_path / "out"))
    other = train_sentencepiece(tmp_path / "other.model", vocab_size=290)
    to_tokenizer_json(other.read_bytes()).save(str(out / "tokenizer.json"))
    assert main(["check", str(run), str(out)]) == 1
    assert "has other ids  DOES NOT HOLD" in capsys.readouterr().out
    made = to_tokenizer_json((tmp_path / "elsewhere" / "spm.model").read_bytes())
    made.decoder = decoders.Fuse()
    made.save(str(out / "tokenizer.json"))
    assert main(["check", str(run), str(out)]) == 1
    assert re.search("222 of 222 .*holds\n.*\ndecoded .* DOES NOT HOLD", capsys.readouterr().out)


@pytest.fixture
def gpt2(tmp_path):
    """GPT-2's two files."""
    (tmp_path / "home").mkdir()
    return train(tmp_path / "home", TRICKY, 400)


def test_gpt2s_two_files_travel_and_become_a_tokenizer_json(gpt2, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = load_tokenizer("GPT2BPETokenizer", vocab_file=gpt2[0], merge_file=gpt2[1])
    path = save_run(tmp_path / "run", "GPT2BPETokenizer", vocab_file=gpt2[0], merge_file=gpt2[1])
    (tmp_path / "home").rename(tmp_path / "elsewhere")
    assert generate(load_text_model(path), "def f(", 3, Sampling(temperature=0)).startswith("def f(")
    assert main(["to-hf", str(path), str(tmp_path / "out")]) == 0
    for name in ("vocab.json", "merges.txt"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "elsewhere" / name).read_bytes()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (theirs.eos_token, theirs.eos_token_id) == ("<|endoftext|>", tokenizer.info.eod)
    for text in [*TRICKY, *texts()]:  # one that spells the end of a document is a text, as in training
        assert theirs.encode(text) == tokenizer.encode(text), text
        assert theirs.decode(tokenizer.encode(text), clean_up_tokenization_spaces=False) == text
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == tokenizer.info.eod


def test_a_published_gpt2_with_two_files_is_imported(gpt2, tmp_path, capsys):
    """Its folder has no tokenizer.json; in its texts the end of a document is found, in ours it is spelt."""
    size = load_tokenizer("GPT2BPETokenizer", vocab_file=gpt2[0], merge_file=gpt2[1]).info.vocab_size
    hf = save_model(tmp_path / "hf", "gpt2", vocab_size=size)
    for file in gpt2:
        file.rename(hf / file.name)
    (hf / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "model_max_length": 64}')
    assert main(["from-hf", str(hf), str(tmp_path / "ck")]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"(\d{3}) of \1 texts the same ids.*; \d+ that spell special tokens left out", printed)
    assert main(["flags", str(hf)]) == 0
    assert f"--vocab-file {hf / 'vocab.json'}" in capsys.readouterr().out
    hf.rename(tmp_path / "elsewhere")
    assert generate(load_text_model(tmp_path / "ck"), "a", 3, Sampling(temperature=0)).startswith("a")
    assert main(["to-hf", str(tmp_path / "ck"), str(tmp_path / "out")]) == 0
    assert "222 of 222 texts the same ids" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["model_max_length"] == 64
