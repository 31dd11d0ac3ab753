"""Another commit's checkout beside this working tree, for programs that run both, each by its own scripts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT


@dataclass(frozen=True)
class Tree:
    """A checkout to run. name: for people."""

    name: str
    path: Path


class TreeRanks:
    """Runs jobs of tree_ranks.py in a tree. A context manager; it ends every process that it started."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        environment = {**os.environ, "PYTHONPATH": str(tree.path), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            # -P: a checkout's modules come from its own folder, not from the one of tree_ranks.py.
            [sys.executable, "-P", str(Path(__file__).with_name("tree_ranks.py")), str(tree.path)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ask(self, job: Any) -> Any:
        """Return the answer to a job. Raises RuntimeError if the process has ended; it printed why."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(job), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            raise RuntimeError(f"{self.tree.name}: its runs ended; what they said is above") from None

    def __enter__(self) -> TreeRanks:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@contextmanager
def two_trees(ref: str) -> Iterator[tuple[Tree, Tree]]:
    """Yield git's commit ``ref``, in a temporary worktree, and this tree. Raises ValueError if git has no such
    commit."""
    commit = git("rev-parse", "--verify", f"{ref}^{{commit}}").strip()
    with tempfile.TemporaryDirectory(prefix="megazero-worktree-") as folder:
        path = Path(folder).resolve() / "tree"
        git("worktree", "add", "--quiet", "--detach", str(path), commit)
        try:
            yield Tree(f"{ref} ({commit[:7]})", path), Tree("this tree", ROOT)
        finally:
            git("worktree", "remove", "--force", str(path))


def git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(
            f"git {' '.join(words)}: {done.stderr.strip()}; --against takes a commit of this checkout, e.g. HEAD~1"
        )
    return done.stdout
