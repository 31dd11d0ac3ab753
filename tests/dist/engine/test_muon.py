"""Muon on many ranks: weights, losses and norms are those of one rank, whoever steps which matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megazero.config import RunConfig, World
from megazero.train.distributed import make_mesh
from megazero.zero import matrix_updates
from tests.dist import parity
from tests.dist.parity_cases import Case, Model, full_product, pairwise_cover
from tests.dist.pipeline.cases import pipeline_product
from tests.dist.pool import RankError, run_ranks
from tests.dist.runs import train_each
from tests.oracle_muon import POLYNOMIALS, plain_step
from tests.sizes import TINY

MOMENTUM, STEPS = 0.8, 3
# Elements of a round for one owner: the models' matrices have 128 to 640, so that every rank takes several rounds.
ROUND = 500
# In fp64 what is left is the order of sums, times the slope of the iteration at 0 (493).
LIMIT = 1e-9


def with_muon(config: RunConfig, **more: Any) -> RunConfig:
    muon = {"optimizer": "muon", "muon_momentum": MOMENTUM, "muon_fp32_matmul_prec": "high", "lr": 2e-3}
    return replace(config, optimizer=replace(config.optimizer, **muon, **more))


class MuonCase(Case):
    def config(self) -> RunConfig:
        return with_muon(super().config())


@dataclass(frozen=True)
class OneRank:
    losses: list[float]
    norms: list[float]
    final: parity.Tensors


@cache
def one_rank(model: Model) -> OneRank:
    """Matrices by the polynomials of their singular values, the rest by torch's AdamW."""
    config, decoder = with_muon(model.config()), parity._whole_decoder(model)
    o, params = config.optimizer, dict(decoder.named_parameters())
    matrices = {n: p for n, p in params.items() if n.startswith("layers.") and p.ndim > 1}
    rest = [
        {"params": [p], "weight_decay": o.weight_decay if p.ndim > 1 else 0.0}
        for n, p in params.items()
        if n not in matrices
    ]
    adamw = torch.optim.AdamW(rest, lr=o.lr, betas=(o.adam_beta1, o.adam_beta2), eps=o.adam_eps)
    momenta = {name: torch.zeros_like(p) for name, p in matrices.items()}
    losses, norms = [], []
    for step in range(STEPS):
        decoder.zero_grad()
        losses.append(parity._backward(decoder, config, step))
        norms.append(float(torch.nn.utils.clip_grad_norm_(decoder.parameters(), o.clip_grad)))
        adamw.step()
        with torch.no_grad():
            for name, p in matrices.items():
                assert p.grad is not None
                # Of stacked experts each matrix is its own.
                for own in zip(*(x.view(-1, *p.shape[-2:]) for x in (p, p.grad, momenta[name])), strict=True):
                    plain_step(
                        *own, lr=o.lr, decay=o.weight_decay, beta=MOMENTUM, nesterov=False,
                        polynomials=POLYNOMIALS["quintic"], scale=lambda m, n: max(m, n) ** 0.5,
                    )  # fmt: skip
    return OneRank(losses, norms, parity._arrays(params))


def on_rank(cases: Sequence[Case], fault: str = "") -> list[parity.Outcome]:
    mesh = make_mesh(cases[0].config(), World(cases[0].world, cases[0].per_node), torch.device("cpu"))
    out = []
    with patch.object(matrix_updates, "ROUND_NUMEL", ROUND), patch.object(*FAULTS[fault]):
        for case in cases:
            out.append(parity._run(case, case.config(), mesh, STEPS))
            mesh.release()
    return out


def _others_update(transit: Any, own: Any = matrix_updates._Transit.back) -> Any:
    """Two neighbouring elements of what an owner computed change places on their way back."""
    transit.arrived[:2] = transit.arrived[:2].flip(0)
    return own(transit)


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "": (matrix_updates, "INTRA", matrix_updates.INTRA),
    "an owner's elements swapped": (matrix_updates._Transit, "back", _others_update),
    "parts in one order": (matrix_updates.Matrix, "part_of", lambda matrix, source: 0),
}


def faults(case: Case, ranks: Sequence[parity.Outcome]) -> Iterator[str]:
    want = one_rank(case.model)
    final = parity.assemble(case, ranks, "final")
    # A key bias without rotary positions shifts all scores of a query alike: its gradient is noise, which AdamW makes
    # steps of full size of.
    noise = "k_proj.bias" if case.family in ("gpt", "bloom") else "none"
    for name, weights in want.final.items():
        if name.endswith(noise):
            continue
        error = float(np.abs(final[name] - weights).max() / np.abs(weights).max())
        if not error <= LIMIT:
            yield f"{case.id}: {name} is {error:.3g} from one rank's"
    own = [o.losses for o in ranks if o.tp_rank == 0 and o.last]
    counts = [parity.samples(case.model.config(), step)[2].sum().item() for step in range(STEPS)]
    losses = [sum(column) / count for column, count in zip(zip(*own, strict=True), counts, strict=True)]
    for what, got, expected in (("loss", losses, want.losses), ("norm", ranks[0].norms, want.norms)):
        error = max(abs(a - b) / abs(b) for a, b in zip(got, expected, strict=True))
        if not error <= LIMIT:
            yield f"{case.id}: {what} is {error:.3g} from one rank's"
    yield from parity._replica_faults(case, ranks)


