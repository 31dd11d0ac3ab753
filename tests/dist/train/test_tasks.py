"""Tasks of lm-eval's harness on the model in memory: on any layout what the harness says of the exported folder."""

from __future__ import annotations

import json
import os
import random
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megazero.convert.command import main as convert
from megazero.log.metrics import read_metrics
from megazero.train import tasks
from tests.dist.pool import run_ranks
from tests.dist.runs import Seen, refusal, train
from tests.messages import names

lm_eval = pytest.importorskip("lm_eval")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "birds", "fly", "over", "green", "hills")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero3": (2, {"zero_preset": "zero3"}),
    "cp 2": (2, {"context_parallel_size": 2, "cp_comm_type": ("all_gather",)}),
    "pp 2": (2, {"pipeline_model_parallel_size": 2}),
    "pp 2 x tp 2": (
        4,
        {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    ),
}


def write_task(folder: Path, name: str, kind: str, rows: list[dict], metrics: list[str], form: str) -> str:
    """Write a task of a local file in lm-eval's form; return its YAML file."""
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    listed = "".join(f"  - metric: {metric}\n" for metric in metrics)
    file = folder / f"{name}.yaml"
    file.write_text(
        f"task: {name}\noutput_type: {kind}\ndataset_path: json\ntest_split: test\ndataset_kwargs:\n  data_files:\n"
        f"    test: {folder / name}.jsonl\n{form}metric_list:\n{listed}"
    )
    return str(file)


def write_tokenizer(folder: Path, texts: list[str]) -> None:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet),
    )
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')


@cache
def manager() -> Any:
    """lm-eval's table without its own tasks, which take 8 s to list."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=False)


def offline(values: dict[str, Any], cached: str) -> Seen:
    os.environ.update({**OFFLINE, "HF_DATASETS_CACHE": cached})
    with patch.object(tasks, "_manager", manager):
        return train(values)


def by_harness(folder: Path, files: list[str]) -> dict[str, Any]:
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=1, max_length=32)
    return lm_eval.simple_evaluate(model, tasks=files, task_manager=manager(), bootstrap_iters=0)


def results(log_dir: Path) -> list[dict[str, float]]:
    lines = [{k: v for k, v in line.items() if "/" in k} for line in read_metrics(log_dir)]
    return [line for line in lines if line]


@pytest.mark.slow
def test_every_layout_has_the_results_of_the_exported_folder(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("accelerate")
    for name, value in {**OFFLINE, "HF_DATASETS_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(3, 12))) for _ in range(60)]
    write_tokenizer(tmp_path, texts)
    choices = [[f" {texts[i + 20]}", f" {texts[i + 40]}", " mat"] for i in range(9)]
    asked = [{"q": texts[i], "choices": choices[i], "label": i % 3} for i in range(9)]
    of_choices = (
        'doc_to_text: "{{q}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: label\ntarget_delimiter: ""\n'
    )
    measures = ["acc", "acc_norm", "brier_score"]
    long = [{"text": ". ".join(texts[i : i + 6])} for i in range(3)]  # of several windows
    files = [
        write_task(tmp_path, "choices", "multiple_choice", asked, measures, of_choices),
        write_task(
            tmp_path, "text", "loglikelihood_rolling", long, ["byte_perplexity"],
            'doc_to_text: ""\ndoc_to_target: "{{text}}"\n',
        ),
    ]  # fmt: skip
    base = {
        "seq_length": 32, "vocab_size": None, "micro_batch_size": 2, "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": str(tmp_path), "log_dir": str(tmp_path / "logs"), "eval_interval": 3,
    }  # fmt: skip
    run = {**base, "save": str(tmp_path / "run"), "eval_tasks": tuple(files), "eval_tasks_interval": 6}
    cached = str(tmp_path / "cache")
    (plain,) = run_ranks(1, offline, {**base, "log_dir": str(tmp_path / "plain")}, cached, timeout=300)
    (seen,) = run_ranks(1, offline, run, cached, timeout=300)
    assert seen.losses == plain.losses  # which tasks leave as they are
    (last,) = results(tmp_path / "logs")
    assert convert(["to-hf", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    names(
        (tmp_path / "hf" / "README.md").read_text(),
        f"| choices/brier_score | {last['choices/brier_score']:.4g} |",
    )

    # What the folder's model generates is the answer to half of the questions.
    until = 'doc_to_text: "{{q}}"\ndoc_to_target: "{{a}}"\ngeneration_kwargs:\n  until: ["!"]\n  max_gen_toks: 6\n'
    said = [{"q": text, "a": "x"} for text in texts[:4]]
    files.append(write_task(tmp_path, "said", "generate_until", said, ["exact_match"], until))
    found = by_harness(tmp_path / "hf", files)
    for row, sample in zip(said[:2], found["samples"]["said"], strict=False):
        row["a"] = sample["resps"][0][0]
    write_task(tmp_path, "said", "generate_until", said, ["exact_match"], until)
    found = by_harness(tmp_path / "hf", files)["results"]
    wanted = {
        f"{task}/{name.removesuffix(',none')}": pytest.approx(value, rel=1e-6)
        for task, measured in found.items()
        for name, value in measured.items()
        if name.endswith(",none") and "_stderr" not in name
    }
    assert len(wanted) == 5 and found["said"]["exact_match,none"] == 0.5
    assert {name: wanted[name] for name in last} == last
    again = {
        **run,
        "save": None,
        "load": run["save"],
        "finetune": True,
        "eval_at_start": True,
        "train_iters": 1,
    }
    for name, (ranks, layout) in LAYOUTS.items():
        job = {**again, **layout, "eval_tasks": tuple(files), "log_dir": str(tmp_path / name)}
        run_ranks(ranks, offline, {**job, "lr_warmup_iters": 0}, cached, timeout=300)
        assert results(tmp_path / name)[0] == wanted, name


@pytest.mark.slow
def test_a_task_that_is_none_ends_every_rank_before_training(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, list(WORDS))
    job = {
        "vocab_size": None, "tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tmp_path),
        "log_dir": str(tmp_path / "logs"), "eval_tasks": ("hellaswagg",), "global_batch_size": 8,
    }  # fmt: skip
    for text in run_ranks(2, refusal, job, timeout=300):
        names(text, "--eval-tasks hellaswagg", "hellaswagg")
