"""QK-clip: the largest scores against dense ones, and what a step does to queries and keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.log.metrics import read_metrics
from megazero.models.largest_scores import largest_scores
from megazero.models.masking import Masking
from megazero.train.qk_clip import QKClip
from tests.unit.train.test_seams import SMALL, run

STARTS = torch.tensor([[0] * 200 + [200] * 400, [0] * 599 + [599]])
MASKINGS = {
    "plain": Masking(0.3),
    "window": Masking(0.3, window=7),
    "documents": Masking(0.3, starts=STARTS),
    "chunks": Masking(0.3, queries=(range(100, 150), range(550, 600))),
}


@pytest.mark.parametrize("name", MASKINGS)
def test_largest_scores_are_those_of_all_scores(name: str) -> None:
    masking, draw = MASKINGS[name], torch.Generator().manual_seed(2)
    q, k = (torch.randn(600, 2, heads, 5, generator=draw, dtype=torch.float64) for heads in (6, 3))
    q = q[masking.positions(600, q.device)]
    scores = 0.3 * torch.einsum("nbhd,mbhd->bhnm", q, k.repeat_interleave(2, 2))
    every = scores + masking.dense(600, q)
    assert largest_scores(q, k, masking).tolist() == pytest.approx(every.amax((0, 2, 3)).tolist(), rel=1e-6)


LATENT = {"multi_latent_attention": True, "kv_lora_rank": 6, "q_lora_rank": 5, "qk_head_dim": 4}
LATENT |= {"qk_pos_emb_head_dim": 2, "v_head_dim": 3, "qk_norm": "none", "num_query_groups": None}
MODELS: dict[str, dict[str, Any]] = {
    "heads share keys": {"num_attention_heads": 4, "add_qkv_bias": True},
    "gates": {"attention_output_gate": True},
    "latents": LATENT,
    "latents, whole queries": {**LATENT, "q_lora_rank": None},
}


@pytest.mark.parametrize("model", MODELS)
def test_a_step_scales_queries_and_keys_after_its_update(tmp_path: Path, model: str) -> None:
    """By the paper's powers, in the heads above the bound alone; all else is as without it."""
    values = {**SMALL, "init_method_std": 0.5, "params_dtype": "fp64", "train_iters": 1, "lr_warmup_iters": 0}
    values |= {**MODELS[model], "log_dir": str(tmp_path)}

    def step(**options: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        held: list[Any] = []
        run({**values, **options}, held.append)
        engine, part = held[0].engine, held[0].engine.part(QKClip)
        with engine.gathered():
            named = {name: p.detach().clone() for name, p in held[0].decoder.named_parameters()}
        return named, part.largest[0].double()

    plain, largest = step(log_max_attention_logit=True)
    (line,) = (each for each in read_metrics(tmp_path) if "lm_loss" in each)
    assert line["max_attention_logit"] == largest.max().item()
    bound = largest.sort().values[-2:].mean().item()  # one head is above it
    assert 0 < bound < largest.max()
    clipped, _ = step(qk_clip=True, qk_clip_threshold=bound, qk_clip_alpha=0.3)
    heads = len(largest)
    factor = torch.where(largest > bound, bound / largest, 1.0)
    if model.startswith("heads share"):
        shared = factor.view(2, 2).amin(1)
        factor = shared.repeat_interleave(2)
        rows = {"q_proj": (factor.repeat_interleave(2), 0.3), "k_proj": (shared.repeat_interleave(2), 0.7)}
        powers = {f"{n}.{kind}": each**p for n, (each, p) in rows.items() for kind in ("weight", "bias")}
    elif model == "gates":
        ones = torch.ones(heads, 4)
        queries = torch.cat([(factor**0.3)[:, None] * ones, ones], 1).flatten()
        powers = {"q_proj.weight": queries, "k_proj.weight": ((factor**0.7)[:, None] * ones).flatten()}
    else:
        of = factor[:, None].double()
        queries = torch.cat([(of**0.3).expand(-1, 4), of.expand(-1, 2)], 1).flatten()
        keys = torch.cat([(of**0.7).expand(-1, 4), torch.ones(heads, 3)], 1).flatten()
        powers = {f"q_{'full' if 'whole' in model else 'up'}_proj.weight": queries, "kv_up_proj.weight": keys}
    for name, weights in plain.items():
        scale = powers.get(name.removeprefix("layers.0.attention."), torch.ones(1, dtype=torch.float64))
        want = weights * (scale if weights.ndim == 1 else scale[:, None])
        torch.testing.assert_close(clipped[name], want, rtol=1e-6, atol=0, msg=name)


def test_attention_that_predicts_further_tokens_is_bounded_too(tmp_path: Path) -> None:
    held: list[Any] = []
    run({**SMALL, "mtp_num_layers": 1, "qk_clip": True, "log_dir": str(tmp_path)}, held.append)
    assert held[0].engine.part(QKClip).largest.keys() == {0, 1}
