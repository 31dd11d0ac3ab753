"""Muon beside AdamW at equal tokens, with exact and with quantised messages.

    python -m benchmarks.loss.muon --work runs/loss [--steps 300] [--seeds 1 2] [--peaks 1e-3 2e-3 4e-3]

The model, text and ranks of study.py: 4 ranks as 2 nodes of 2. Every contestant is run at every peak rate with the
first seed, and with the other seeds at its best one. Muon has Megatron's defaults but for updates of AdamW's size
(an extra scale of 0.2) and Nesterov's momentum of 0.95. Each run is one line in WORK/muon.jsonl, so the same command
goes on where it stopped.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import harness
from benchmarks.loss.plan import Record, Runs, taken
from benchmarks.loss.run import Run, Settings
from benchmarks.loss.study import Trainer
from benchmarks.loss.variants import BY_MUON


def main() -> None:
    options = harness.parser(
        __doc__, work=Path, steps=300, seeds=[1, 2], peaks=([1e-3, 2e-3, 4e-3], "of the learning rate")
    ).parse_args()
    torch.set_num_threads(1)
    store = Runs(options.work / "muon.jsonl")
    store.claim()
    trainer = Trainer(options.work, store)
    first = Settings(steps=options.steps, warmup=max(options.steps // 10, 1))

    def run(name: str, peak: float, seed: int) -> Record:
        settings, one = replace(first, peak=peak), Run(name, seed)
        trainer(settings, one)
        return store.results(settings).runs[one]

    rows = []
    for name in (each for muon, plain in BY_MUON.items() for each in (plain, muon)):
        by_peak = {peak: run(name, peak, options.seeds[0])["loss"] for peak in options.peaks}
        best = min(options.peaks, key=lambda peak: by_peak[peak])
        runs = [run(name, best, seed) for seed in options.seeds]
        tuned = ", ".join(f"{loss:.4f} at {peak:g}" for peak, loss in by_peak.items())
        sent = statistics.fmean(record["sent"] for record in runs) / 1e6
        losses = harness.spread([record["loss"] for record in runs], 4)
        rows.append([name, tuned, taken(best, options.peaks), losses, f"{sent:.2f}"])
    header = ["variant", "first seed", "best peak", "loss (range over seeds)", "MB a step and node"]
    print(harness.table(header, rows))


if __name__ == "__main__":
    harness.start(main)
