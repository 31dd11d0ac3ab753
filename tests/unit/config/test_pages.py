"""The pages about files of --config and about continued pretraining say what is read and done."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megazero.config import World, parse
from tests import ROOT
from tests.hugging_face import publish_tokenizer, save_model, train_byte_level

PAGES = ROOT / "docs"


def block(page: str, language: str, number: int = 0) -> str:
    """A block of code of a page."""
    text = (PAGES / page).read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[number]


def test_the_example_of_a_config_file_is_read(tmp_path: Path) -> None:
    (file := tmp_path / "run.yaml").write_text(block("reference/config-file.md", "yaml"))
    config = parse(["--config", str(file)], World(1, 1))
    assert config.model.swiglu and config.precision.params_dtype == "bf16" and config.data.split == "90,10,0"
    assert config.skipping.skip_train_iteration_range == ("3-4", "7-7")
    assert config.logging.callbacks == ("json:JSONDecoder",) and config.optimizer.min_lr == 0
    assert parse(["--config", str(file), "--no-callbacks"], World(1, 1)).logging.callbacks == ()


@pytest.mark.slow
def test_the_page_of_continued_pretraining_runs_from_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    base = tmp_path / "models" / "base"
    base.mkdir(parents=True)
    save_model(publish_tokenizer(base, train_byte_level()), vocab_size=280)
    text = "the lower the newest the widest low "
    lines = (json.dumps({"text": text * (5 + number % 7)}) for number in range(400))
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    page = "guide/continue-pretraining.md"
    (tmp_path / "run.yaml").write_text(block(page, "yaml") + "device: cpu\n")
    said = []
    for line in re.sub(r"\\\n", "", block(page, "sh")).splitlines():
        if line.startswith("megazero"):
            words = [sys.executable, "-m", "megazero", *shlex.split(line)[1:]]
            done = subprocess.run(
                words, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
                capture_output=True, text=True, timeout=400, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
            said += re.findall(r"^valid \| loss ([\d.]+)", done.stdout, re.MULTILINE)
    before, after = map(float, said)
    assert after < before
    card = (tmp_path / "out" / "more" / "README.md").read_text()
    assert "| base model | base |" in card and "--train-iters 20" in card
