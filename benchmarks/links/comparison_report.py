"""The comparison's tables, a table for each heat. Pure functions of comparison.json."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import harness

Result = Mapping[str, Any]  # of one rate, number of micro-batches and heat
BASELINE = "FSDP2"
OVER_RATES = {"megazero zeropp": "sharded", "FSDP2": "sharded", "HSDP once": "sharded", "DDP": "replicated"}


def sent(result: Result, name: str) -> float:
    """Return the bytes per step of the node that sent most, averaged over rounds."""
    return statistics.mean(max(turn) for turn in result["sent"][name])


def heat_table(results: Sequence[Result]) -> str:
    """Return the table of one heat's results: by number of micro-batches the bytes over 2N, the model in bf16, with
    those of a meeting's step behind them; by rate the seconds of a step, and how many times as fast as FSDP2 that is,
    round by round."""
    counts = sorted({result["micro_batches"] for result in results})
    header = ["", *(f"bytes / 2N, {count}" for count in counts)]
    header += [f"{result['rate']}, {result['micro_batches']}" for result in results]
    rows = []
    for name in sorted(
        results[0]["seconds"], key=lambda name: statistics.median(results[0]["seconds"][name])
    ):
        ran = [result for result in results if name in result["seconds"]]
        row = [name]
        for count in counts:
            own = [result for result in ran if result["micro_batches"] == count]
            row.append(_bytes(max(own, key=lambda result: sent(result, name)), name) if own else "")
        row += [_seconds(result, name) if result in ran else "" for result in results]
        rows.append(row)
    return harness.table(header, rows)


def _bytes(result: Result, name: str) -> str:
    whole = 2 * result["elements"]
    most = result.get("most", {}).get(name)
    return f"{sent(result, name) / whole:.3f}" + (f", most {most / whole:.3f}" if most else "")


def _seconds(result: Result, name: str) -> str:
    own, base = result["seconds"][name], result["seconds"].get(BASELINE)
    times = f"; {statistics.median(harness.ratios(base, own)):.2f}" if base and name != BASELINE else ""
    return harness.spread(own, 2) + times


def byte_lines(results: Sequence[Result]) -> list[str]:
    """Return the ranges of the bytes at the interfaces over the formulas', and over the engines' own counters."""
    formula = [sent(r, name) / r["formula"][name] for r in results for name in r["formula"]]
    counted = [
        sum(map(sum, r["sent"][name])) / total
        for r in results
        for name in r["seconds"]
        if (total := sum(map(sum, r["counted"][name])))
    ]
    pairs = (("the formulas", formula), ("the engines' counters", counted))
    return [f"bytes over those of {what}: {min(x):.3f} to {max(x):.3f}" for what, x in pairs if x]


def tables(results: Sequence[Result]) -> dict[str, str]:
    """Return the table of each heat."""
    heats = dict.fromkeys(result["heat"] for result in results)
    return {heat: heat_table([r for r in results if r["heat"] == heat]) for heat in heats}
