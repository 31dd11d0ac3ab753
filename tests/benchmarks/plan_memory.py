"""Predicted memory beside the measured peak, over layouts drawn at random, on 4 CPU ranks as 2 nodes of 2.

    python tests/benchmarks/plan_memory.py [--seed 0] [--layouts 20] [--out FILE]

Each layout trains three steps of a decoder whose model state is half a gigabyte or more. Measured are, on each rank,
the most bytes resident above those before the model was made, and the bytes of the model states. The rank that needs
the most counts. glibc is told to return what is freed at once (MALLOC_MMAP_THRESHOLD_): by default, memory that
it keeps doubles the resident size of some layouts. Every layout's row is kept in FILE; a second call goes on where
the first ended.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed, too

from megazero.config import ConfigError, World, make_config
from megazero.plan.memory import Memory

ROOT = Path(__file__).resolve().parents[2]
RANKS, PER_NODE, STEPS = 4, 2, 3
MODEL = {
    "num_layers": 8,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "seq_length": 128,
    "vocab_size": 16000,
    "global_batch_size": 8,
    "train_iters": STEPS,
    "lr": 1e-4,
    "mock_data": True,
    "eval_iters": 0,
    "ranks_per_node": PER_NODE,
    "log_interval": 1000,
}
CHOICES: dict[str, list[Any]] = {
    "model_family": ["llama", "gpt"],
    "params_dtype": ["fp32", "fp32", "bf16"],
    "tensor_model_parallel_size": [1, 1, 2],
    "pipeline_model_parallel_size": [1, 1, 2],
    "zero_preset": ["ddp", "zero1", "zero2", "zero3", "hpz", "zeropp"],
    "zero_gradients_lifetime": [None, None, "step"],
    "zero_params_lifetime": [None, None, "gathered"],
    "zero_prefetch_bytes": [0, 2**25, 2**28],
    "recompute_granularity": ["none", "selective", "full"],
    "micro_batch_size": [1, 2],
}


def draw(seed: int, number: int) -> list[dict[str, Any]]:
    """Return so many different legal layouts: options over MODEL."""
    drawn, made = random.Random(seed), list[dict[str, Any]]()
    while len(made) < number:
        values = {name: drawn.choice(choices) for name, choices in CHOICES.items()}
        try:
            make_config({**MODEL, **values}, World(RANKS, PER_NODE))
        except ConfigError:
            continue
        if values not in made:
            made.append(values)
    return made


def measure(values: dict[str, Any]) -> dict[str, int]:
    """Train in 4 processes; return the measured bytes of the fullest rank."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "PYTHONPATH": str(ROOT),
    }
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    words += [__file__, "--rank", json.dumps(values)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=400)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == RANKS, done.stdout
    return {name: max(row[name] for row in rows) for name in ("peak", "states")}


def predict(values: dict[str, Any]) -> Memory:
    """Return what the planner says of the fullest rank."""
    from megazero.train.forecast import foresee

    world = World(RANKS, PER_NODE)
    config = make_config({**MODEL, **values, "memory_check": False}, world)
    _, forecast, _ = foresee(config, world, torch.device("cpu"))
    assert forecast is not None
    return forecast.memory


def on_rank(values: dict[str, Any]) -> None:
    """Train on this rank and print its measurements."""
    import torch.distributed as dist

    from megazero.mesh.launch import read_launch
    from megazero.train import setup
    from megazero.train.outputs import peak_memory

    launch = read_launch()
    with ExitStack() as stack, redirect_stdout(StringIO()):
        logs = stack.enter_context(tempfile.TemporaryDirectory())
        config = make_config({**MODEL, **values, "log_dir": logs}, World(RANKS, RANKS))
        trainer = setup.prepare(config, launch, stack, time.monotonic())
        states = list[int]()
        step = trainer.engine.step

        def counted(*arguments: Any) -> Any:
            states.append(state_bytes(trainer.engine))
            return step(*arguments)

        trainer.engine.step = counted
        trainer.run()
    peak = peak_memory(trainer.mesh.device) - trainer.forecast.resident
    print(json.dumps({"peak": peak, "states": states[-1]}), flush=True)
    dist.barrier()
    os._exit(0)  # what watches the ranks has threads that are joined by the program alone


def state_bytes(engine: Any) -> int:
    """Return the bytes of P copies, gradients, master weights, moments and residuals, before an update."""
    storages: dict[int, int] = {}
    moments = (value for state in engine.optimizer.torch.state.values() for value in state.values())
    buffers = (
        (unit.copy if unit.copy_present else None, unit.master, unit.grad, unit.residual)
        for unit in engine.units
    )
    for tensor in (*moments, *(each for four in buffers for each in four)):
        if isinstance(tensor, torch.Tensor) and tensor.numel() > 1:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layouts", type=int, default=20)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        on_rank(json.loads(options.rank))
        return
    kept = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    for values in draw(options.seed, options.layouts):
        key = ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
        if key not in kept:
            kept[key] = measure(values)
            if options.out:
                beside = options.out.with_name(options.out.name + ".partial")
                beside.write_text(json.dumps(kept, indent=1))
                beside.replace(options.out)
        row, memory = kept[key], predict(values)
        row |= {"predicted": memory.total, "predicted_states": memory.model_states}
        total, states = row["predicted"] / row["peak"] - 1, row["predicted_states"] / row["states"] - 1
        peak, kept_states = row["peak"] / 2**20, row["states"] / 2**20
        print(f"{peak:7.0f} MiB {total:+7.1%}   states {kept_states:7.0f} {states:+7.1%}   {key}", flush=True)
    for name, measured in (("predicted", "peak"), ("predicted_states", "states")):
        off = [abs(row[name] / row[measured] - 1) for row in kept.values()]
        print(
            f"{measured}: off by {median(off):.1%} at the median, {max(off):.1%} at most, over {len(off)} layouts"
        )


if __name__ == "__main__":
    main()