def run(cases: Sequence[Case], fault: str = "") -> list[str]:
    groups: dict[tuple, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.mesh, []).append(case)
    bad = []
    for group in groups.values():
        ranks = run_ranks(group[0].world, on_rank, group, fault, timeout=120 + 30 * len(group))
        for case, outcomes in zip(group, zip(*ranks, strict=True), strict=True):
            bad += faults(case, outcomes)
    return bad


def _muon(case: Case) -> MuonCase:
    """The case in fp64, without what its optimizer does not see: torch.compile."""
    values = {**vars(case), "dtype": "fp64", "compiled": None}
    return MuonCase(**values)


PLAIN = {"micro_batches": 1, "tied": False, "vocabulary": "odd", "recompute": "none", "dtype": "fp64"}
FEW = [
    # every kind of axis that cuts the states: one, two nodes, and both with tensor-parallel ranks
    MuonCase(1, 2, 2, "zero3", None, False, family="llama", **PLAIN),
    MuonCase(1, 4, 2, "1,2,4", None, False, family="gpt", **PLAIN),
    MuonCase(2, 2, 2, "zero3", None, True, family="llama", **PLAIN),
    MuonCase(1, 4, 2, "1,2,4", None, False, family="experts", **PLAIN),
    MuonCase(2, 2, 2, "zero3", None, True, family="balanced experts", **PLAIN),
    # ranks that share the experts: zeropp's shards; with tensor-parallel ranks, of one node and of two
    MuonCase(1, 4, 2, "2,2,4", None, False, family="experts", ep=2, **PLAIN),
    MuonCase(2, 2, 4, "zero2", None, True, family="shared experts", ep=2, **PLAIN),
    MuonCase(1, 4, 2, "zero3", None, False, family="idle ranks", ep=4, **PLAIN),
]


@pytest.mark.first(3)
@pytest.mark.parametrize("case", FEW, ids=lambda case: case.id)
def test_few_layouts_equal_one_rank(case):
    assert not run([case])


def test_a_pipeline_of_virtual_stages_equals_one_rank():
    case = MuonCase(
        1, 2, 2, "zero2", None, False, family="llama", pp=2, schedule="interleaved", virtual=2, layers=4,
        **{**PLAIN, "tied": True, "micro_batches": 2},
    )  # fmt: skip
    assert not run([case])


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault])
def test_a_fault_is_seen(fault):
    """Values that are never written may be wrong ones, or not finite, which parity tells as an error of its own."""
    with pytest.raises((AssertionError, RankError), match="tp2-dp2|not finite"):
        assert run([FEW[2]], fault) == []


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_cover_of_layouts_equals_one_rank(world):
    cover = pairwise_cover([case for case in full_product() if case.world == world], seed=26)
    bad = run(list(dict.fromkeys(map(_muon, cover))))
    assert not bad, "\n".join(bad)


@pytest.mark.slow
def test_a_cover_of_pipelines_equals_one_rank():
    cover = pairwise_cover([case for case in pipeline_product() if case.world == 4], seed=26)
    bad = run(list(dict.fromkeys(map(_muon, cover))))
    assert not bad, "\n".join(bad)


TRAINED = {
    "optimizer": "muon",
    "muon_fp32_matmul_prec": "high",
    "params_dtype": "fp64",
    "weight_decay": 0.1,
    "lr": 5e-3,
}


def test_a_run_goes_on_on_another_layout(tmp_path: Path) -> None:
    """Momentum is saved as slices, as AdamW's states, and the number of steps with them."""
    log, save = {"log_dir": str(tmp_path)}, {"save": str(tmp_path / "run"), "exit_interval": 3}
    pipeline = {"pipeline_model_parallel_size": 2}
    sharded = {"tensor_model_parallel_size": 2, "zero_preset": "zero3", "load": str(tmp_path / "run")}
    seen = train_each(
        {
            "one rank": (1, {**TINY, **TRAINED, **log}),
            "two stages": (2, {**TINY, **TRAINED, **log, **pipeline, **save}),
            "rest": (4, {**TINY, **TRAINED, **log, **sharded}),  # after the others, by number of ranks
        }
    )
    whole = [loss for _, loss in seen["one rank"][0].losses]
    assert [loss for _, loss in seen["two stages"][0].losses] == pytest.approx(whole[:3], rel=1e-9)
    assert [loss for _, loss in seen["rest"][0].losses] == pytest.approx(whole[3:], rel=1e-9)


SHARED = {"num_experts": 4, "moe_ffn_hidden_size": 12, "expert_model_parallel_size": 2}


@pytest.mark.parametrize("more", [{}, SHARED], ids=["dense", "shared experts"])
def test_quantised_messages_and_bfloat16_train_beside_exact_ones(
    more: dict[str, Any], tmp_path: Path
) -> None:
    """Two nodes of two: 4-bit differences of weights and INT4 gradients across them."""
    nodes = {**TINY, **TRAINED, **more, "log_dir": str(tmp_path), "ranks_per_node": 2, "params_dtype": "fp32"}
    medium = {"muon_fp32_matmul_prec": "medium", "zero_exact_numel": 64}
    seen = train_each(
        {
            "exact": (4, {**nodes, "zero_preset": "zero3"}),
            "zeropp": (4, {**nodes, **medium, "zero_preset": "zeropp"}),
        }
    )
    exact, coded = ([loss for _, loss in seen[name][0].losses] for name in ("exact", "zeropp"))
    assert coded == pytest.approx(exact, rel=0.02) and coded != exact
    assert all(sent["update_inter_node"] > 0 for rank in seen["zeropp"] for sent in rank.sent)
