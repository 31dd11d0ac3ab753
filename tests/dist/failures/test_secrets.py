"""Secrets in the environment and in URLs of real runs: none is in what they print or in any byte on disk.

But for those that an option holds: config.yaml and the manifests have them as they were given.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

from megazero.config import begun, parse
from megazero.config.secrets import redact
from megazero.log.exit_status import ExitStatus
from tests import ROOT

FLAGS = (
    "--model-family llama --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
    "--micro-batch-size 1 --lr 1e-3 --train-iters 4 --mock-data --vocab-size 50 --log-interval 1 --eval-iters 1 "
    "--device cpu --save-interval 1"
)
ENVIRONMENT = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "hf_plantedPlantedPlantedPlanted1",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG+planted",
    "DB_PASSWORD": 'planted "quoted" \\ it\'s',
    "SSH_PRIVATE_KEY": "-----BEGIN KEY-----\nplantedFirstLine\nplantedSecondLine\n-----END KEY-----",
    "MY_TOKEN": "planted1",
    "HTTPS_PROXY": "http://someone:plantedProxy7@proxy.example:3128",
}
IN_URL = "s3://someone:plantedBucket8@bucket.example/stop"
PLANTED = (
    *(value for name, value in ENVIRONMENT.items() if name not in ("HTTPS_PROXY", "SSH_PRIVATE_KEY")),
    *("plantedFirstLine", "plantedSecondLine", "plantedProxy7"),
)
# The program, with a library in it that fails and says all that it knows.
CRASH = r"""
import logging, os, sys, warnings
from megazero.cli import main
from megazero.train import command
words = [os.environ[name] for name in os.environ["SECRETS"].split(",")]
def told():
    import megazero.train.trainer as trainer
    step = trainer.Trainer._iterate
    def iterate(self, batches):
        if self.progress.iteration == 2:
            self.outputs.console.note(f"a note of {words[1]}")
            warnings.warn(f"a warning of {words[0]}")
            logging.getLogger("a.library").warning("a line of %s", words[2])
            self.outputs.event("note", text=" ".join(words))
            raise RuntimeError(f"cannot log in as {words}")
        return step(self, batches)
    trainer.Trainer._iterate = iterate
run = command.run
command.run = lambda *arguments: (told(), run(*arguments))[1]
sys.exit(main(command="train"))
"""


def forms(secret: str) -> set[bytes]:
    return {
        text.encode()
        for text in (secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], quote(secret, safe=""))
    }


def found(folder: Path, *outputs: str) -> list[tuple[str, str]]:
    """(where, secret) of every planted one that is in a file below the folder or in an output."""
    texts = {f"{path}": path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    texts |= {f"output {i}": text.encode() for i, text in enumerate(outputs)}
    planted = *PLANTED, "plantedBucket8"
    return [(where, s) for where, text in texts.items() for s in planted if any(f in text for f in forms(s))]


def start(folder: Path, command: list[str], *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **ENVIRONMENT, **environ}
    done = subprocess.run(
        [sys.executable, *command, *FLAGS.split(), *flags, "--log-dir", str(folder / "logs")],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    (folder / "log").write_text(done.stdout + done.stderr)
    return done


@pytest.mark.slow
@pytest.mark.parametrize("logger", ["tensorboard", "wandb"])
def test_a_run_that_trains_saves_and_crashes(tmp_path: Path, logger: str) -> None:
    pytest.importorskip(logger)
    to = ["--tensorboard-dir", str(tmp_path / "board")]
    if logger == "wandb":
        named = f"--wandb-exp-name={ENVIRONMENT['HF_TOKEN']}"
        to = ["--wandb-project", "p", "--wandb-save-dir", str(tmp_path), named]
    kill_switch = ["--kill-switch-path", IN_URL]
    save = ["--save", str(tmp_path / "run")]
    names = ",".join(ENVIRONMENT)
    done = start(tmp_path, ["-c", CRASH], *save, *kill_switch, *to, WANDB_MODE="offline", SECRETS=names)
    assert done.returncode == ExitStatus.UNEXPECTED, done.stderr
    assert "RuntimeError: cannot log in as" in done.stderr and "Traceback" in done.stderr
    assert "a note of ***" in done.stdout and "a warning of ***" in done.stderr
    assert (tmp_path / "run" / "iter_0000002" / "manifest.json").exists()
    assert "cannot log in" in (tmp_path / "logs" / "events.jsonl").read_text()
    options = [IN_URL, *([ENVIRONMENT["HF_TOKEN"]] if logger == "wandb" else [])]
    resolved = tmp_path / "logs" / "config.yaml"
    assert begun(parse(["--config", str(resolved)])).training.kill_switch_path == options[0]
    held = [resolved, *(tmp_path / "run").glob("iter_*/manifest.json")]
    for file in held:  # as they were given
        assert all(option in file.read_text() for option in options), file
    elsewhere = found(tmp_path, done.stdout, done.stderr)
    assert [each for each in elsewhere if each[0] not in map(str, held)] == []


def test_mistakes_in_flags(tmp_path: Path) -> None:
    words = ["--save-intervals", IN_URL, "--wandb-project", "--nr", ENVIRONMENT["MY_TOKEN"]]
    done = start(tmp_path, ["pretrain/pretrain_gpt.py"], *words)
    assert done.returncode == ExitStatus.MISTAKE and "--save-intervals does not exist" in done.stderr, (
        done.stderr
    )
    assert found(tmp_path, done.stdout, done.stderr) == []


PLAIN = (
    *("iteration 1 | 12.3k tokens/s | tokens: 123456", "eos_token='<|endoftext|>'", "forward pass: computed"),
    *("KeyError: 'layers', abc, key 1: value", "http://host.example/a@b, sha256 0123456789abcdef"),
    *("hf:/models/sk-newspaper-llama-2", "data/corpus"),
)


def test_what_is_hidden_and_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**ENVIRONMENT, "SHORT_TOKEN": "abc", "DATA_KEY": "corpus"}.items():
        monkeypatch.setenv(name, value)
    assert redact(IN_URL) == "s3://***@bucket.example/stop"
    for secret in PLANTED:
        query = f"https://host/?q={quote(secret, safe='')}"
        for form in (secret, f"x={secret!r}", json.dumps({"a": secret}), query):
            assert not any(each in redact(form).encode() for each in forms(secret)), form
    said = {"data": ("a", 1, ["planted1"]), "n": 2.5}
    assert redact(said) == {"data": ("a", 1, ["***"]), "n": 2.5}
    for text in PLAIN:
        assert redact(text) == text
