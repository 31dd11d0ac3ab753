"""torchtitan's mixtures of experts under fsdp2_patch: step times, bytes and losses beside FSDP2 and HSDP.

    pip install --no-deps torchtitan==0.3.0, with what it imports
    python -m benchmarks.patches.torchtitan_steps [--rates 200mbit none] [--experts 16] [--only "1-D, exact" ...]

2 nodes of 2 CPU ranks (tests/netlab), expert parallelism of 2, 2 micro-batches, fp32 (tests/fsdp2/titan_on_cpu.py). A
quarter of the letters of the text is random. Contestants take turns; each turn is a trainer of its own, in a process
that is forked from one that has imported torchtitan; each round has a seed of its own. Prints s per step, bytes that
a node's interface sends beside the patch's own counters and the page's formula, and losses: of all ranks, the mean of
the last fifth of the steps. ``--steps 100 --rounds 1 --rates none`` is for these.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks import harness
from megazero.config.layout.wire import EXACT_NUMEL
from tests import ROOT
from tests.fsdp2 import titan_on_cpu
from tests.netlab.lab import interface_bytes

PLAIN, HSDP = "FSDP2", "HSDP once"
INT8_INT4 = 'weights="int8", gradients="int4"'  # the page's own words
EXPERT_PARALLEL = 2
WARM_UP = 2  # steps
MICRO_BATCHES = 2
Turn = dict[str, Any]


@dataclass(frozen=True)
class Contestant:
    """words: of ``enable``; None: without the patch. options: of the training. weights, gradients: bits, 32 if exact.

    base: the contestant whose losses are compared with: DTensors of another mesh begin otherwise.
    """

    words: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    weights: int = 32
    gradients: int = 32
    base: str = PLAIN


CONTESTANTS = {
    PLAIN: Contestant(),
    HSDP: Contestant(None, {"replicas": 2, "defers_replicas": True}, base=HSDP),
    "1-D, exact": Contestant(""),
    "1-D, int8 and int4": Contestant(INT8_INT4, {}, 8, 4),
    "2-D, int4": Contestant('gradients="int4"', {"replicas": 2}, 0, 4, HSDP),
}


def script(words: str | None) -> str:
    """Return torchtitan's own program, or that of docs/integrate/fsdp2.md with these words of ``enable``."""
    if words is None:
        return "import torchtitan.train\n\ntorchtitan.train.main()\n"
    page = (ROOT / "docs" / "integrate" / "fsdp2.md").read_text()
    (found,) = re.findall(r"```python\n(# train_fsdp2\.py.*?)```", page, re.DOTALL)
    return found.replace(INT8_INT4, words)


def formula(trainer: Any, contestant: Contestant) -> tuple[float, float]:
    """Return the bytes that this rank sends to its one peer on the other node in a step, by the page's formula: of
    weights and of gradients.

    Gradients of the last norm and the output layer cross with every micro-batch, as torchtitan's loss in chunks has
    it.
    """
    replicas = "replicas" in contestant.options
    weights = gradients = 0.0
    for name, parameter in (pair for part in trainer.model_parts for pair in part.named_parameters()):
        shared = "ep" in (parameter.device_mesh.mesh_dim_names or ())
        exact = parameter.numel() // (EXPERT_PARALLEL if shared else 1) <= EXACT_NUMEL
        own = parameter.to_local().numel()
        times = MICRO_BATCHES if name.startswith(("norm.", "lm_head.")) else 1
        weights += 0 if replicas else size(own, contestant.weights, exact)
        # Of two replicas each sums a half, and sends it back.
        gradients += times * (
            2 * size(own / 2, contestant.gradients, exact)
            if replicas
            else size(own, contestant.gradients, exact)
        )
    return weights, gradients


