"""A loop of transformers and accelerate on FSDP2, as their users write it: a small Llama on CPU ranks.

torchrun ... accelerate_job.py FOLDER WORDS: what fsdp2_patch.enable takes as JSON; null: without the patch.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp2_patch

STEPS, MICRO_BATCHES = 3, 2


def batch(step: int, micro_batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + int(os.environ["RANK"]))
    start = torch.randint(128, (2, 1), generator=generator)
    return (start + torch.arange(16) * 5) % 128


def pretend_gpus() -> None:
    """Let accelerate shard on CPU ranks, which it does on accelerators alone."""
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config)


def note(folder: str, losses: list[float], patched: bool) -> None:
    """Write this rank's losses, and what it has sent through the patch."""
    sent = fsdp2_patch.counters().take() if patched else {}
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, f"losses{os.environ['RANK']}.json").write_text(json.dumps(losses))
    Path(folder, f"sent{os.environ['RANK']}.json").write_text(json.dumps(sent))


def main(folder: str, words: dict[str, Any] | None) -> None:
    pretend_gpus()
    torch.manual_seed(1)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=True,
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    if words is not None:
        fsdp2_patch.enable(model, **words)
    losses = []
    for step in range(STEPS):
        for i in range(MICRO_BATCHES):
            model.set_requires_all_reduce(i == MICRO_BATCHES - 1)
            tokens = batch(step, i)
            loss = model(input_ids=tokens, labels=tokens).loss / MICRO_BATCHES
            accelerator.backward(loss)
            losses.append(loss.item())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    note(folder, losses, words is not None)
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
