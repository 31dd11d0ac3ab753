"""torchtitan's mixtures of experts under fsdp2_patch: step times, bytes and losses beside FSDP2 and HSDP.

    pip install --no-deps torchtitan==0.3.0, with what it imports
    python -m benchmarks.patches.torchtitan_steps [--rates 200mbit none] [--model qwen3.qwen3_moe_debug] [--rounds 3]

2 nodes of 2 CPU ranks (tests/netlab), expert parallelism of 2, 2 micro-batches, fp32 (tests/fsdp2/titan_on_cpu.py).
Contestants take turns; each turn is a trainer of its own, in a process that is forked from one that has imported
torchtitan. Prints s per step, bytes that a node's interface sends beside the patch's own counters and the formats'
bytes, and the mean loss of the last 10 steps. ``--steps 100 --rounds 1 --rates none`` is for losses.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks import harness
from tests import ROOT
from tests.fsdp2 import titan_on_cpu
from tests.netlab.lab import interface_bytes

PLAIN = "FSDP2"
INT8_INT4 = 'weights="int8", gradients="int4"'  # the page's own words
CONTESTANTS: dict[str, tuple[str | None, dict[str, Any]]] = {
    PLAIN: (None, {}),
    "HSDP once": (None, {"replicas": 2, "defers_replicas": True}),
    "1-D, exact": ("", {}),
    "1-D, int8 and int4": (INT8_INT4, {}),
    "2-D, int4": ('gradients="int4"', {"replicas": 2}),
}
WARM_UP = 2  # steps
Turn = dict[str, Any]


def script(words: str | None) -> str:
    """Return torchtitan's own program, or that of docs/integrate/fsdp2.md with these words of ``enable``."""
    if words is None:
        return "import torchtitan.train\n\ntorchtitan.train.main()\n"
    page = (ROOT / "docs" / "integrate" / "fsdp2.md").read_text()
    (found,) = re.findall(r"```python\n(# train_fsdp2\.py.*?)```", page, re.DOTALL)
    return found.replace(INT8_INT4, words)


def message_bytes(numel: int, quantised: bool, block: int) -> int:
    """Return the bytes of a shard of so many elements, whose blocks of 64 have ``block`` bytes if it is quantised."""
    return -(-numel // 64) * block if quantised else 4 * numel


def refresh_bytes(trainer: Any) -> int:
    """Return what this rank sends of its weights to one other node in a step, as int8 with exact small parameters."""
    sent = 0
    for parameter in (p for part in trainer.model_parts for p in part.parameters()):
        own = parameter.to_local().numel()
        ranks = dist.get_world_size() if "ep" not in str(parameter.device_mesh.mesh_dim_names) else 2
        sent += message_bytes(own, own * ranks > 16384, 66)
    return sent


def noting(trainer: Any, file: Path) -> None:
    """Let a trainer of torchtitan's note the seconds and bytes of its steps in a file, on rank 0."""
    import fsdp2_patch

    step, train = trainer.train_step, trainer.train
    seconds: list[float] = []
    sent: list[int] = []

    def timed(self: Any, data: Any) -> None:
        dist.barrier()
        if len(seconds) == WARM_UP and fsdp2_patch._patch is not None:
            fsdp2_patch.counters().take()
        began, (before, _) = time.perf_counter(), interface_bytes()
        step(self, data)
        dist.barrier()
        seconds.append(time.perf_counter() - began)
        sent.append(interface_bytes()[0] - before)

    def whole(self: Any) -> None:
        train(self)
        patch = fsdp2_patch._patch
        own = {} if patch is None else fsdp2_patch.counters().take()
        own |= {"formula": refresh_bytes(self)}
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
        steps = len(seconds) - WARM_UP
        node = every[: len(every) // 2]
        counted = {kind: sum(one.get(kind, 0) for one in node) / steps for kind in own if kind != "formula"}
        formula = sum(one["formula"] for one in node)
        found = {"seconds": seconds[WARM_UP:], "sent": statistics.fmean(sent[WARM_UP:]), "counted": counted}
        if dist.get_rank() == 0:
            file.write_text(json.dumps(found | {"formula": formula}))

    trainer.train_step, trainer.train = timed, whole


def turn(name: str, number: int, model: str, steps: int, folder: str) -> Turn:
    """Train a contestant; return what rank 0 has noted. number: of the turn, which no other has."""
    words, options = CONTESTANTS[name]
    place = Path(folder, f"{number}")
    place.mkdir(parents=True, exist_ok=True)

    def act() -> None:
        from torchtitan.trainer import Trainer

        file = place / f"script{os.environ['RANK']}.py"
        file.write_text(script(words))
        noting(Trainer, place / "found.json")
        titan_on_cpu.train(str(file), str(place), {"steps": WARM_UP + steps, "model": model, **options})

    titan_on_cpu.forked(number, act)
    if os.environ["RANK"] != "0":
        return {}
    losses = json.loads((place / "losses0.json").read_text())
    return json.loads((place / "found.json").read_text()) | {"loss": statistics.fmean(losses[-20:])}


def compare(names: list[str], model: str, rounds: int, steps: int, folder: str) -> dict[str, list[Turn]]:
    """Let contestants take turns, on every rank."""
    titan_on_cpu.import_titan()
    found: dict[str, list[Turn]] = {name: [] for name in names}
    for i in range(rounds):
        for j, name in enumerate(names):
            found[name].append(turn(name, i * len(names) + j, model, steps, folder))
    return found


def rows(rate: str, found: dict[str, list[Turn]]) -> Iterator[list[str]]:
    """Yield a row for each contestant."""
    medians = {name: [statistics.median(each["seconds"]) for each in turns] for name, turns in found.items()}
    for name, turns in found.items():
        last, mb = turns[-1], 1e-6
        counted = last["counted"]
        ours = bool(counted)
        yield [
            rate,
            name,
            harness.spread(medians[name]),
            harness.of_medians(medians[name], medians[PLAIN]) if PLAIN in medians and name != PLAIN else "1",
            f"{statistics.median(each['sent'] for each in turns) * mb:.3f}",
            f"{counted['inter_node_bytes'] * mb:.3f}" if ours else "",
            f"{counted['refresh_inter_node_bytes'] * mb:.3f}"
            if "refresh_inter_node_bytes" in counted
            else "",
            f"{last['formula'] * mb:.3f}" if "int8" in name else "",
            f"{statistics.fmean(each['loss'] for each in turns):.4f}",
        ]


def main() -> None:
    options = harness.parser(
        __doc__,
        rates=["200mbit", "none"],
        only=(list(CONTESTANTS), "contestants"),
        model="qwen3.qwen3_moe_debug",
        rounds=3,
        steps=(5, "timed steps of a contestant's turn"),
        timeout=3000.0,
    ).parse_args()
    header = ["link", "messages", "s per step", f"of {PLAIN}", "MB sent by a node", "counted"]
    header += ["weights of it", "by the formats", "loss"]
    print(options.model)
    for lab in harness.labs_at(options.rates):
        with tempfile.TemporaryDirectory() as folder:
            asked = (options.only, options.model, options.rounds, options.steps, folder)
            found = harness.run(compare, *asked, lab=lab, world=False, timeout=options.timeout)
        print(harness.table(header, list(rows(lab.rate or "none", found))), flush=True)


if __name__ == "__main__":
    harness.start(main)
