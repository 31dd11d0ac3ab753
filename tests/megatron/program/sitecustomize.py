"""Lets the ranks of Megatron-LM's own training programs run on CPUs: python imports it before anything else.

In ranks with MEGATRON_LM (the folder of Megatron-LM) and this folder on PYTHONPATH. Beside what megatron-core needs
(``devices``), the program's questions to the GPU are answered, and it compiles nothing. megatron-core is the
installed one, whose helpers are compiled.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock


def shims() -> contextlib.ExitStack:
    """Put everything in place, for as long as the stack that is returned stays open."""
    sys.path.append(os.environ["MEGATRON_LM"])  # at the end: megatron.core is the installed one
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    import torch

    from tests.megatron.devices import megatron_on_cpu

    sys.path.pop(0)
    stack = contextlib.ExitStack()
    stack.enter_context(megatron_on_cpu())
    device = SimpleNamespace(major=9, minor=0, total_memory=2**36)
    answers: dict[str, Any] = {
        "device_count": 1,
        "set_device": None,
        "get_device_capability": (device.major, device.minor),
        "get_device_properties": device,
        "memory_stats": {},
        "reset_peak_memory_stats": None,
    }
    answers |= dict.fromkeys(
        ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0
    )
    for name, answer in answers.items():
        stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=answer, **__: answer))
    stack.enter_context(mock.patch.object(torch.nn.Module, "cuda", lambda module, *_: module))
    # Megatron-LM's own modules, once what they ask for is there.
    from megatron.core.datasets import utils
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.training import initialize, training

    begin, after_init = training.initialize_megatron, ModelParallelConfig.__post_init__

    def keeping_outputs(config: ModelParallelConfig) -> None:
        """Gloo reads a message after the send has begun, where Megatron frees it: NaN with virtual stages."""
        config.deallocate_pipeline_outputs = False
        after_init(config)

    stack.enter_context(mock.patch.object(ModelParallelConfig, "__post_init__", keeping_outputs))
    # It is for a log line, by psutil: without that the processes that write a save die, and the save waits for ever.
    stack.enter_context(mock.patch.object(filesystem_async, "_process_memory", lambda: 0))
    stack.enter_context(mock.patch.object(utils, "compile_helpers", lambda: None))
    stack.enter_context(mock.patch.object(initialize.fused_kernels, "load", lambda _: None))
    stack.enter_context(
        mock.patch.object(
            training, "initialize_megatron", lambda *args, **words: begin(*args, **words, allow_no_cuda=True)
        )
    )
    return stack


if "RANK" in os.environ and "MEGATRON_LM" in os.environ:
    STACK = shims()
