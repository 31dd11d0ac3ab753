"""The loss of a step on packed conversations is that of TRL's SFTTrainer on the same, padded ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero import cli
from tests.chat_cases import TALK, TEMPLATES, write_tokenizer
from tests.dist.pool import run_ranks
from tests.dist.runs import train

CHATS, SEQUENCE = 8, 128
FAR = {"Llama 3", "SmolLM2"}


def theirs(folder: Path, talks: list[Any]) -> float:
    """Return the loss that SFTTrainer logs for its first step, on all talks as one batch."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    options = {"assistant_only_loss": True, "max_steps": 1, "per_device_train_batch_size": CHATS, "logging_steps": 1}
    options |= {"use_cpu": True, "report_to": "none", "bf16": False, "gradient_checkpointing": False, "packing": False}
    trainer = trl.SFTTrainer(
        AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        args=trl.SFTConfig(f"{folder / 'trl'}", max_length=SEQUENCE, save_strategy="no", **options),
        train_dataset=Dataset.from_list([{"messages": talk} for talk in talks]),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer", pad_token="<|im_end|>"),
    )
    trainer.train()
    return next(line["loss"] for line in trainer.state.log_history if "loss" in line)


def test_a_step_has_the_loss_of_sft_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trl")
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = write_tokenizer(tmp_path / "tokenizer", TEMPLATES["SmolLM2"][1])
    talks = [TALK[: 3 + 2 * (n % 2)] + [{"role": "user", "content": "Why? " * n}, TALK[2]] for n in range(CHATS)]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    kind = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", f"{tokenizer}"]
    named = ["--input", f"{tmp_path / 'talks.jsonl'}", "--output-prefix", f"{tmp_path / 'talks'}"]
    assert cli.main(["preprocess", "--chats", *named, *kind]) == 0
    size = json.loads((tmp_path / "talks_chats_document.meta.json").read_text())["tokenizer"]["vocab_size"]
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=size, **shape)).save_pretrained(tmp_path / "model")
    index = (tmp_path / "talks_chats_document.idx").stat().st_size
    assert index
    wanted = theirs(tmp_path, talks)
    print(wanted)
