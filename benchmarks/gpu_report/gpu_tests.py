"""The tests marked gpu, by file: how many pass. Each file is a process of its own; one that is stopped keeps what it
had."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from benchmarks.gpu_report.record import Record
from benchmarks.gpu_report.setting import ROOT, Setting

WORDS = {"PASSED": "passed", "FAILED": "failed", "ERROR": "failed", "SKIPPED": "skipped"}
MANY = {"test_kernels.py": ("-n", "4")}  # tests that compile for long and time nothing
LAST = ("test_fsdp2_patch.py", "test_megatron_patch.py")  # which take a minute or more
# A test's own line, with and without xdist: the summary at the end names failures once more.
OUTCOME = re.compile(
    r"(PASSED|FAILED|ERROR|SKIPPED)(?: \(.*\))?\s+\[ *\d+%\]|\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED) "
)


def run(setting: Setting, record: Record) -> None:
    if importlib.util.find_spec("pytest") is None:
        record.row(file="tests/gpu", reason="pytest is not installed (pip install pytest)")
        return
    files = sorted(
        (ROOT / "tests" / "gpu").glob("test_*.py"), key=lambda file: (file.name in LAST, file.name)
    )
    for file in files:
        many = MANY.get(file.name, ()) if importlib.util.find_spec("xdist") is not None else ()
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-vvrfEs",
            "-m",
            "gpu",
            "-p",
            "no:cacheprovider",
            *many,
            str(file),
        ]
        log = setting.folder / f"{file.stem}.log"
        with open(log, "w") as text:
            try:
                subprocess.run(
                    command,
                    cwd=ROOT,
                    timeout=max(1.0, setting.left - 5),
                    stdout=text,
                    stderr=subprocess.STDOUT,
                )
                reason = {}
            except subprocess.TimeoutExpired:
                reason = {"reason": "not done in the time of this piece"}
        tell(file.relative_to(ROOT), log.read_text(errors="replace"), record, reason)


def tell(file: Path, printed: str, record: Record, reason: dict[str, str]) -> None:
    """Write a row from what pytest printed, and as notes what failed and why tests were skipped."""
    found = Counter(WORDS[one or other] for one, other in OUTCOME.findall(printed))
    if not found and not reason:
        reason = {
            "reason": "pytest ended before any test: "
            + (printed.strip().splitlines() or ["it printed nothing"])[-1]
        }
    record.row(file=str(file), **{word: found[word] for word in ("passed", "failed", "skipped")}, **reason)
    for line in re.findall(r"^(?:FAILED|ERROR|SKIPPED) .*", printed, re.MULTILINE):
        if " - " in line or line.startswith("SKIPPED"):
            record.note(" ".join(line.split())[:240].replace("|", "/"))
