"""The numbers of metrics.jsonl as curves over iterations, in 16 bytes a point. This needs no torch."""

from __future__ import annotations

import os
from array import array
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from megazero.log.loggers import scalars
from megazero.log.metrics import METRICS_FILE, decode

MOST = 200  # names of one file


class Curve(NamedTuple):
    """Values by iteration, both of doubles. Iterations ascend."""

    x: array[float]
    y: array[float]

    @classmethod
    def empty(cls) -> Curve:
        return cls(array("d"), array("d"))

    def add(self, x: float, y: float) -> None:
        """Add a point. Those of the same iteration and of later ones go: a restart trained them again."""
        while self.x and self.x[-1] >= x:
            self.x.pop()
            self.y.pop()
        self.x.append(x)
        self.y.append(y)


def read_curves(log_dir: str | os.PathLike[str]) -> Mapping[str, Curve]:
    """Return the curves by their names, nested ones joined by '/': ``time_bill/compute``. Of evaluations of other data
    the data's name follows: ``eval_lm_loss test``. What is torn or has no iteration is passed over.
    """
    curves, path = defaultdict[str, Curve](Curve.empty), Path(log_dir) / METRICS_FILE
    if not path.exists():
        return curves
    with open(path, "rb") as file:
        for row in file:
            try:
                line = decode(row)
                values = dict(scalars(line))
            except (ValueError, OverflowError):  # an integer may be beyond a float
                continue
            iteration = values.pop("iteration", -1.0)
            data = f" {line['eval_data']}" if "eval_data" in line else ""
            for name, value in values.items() if 0 <= iteration < 2**53 else ():
                if name + data in curves or len(curves) < MOST:
                    curves[name + data].add(iteration, value)
    return curves
