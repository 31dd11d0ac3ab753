"""Published runs, small: the flags of their scripts as they stand, with other sizes, train on real text.

All ten, 40 iterations each (some minutes): pytest --run-slow -m slow tests/dist/test_published_runs.py
"""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from statistics import mean

import pytest

from megazero.config import World, parse
from megazero.data.corpus import stdlib_sources
from megazero.data.preprocess import Job, preprocess
from megazero.data.tokenizer_training import train_tokenizer
from tests.dist.pool import run_ranks
from tests.dist.published_runs import PUBLISHED
from tests.dist.runs import train_flags

VOCABULARY = 700
FEW, MANY = 10, 40
TOKENIZERS = {"PretrainedFromHF": "huggingface", "GPTSentencePieceTokenizer": "sentencepiece"}
ALWAYS = ("LUMI 71B", "BLOOM 176B")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What stands in braces, and under ``data of KIND`` the prefix of the text's tokens."""
    from tokenizers import ByteLevelBPETokenizer

    root, end = tmp_path_factory.mktemp("published"), "<|endoftext|>"
    sources = stdlib_sources()[::24]
    texts = [path.read_text("utf-8")[:30000] for path in sources]
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
    (root / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
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


def command_line(name: str, files: dict[str, str], folder: Path, iterations: int) -> list[str]:
    run = PUBLISHED[name]
    kind = next((own for theirs, own in TOKENIZERS.items() if theirs in run.flags), "gpt2")
    batch = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
    (folder / "ds.json").write_text(json.dumps({**run.deepspeed, **(batch if run.deepspeed else {})}))
    fill = {**files, "DATA": files[f"data of {kind}"], "DIR": str(folder)}
    fill |= {"DEEPSPEED": str(folder / "ds.json"), "ITERS": str(iterations)}
    fill |= {"SAMPLES": str(8 * iterations), "TOKENS": str(8 * 64 * iterations)}
    words = shlex.split(f"{run.flags} {run.sizes} --device cpu --log-dir {{DIR}}/logs")
    for key, value in fill.items():
        words = [word.replace(f"{{{key}}}", value) for word in words]
    return words


def losses(name: str, files: dict[str, str], folder: Path, iterations: int) -> list[float]:
    words, ranks = command_line(name, files, folder, iterations), PUBLISHED[name].ranks
    assert parse(words, World(ranks, ranks)).model.vocab_size is None  # the tokenizer's
    seen = run_ranks(ranks, train_flags, words, timeout=300)
    assert all(each.losses == seen[0].losses for each in seen)
    return [loss for _, loss in seen[0].losses]


def check(name: str, files: dict[str, str], folder: Path, iterations: int, least: float) -> None:
    found = losses(name, files, folder, iterations)
    assert len(found) >= iterations - 2 and all(map(math.isfinite, found))
    assert abs(found[0] - math.log(VOCABULARY)) < 0.5  # untrained: no better than a guess
    assert mean(found[:3]) - mean(found[-3:]) > least, found


@pytest.mark.parametrize("name", ALWAYS)
def test_a_published_run_trains(name: str, files: dict[str, str], tmp_path: Path) -> None:
    check(name, files, tmp_path, FEW, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_runs_train(name: str, files: dict[str, str], tmp_path: Path) -> None:
    check(name, files, tmp_path, MANY, 0.02)
