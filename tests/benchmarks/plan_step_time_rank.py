"""One rank of plan_step_time.py: measures layouts one after the other. Started in every node of a lab.

Each layout has a world of its own, so that no threads of process groups are left over from the one before.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megazero.config import RunConfig, World, parse
from megazero.log.time_bill import TimeBill
from megazero.train.distributed import make_mesh
from megazero.train.parallelize import MicroBatch, build_decoder, build_pipeline, shard_decoder

CPU = torch.device("cpu")
PORT, TIMEOUT = 29600, timedelta(seconds=120)
WARM = 2  # turns that do not count: the first makes connections and optimizer states, the second fills caches
QUIET = 0.06  # of the machine's processors: other programs took no more in a quiet round
LONG_S = 2.0  # of so many seconds is a step in which caches are nothing: its second turn counts


def measure(config: RunConfig, world: World, rounds: int, most: int) -> dict[str, Any]:
    """Return the seconds of the quietest rounds, processor seconds of all ranks and what other programs took of the
    machine in each, and medians of this rank's time bill.

    Rounds are taken until so many were quiet, ``most`` at most.
    """
    bill = TimeBill()
    mesh = make_mesh(config, world, CPU, TIMEOUT)
    decoder = build_decoder(config, mesh)
    engine = shard_decoder(decoder, config, mesh, bill.span)
    pipeline = build_pipeline(decoder, engine, config, mesh, bill.span)
    size, count = config.batch.micro_batch_size, config.num_micro_batches(world)
    assert size and config.model.seq_length
    generator = torch.Generator().manual_seed(mesh.dp_rank)
    shape = (count * size, config.model.seq_length)
    tokens = torch.randint(0, config.model.vocab_size or 0, shape, generator=generator)
    data = [MicroBatch(t, t, torch.ones(t.shape)) for t in tokens.chunk(count)]
    program, total = pipeline.program(count), tokens.numel() * mesh.dp_size
    taken: list[dict[str, Any]] = []
    turn = 0
    while turn < WARM + most and sum(one["foreign"] < QUIET for one in taken) < rounds:
        dist.barrier()
        began, spent, others = time.perf_counter(), time.process_time(), machine_seconds()
        with bill.span("compute"):
            engine.begin_step(count, total, program)
            pipeline.step(data)
            engine.step()
        dist.barrier()
        took = time.perf_counter() - began
        own = torch.tensor(
            [time.process_time() - spent, took, machine_seconds() - others], dtype=torch.float64
        )
        items = bill.close(took)
        every = [torch.empty_like(own) for _ in range(world.world_size)]
        dist.all_gather(every, own)
        busy, (_, took, machine) = sum(float(row[0]) for row in every), every[0].tolist()
        turn += 1
        if turn > WARM or turn == WARM and took > LONG_S:
            foreign = max(0.0, machine - busy) / (took * (os.cpu_count() or 1))
            taken.append({"seconds": took, "busy": busy, "foreign": foreign, "bill": items})
    quietest = sorted(taken, key=lambda one: one["foreign"])[:rounds]
    columns = {name: [one[name] for one in quietest] for name in ("seconds", "busy", "foreign")}
    bills = [one["bill"] for one in quietest]
    return {**columns, "bill": {name: statistics.median(b[name] for b in bills) for name in bills[0]}}


def machine_seconds() -> float:
    """Return the processor seconds that all programs of the machine have taken: all but idle, and waits for disks."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    return sum(int(n) for i, n in enumerate(words) if i not in (3, 4)) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--asked", type=Path, required=True, help="a JSON list of layouts: key and flags")
    parser.add_argument("--result", type=Path, required=True, help="a line of JSON for each is added to it")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument(
        "--until", type=float, required=True, help="no layout is begun after this time.time()"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    world = World(size, int(os.environ["LOCAL_WORLD_SIZE"]))
    store = dist.TCPStore(os.environ["MASTER_ADDR"], PORT, size, rank == 0, TIMEOUT)
    for number, asked in enumerate(json.loads(options.asked.read_text())):
        own = dist.PrefixStore(f"layout {number}", store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=TIMEOUT)
        late = torch.tensor(float(time.time() > options.until))
        dist.broadcast(late, 0)
        if not late:
            found = measure(parse(asked["flags"], world), world, options.rounds, options.rounds + 3)
            every: list[Any] = [None] * size
            dist.all_gather_object(every, found.pop("bill"))
            if rank == 0:
                line = {**asked, **found, "bills": every}
                with options.result.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(asked["key"], f"{statistics.median(found['seconds']):.3f} s", flush=True)
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()  # engines are cycles, and hold process groups
        if late:
            break


if __name__ == "__main__":
    main()
