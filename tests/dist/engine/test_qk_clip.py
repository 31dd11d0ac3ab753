"""QK-clip on layouts: every rank finds the largest scores of all, and scales its slices of the master weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megazero.log.metrics import read_metrics
from tests.dist.runs import train_each

LATENT = {
    "multi_latent_attention": True,
    "kv_lora_rank": 6,
    "q_lora_rank": 5,
    "qk_head_dim": 4,
    "qk_norm": "head",
}
LATENT |= {"qk_pos_emb_head_dim": 2, "v_head_dim": 3, "num_query_groups": None, "optimizer": "muon"}
MODELS: dict[str, dict[str, Any]] = {
    "one key for ranks, further tokens": {"num_query_groups": 1, "mtp_num_layers": 1},
    "latents, muon": LATENT,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2 x zero3, sequence parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    | {"zero_preset": "zero3"},
    "cp 2 x pp 2 x zero2": {
        "context_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "zero_preset": "zero2",
    },
}
BASE = {
    "params_dtype": "fp64",
    "train_iters": 4,
    "global_batch_size": 4,
    "init_method_std": 0.4,
    "lr_warmup_iters": 1,
}
CLIP = {"qk_clip": True, "qk_clip_threshold": 1.5}


@pytest.mark.parametrize("model", MODELS)
def test_a_layout_clips_what_one_rank_does(tmp_path: Path, model: str) -> None:
    values = {**BASE, **MODELS[model]}
    jobs = {name: (4, {**values, **CLIP, **layout}) for name, layout in LAYOUTS.items()}
    jobs |= {
        "one rank": (1, {**values, **CLIP}),
        "unclipped": (1, {**values, "log_max_attention_logit": True}),
    }
    jobs = {name: (world, {**job, "log_dir": str(tmp_path / name)}) for name, (world, job) in jobs.items()}
    losses = {name: [loss for _, loss in seen[0].losses] for name, seen in train_each(jobs).items()}
    wanted = losses["one rank"]
    assert max(abs(a - b) for a, b in zip(wanted, losses["unclipped"], strict=True)) > 1e-4
    for name in LAYOUTS:
        assert losses[name] == pytest.approx(wanted, rel=1e-8), name
    told = {
        name: [line["max_attention_logit"] for line in read_metrics(tmp_path / name) if "lm_loss" in line]
        for name in jobs
    }
    assert all(told[name] == pytest.approx(told["one rank"], rel=1e-5) for name in LAYOUTS)
    assert told["one rank"][0] == told["unclipped"][0] > 1.5 and told["one rank"][1] < told["unclipped"][1]
