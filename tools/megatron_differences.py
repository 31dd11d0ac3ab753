"""Where megazero and Megatron differ in what a flag means, by hand. tools/megatron_page.py prints it."""

from __future__ import annotations

# (flag, what Megatron does, what megazero does, why)
DIFFERENCES: list[tuple[str, str, str, str]] = []
