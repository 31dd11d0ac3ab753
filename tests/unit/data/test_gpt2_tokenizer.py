"""GPT2BPETokenizer: ids of transformers' and of GPT-2's own rule, on text that is easy to get wrong; clear errors."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megazero.checkpoint.store import CheckpointError
from megazero.cli.preprocess import main
from megazero.config import ConfigError, make_config
from megazero.data.indexed import IndexedDataset
from megazero.data.preprocess import Job, preprocess
from megazero.data.text import find_inputs, stdlib_sources
from megazero.data.tokenizer import GPT2BPETokenizer
from megazero.log.metrics import read_metrics
from megazero.train.generate import generate, load_text_model
from tests import ROOT
from tests.messages import refused
from tests.unit.train.test_seams import run

EOD = "<|endoftext|>"
TRICKY = [
    "", " ", "  ", "\n", "\n\n", " \n ", "\t\tx", "a\r\nb", "  lead", "trail  ", "a  b   c", "x\u00a0y\u3000z",
    "I'm you're they've it's don't we'll he'd", "I'M YOU'RE 'S 's", "''''s", "f(x)=3.14e-10;//!?", "٣½²Ⅷ १२",
    "naïve Ελλάς Ωmega ß İstanbul", "漢字かな交じり文。한국어", "🙂👩‍👩‍👧‍👦🏳️‍🌈", "e\u0301 vs é",
    "\u200b\ufeff\u2028\u2029", "a\0b\x07",
    "\x1c\x1d \x85", f"one{EOD}two", f" {EOD} {EOD}", "<|endoftext|", "_under_ score__",
    "def f(a,\n    b):\n\treturn a",
]  # fmt: skip


def train(folder: Path, texts: list[str], size: int = 700) -> tuple[Path, Path]:
    """A byte-level BPE in GPT-2's two files."""
    from tokenizers import ByteLevelBPETokenizer

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, size, min_frequency=1, special_tokens=[EOD], show_progress=False)
    trained.save_model(str(folder))
    return folder / "vocab.json", folder / "merges.txt"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    texts = [path.read_text("utf-8")[:20000] for path in stdlib_sources()[::40]]
    return train(tmp_path_factory.mktemp("gpt2"), [*texts, *TRICKY])


def test_ids_are_transformers(files: tuple[Path, Path]) -> None:
    """Its tokenizer takes <|endoftext|> within a text for the end of a document. Megatron's does not."""
    transformers = pytest.importorskip("transformers")
    tokenizer = GPT2BPETokenizer(*files)
    for theirs in (
        transformers.GPT2Tokenizer(str(files[0]), str(files[1])),
        transformers.GPT2Tokenizer.from_pretrained(str(files[0].parent)),
    ):
        assert tokenizer.info.eod == theirs.eos_token_id
        for text in TRICKY:
            if EOD not in text:
                assert tokenizer.encode(text) == theirs.encode(text), text


