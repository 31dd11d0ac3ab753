"""A folder from a stranger: none of its code runs, whoever says yes, and a terminal obeys none of its names."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from megazero.cli import main as command_line
from megazero.convert.command import main
from tests import ROOT
from tests.hugging_face import publish_tokenizer, save_model, train_byte_level

CODE = """
from pathlib import Path
Path({path!r}).touch()
from transformers import LlamaConfig as Config, LlamaForCausalLM as Model, PreTrainedTokenizerFast as Tokenizer
"""
# file -> (the classes that it names, what the import is told, what it says)
MAPS = {
    "config.json": ({"AutoConfig": "evil.Config"}, [], "is custom code, which is not run"),
    "config.json, accepted": (
        {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        ["--accept-field", "auto_map"],
        "",
    ),
    "tokenizer_config.json": (
        {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]},
        [],
        "code of its own, which is never run",
    ),
}


@pytest.mark.parametrize("name", MAPS)
def test_code_of_a_folder_never_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ``yes | megazero convert`` would: transformers asks, unless it is told."""
    pytest.importorskip("transformers")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", f"{tmp_path / 'modules'}")
    folder = save_model(tmp_path / "published", vocab_size=280)
    # Code gives a class a name of its own.
    known = "Tokenizer" if name == "tokenizer_config.json" else "PreTrainedTokenizerFast"
    publish_tokenizer(folder, train_byte_level(), tokenizer_config={"tokenizer_class": known})
    (folder / "evil.py").write_text(CODE.format(path=f"{tmp_path / 'ran'}"))
    (classes, words, said), file = MAPS[name], folder / name.partition(",")[0]
    file.write_text(json.dumps({**json.loads(file.read_text()), "auto_map": classes}))
    status = main(["from-hf", f"{folder}", f"{tmp_path / 'imported'}", *words])
    assert not (tmp_path / "ran").exists(), capsys.readouterr()
    assert status == (2 if said else 0) and said in capsys.readouterr().err


def test_every_reader_of_transformers_says_that_no_code_is_trusted() -> None:
    """One that does not say it asks the user, or a pipe."""
    for top in ("megazero", "tools", "pretrain", "megatron_core_patch", "fsdp2_patch"):
        for path in (ROOT / top).rglob("*.py"):
            calls = re.findall(r"\.from_pretrained\(([^)]*)\)", path.read_text())
            assert all("trust_remote_code=False" in call for call in calls), path


EVIL, SHOWN = "\x1b]0;owned\a\x9b31m\r", r"\x1b]0;owned\x07\x9b31m\r"


def test_a_terminal_obeys_no_name_of_a_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor a path: as the console script prints it."""
    pytest.importorskip("transformers")
    folder = save_model(tmp_path / f"published{EVIL.strip()}")
    index = folder / "model.safetensors.index.json"
    index.write_text(
        index.read_text().replace("model.norm.weight", f"model.norm{json.dumps(EVIL)[1:-1]}.weight")
    )
    monkeypatch.setattr(
        "sys.argv", ["megazero", "convert", "from-hf", f"{folder}", f"{tmp_path / 'imported'}"]
    )
    monkeypatch.setattr("sys.stdout", sys.stdout)  # and back: the command guards both
    monkeypatch.setattr("sys.stderr", sys.stderr)
    assert command_line() == 2
    said = capsys.readouterr().err
    assert SHOWN in said and not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", said)
