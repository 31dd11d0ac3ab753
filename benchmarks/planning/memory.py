"""Predicted memory beside the measured peak, over layouts drawn at random, on 4 CPU ranks as 2 nodes of 2.

    python -m benchmarks.planning.memory --keep FILE [--seeds 0 1] [--layouts 20] [--seconds 380]

Each layout trains three steps of a decoder whose model state is half a gigabyte or more. Measured are, on each rank,
the most bytes resident above those before the model was made, and the bytes of the model states. The rank that needs
the most counts. glibc is told to return what is freed at once (MALLOC_MMAP_THRESHOLD_): by default, memory that
it keeps doubles the resident size of some layouts. FILE keeps every measurement; a call begins no layout after
so many seconds, and the next one goes on. The call that has them all writes the section of docs/guide/planning.md
(--page: another file). With --moments the layouts are those of docs/guide/training.md, whose moments are kept in
fewer bits, with --contexts ranks share samples of 16,384 tokens, with --experts layers have 16 experts; nothing is
written then.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness
from megazero.config import ConfigError, World, make_config
from megazero.config.layout.shards import QUANTISED
from megazero.mesh.launch import read_launch
from megazero.plan.memory import Memory
from megazero.train import setup
from megazero.train.callbacks.reports import Prediction
from megazero.train.forecast import foresee

TITLE = "Memory against measurement"
AIM = 0.1  # of the peak
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
# No seed draws these.
MOMENTS: list[dict[str, Any]] = [
    {
        **{name: choices[0] for name, choices in CHOICES.items()},
        "params_dtype": "bf16",
        "zero_preset": preset,
        "zero_prefetch_bytes": 2**25,
        "exp_avg_dtype": dtype,
        "exp_avg_sq_dtype": dtype,
    }
    for preset in ("ddp", "zero1", "zero3", "zeropp")
    for dtype in ("fp32", "bf16", "int8")
]

CONTEXTS: list[dict[str, Any]] = [
    {
        **{name: choices[0] for name, choices in CHOICES.items()},
        **{
            "num_layers": 2,
            "hidden_size": 128,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "vocab_size": 500,
        },
        **{"seq_length": 16384, "global_batch_size": 4, "train_iters": 2, "context_parallel_size": size},
        "cp_comm_type": word and (word,),
    }
    for size, word in ((1, None), (2, None), (4, None), (4, "a2a"), (4, "all_gather"))
]


EXPERTS: list[dict[str, Any]] = [
    {
        **{name: choices[0] for name, choices in CHOICES.items()},
        **{"num_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "ffn_hidden_size": 512},
        **{"num_experts": 16, "zero_preset": preset, "expert_model_parallel_size": ep, "seq_length": length},
        **{"micro_batch_size": 2, "recompute_granularity": recompute},
        "moe_dispatch_across_nodes": "exact" if ep > PER_NODE else "no",
    }
    for preset, ep, length, recompute in (
        ("zero1", 1, 128, "none"),
        ("zero3", 1, 128, "none"),
        ("zero1", 2, 128, "none"),
        ("zero2", 2, 128, "none"),
        ("zero3", 2, 128, "none"),
        ("hpz", 2, 128, "none"),
        ("zeropp", 2, 128, "none"),
        ("zero3", 4, 128, "none"),
        # Here activations are most of it: 4,096 tokens a rank, each with two rows.
        ("zeropp", 1, 2048, "none"),
        ("zeropp", 2, 2048, "none"),
        ("zeropp", 2, 2048, "full"),
        ("zero3", 4, 2048, "none"),
    )
]


def draw(seed: int, number: int) -> list[dict[str, Any]]:
    """Return so many different legal layouts: options over MODEL. None has a preset that stands for another one."""
    drawn, made, world = random.Random(seed), list[dict[str, Any]](), World(RANKS, PER_NODE)
    while len(made) < number:
        values = {name: drawn.choice(choices) for name, choices in CHOICES.items()}
        try:
            config = make_config({**MODEL, **values}, world)
        except ConfigError:
            continue
        alone = values["zero_preset"] in QUANTISED and config.data_ranks_per_node(world) == 1
        if values not in made and not alone:
            made.append(values)
    return made


def predict(values: dict[str, Any]) -> Memory:
    """Return what the planner says of the fullest rank."""
    world = World(RANKS, PER_NODE)
    config = make_config({**MODEL, **values, "memory_check": False}, world)
    _, forecast, _ = foresee(config, world, torch.device("cpu"))
    assert forecast is not None
    return forecast.memory


def measure(values: dict[str, Any]) -> dict[str, int]:
    """Train on each rank; return the measured bytes of the fullest one."""
    with ExitStack() as stack, redirect_stdout(StringIO()):
        logs = stack.enter_context(tempfile.TemporaryDirectory())
        config = make_config({**MODEL, **values, "log_dir": logs}, World(RANKS, RANKS))
        trainer = setup.prepare(config, read_launch(), stack)
        # The rounding of the largest units, the last and the first, is measured in the first steps.
        trainer.engine.rounding.updates = len(trainer.engine.rounding.names) - 1
        states = list[int]()
        step = trainer.engine.step

        def counted(*arguments: Any) -> Any:
            states.append(state_bytes(trainer.engine))
            return step(*arguments)

        trainer.engine.step = counted
        trainer.run()
        (prediction,) = (each for each in trainer.callbacks.members if isinstance(each, Prediction))
        peak = prediction.forecast.grown(trainer.mesh.device)
        row = torch.tensor([peak, states[-1]])
        dist.all_reduce(row, dist.ReduceOp.MAX)
    return dict(zip(("peak", "states"), row.tolist(), strict=True))


def outer_tensors(engine: Any) -> list[torch.Tensor]:
    """Return what outer steps keep, and what is under way between replicas."""
    if engine.outer is None:
        return []
    every = [t for a in engine.outer.anchors.values() for t in (a.value, a.momentum, a.residual)]
    flying = engine.outer.flight.sums.values() if engine.outer.flight else ()
    return [*(t for t in every if t is not None), *flying]


def state_bytes(engine: Any) -> int:
    """Return the bytes of P copies, gradients, master weights, moments, residuals and anchors, before an update."""
    storages: dict[int, int] = {}
    moments = (value for state in engine.optimizer.torch.state.values() for value in state.values())
    buffers = (
        (
            unit.weights.copy if unit.weights.copy_present else None,
            unit.master.value,
            unit.gradients.grad,
        )
        for unit in engine.units
    )
    for tensor in (*moments, *outer_tensors(engine), *(each for four in buffers for each in four)):
        if isinstance(tensor, torch.Tensor) and tensor.numel() > 1:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def key_of(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)


def words_of(values: dict[str, Any]) -> str:
    """Return a layout in a table's words: what differs between the layouts, without what is at its default."""
    said = [f"{values['model_family']} {values['params_dtype']}"]
    said += [
        f"{short} {values[name]}"
        for short, name in (("TP", "tensor_model_parallel_size"), ("PP", "pipeline_model_parallel_size"))
        if values[name] > 1
    ]
    said.append(values["zero_preset"])
    if "num_experts" in values:
        said.append(f"EP {values['expert_model_parallel_size']}, {values['seq_length']} tokens")
    if values.get("context_parallel_size", 1) > 1:
        said.append(f"CP {values['context_parallel_size']} {(values['cp_comm_type'] or ('by default',))[0]}")
    said += [f"gradients {values['zero_gradients_lifetime']}"] * bool(values["zero_gradients_lifetime"])
    said += [f"parameters {values['zero_params_lifetime']}"] * bool(values["zero_params_lifetime"])
    said.append(f"prefetch {values['zero_prefetch_bytes'] >> 20} MiB")
    said += [f"recompute {values['recompute_granularity']}"] * (values["recompute_granularity"] != "none")
    if "exp_avg_dtype" in values:
        said.append(f"moments {values['exp_avg_dtype']}")
    return ", ".join([*said, f"micro-batch {values['micro_batch_size']}"])


