"""Exported folders in the hands of their users: two releases of transformers, and its Trainer.

    MEGAZERO_TRANSFORMERS_4=venv4/bin/python python -m pytest -m slow tests/unit/test_convert_readers.py

The variable names a python that has torch and transformers 4.57. Without it the test makes a virtual environment,
whose torch is this one's; it is skipped where transformers 4.57 cannot be installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

from megazero.convert.export import finish, write_folder
from megazero.convert.importing import Published, write_checkpoint
from megazero.convert.source import Source
from megazero.train.generate import load_text_model
from tests.family_models import VARIANTS, save, transformers
from tests.hugging_face import save_model

torch.set_num_threads(1)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
CHANGES = {"llama-rope-llama3": {"rope_parameters": LLAMA3}}  # of Llama 3.1
TOKENS = torch.arange(20)[None]
READ = """
import json, sys, torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM
for folder in sys.argv[1:]:
    capped = getattr(AutoConfig.from_pretrained(folder), "attn_logit_softcapping", None)
    options = {"attn_implementation": "eager"} if capped else {}  # 4.57's default leaves the cap out
    model = AutoModelForCausalLM.from_pretrained(folder, **options).float().eval()
    logits = model(torch.arange(20)[None], use_cache=False).logits
    print("read", json.dumps([transformers.__version__, type(model).__name__, logits.flatten().tolist()]))
"""


@pytest.fixture(scope="module")
def version4(tmp_path_factory) -> str:
    given = os.environ.get("MEGAZERO_TRANSFORMERS_4")
    if given:
        return given
    root = tmp_path_factory.mktemp("venv")
    venv.create(root, with_pip=True)
    python = str(root / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "transformers==4.57.*"]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"transformers 4.57 cannot be installed: {done.stderr[-200:]}")
    (packages,) = root.glob("lib/python*/site-packages")
    (packages / "zz_torch.pth").write_text(
        str(Path(torch.__file__).parents[1])
    )  # after the environment's own
    return python


@pytest.mark.slow
def test_both_releases_of_transformers_read_the_same_models(version4: str, tmp_path: Path) -> None:
    """Every family in each of its variants: 35 exports, read in one go by each release."""
    folders, ours = [], []
    for name in VARIANTS:
        root = tmp_path / name
        path = write_checkpoint(Published.open(save(name, root / "hf", **CHANGES.get(name, {}))), root / "ck")
        folders.append(str(finish(write_folder(Source(path), root / "out"))))
        with torch.no_grad():
            ours.append(load_text_model(path).decoder.full_logits(TOKENS).flatten())
    wrong = []
    for python in (sys.executable, version4):
        done = subprocess.run([python, "-c", READ, *folders], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-2000:]
        lines = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("read ")]
        for name, wanted, (version, kind, logits) in zip(VARIANTS, ours, lines, strict=True):
            theirs = torch.tensor(logits)
            error = float((wanted - theirs).norm() / theirs.norm())
            print(f"{version} {kind} {name}: {error:.1e}")
            if not error < 5e-6:
                wrong.append((version, name, error))
    assert not wrong


def test_transformers_trainer_finds_our_perplexity(tmp_path):
    """A consumer of its own, transformers' Trainer, evaluates an export: the loss is the decoder's."""
    pytest.importorskip("accelerate")
    path = write_checkpoint(Published.open(save_model(tmp_path / "hf")), tmp_path / "ck")
    out = finish(write_folder(Source(path), tmp_path / "out"))
    texts = torch.randint(0, 51, (6, 33), generator=torch.Generator().manual_seed(1))
    decoder = load_text_model(path).decoder
    with torch.no_grad():
        ours = decoder(texts[:, :-1], texts[:, 1:]).mean().exp()
    settings = transformers.TrainingArguments(
        str(tmp_path / "trainer"), per_device_eval_batch_size=2, report_to=[], use_cpu=True
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    data = [{"input_ids": row, "labels": row} for row in texts]
    loss = transformers.Trainer(model=model, args=settings, eval_dataset=data).evaluate()["eval_loss"]
    assert float(torch.tensor(loss).exp()) == pytest.approx(float(ours), rel=1e-4)
