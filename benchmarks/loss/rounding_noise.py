"""How much rounding raises the noise of gradients, by layer, phase, size of the model and batch of a node.

    python -m benchmarks.loss.rounding_noise [--work runs/loss] [--out docs/results] [--rungs "0.3M x 4" "1.3M x 1"]

Trains the models of ladder.py with exact messages, in one process. At some steps it computes many nodes' gradients
for the same weights and rounds each as a message. Appends to loss_at_size_noise.jsonl, which ``study.py --ladder
--report`` shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks import harness
from benchmarks.loss.data import train_samples
from benchmarks.loss.ladder import RUNGS
from benchmarks.loss.plan import Runs
from benchmarks.loss.rounding_errors import GRADIENTS, KINDS, gradients_of, rounded, steps
from benchmarks.loss.run import RANKS, Settings
from benchmarks.results import PAGES, data_of
from megazero.comm.codec import Blockwise
from megazero.data.sampler import Batches
from megazero.models import Decoder

NODES = 64  # whose gradients are taken at one set of weights
BATCHES = (1, 4, 16)  # a node's batch, over the rung's own
PHASES = (0.05, 0.25, 1.0)  # of the steps
CODECS = ("INT4", "INT4 + H", "2 bits, clip + H")
SEED = 100  # of the data: other samples than the training's
ALL = "all matrices"


@dataclass(frozen=True)
class Added:
    """The effect of rounding on nodes' gradients g, over draws of their batches.

    error: sqrt(E||e||^2 / E||g||^2), e being the rounding error of one message: quantization_error_gradients.
    added: by which share it raises the noise, tr Cov(g + e) / tr Cov(g) - 1. bias: ||E e|| / ||E g||, 0 where the
    draws do not show one.
    """

    error: float
    added: float
    bias: float


def noise(draws: torch.Tensor) -> tuple[float, float]:
    """Return (||E g||^2, tr Cov g) of draws [m, n], both without bias; the first may be below 0."""
    mean = draws.mean(0, dtype=torch.float64)
    spread = float((draws - mean).square().sum()) / (len(draws) - 1)
    return float(mean.square().sum()) - spread / len(draws), spread


def compare(draws: Sequence[torch.Tensor], coding: Blockwise) -> Added:
    """draws: of each parameter [m, n]."""
    sums = torch.zeros(5, dtype=torch.float64)
    for g in draws:
        sent = rounded(coding, g)
        error = sent - g
        (mean, spread), (bias, _) = noise(g), noise(error)
        squares = [float(x.double().square().sum()) / len(g) for x in (error, g)]
        sums += torch.tensor([*squares, noise(sent)[1] - spread, bias, mean], dtype=torch.float64)
    spread = sum(noise(g)[1] for g in draws)
    error, whole, more, bias, mean = sums.tolist()
    relative = (max(0.0, bias) / mean) ** 0.5 if mean > 0 else float("nan")
    return Added((error / whole) ** 0.5, more / spread, relative)


def grouped(draws: Mapping[str, torch.Tensor], size: int) -> dict[str, torch.Tensor]:
    """Return the gradients of batches ``size`` times as large."""
    return {name: g.view(-1, size, g.shape[1]).mean(1) for name, g in draws.items()}


def gradients(
    folder: Path, settings: Settings, model: Decoder, names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Return gradients [NODES, n] by matrix, each row of one rank's batch."""
    data = train_samples(folder, settings.sequence, SEED, NODES * settings.micro_batch)
    drawn: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    with Batches(data, micro_batch_size=settings.micro_batch, rank=0, size=1) as batches:
        for batch in batches.next_step(NODES):
            found = gradients_of(model, batch, settings.micro_batch * settings.sequence)
            for name in names:
                drawn[name].append(found[name].view(-1))
    return {name: torch.stack(rows) for name, rows in drawn.items()}


def rows(rung: str, folder: Path, settings: Settings) -> Iterator[dict]:
    wanted = [max(1, round(phase * settings.steps)) for phase in PHASES]
    for step, model, sums, _ in steps(folder, settings, wanted, RANKS):
        whole = gradients(folder, settings, model, list(sums))
        for size in BATCHES:
            draws = grouped(whole, size)
            for kind, words in {ALL: ("",), **KINDS}.items():
                found = [g for name, g in draws.items() if any(word in name for word in words)]
                mean, spread = (sum(each) for each in zip(*map(noise, found), strict=True))
                yield {
                    "rung": rung,
                    "step": step,
                    "steps": settings.steps,
                    "peak": settings.peak,
                    "tokens": size * settings.micro_batch * settings.sequence,
                    "kind": kind,
                    "noise": spread / mean if mean > 0 else None,
                    **{name: asdict(compare(found, GRADIENTS[name])) for name in CODECS},
                }


def measured(store: harness.Store, rung: str, settings: Settings) -> bool:
    """Return whether the rung's last step is there at this peak, which the ladder may change."""
    key = (rung, settings.steps, settings.peak)
    return any((row["rung"], row["step"], row["peak"]) == key for row in store.records())


def main() -> None:
    options = harness.parser(
        __doc__, work=Path("runs/loss"), out=PAGES, rungs=["0.3M x 1", "0.3M x 4", "1.3M x 1"]
    ).parse_args()
    torch.set_num_threads(1)
    data = data_of(options.out)
    runs, store = (
        Runs(data / "loss_at_size.jsonl"),
        harness.Store(data / "loss_at_size_noise.jsonl"),
    )
    store.claim()
    for name in options.rungs:
        settings = RUNGS[name].tuned_settings(runs) or RUNGS[name].settings()
        if measured(store, name, settings):
            continue
        folder = runs.data(options.work, settings)
        for row in list(rows(name, folder, settings)):
            store.append(row)
        print(name, flush=True)


if __name__ == "__main__":
    harness.start(main)
