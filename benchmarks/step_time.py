"""Step time as a ratio to torch's own, and bytes per rank against the formula.

    python benchmarks/step_time.py [--ranks 4] [--rounds 5] [--dtype fp32] [--json FILE]
    python benchmarks/step_time.py --against HEAD~1 [--only zero3 hpz]     # this tree / another commit

Every contestant trains the same decoder (same module, dtype, optimizer, clipping) on the same tokens, at least
2048 a rank and step (512 with --against, which is about the engine). Contestants take turns within a round; the
median over rounds counts, with the range.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from benchmarks import step_time_against as against
from benchmarks.links.contestants import ddp, fsdp2
from benchmarks.steps import AdamW, Shape, Step, bytes_in_step, decoder, ours, torch_step
from megazero.config import resolve_shards

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PAIRS = {"zero3": "fsdp2", "mics": "hsdp", "ddp": "torch ddp", "zero1": "torch ddp", "hpz": "fsdp2"}
PEERS = {"fsdp2": fsdp2(), "hsdp": fsdp2(hybrid=True), "torch ddp": ddp(once=True)}
FORMULA_PRESETS = ("ddp", "zero1", "zero2", "zero3", "mics", "hpz")
Result = dict[str, Any]


def contestants(shape: Shape, only: list[str] | None) -> dict[str, Step]:
    device, world = harness.device(), dist.get_world_size()
    if world == 1:
        model = decoder(shape).to(device)
        bare = torch_step(model, AdamW(model.parameters(), shape.dtype != torch.float32), shape, device)
        return {"megazero": ours("ddp", shape, 1, device)[0], "bare torch": bare}
    names = [name for name in (*PAIRS, *PEERS) if not only or name in only]
    return {
        name: PEERS[name].build(shape, world // 2).step
        if name in PEERS
        else ours(name, shape, world // 2, device)[0]
        for name in names
    }


def compare(options: dict[str, Any]) -> Result:
    """Return seconds per step of every turn, bytes held by preset, the model's elements and a rank's tokens of a
    step."""
    shape = Shape(dtype=DTYPES[options["dtype"]], micro_batches=options["micro_batches"])
    steps = contestants(shape, options["only"])
    harness.require_training({name: harness.learned([step(), step()]) for name, step in steps.items()})
    turns = {
        name: lambda step=step: harness.measure(step, options["steps"])[0] for name, step in steps.items()
    }
    found: Result = {
        "seconds": harness.take_turns(turns, options["rounds"]),
        "held": {},
        "tokens": shape.tokens,
    }
    found["elements"] = sum(p.numel() for p in decoder(shape, "meta").parameters())
    if (world := dist.get_world_size()) > 1:
        small = dataclasses.replace(shape, dtype=torch.bfloat16, sequence=16, micro_batch=1, micro_batches=1)
        for preset in FORMULA_PRESETS:
            found["held"][preset] = bytes_in_step(preset, small, world // 2, harness.device())
    return found


def expected_bytes(preset: str, n: int, world: int) -> dict[str, float]:
    """Return 2 N/P for bf16 parameters, 4 N/G for accumulated gradients, 12 N/OS for master and two moments."""
    s = resolve_shards(preset, world, max(1, world // 2))
    return {"parameters": 2 * n / s.p, "gradients": 4 * n / s.g, "optimizer": 12 * n / s.os}


def report(world: int, result: Result) -> dict:
    times, n = result["seconds"], result["elements"]
    print(f"\n{world} rank(s), {result['tokens']} tokens per rank and step, {n / 1e6:.1f}M parameters")
    print(f"{'contestant':12} {'median s':>9} {'min':>7} {'max':>7}")
    for name, t in times.items():
        print(f"{name:12} {statistics.median(t):9.3f} {min(t):7.3f} {max(t):7.3f}")
    ratios = {}
    for mine, theirs in ({"megazero": "bare torch"} if world == 1 else PAIRS).items():
        if mine in times and theirs in times:
            ratios[f"{mine} / {theirs}"] = statistics.median(times[mine]) / statistics.median(times[theirs])
            print(
                f"{mine} / {theirs}: {harness.of_medians(times[mine], times[theirs], 3)}, of medians, and by round"
            )
    table = {}
    for preset, kinds in result["held"].items():
        want = expected_bytes(preset, n, world)
        table[preset] = {k: kinds[k] / want[k] for k in want}
        cells = (f"{k} {kinds[k]:,} = {r:.4f} x formula" for k, r in table[preset].items())
        print(f"bytes {preset:6} " + "  ".join(cells))
    return {"world": world, "seconds": times, "ratios": ratios, "bytes_over_formula": table}


def compare_with_commit(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict:
    options.contestants = options.only or list(against.CONTESTANTS)
    if wrong := [name for name in options.contestants if name not in against.CONTESTANTS]:
        parser.error(f"--only {wrong[0]!r} with --against; there are {', '.join(against.CONTESTANTS)}")
    try:
        times = against.measure(options)
    except ValueError as error:
        parser.error(str(error))
    print("\n".join(against.report(options.against, times)))
    return times


def main() -> None:
    parser = harness.parser(__doc__, ranks=4, steps=(1, "steps per turn"), micro_batches=1)
    parser.add_argument("--rounds", type=int, help="default: 5; 7 with --against")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument(
        "--only", nargs="*", help="contestants of the several-rank part, e.g. ddp 'torch ddp'"
    )
    parser.add_argument("--against", metavar="REF", help="a commit of this checkout, instead of torch's own")
    parser.add_argument("--json")
    options = parser.parse_args()
    options.rounds = options.rounds or (7 if options.against else 5)
    os.environ["OMP_NUM_THREADS"] = "1"
    results: object
    if options.against:
        results = compare_with_commit(parser, options)
    else:
        worlds = dict.fromkeys((1, options.ranks))
        results = [report(world, harness.run(compare, vars(options), ranks=world)) for world in worlds]
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    harness.start(main)
