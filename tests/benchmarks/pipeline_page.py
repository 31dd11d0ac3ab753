"""docs/pipeline.md: each benchmark of pipelines writes its own section and leaves the others."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "pipeline.md"
HEAD = """# Pipelines: measurements

Each section is written by the program it names. Ranks are processes with gloo on one machine. Figures are medians (least to
most) unless stated otherwise.
"""
BUBBLE, BYTES, STEP_TIME, SPLIT = (
    "Bubble against theory",
    "Bytes between nodes",
    "Step time against torch's pipelining and FSDP2",
    "Split backward: torch's and ours",
)
TITLES = (BUBBLE, BYTES, STEP_TIME, SPLIT)


def sections(text: str) -> dict[str, str]:
    """Title to text of each section of a page."""
    found = (part.partition("\n") for part in text.split("\n## ")[1:])
    return {title.strip(): body.strip("\n") for title, _, body in found}


def write_section(title: str, text: str, page: Path = PAGE) -> None:
    """Put ``text`` under ``title``, the sections in the order of TITLES. ValueError for another title."""
    if title not in TITLES:
        raise ValueError(f"section {title!r} is not one of {', '.join(TITLES)}")
    every = {**(sections(page.read_text()) if page.exists() else {}), title: text.strip("\n")}
    blocks = [f"## {name}\n\n{every[name]}\n" for name in TITLES if name in every]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join([HEAD, *blocks]))


def setting() -> str:
    """What a section was measured on, in words."""
    return f"{os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
