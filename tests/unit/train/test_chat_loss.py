"""The loss of a step on packed conversations is that of TRL's SFTTrainer on the same conversations, padded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from megazero import cli
from megazero.data.chats import pack
from megazero.data.indexed import IndexedDataset
from tests.chat_cases import TALK, TEMPLATES, write_tokenizer
from tests.dist.pool import run_ranks
from tests.dist.runs import train_flags

trl = pytest.importorskip("trl")
SEQUENCE = 300  # room for two or three conversations
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TALKS = [[*TALK[: 3 + 2 * (n % 2)], {"role": "user", "content": "Why? " * n}, TALK[2]] for n in range(8)]


def theirs(folder: Path) -> float:
    """Return the loss that SFTTrainer logs for its first step, on all talks as one batch."""
    options: dict[str, Any] = {"per_device_train_batch_size": len(TALKS), "max_steps": 1, "logging_steps": 1}
    options |= {
        "assistant_only_loss": True,
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "report_to": "none",
    }
    trainer = trl.SFTTrainer(
        AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        args=trl.SFTConfig(f"{folder / 'trl'}", max_length=SEQUENCE, **options),
        train_dataset=pytest.importorskip("datasets").Dataset.from_list(
            [{"messages": talk} for talk in TALKS]
        ),
        processing_class=PreTrainedTokenizerFast.from_pretrained(
            folder / "tokenizer", pad_token="<|im_end|>"
        ),
    )
    trainer.train()
    return next(line["loss"] for line in trainer.state.log_history if "loss" in line)


def test_a_step_has_the_loss_of_sft_trainer(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", TEMPLATES["SmolLM2"][1])
    size = len(PreTrainedTokenizerFast.from_pretrained(tokenizer))
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=size, initializer_range=0.3, **SHAPE)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))
    tokens = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", f"{tokenizer}"]
    made = ["--input", f"{tmp_path / 'talks.jsonl'}", "--output-prefix", f"{tmp_path / 'talks'}"]
    assert cli.main(["preprocess", "--chats", *made, *tokens]) == 0
    source = IndexedDataset(tmp_path / "talks_chats_document")
    samples = len(pack(source.lengths, SEQUENCE)["starts"]) - 1
    assert 1 < samples < len(TALKS)
    data = f"--chats --reset-attention-mask --reset-position-ids --data-path {source.prefix} --split 1,0,0"
    steps = f"--micro-batch-size 1 --global-batch-size {samples} --train-iters 1 --lr 1e-3 --eval-iters 0"
    run = f"{data} {steps} --seq-length {SEQUENCE} --load hf:{tmp_path / 'model'} --device cpu --log-dir {tmp_path}"
    (seen,) = run_ranks(1, train_flags, [*run.split(), *tokens])
    ((_, ours),) = seen.losses
    assert ours == pytest.approx(theirs(tmp_path), rel=1e-5)
