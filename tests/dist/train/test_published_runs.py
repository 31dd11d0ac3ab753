"""Published runs, small: the flags of their scripts as they stand, with other sizes, train on real text.

All ten, 40 iterations each (some minutes): pytest -m slow tests/dist/train/test_published_runs.py
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from statistics import mean

import pytest

from megazero.config import World, begun, parse
from megazero.data.preprocess import Job, preprocess
from megazero.data.text import stdlib_sources
from megazero.data.tokenizer_training import train_tokenizer
from megazero.train.outputs import export_note
from tests import ROOT
from tests.dist.pool import run_ranks
from tests.dist.runs import train_flags
from tests.published_runs import PUBLISHED, command_line
from tests.sizes import PUBLISHED as SMALL

VOCABULARY = 700
FEW, MANY = 5, 40
TOKENIZERS = {"PretrainedFromHF": "huggingface", "GPTSentencePieceTokenizer": "sentencepiece"}
ALWAYS = ("LUMI 71B",)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What stands in braces, and under ``data of KIND`` the prefix of the text's tokens."""
    from tokenizers import ByteLevelBPETokenizer

    root, end = tmp_path_factory.mktemp("published"), "<|endoftext|>"
    sources = stdlib_sources()[::48]
    texts = [path.read_text("utf-8")[:30000] for path in sources]
    documents = [text[at : at + 2000] for text in texts for at in range(0, len(text), 2000)]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, VOCABULARY, special_tokens=[end], show_progress=False)
    bpe.save_model(str(root))
    (root / "hf").mkdir()
    bpe.save(str(root / "hf" / "tokenizer.json"))
    (root / "hf" / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    train_tokenizer(
        [line for text in texts for line in text.splitlines() if line.strip()],
        str(root / "spm.model"),
        vocab_size=VOCABULARY,
        model_type="bpe",
        character_coverage=0.9995,
        threads=1,
    )
    (root / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    found = {
        "VOCAB": str(root / "vocab.json"),
        "MERGES": str(root / "merges.txt"),
        "TOKENIZER": str(root / "hf"),
        "SENTENCEPIECE": str(root / "spm.model"),
    }
    of = {
        "gpt2": ("GPT2BPETokenizer", None, found["VOCAB"], found["MERGES"]),
        "huggingface": ("HuggingFaceTokenizer", found["TOKENIZER"], None, None),
        "sentencepiece": ("SentencePieceTokenizer", found["SENTENCEPIECE"], None, None),
    }
    for name, (kind, model, vocabulary, merges) in of.items():
        job = Job((str(root / "text.jsonl"),), ("text",), kind, model, None, True, False, vocabulary, merges)
        found[f"data of {name}"] = preprocess(job, root / name, say=lambda _: None)[0][0]
    return found


def words_of(name: str, files: dict[str, str], folder: Path, iterations: int) -> list[str]:
    """The command line of a run on data of its tokenizer."""
    kind = next((own for theirs, own in TOKENIZERS.items() if theirs in PUBLISHED[name].flags), "gpt2")
    return command_line(name, {**files, "DATA": files[f"data of {kind}"]}, folder, iterations)


def check(words: list[str], ranks: int, iterations: int, least: float) -> None:
    seen = run_ranks(ranks, train_flags, words, timeout=300)
    assert all(each.losses == seen[0].losses for each in seen)
    found = [loss for _, loss in seen[0].losses]
    assert len(found) >= iterations - 2 and all(map(math.isfinite, found))
    assert abs(found[0] - math.log(VOCABULARY)) < 0.5  # untrained: no better than a guess
    assert mean(found[:3]) - mean(found[-3:]) > least, found


@pytest.mark.parametrize("name", ALWAYS)
def test_a_published_run_trains(name: str, files: dict[str, str], tmp_path: Path) -> None:
    check(words_of(name, files, tmp_path, FEW), PUBLISHED[name].ranks, FEW, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_runs_train(name: str, files: dict[str, str], tmp_path: Path) -> None:
    check(words_of(name, files, tmp_path, MANY), PUBLISHED[name].ranks, MANY, 0.02)


# -- the scripts of pretrain/slurm --------------------------------------------------------------------

SAMPLES = "--train-samples {0} --lr-decay-samples {0} --lr-warmup-samples 8"
TOKENS = f"--train-tokens {512 * FEW} --lr-decay-tokens {512 * FEW} --lr-warmup-tokens 512"
# script: (nodes that it asks for, kind of data, what replaces its sizes)
SCRIPTS = {
    "llama-8b-zeropp": (
        4,
        "huggingface",
        f"{SMALL} {SAMPLES.format(8 * FEW)} --ffn-hidden-size 192 --num-query-groups 2 --ranks-per-node 2 "
        "--lr 1e-3",  # by its own, 1.5e-4, losses of five batches differ by more than they fall
    ),
    "gpt-1b3-deepspeed": (2, "gpt2", f"{SMALL} {TOKENS}"),
}


def script(name: str, data: str, files: dict[str, str]) -> list[str]:
    """The flags that a script hands on to pretrain.sbatch."""
    submit = {"SUBMIT": "printf %s\\0"}
    done = subprocess.run(
        [str(ROOT / "pretrain" / "slurm" / f"{name}.sh")],
        env={**os.environ, **files, "DATA_PATH": data, **submit},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split("\0")[:-1]


@pytest.mark.first(1)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_that_people_copy_trains(name: str, files: dict[str, str], tmp_path: Path) -> None:
    """As it stands it fits the nodes that it asks for; with small sizes its flags train here."""
    nodes, kind, sizes = SCRIPTS[name]
    text = (ROOT / "pretrain" / "slurm" / f"{name}.sh").read_text("utf-8")
    assert f"--nodes={nodes} pretrain/slurm/pretrain.sbatch" in text
    given = {key: value for key, value in files.items() if not key.startswith("data of")}
    words = script(name, files[f"data of {kind}"], given)
    world = World(8 * nodes, 8)
    whole = begun(parse([*words, "--save", "c", "--load", "c", "--log-dir", "l"], world), world)
    assert whole.data_parallel_size(world) == {4: 32, 2: 8}[nodes]
    assert export_note(whole) is None
    folders = ["--save", str(tmp_path / "c"), "--load", str(tmp_path / "c"), "--log-dir", str(tmp_path / "l")]
    check([*words, *folders, *sizes.split(), "--device", "cpu"], 4, FEW, 0.0)
