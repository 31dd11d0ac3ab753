"""docs/guide/slurm.md's table from results of test_matrix.py: python -m tests.slurm.matrix_page results.jsonl"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.slurm.pausing import MOMENTS


def cell(result: Mapping[str, Any]) -> str:
    """The state in which a job ended, how often it was restarted, and its curve beside that of an undisturbed run."""
    restarts = result["restarts"]
    times = "" if restarts == 0 else ", 1 restart" if restarts == 1 else f", {restarts} restarts"
    apart = result["apart"]
    bits = "same bits" if result["same bits"] else "not whole" if apart is None else f"within {apart:.0e}"
    return f"{result['state'].lower()}{times}, {bits}"


def table(results: Iterable[Mapping[str, Any]]) -> str:
    """One row for each event, one column for each moment. Of several results of a cell the last one counts."""
    cells = {(result["event"], result["moment"]): cell(result) for result in results}
    rows = [f"| | {' | '.join(MOMENTS)} |", "|---" * (1 + len(MOMENTS)) + "|"]
    for event in dict.fromkeys(event for event, _ in cells):
        rows.append(f"| {event} | {' | '.join(cells.get((event, at), 'not run') for at in MOMENTS)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text().splitlines()
    print(table(json.loads(line) for line in lines))
