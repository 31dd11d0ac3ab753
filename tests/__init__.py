"""Tests, and what several of them share."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # of the repository
