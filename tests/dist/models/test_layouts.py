"""Every legal cell of layouts, messages and options has one rank's losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from megazero.config import RunConfig, World, make_config
from megazero.models import Decoder
from megazero.train.distributed import make_mesh
from megazero.train.parallelize import MicroBatch, build_decoder, build_pipeline, shard_decoder
from tests.dist.models.layout_cells import LAYOUTS, MODEL_OPTIONS, STATE, Column, refusals, values_of
from tests.dist.pool import run_ranks

# Steps of 2 and of 4 micro-batches: the order of gathers and reductions follows their number.
COUNTS = (2, 4, 2)
# The other rows of STATE, presets with exact messages, are in the covers of engine/ and pipeline/test_parity.py.
TRAINED = (
    "zero3, gradients whole for the step",
    *(row for row in STATE if row.startswith("zeropp") or "quantised" in row),
)
ROWS = {**STATE, **{name: {"zero_preset": "zero1", **more} for name, more in MODEL_OPTIONS.items()}}
# Of losses and norms. fp32 over three steps: 1e-7 to 3e-6 is what one rank's rounding gives. Quantised: what INT4
# gradients of norm 1 +- 0.1 and INT8 weights of +- 0.004 change in two updates.
EXACT, QUANTIZED = {"loss": 1e-5, "norm": 1e-4}, {"loss": 2e-3, "norm": 0.05}


@dataclass(frozen=True)
class Seen:
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    last: bool
    tp: int


def legal() -> list[tuple[str, Column]]:
    return [
        (row, layout)
        for row, options in ROWS.items()
        if row in MODEL_OPTIONS or row in TRAINED
        for layout in LAYOUTS
        if not refusals(layout, options)
    ]


def configuration(row: str, layout: Column) -> RunConfig:
    return make_config(values_of(layout, ROWS[row]), World(layout.world, layout.node))


def sample_rows(config: RunConfig, step: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels [count, s] of a step."""
    length, vocabulary = config.model.seq_length, config.model.vocab_size
    assert length and vocabulary
    ids = torch.randint(0, vocabulary, (count, length + 1), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1], ids[:, 1:]


def on_rank(cells: Sequence[tuple[str, Column]]) -> list[Seen]:
    layout = cells[0][1]
    mesh = make_mesh(configuration(*cells[0]), World(layout.world, layout.node), torch.device("cpu"))
    out = []
    for row, _ in cells:
        try:
            out.append(train(configuration(row, layout), mesh))
        except Exception as error:
            raise RuntimeError(f"{row} on {layout.name}: {error}") from error
        mesh.release()
    return out


def train(config: RunConfig, mesh: Any) -> Seen:
    decoder = build_decoder(config, mesh)
    engine = shard_decoder(decoder, config, mesh)
    pipeline = build_pipeline(decoder, engine, config, mesh)
    losses, norms = [], []
    for step, count in enumerate(COUNTS):
        tokens, labels = sample_rows(config, step, count * mesh.dp_size)
        engine.begin_step(count, tokens.numel(), pipeline.program(count))
        own = [slice(at, at + 1) for at in range(mesh.dp_rank, len(tokens), mesh.dp_size)]
        batches = [MicroBatch(tokens[r], labels[r], torch.ones(1, tokens.shape[1])) for r in own]
        losses.append(pipeline.step(batches).item() / tokens.numel())
        norms.append(engine.step().grad_norm)
    return Seen(tuple(losses), tuple(norms), pipeline.loss_rank == pipeline.rank, mesh.tp.index)


@cache
def one_rank(family: str, groups: int, tied: bool, dp: int) -> tuple[list[float], list[float]]:
    """Losses and norms of plain torch on the same samples."""
    options = {"model_family": family, "untie_embeddings_and_output_weights": not tied, "zero_preset": "ddp"}
    options |= {"num_query_groups": groups}
    config = make_config(values_of(Column("one rank", 1, 1, {}), options), World(1, 1))
    decoder = Decoder(config.model, dtype=torch.float32)
    decoder.initialize(config.training.seed)
    o, plain, named = config.optimizer, decoder.no_weight_decay(), dict(decoder.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if (n in plain) == bare], "weight_decay": decay}
        for bare, decay in ((False, o.weight_decay), (True, 0.0))
    ]
    adamw = torch.optim.AdamW(groups, lr=o.lr, betas=(o.adam_beta1, o.adam_beta2), eps=o.adam_eps)
    losses, norms = [], []
    for step, count in enumerate(COUNTS):
        adamw.zero_grad()
        loss = decoder(*sample_rows(config, step, count * dp)).mean()
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(decoder.parameters(), o.clip_grad).item())
        adamw.step()
    return losses, norms


def faults(row: str, layout: Column, ranks: Sequence[Seen]) -> Iterator[str]:
    config = configuration(row, layout)
    tied = not config.model.untie_embeddings_and_output_weights
    losses, norms = one_rank(config.model.model_family, config.model.num_query_groups, tied, layout.dp)
    limits = QUANTIZED if config.wire(World(layout.world, layout.node)).codings else EXACT
    own = [sum(column) for column in zip(*(r.losses for r in ranks if r.last and r.tp == 0), strict=True)]
    for what, got, want in (("loss", own, losses), ("norm", ranks[0].norms, norms)):
        worst = max(abs(a - b) / abs(b) for a, b in zip(got, want, strict=True))
        if not worst <= limits[what]:
            yield f"{row} on {layout.name}: {what} is {worst:.3g} from one rank's"
    if len({r.norms for r in ranks}) > 1:
        yield f"{row} on {layout.name}: ranks have different norms"


def test_refusals_name_the_nearest():
    refused = [refusals(layout, options) for options in ROWS.values() for layout in LAYOUTS]
    assert all("nearest" in line for lines in refused for line in lines) and any(refused)


# Columns of 8 ranks take 10 to 50 s each, those of pipelines 15 s.
LONG = {x.name for x in LAYOUTS if x.world == 8 or x.name.startswith("PP 2 x DP 2")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [pytest.param(x, id=x.name, marks=[pytest.mark.slow] if x.name in LONG else []) for x in LAYOUTS],
)
def test_legal_cells_train_as_one_rank(layout):
    meshes: dict[tuple, list[tuple[str, Column]]] = {}
    for row, where in legal():
        if where is layout:
            config = configuration(row, layout)
            key = config.shards(World(layout.world, layout.node)).factors
            key = (*key, config.model.untie_embeddings_and_output_weights)
            meshes.setdefault(key, []).append((row, layout))
    bad = []
    for cells in meshes.values():
        ranks = run_ranks(layout.world, on_rank, cells, timeout=120)
        for (row, _), seen in zip(cells, zip(*ranks, strict=True), strict=True):
            bad += faults(row, layout, seen)
    assert not bad, "\n".join(bad)
