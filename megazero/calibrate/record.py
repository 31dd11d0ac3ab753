"""Writes measurements as a cluster file. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from megazero.config.options.cluster import TABLES, Cluster, parse_cluster
from megazero.files import write_text

Rows = list[dict[str, Any]]


def links(collectives: Rows, memory_gbytes_per_s: float, ranks_per_node: int) -> dict[str, dict[str, float]]:
    """Return the sections of the links: rates of the largest gathers or exchanges, latencies of the smallest.

    Rows have the bytes of one rank while all ranks of a node send: a node's link carries as many times more. A link
    that does not exist (one rank per node, or one node) gets the other one's figures, or the memory's.
    """
    rates: dict[bool, tuple[float, float]] = {}
    for across in (False, True):
        rows = [
            r for r in collectives if r["operation"] in ("gather", "exchange") and (r["nodes"] > 1) == across
        ]
        if rows:
            rate = max(r["bytes"] / r["seconds"] for r in rows)
            rates[across] = rate, min(r["seconds"] / (r["ranks"] - 1) for r in rows)
    inside, latency = rates.get(False) or rates.get(True) or (memory_gbytes_per_s * 1e9, 0.0)
    outside, delay = rates.get(True) or (inside, latency)
    return {
        "intra_node": {"gbytes_per_s": inside / 1e9, "latency_us": latency * 1e6},
        "inter_node": {
            "gbits_per_s": outside * ranks_per_node * 8 / 1e9,
            "latency_us": delay * 1e6,
            "efficiency": 1.0,
        },
    }


def cluster_text(sections: Mapping[str, Any]) -> str:
    """Return a cluster file: scalars and sections first, then a line for each row of the tables."""

    def flow(value: Any) -> str:
        return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6).strip()

    rounded = json.loads(json.dumps(sections), parse_float=lambda text: float(f"{float(text):.5g}"))
    lines = [
        "# Written by megazero calibrate. bytes: that a rank sends. busy: seconds of a processor that it takes."
    ]
    for key, value in rounded.items():
        if key in TABLES:
            lines += [f"{key}:", *(f"- {flow(row)}" for row in value)]
        elif isinstance(value, dict):
            lines += [f"{key}:", *(f"  {name}: {json.dumps(entry)}" for name, entry in value.items())]
        else:
            lines.append(f"{key}: {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def write_cluster(path: Path, sections: Mapping[str, Any]) -> Cluster:
    """Write a cluster file, which is replaced as a whole, and return what the planner reads in it."""
    text = cluster_text(sections)
    cluster = parse_cluster(text, str(path))
    write_text(path, text)
    return cluster
