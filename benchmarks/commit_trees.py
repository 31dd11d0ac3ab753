"""Another commit's code beside this working tree's, for programs that run both. No torch.

A process imports one of the two. ``megazero`` is not importable from a bare checkout, since setup.cfg maps
megazero.kernels to another folder, and an editable install would fill the gap with this tree's kernels. So each tree
gets a folder of links that is laid out as an installation is.
"""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HERE = "this tree"
IMPORTS = "MEGAZERO_IMPORTS"  # environment variable of a started process: the folder that megazero is in


@dataclass(frozen=True)
class Tree:
    """Code to run. name: for people. imports: the folder that ``megazero`` and this tree's ``tests`` are in."""

    name: str
    imports: Path

    def start(self, code: str, *arguments: str, **options: Any) -> subprocess.Popen:
        """A Python process with this tree's megazero. code: of ``python -c``. options: of Popen."""
        environment = {**os.environ, "PYTHONPATH": str(self.imports), IMPORTS: str(self.imports)}
        # Not the current folder, which may hold another megazero; no compiled files in the trees.
        environment |= {"PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment, **options)


# Programs of both trees' processes.
STARTED = ("commit_trees.py", "compare_commits_rank.py", "step_time_rank.py")


@contextmanager
def two_trees(ref: str) -> Iterator[tuple[Tree, Tree]]:
    """The commit ``ref`` of git and this working tree. Raises ValueError where git has no such commit."""
    with tempfile.TemporaryDirectory(prefix="megazero-commits-") as folder, worktree(ref) as (commit, path):
        yield (
            Tree(f"{ref} ({commit[:7]})", link_imports(path, Path(folder) / "ref")),
            Tree(HERE, link_imports(ROOT, Path(folder) / "here")),
        )


@contextmanager
def worktree(ref: str) -> Iterator[tuple[str, Path]]:
    """The full hash of a commit and a temporary git worktree of it, which is removed in the end."""
    commit = git("rev-parse", "--verify", f"{ref}^{{commit}}").strip()
    with tempfile.TemporaryDirectory(prefix="megazero-worktree-") as folder:
        path = Path(folder) / "tree"
        git("worktree", "add", "--quiet", "--detach", str(path), commit)
        try:
            yield commit, path
        finally:
            git("worktree", "remove", "--force", str(path))


def git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(
            f"git {' '.join(words)}: {done.stderr.strip()}; --against takes a commit of this checkout, e.g. HEAD~1"
        )
    return done.stdout


def link_imports(tree: Path, folder: Path) -> Path:
    """``folder``, made with links to a checkout's megazero, laid out as its setup.cfg says, and to its benchmarks and
    tests, which call it by the names that it has. What is started in both trees is ours."""
    for made in ("megazero", "benchmarks"):
        (folder / made).mkdir(parents=True)
        where = tree / made
        for entry in where.iterdir() if where.exists() else ():
            if entry.name not in STARTED:
                (folder / made / entry.name).symlink_to(entry)
    (folder / "tests").symlink_to(tree / "tests")
    for name in STARTED:
        (folder / "benchmarks" / name).symlink_to(ROOT / "benchmarks" / name)
    for module, where in package_folders((tree / "setup.cfg").read_text()).items():
        (folder / module.replace(".", "/")).symlink_to(tree / where)
    return folder


def package_folders(setup: str) -> dict[str, str]:
    """package_dir of a setup.cfg: module -> folder."""
    parser = configparser.ConfigParser()
    parser.read_string(setup)
    lines = parser.get("options", "package_dir", fallback="").split("\n")
    return {
        module.strip(): where.strip() for module, _, where in (line.partition("=") for line in lines) if where
    }


def refuse_other_code(modules: Mapping[str, Any] | None = None) -> None:
    """In a started process: RuntimeError if a module of megazero came from anywhere but its tree."""
    own, loaded = os.environ[IMPORTS] + os.sep, sys.modules if modules is None else modules
    files = {
        name: getattr(module, "__file__", None)
        for name, module in loaded.items()
        if name.split(".")[0] == "megazero"
    }
    wrong = [f"{name} from {file}" for name, file in files.items() if file and not file.startswith(own)]
    if wrong or not files:
        raise RuntimeError(f"not of the tree {own}: {', '.join(wrong) or 'megazero was not imported'}")
