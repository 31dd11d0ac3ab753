"""Layers compiled (--compile) beside eager ones: time of a step, of the first step, and losses.

    python -m benchmarks.features.compiled_step_time [--layouts one zeropp zero3 tp2 pp2] [--rounds 5]

Every turn trains the same decoder (hidden 512) on the same tokens, in new processes of one thread each; ``--steps``
steps are timed after five. Eager and compiled runs take turns; ratios are of the rounds, median (least to most). A
compiled run finds in a cache what the one before compiled. The first has none; the first step printed is its. Losses
are apart by the largest difference from eager's in the first five steps.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness
from megazero.config import World, make_config
from megazero.train.distributed import make_mesh
from megazero.train.parallelize import MicroBatch, build_decoder, build_pipeline, shard_decoder

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"zero_preset": "ddp"}),
    "zeropp": (2, {"zero_preset": "zeropp"}),
    "zero3": (2, {"zero_preset": "zero3"}),
    "tp2": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
}
MODEL = {
    "model_family": "llama",
    "num_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "vocab_size": 4096,
    "seq_length": 256,
    "micro_batch_size": 2,
    "params_dtype": "fp32",
    "lr": 1e-3,
    "train_iters": 100,
    "mock_data": True,
}
MICRO_BATCHES, COMPARED = 2, 5


def train(values: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return the losses of the first steps, of the first one the seconds and the norm of the gradients, and the
    seconds of one of the last ``steps``."""
    ranks = dist.get_world_size()
    config = make_config({**MODEL, **values}, World(ranks, ranks))
    mesh = make_mesh(config, World(ranks, ranks), harness.device())
    decoder = build_decoder(config, mesh)
    engine = shard_decoder(decoder, config, mesh)
    pipeline = build_pipeline(decoder, engine, config, mesh)
    size, length = config.batch.micro_batch_size or 1, config.model.seq_length
    counts = torch.ones(size, length, device=mesh.device)
    losses: list[float] = []
    norms: list[float] = []

    def step() -> None:
        drawn = torch.Generator().manual_seed(
            mesh.dp_rank
        )  # the same tokens in every step, so the loss falls
        ids = torch.randint(0, MODEL["vocab_size"], (MICRO_BATCHES, size, length + 1), generator=drawn)
        batches = [MicroBatch(x[:, :-1], x[:, 1:], counts) for x in ids.to(mesh.device)]
        tokens = MICRO_BATCHES * counts.numel() * mesh.dp_size
        engine.begin_step(MICRO_BATCHES, tokens, pipeline.program(MICRO_BATCHES))
        loss = pipeline.step(batches)
        norms.append(engine.step().grad_norm)
        rows = mesh.gather_rows(loss.reshape(1)).tolist()
        losses.append(sum(rows[rank][0] for rank in mesh.stage_ranks(pipeline.loss_rank)) / tokens)

    began = time.perf_counter()
    step()
    first = time.perf_counter() - began
    for _ in range(COMPARED - 1):
        step()
    return {
        "first": first,
        "seconds": harness.measure(step, steps)[0],
        "losses": losses[:COMPARED],
        "norm": norms[0],
    }


def main() -> None:
    options = harness.parser(
        __doc__, layouts=list(LAYOUTS), rounds=5, steps=(3, "timed in a turn"), backend="inductor"
    ).parse_args()
    print(harness.setting())
    for name in options.layouts:
        ranks, values = LAYOUTS[name]
        with tempfile.TemporaryDirectory() as cache:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # of the ranks, which inherit it
            compiled = {**values, "compile": True, "compile_backend": options.backend}
            forms = {"eager": values, "compiled": compiled}
            turns = {n: partial(harness.run, train, v, options.steps, ranks=ranks) for n, v in forms.items()}
            found = harness.take_turns(turns, options.rounds, warm_up=0)
        seconds = {form: [turn["seconds"] for turn in taken] for form, taken in found.items()}
        (eager, *_), (mine, *again) = found["eager"], found["compiled"]
        learned = {
            n: harness.Learned(t["losses"][0], t["losses"][-1], t["norm"]) for n, (t, *_) in found.items()
        }
        harness.require_training(learned)
        apart = max(abs(a - b) for a, b in zip(eager["losses"], mine["losses"], strict=True))
        later = (
            f", {statistics.median(turn['first'] for turn in again):.1f} s from the cache" if again else ""
        )
        print(
            f"{name}, {ranks} rank(s), {options.backend}: eager {harness.spread(seconds['eager'])} s, compiled "
            f"{harness.spread(seconds['compiled'])} s, ratio "
            f"{harness.spread(harness.ratios(seconds['compiled'], seconds['eager']), 2)}; first step "
            f"{mine['first']:.1f} s{later}; losses apart by {apart:.1e}"
        )


if __name__ == "__main__":
    harness.start(main)
