"""Keeps LOG_DIR/report.html up to date while a run lasts, by `megazero report` in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

EVERY_S = 60.0  # a page is begun at most so often, and takes no longer part of the time than SHARE
SHARE = 0.05  # of a core
LAST_S = 20.0  # that the run's end waits for a page


class LivePage:
    """The page of a run, on its first rank. warn: prints a line; a page that fails is told of once."""

    def __init__(self, log_dir: str, warn: Callable[[str], None]) -> None:
        self.log_dir, self.warn = log_dir, warn
        self._process: subprocess.Popen[str] | None = None
        self._began = self._due = 0.0
        self._told = False

    def tick(self) -> None:
        """Begin a page if it is time for one."""
        if time.monotonic() >= self._due and self._ended(0.0):
            self._begin()

    def close(self) -> None:
        """Write the page for the last time, and wait for it."""
        if self._ended(LAST_S):
            self._begin()
            self._ended(LAST_S)

    def _begin(self) -> None:
        self._began = time.monotonic()
        self._due = self._began + EVERY_S
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megazero", "report", self.log_dir],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            self._fail(f"{error}")

    def _ended(self, wait_s: float) -> bool:
        """Tell whether no page is being written any more, after ``wait_s`` seconds at most."""
        if self._process is None:
            return True
        try:
            _, said = self._process.communicate(timeout=wait_s)
        except subprocess.TimeoutExpired:
            return False
        now, status = time.monotonic(), self._process.returncode
        self._due = max(self._due, now + (now - self._began) / SHARE)
        self._process = None
        if status:
            self._fail((said.strip().splitlines() or [f"exit status {status}"])[-1])
        return True

    def _fail(self, why: str) -> None:
        if not self._told:
            self.warn(f"--report: {self.log_dir} has no new page: {why}; training goes on")
        self._told = True
