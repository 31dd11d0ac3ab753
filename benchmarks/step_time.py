"""Step time as a ratio to torch's own.

    python benchmarks/step_time.py [--ranks 4] [--rounds 5] [--dtype fp32] [--json FILE]
    python benchmarks/step_time.py --against HEAD~1 [--only zero3 hpz]     # this tree / another commit

Every contestant trains the same decoder (same module, dtype, optimizer, clipping) on the same tokens, at least
2048 a rank and step (512 with --against, which is about the engine). Contestants take turns within a round; the
median over rounds counts, with the range.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from benchmarks import step_time_against as against
from benchmarks.links.contestants import ddp, fsdp2
from benchmarks.steps import AdamW, Shape, Step, decoder, ours, torch_step

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PAIRS = {"zero3": "fsdp2", "mics": "hsdp", "ddp": "torch ddp", "zero1": "torch ddp", "hpz": "fsdp2"}
PEERS = {"fsdp2": fsdp2(), "hsdp": fsdp2(hybrid=True), "torch ddp": ddp(once=True)}
ALONE = {"megazero": "bare torch"}  # the pair of one rank


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


def compare(options: dict[str, Any]) -> dict[str, list[float]]:
    """Return the seconds per step of every turn."""
    shape = Shape(dtype=DTYPES[options["dtype"]], micro_batches=options["micro_batches"])
    steps = contestants(shape, options["only"])
    harness.require_training({name: harness.learned([step(), step()]) for name, step in steps.items()})
    turns = {
        name: lambda step=step: harness.measure(step, options["steps"])[0] for name, step in steps.items()
    }
    return harness.take_turns(turns, options["rounds"])


def report(world: int, times: Mapping[str, Sequence[float]]) -> str:
    rows = []
    for name, seconds in times.items():
        other = (ALONE if world == 1 else PAIRS).get(name)
        ratio = f"{harness.of_medians(seconds, times[other], 3)} of {other}" if other in times else ""
        rows.append([name, harness.spread(seconds), ratio])
    return f"{world} rank(s)\n\n{harness.table(['', 's per step', 'of medians, and by round'], rows)}\n"


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
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.rounds = options.rounds or (7 if options.against else 5)
    os.environ["OMP_NUM_THREADS"] = "1"
    found: dict[Any, Any] = {}
    if options.against:
        found = compare_with_commit(parser, options)
    else:
        asked = {
            name: getattr(options, name) for name in ("dtype", "micro_batches", "only", "steps", "rounds")
        }
        for world in dict.fromkeys((1, options.ranks)):
            found[world] = harness.run(compare, asked, ranks=world)
            print(report(world, found[world]))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    harness.start(main)