def test_preprocessing_makes_data_of_this_tokenizer(files: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TRICKY))
    command = [sys.executable, "tools/preprocess_data.py", "--input", str(tmp_path / "in.jsonl")]
    # Megatron's default, by --vocab-file.
    command += ["--append-eod", "--output-prefix", str(tmp_path / "out")]
    done = subprocess.run([*command, "--vocab-file", str(files[0])], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "GPT2BPETokenizer needs its merge file" in done.stderr
    command += ["--vocab-file", str(files[0]), "--merge-file", str(files[1])]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    data, tokenizer = IndexedDataset(tmp_path / "out_text_document"), GPT2BPETokenizer(*files)
    wanted = [[*tokenizer.encode(text), tokenizer.info.eod] for text in TRICKY if text]
    assert [data.get(i).tolist() for i in range(len(data))] == wanted


def test_preprocessing_asks_for_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--input", "in.jsonl", "--output-prefix", str(tmp_path / "out")]) == 2
    assert "--tokenizer-type is required: SentencePieceTokenizer, " in capsys.readouterr().err


def test_the_files_are_checked(files: tuple[Path, Path], tmp_path: Path) -> None:
    ids, merges = json.loads(files[0].read_text("utf-8")), files[1].read_text("utf-8")

    def load(vocabulary: object, lines: str) -> GPT2BPETokenizer:
        (tmp_path / "v").write_text(json.dumps(vocabulary), "utf-8")
        (tmp_path / "m").write_text(lines, "utf-8")
        return GPT2BPETokenizer(tmp_path / "v", tmp_path / "m")

    for vocabulary, lines, message in (
        ({token: i for token, i in ids.items() if token != EOD}, merges, r"v has no <\|endoftext\|>"),
        ({"a": 0, EOD: 1}, merges, "no token for 255 of the 256 bytes"),
        ([1], merges, "must map each token to an id of its own"),
        ({**ids, "new": 3}, merges, "must map each token to an id of its own"),
        (ids, "#\nx\n", "m, line 2: not two tokens"),
        (ids, "#\nx qzqzq\n", "m does not belong to .*v"),
    ):
        with pytest.raises(ValueError, match=message):
            load(vocabulary, lines)
    (tmp_path / "v").write_text("{")
    for pair, message in (
        ((tmp_path / "v", files[1]), "v is not JSON"),
        ((tmp_path / "none", files[1]), r"cannot read tokenizer .*none.*vocab\.json"),
        ((files[0], tmp_path / "none"), r"cannot read tokenizer .*none.*merges\.txt"),
    ):
        with pytest.raises(ValueError, match=message):
            GPT2BPETokenizer(*pair)
    same = GPT2BPETokenizer(*files).info
    other = load(ids, merges + "\n").info
    assert other.fingerprint != same.fingerprint and (other.vocab_size, other.eod) == (
        same.vocab_size,
        same.eod,
    )


SMALL = {
    "model_family": "gpt", "num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 8,
    "micro_batch_size": 1, "lr": 1e-3, "train_iters": 1, "mock_data": True,
}  # fmt: skip


def test_its_files_choose_it() -> None:
    config = make_config({**SMALL, "vocab_file": "v", "merge_file": "m"})
    assert config.data.tokenizer_type == "GPT2BPETokenizer" and "Megatron's default" in " ".join(config.notes)
    for given, missing in (("vocab_file", "--merge-file"), ("merge_file", "--vocab-file")):
        with pytest.raises(ConfigError, match=f"GPT2BPETokenizer needs {missing}"):
            make_config({**SMALL, given: "x"})
    spm = {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": "s"}
    config = make_config({**SMALL, **spm, "vocab_file": "v"})
    assert any("--vocab-file v has no effect" in note for note in config.notes)


def test_a_run_its_resume_and_its_text(files: tuple[Path, Path], tmp_path: Path) -> None:
    """From raw text to a sample, also when the files have moved; data and runs of another tokenizer are refused."""
    for name in ("text", "other"):
        (tmp_path / name).mkdir()
    for number, path in enumerate(stdlib_sources()[:30]):
        (tmp_path / "text" / f"{number}.py").write_text(path.read_text("utf-8")[:3000], "utf-8")
    shutil.copytree(files[0].parent, tmp_path / "own")
    train(tmp_path / "other", TRICKY, 400)

    def of(name: str) -> dict[str, str]:
        return {
            "vocab_file": str(tmp_path / name / "vocab.json"),
            "merge_file": str(tmp_path / name / "merges.txt"),
        }

    def data_of(name: str) -> dict[str, list[str]]:
        job = Job(
            find_inputs([str(tmp_path / "text")]),
            ("text",),
            "GPT2BPETokenizer",
            None,
            None,
            True,
            False,
            **of(name),
        )
        return {"data_path": preprocess(job, tmp_path / f"data of {name}", say=lambda _: None)[0]}

    base = {**SMALL, "mock_data": None, "train_iters": 3, "eval_iters": 1, "split": "9,1,0", **of("own")}
    base |= {**data_of("own"), "save": str(tmp_path / "run"), "log_dir": str(tmp_path / "logs")}
    run({**base, "exit_interval": 2})
    run({**base, "load": base["save"]})
    assert [line["iteration"] for line in read_metrics(tmp_path / "logs")] == [1, 2, 3]
    with pytest.raises(ValueError, match="made with another tokenizer: vocabulary size"):
        run({**base, **of("other"), "load": base["save"]})
    with refused("--merge-file", by=CheckpointError):
        same_size = {"vocab_size": GPT2BPETokenizer(*files).info.vocab_size}
        run({**base, **of("other"), **data_of("other"), **same_size, "load": base["save"]})
    assert generate(load_text_model(base["save"]), "def f(", 5).startswith("def f(")
    (tmp_path / "own").rename(tmp_path / "moved")
    assert generate(load_text_model(base["save"]), "def f(", 5).startswith(
        "def f("
    )  # the checkpoint has its own
    with pytest.raises(ValueError, match="cannot read tokenizer"):
        load_text_model(base["save"], **of("own"))
    assert generate(load_text_model(base["save"], **of("moved")), "def f(", 5).startswith("def f(")