def size(numel: float, bits: int, exact: bool) -> float:
    """Return the bytes of so many elements of a parameter: whole blocks of 64 codes and a scale, or fp32."""
    return 4 * numel if exact or bits == 32 else -(-numel // 64) * (8 * bits + 2)


def noting(trainer: Any, contestant: Contestant, file: Path) -> None:
    """Let a trainer of torchtitan's note the seconds, bytes and losses of its steps in a file, on rank 0."""
    import fsdp2_patch

    step, run, forward_backward = trainer.train_step, trainer.train, trainer.forward_backward_step
    seconds: list[float] = []
    sent: list[int] = []
    losses: list[float] = []

    def timed(self: Any, data: Any) -> None:
        dist.barrier()
        if len(seconds) == WARM_UP and contestant.words is not None:
            fsdp2_patch.counters().take()
        losses.append(0.0)
        began, (before, _) = time.perf_counter(), interface_bytes()
        step(self, data)
        dist.barrier()
        seconds.append(time.perf_counter() - began)
        sent.append(interface_bytes()[0] - before)

    def adding(self: Any, **given: Any) -> Any:
        loss = forward_backward(
            self, **given
        )  # a share of the mean over all ranks' and micro-batches' tokens
        losses[-1] += float(loss)
        return loss

    def whole(self: Any) -> None:
        run(self)
        counted = {} if contestant.words is None else fsdp2_patch.counters().take()
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (counted, formula(self, contestant), losses))
        if dist.get_rank() == 0:
            file.write_text(json.dumps(found(every)))

    def found(every: list[Any]) -> Turn:
        node = every[: len(every) // 2]
        return {
            "seconds": seconds[WARM_UP:],
            "sent": statistics.fmean(sent[WARM_UP:]),
            "counted": {
                kind: sum(counted[kind] for counted, *_ in node) / (len(seconds) - WARM_UP)
                for kind in node[0][0]
            },
            "formula": [sum(bytes_[i] for _, bytes_, _ in node) for i in range(2)],
            "losses": [sum(shares) for shares in zip(*(losses for *_, losses in every), strict=True)],
        }

    trainer.train_step, trainer.train, trainer.forward_backward_step = timed, whole, adding


def turn(name: str, number: int, folder: str, options: dict[str, Any]) -> Turn:
    """Train a contestant; return what rank 0 has noted. number: of the turn, which no other has."""
    contestant = CONTESTANTS[name]
    place = Path(folder, f"{number}")
    place.mkdir(parents=True, exist_ok=True)

    def act() -> None:
        from torchtitan.trainer import Trainer

        file = place / f"script{os.environ['RANK']}.py"
        file.write_text(script(contestant.words))
        noting(Trainer, contestant, place / "found.json")
        titan_on_cpu.train(str(file), str(place), {**options, **contestant.options})

    titan_on_cpu.forked(number, act)
    return json.loads((place / "found.json").read_text()) if os.environ["RANK"] == "0" else {}


def compare(names: list[str], rounds: int, folder: str, options: dict[str, Any]) -> dict[str, list[Turn]]:
    """Let contestants take turns, on every rank."""
    titan_on_cpu.import_titan()
    numbers = itertools.count()
    seeds = {name: itertools.count(1) for name in names}

    def acting(name: str) -> Callable[[], Turn]:
        return lambda: turn(name, next(numbers), folder, {**options, "seed": next(seeds[name])})

    return harness.take_turns({name: acting(name) for name in names}, rounds, warm_up=0)


def rows(rate: str, found: dict[str, list[Turn]]) -> Iterator[list[str]]:
    """Yield a row for each contestant."""
    seconds = {name: [s for each in turns for s in each["seconds"]] for name, turns in found.items()}
    losses = {name: [mean_of_last(each["losses"]) for each in turns] for name, turns in found.items()}
    for name, turns in found.items():
        counted, contestant = turns[-1]["counted"], CONTESTANTS[name]
        kinds = [counted.get(f"{kind}_inter_node_bytes", 0) for kind in ("refresh", "reduce")]
        own, base = contestant.words is not None, losses.get(contestant.base)
        yield [
            rate,
            name,
            harness.spread(seconds[name], 2),
            f"{statistics.median(seconds[name]) / statistics.median(seconds[PLAIN]):.2f}"
            if PLAIN in found
            else "",
            f"{statistics.median(each['sent'] for each in turns) / 1e6:.2f}",
            " + ".join(f"{n / 1e6:.2f}" for n in kinds) if own else "",
            " + ".join(f"{n / 1e6:.2f}" for n in turns[-1]["formula"]) if own else "",
            f"{statistics.fmean(losses[name]):.4f}",
            "; ".join(f"{a - b:+.4f}" for a, b in zip(losses[name], base, strict=True))
            if base and name != contestant.base
            else "",
        ]


def mean_of_last(losses: list[float]) -> float:
    return statistics.fmean(losses[-max(1, len(losses) // 5) :])


def main() -> None:
    options = harness.parser(
        __doc__,
        rates=["200mbit", "none"],
        only=(list(CONTESTANTS), "contestants"),
        model="qwen3.qwen3_moe_debug",
        experts=(0, "of each layer; 0: all"),
        rounds=3,
        steps=(3, "timed steps of a contestant's turn"),
        timeout=3000.0,
    ).parse_args()
    header = [
        "link",
        "messages",
        "s per step",
        f"of {PLAIN}",
        "MB sent by a node",
        "counted: weights + gradients",
    ]
    header += ["by the formula", "loss", "from FSDP2's or HSDP's, by seed"]
    training = {
        "model": options.model,
        "experts": options.experts,
        "steps": WARM_UP + options.steps,
        "noise": 0.25,
    }
    print(f"{options.model}, {options.rounds} rounds of {options.steps} steps, {harness.setting()}")
    for lab in harness.labs_at(options.rates):
        with tempfile.TemporaryDirectory() as folder:
            asked = (options.only, options.rounds, folder, training)
            found = harness.run(compare, *asked, lab=lab, world=False, timeout=options.timeout)
        print(harness.table(header, list(rows(lab.rate or "none", found))), flush=True)


if __name__ == "__main__":
    harness.start(main)
