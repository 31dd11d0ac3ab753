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
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import step_time_against as against

DTYPES = ("fp32", "bf16")
PAIRS = {"zero3": "fsdp2", "mics": "hsdp", "ddp": "torch ddp", "zero1": "torch ddp", "hpz": "fsdp2"}
FORMULA_PRESETS = ("ddp", "zero1", "zero2", "zero3", "mics", "hpz")


def run_rank(rank: int, world: int, store: str, options: argparse.Namespace, queue: mp.Queue) -> None:
    import torch
    import torch.distributed as dist

    from benchmarks import contestants as c
    from benchmarks.step_time_rank import join, seconds_per_step

    device = join(rank, world, store)
    shape = c.Shape(dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype])
    shape = dataclasses.replace(shape, micro_batches=options.micro_batches)
    node = max(1, world // 2)
    if world == 1:
        steps = {"megazero": c.ours("ddp", shape, 1, device)[0], "bare torch": c.bare(shape, device)}
    else:
        makers = {p: partial(_ours, c, p, shape, node, device) for p in PAIRS}
        makers["fsdp2"] = lambda: c.fsdp2(shape, device)
        makers["hsdp"] = lambda: c.fsdp2(shape, device, replicas=2)
        makers["torch ddp"] = lambda: c.ddp(shape, device)
        steps = {name: make() for name, make in makers.items() if not options.only or name in options.only}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(options.rounds + 1):
        for name, step in steps.items():
            seconds = seconds_per_step(step, options.steps, device)
            if turn:  # the first round warms up
                times[name].append(seconds)
    held = {}
    if world > 1:
        for preset in FORMULA_PRESETS:
            bf16 = dataclasses.replace(
                shape, dtype=torch.bfloat16, sequence=16, micro_batch=1, micro_batches=1
            )
            held[preset] = c.bytes_in_step(preset, bf16, node, device)
    if rank == 0:
        elements = sum(p.numel() for p in c.decoder(shape, "meta").parameters())
        queue.put((times, held, elements, shape.tokens))
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def _ours(c, preset, shape, node, device):
    return c.ours(preset, shape, node, device)[0]


def launch(world: int, options: argparse.Namespace) -> tuple[dict, dict, int, int]:
    context = mp.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = [
            context.Process(target=run_rank, args=(r, world, store, options, queue)) for r in range(world)
        ]
        for p in ranks:
            p.start()
        result = queue.get(timeout=1200)
        for p in ranks:
            p.join()
    return result


def expected_bytes(preset: str, n: int, world: int) -> dict[str, float]:
    """2 N/P bf16 parameters, 4 N/G accumulated gradients, 12 N/OS master and two moments."""
    from megazero.config import resolve_shards

    s = resolve_shards(preset, world, max(1, world // 2))
    return {"parameters": 2 * n / s.p, "gradients": 4 * n / s.g, "optimizer": 12 * n / s.os}


def report(world: int, result: tuple[dict, dict, int, int]) -> dict:
    times, held, elements, tokens = result
    print(f"\n{world} rank(s), {tokens} tokens per rank and step, {elements / 1e6:.1f}M parameters")
    print(f"{'contestant':12} {'median s':>9} {'min':>7} {'max':>7}")
    for name, t in times.items():
        print(f"{name:12} {statistics.median(t):9.3f} {min(t):7.3f} {max(t):7.3f}")
    pairs = {"megazero": "bare torch"} if world == 1 else PAIRS
    ratios = {}
    for mine, theirs in pairs.items():
        if mine not in times or theirs not in times:
            continue
        per_round = [a / b for a, b in zip(times[mine], times[theirs], strict=True)]
        ratios[f"{mine} / {theirs}"] = statistics.median(times[mine]) / statistics.median(times[theirs])
        print(
            f"{mine} / {theirs}: {ratios[f'{mine} / {theirs}']:.3f} of medians "
            f"(round by round {min(per_round):.3f} to {max(per_round):.3f})"
        )
    table = {}
    for preset, kinds in held.items():
        want = expected_bytes(preset, elements, world)
        table[preset] = {k: kinds[k] / want[k] for k in want}
        print(
            f"bytes {preset:6} "
            + "  ".join(f"{k} {kinds[k]:,} = {r:.4f} x formula" for k, r in table[preset].items())
        )
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, help="default: 5; 7 with --against")
    parser.add_argument("--steps", type=int, default=1, help="steps per turn")
    parser.add_argument("--micro-batches", type=int, default=1)
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
        results = [report(world, launch(world, options)) for world in dict.fromkeys((1, options.ranks))]
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
