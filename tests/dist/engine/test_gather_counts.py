"""How often units are gathered: at most once for each of their uses, and not again while they may stay."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from megazero.config import World, make_config
from megazero.plan.gathers import Copies, gathers
from megazero.train.distributed import make_mesh
from megazero.train.parallelize import MicroBatch, build_decoder, build_pipeline, shard_decoder
from tests.dist.pool import by_case
from tests.sizes import SMALL

MODEL = {
    **{
        **SMALL,
        "hidden_size": 32,
        "seq_length": 8,
        "vocab_size": 40,
        "micro_batch_size": 1,
        "ranks_per_node": 2,
    },
    **{"untie_embeddings_and_output_weights": True, "zero_chunk_numel": 4096},
}
PP2 = {"pipeline_model_parallel_size": 2}
BOUNDS = (0, 20_000, 256 << 20)  # none, a part of a layer (of 50,000 bytes), the whole model


def several(function, cases):
    """One mesh for cases of one preset and pipeline."""
    mesh, found = make_mesh(config_of(cases[0]), World(4, 2), torch.device("cpu")), []
    for values in cases:
        found.append(function(values, mesh))
        mesh.release()
    return found


def config_of(values):
    return make_config({**MODEL, **values}, World(4, 2))


def gathered_in_step(values, mesh):
    """How often each unit was gathered in the second step; that by the formula; the units of each part's modules."""
    config = config_of(values)
    decoder = build_decoder(config, mesh)
    engine = shard_decoder(decoder, config, mesh)
    pipeline = build_pipeline(decoder, engine, config, mesh)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    data = [MicroBatch(tokens, tokens, torch.ones(1, 8))] * config.num_micro_batches(World(4, 2))
    program, launched = pipeline.program(len(data)), Counter[int]()
    launch = engine.gatherer._launch

    def count(unit):
        launched[engine.gatherer.index[unit]] += 1
        launch(unit)

    engine.gatherer._launch = count
    for _ in range(2):
        launched.clear()
        engine.begin_step(len(data), 1.0, program)
        pipeline.step(data)
        engine.step()
    uses = [[units_of(engine, module) for module in part] for part in decoder.parts()]
    copies = Copies(uses, engine.policy.keep_gathered, engine.policy.prefetch_bytes)
    expected = gathers(copies, program, [u.weights.full.nbytes for u in engine.units])
    return launched, expected, uses


def units_of(engine, module):
    inside = set(map(id, module.parameters()))
    return [i for i, u in enumerate(engine.units) if inside & set(map(id, u.params.values()))]


LAYOUTS = {
    "one stage": {},
    "1f1b": PP2,
    "interleaved": {**PP2, "num_virtual_stages_per_pipeline_rank": 2},
    "zb-h1": {**PP2, "pipeline_schedule": "zb-h1"},
}
PRESETS = ("zero3", "hpz", "zeropp")


def case(preset, layout, bound, micro_batches, recompute):
    values = {"zero_preset": preset, "zero_prefetch_bytes": bound, "recompute_granularity": recompute}
    size = micro_batches * (4 if layout == "one stage" else 2)
    exact = {"zero_exact_numel": 64} if preset == "zeropp" else {}
    return {**values, "global_batch_size": size, **exact, **LAYOUTS[layout]}


def check(cases):
    for values, ranks in by_case(4, several, gathered_in_step, cases):
        for launched, expected, uses in ranks:
            assert launched == expected, values
            if values["zero_prefetch_bytes"] == BOUNDS[-1]:
                assert set(launched.values()) == {1}, "the whole model fits"
            elif values["zero_prefetch_bytes"] == 0 and "pipeline_model_parallel_size" not in values:
                m, (first, *inner, last) = values["global_batch_size"] // 4, uses[0]
                assert {launched[u] for units in inner for u in units} == {2 * m}
                assert {launched[u] for u in first} == {m + 1}, "stays from a backward to the next forward"
                assert {launched[u] for u in last} == {m}, "stays from a forward to its backward"


@pytest.mark.first(1)
@pytest.mark.parametrize("preset, layout", [("zero3", "interleaved"), ("zeropp", "one stage")])
def test_a_unit_is_gathered_once_for_a_forward_and_once_for_a_backward(preset, layout):
    """Less often where what comes next needs it, by the recorded order, near enough for it to stay."""
    check([case(preset, layout, bound, 4, "full") for bound in BOUNDS])


@pytest.mark.slow
@pytest.mark.parametrize("preset, layout", [("zeropp", "one stage"), ("zero3", "zb-h1")])
def test_joined_layers_are_gathered_together(preset, layout):
    """The second of two layers needs what the first has gathered; of three of a stage, the last is alone."""
    joined = {"zero_unit_layers": 2, "zero_chunk_numel": 1 << 27, "num_layers": 6}
    check([{**case(preset, layout, bound, m, None), **joined} for bound in BOUNDS for m in (1, 4)])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("preset", PRESETS)
def test_the_whole_product(preset, layout):
    """python -m pytest tests/dist/engine/test_gather_counts.py -m slow"""
    sizes = (4,) if layout == "interleaved" else (1, 4)
    check([case(preset, layout, b, m, r) for b in BOUNDS for m in sizes for r in (None, "selective", "full")])
