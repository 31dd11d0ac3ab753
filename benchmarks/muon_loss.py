"""Muon beside AdamW at equal tokens, with exact and with quantised messages.

    python benchmarks/muon_loss.py --work runs/loss [--steps 300] [--seeds 1 2] [--peaks 1e-3 2e-3 4e-3]

The model, text and ranks of loss.py: 4 gloo ranks as 2 nodes of 2. Every contestant is run at every peak rate with
the first seed, and with the other seeds at its best one. Muon has Megatron's defaults but for updates of AdamW's size
(an extra scale of 0.2) and Nesterov's momentum of 0.95. Each run is one line in WORK/muon.jsonl, so the same command
goes on where it stopped.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness, loss_run
from benchmarks.loss_data import prepare
from benchmarks.loss_run import RANKS, Run, Settings
from megazero import zero
from tests.dist.pool import run_ranks

CONTESTANTS = [(name, messages) for messages in ("zero3", "zeropp") for name in ("adamw", "muon")]


def traits(matrices: dict[str, int | None], name: str, param: Any) -> zero.Traits:
    return zero.Traits((("weight_decay", 0.0),) if param.ndim < 2 else (), matrix=name in matrices)


def train(folder: str, settings: Settings, run: Run, optimizer: str) -> dict[str, Any]:
    """A run of loss.py under another optimizer, on every rank."""
    options: dict[str, Any] = {}
    if optimizer == "muon":
        muon = {"momentum": 0.95, "nesterov": True, "extra_scale": 0.2, "betas": (0.9, 0.95)}
        options["optimizer"] = partial(zero.Muon, lr=settings.peak, weight_decay=0.1, **muon)
        options["traits"] = partial(traits, settings.decoder().matrices())
    with patch.object(loss_run, "shard", partial(loss_run.shard, **options)):
        return loss_run.train(Path(folder), settings, run)


def main() -> None:
    options = harness.parser(
        __doc__, work=Path, steps=300, seeds=[1, 2], peaks=([1e-3, 2e-3, 4e-3], "of the learning rate")
    ).parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    store = harness.Store(options.work / "muon.jsonl")
    first = Settings(steps=options.steps, warmup=max(options.steps // 10, 1))
    data = options.work / f"data-{first.vocabulary}"
    prepare(data, first.vocabulary)

    def loss(optimizer: str, messages: str, peak: float, seed: int) -> dict[str, Any]:
        settings = replace(first, peak=peak)
        key = {"optimizer": optimizer, "messages": messages, "seed": seed, "settings": asdict(settings)}
        for record in store.records():
            if record["key"] == key:
                return record
        found = run_ranks(RANKS, train, str(data), settings, Run(messages, seed), optimizer, timeout=1800)[0]
        store.append({"key": key, **{name: found[name] for name in ("loss", "sent", "seconds")}})
        print(f"{optimizer}, {messages}, peak {peak:g}, seed {seed}: {found['loss']:.4f}", flush=True)
        return store.records()[-1]

    rows = []
    for optimizer, messages in CONTESTANTS:
        by_peak = {peak: loss(optimizer, messages, peak, options.seeds[0]) for peak in options.peaks}
        best = min(by_peak, key=lambda peak: by_peak[peak]["loss"])
        runs = [loss(optimizer, messages, best, seed) for seed in options.seeds]
        losses = [record["loss"] for record in runs]
        tuned = ", ".join(f"{record['loss']:.4f} at {peak:g}" for peak, record in by_peak.items())
        sent = statistics.fmean(record["sent"] for record in runs) / 1e6
        rows.append([optimizer, messages, tuned, f"{best:g}", harness.spread(losses, 4), f"{sent:.2f}"])
    header = ["optimizer", "messages", "first seed", "best", "loss (range over seeds)", "MB a step and node"]
    print(harness.table(header, rows))


if __name__ == "__main__":
    harness.start(main)
