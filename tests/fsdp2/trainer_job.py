"""transformers' Trainer on FSDP2, with the callback of docs/integrate/fsdp2.md: a small Llama on CPU ranks.

torchrun ... trainer_job.py FOLDER CALLBACK: the source of the page's class, or nothing.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from tests.fsdp2.accelerate_job import MICRO_BATCHES, STEPS, batch, llama, note, pretend_gpus


class Noting(Trainer):
    """Keeps the loss of every micro-batch of this rank."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.losses: list[float] = []

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def main(folder: str, callback: str) -> None:
    pretend_gpus()
    torch.manual_seed(1)
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        accelerator_config={"use_configured_state": True},
        per_device_train_batch_size=2,
        gradient_accumulation_steps=MICRO_BATCHES,
        max_steps=STEPS,
        learning_rate=1e-3,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    given: dict[str, Any] = {}
    exec(callback, given)
    rows = [row for step in range(4 * STEPS) for i in range(MICRO_BATCHES) for row in batch(step, i)]
    trainer = Noting(
        model=llama(),
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[given["AcrossNodes"]()] if callback else [],
    )
    trainer.train()
    note(folder, trainer.losses, bool(callback))
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