@dataclass(frozen=True)
class Row:
    """A layout: bytes of the model states and of the peak, measured and predicted."""

    seed: int
    layout: str
    states: int
    peak: int
    predicted_states: float
    predicted: float

    @property
    def states_off(self) -> float:
        return self.predicted_states / self.states - 1

    @property
    def off(self) -> float:
        return self.predicted / self.peak - 1

    @property
    def cells(self) -> list[str]:
        sizes = [f"{size / 2**20:.0f}" for size in (self.states, self.peak, self.predicted)]
        return [str(self.seed), self.layout, f"{self.states_off:+.1%}", *sizes, f"{self.off:+.1%}"]


def verdict(rows: Sequence[Row]) -> list[str]:
    """Return, for each seed, how far off the predictions are."""
    lines = []
    for seed in sorted({row.seed for row in rows}):
        own = [row for row in rows if row.seed == seed]
        off = [row.off for row in own]
        within = sum(abs(each) <= AIM for each in off)
        states = max(abs(row.states_off) for row in own)
        lines.append(
            f"- seed {seed}, {len(own)} layouts: {within} within {AIM:.0%}; off by {median(map(abs, off)):.1%} "
            f"at the median, {min(off):+.1%} to {max(off):+.1%}; model states by {states:.1%} at most"
        )
    return lines


def main() -> int:
    options = harness.parser(
        __doc__,
        keep=Path,
        seeds=[0],
        layouts=(20, "of each seed"),
        seconds=(1e9, "of this call"),
        page=harness.DOCS / "guide" / "planning.md",
        moments=(False, "measure those of docs/guide/training.md instead"),
        contexts=(False, "measure ranks that share samples instead"),
        experts=(False, "measure layers of experts instead"),
    ).parse_args()
    until = time.monotonic() + options.seconds
    store = harness.Store(options.keep)
    store.claim()
    kept = {record["layout"]: record for record in store.records()}
    cases = [(seed, values) for seed in options.seeds for values in draw(seed, options.layouts)]
    if others := MOMENTS * options.moments + CONTEXTS * options.contexts + EXPERTS * options.experts:
        cases = [(0, values) for values in others]
    how = {"ranks": RANKS, "world": False, "environ": {"MALLOC_MMAP_THRESHOLD_": "65536"}, "timeout": 400}
    for _, values in cases:
        if (key := key_of(values)) not in kept and time.monotonic() < until:
            kept[key] = {"layout": key, **harness.run(measure, values, **how)}
            store.append(kept[key])
    rows = []
    for seed, values in cases:
        if found := kept.get(key_of(values)):
            memory, sizes = predict(values), (found["states"], found["peak"])
            rows.append(Row(seed, words_of(values), *sizes, memory.model_states, memory.total))
    header = ["seed", "layout", "states off", "states MiB", "peak MiB", "predicted MiB", "off"]
    lines = "\n".join([*verdict(rows), "", harness.table(header, [row.cells for row in rows])])
    print(lines)
    if len(rows) < len(cases):
        return 1
    if others:
        return 0
    said = harness.section(options.page, TITLE).partition("\n- seed ")[0].rstrip()
    harness.write_section(options.page, TITLE, f"{said}\n\n{lines}")
    return 0


if __name__ == "__main__":
    harness.start(main)
