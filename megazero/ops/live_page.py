"""Keeps LOG_DIR/report.html up to date while a run lasts, by `megazero report` in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
import warnings

EVERY_S = 60.0  # a page is begun at most so often
LAST_S = 30.0  # that the run's end waits for a page: one of 100,000 iterations takes 8 s of a core


class LivePage:
    """The page of a run, on its first rank. Why a page fails is said by its process: training goes on."""

    def __init__(self, log_dir: str) -> None:
        self._command = [sys.executable, "-m", "megazero", "report", log_dir]
        self._process: subprocess.Popen[bytes] | None = None
        self._due = 0.0

    def tick(self) -> None:
        """Begin a page if it is time for one."""
        if time.monotonic() >= self._due and (self._process is None or self._process.poll() is not None):
            self._due = time.monotonic() + EVERY_S
            try:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
                )
            except OSError as error:
                warnings.warn(f"--report: no page is written ({error}); training goes on", stacklevel=2)

    def close(self) -> None:
        """Write the page for the last time, and wait for it."""
        for last in (False, True):
            if last:
                self._due = 0.0
                self.tick()
            try:
                if self._process is not None:
                    self._process.wait(LAST_S)
            except subprocess.TimeoutExpired:
                return
