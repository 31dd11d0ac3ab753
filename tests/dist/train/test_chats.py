"""The loss of conversations is the mean over the answers of the global batch, whatever the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megazero.data.indexed import IndexedWriter, mask_prefix
from tests.dist.runs import samples, train_each

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one micro-batch": (1, {"micro_batch_size": 8}),
    "zero3": (4, {"zero_preset": "zero3"}),
    "tensors": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "zero_preset": "zero2"}),
    "pipeline": (4, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"}),
    "shared samples": (4, {"context_parallel_size": 2, "cp_comm_type": ("all_gather",)}),
}


def write_chats(prefix: Path) -> str:
    """Write conversations of 3 to 20 tokens, of which the loss counts one to all but the first."""
    random = np.random.default_rng(1)
    with (
        IndexedWriter(prefix, dtype=np.uint16) as writer,
        IndexedWriter(mask_prefix(prefix), dtype=np.uint8) as mask,
    ):
        for _ in range(90):
            size = int(random.integers(3, 21))
            writer.add_document(random.integers(0, 50, size))
            mask.add_document(np.arange(size) >= random.integers(1, size))
    return str(prefix)


def test_every_layout_has_the_losses_of_one_rank(tmp_path: Path) -> None:
    values = {"mock_data": None, "data_path": (write_chats(tmp_path / "talks"),), "split": "80,20,0"}
    values |= {"tokenizer_type": "NullTokenizer", "vocab_size": 50, "train_iters": 4, "eval_iters": 1}
    values |= {
        "chats": True,
        "reset_attention_mask": True,
        "reset_position_ids": True,
        "seq_length": 24,
        "data_stages": ('{"until": 16, "seq-length": 12}', "{}"),
        "log_dir": str(tmp_path),
    }
    jobs = {name: (ranks, {**values, **layout}) for name, (ranks, layout) in LAYOUTS.items()}
    runs = train_each({"one rank": (1, values), **jobs})
    alone = runs["one rank"]
    assert sum("lose their ends" in note for note in alone[0].notes) == 1, "in samples of 12 tokens alone"
    for name in LAYOUTS:
        assert samples(runs[name]) == samples(alone), name
        for one, other in zip(runs[name][0].losses, alone[0].losses, strict=True):
            assert one == pytest.approx(other, rel=1e-5), name
        assert runs[name][0].evaluations == pytest.approx(alone[0].evaluations, rel=1e-5), name
