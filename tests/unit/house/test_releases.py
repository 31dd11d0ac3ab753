"""What setup.cfg, the Makefile and docs/develop/releases.md say of releases, and torch's private parts in use."""

from __future__ import annotations

import ast
import configparser
import re
from collections.abc import Iterator

from tests import ROOT

NOX = ast.parse((ROOT / "noxfile.py").read_text())
(VALUES,) = (
    n.value for n in NOX.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "RELEASES"
)
RELEASES = {python: of[0].split() for python, of in ast.literal_eval(VALUES).items()}
PAGE = (ROOT / "docs" / "develop" / "releases.md").read_text()
SOURCES = [
    path
    for folder in ("megazero", "kernels", "megatron_core_patch", "fsdp2_patch", "pretrain", "tools")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
NOT_TORCHS = {
    "_asdict",
    "_exit",
    "_current_frames",
    "_DummyThread",
    "_unshard_if_dtensor",
    "_reshard_if_dtensor",
}


def requirements() -> dict[str, str]:
    """Package -> bounds, of what an installation needs and what transformers is for."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    options = config["options"]["install_requires"] + config["options.extras_require"]["hf"]
    return dict(re.match(r"([\w-]+)(.*)", line).groups() for line in options.split())  # type: ignore[union-attr, misc]


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part != "*"]


def test_the_oldest_release_is_the_lower_bounds() -> None:
    oldest = dict(requirement.split("==") for requirement in RELEASES["3.11"])
    floors = {name: bounds.removeprefix(">=").split(",")[0] for name, bounds in requirements().items()}
    assert {name: version.removesuffix(".*") for name, version in oldest.items()} == floors


def test_the_newest_release_is_below_the_upper_bound_and_the_next_is_not() -> None:
    (torch,) = (r.split("==")[1] for r in RELEASES["3.13"] if r.startswith("torch=="))
    major, minor = numbers(torch)[:2]
    assert requirements()["torch"].endswith(f"<{major}.{minor + 1}")
    default = re.search(r"^TORCH \?= torch==(\S+)$", (ROOT / "Makefile").read_text(), re.M)
    assert default and numbers("2.11") <= numbers(default[1]) <= numbers(torch)


def foreign(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """The names with one underscore that a module reads of others, or imports from torch."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        yield from (n for n in names if n.startswith("_") and not n.startswith("__") and n not in own)


def defined(tree: ast.Module) -> Iterator[str]:
    """The names that a module gives to its own functions, classes, variables and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(getattr(node, "ctx", None), ast.Store):
            yield ast.unparse(node).removeprefix("self.")


def test_the_page_lists_every_private_part_of_torch() -> None:
    trees = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in SOURCES}
    own = NOT_TORCHS.union(*(defined(tree) for tree in trees.values())) - {"_version"}
    found: dict[str, set[str]] = {}
    for path, tree in trees.items():
        for name in foreign(tree, own):
            found.setdefault(name, set()).add(path)
    listed = {}
    for line in PAGE.splitlines():
        if line.startswith("| `_"):
            names, paths = (re.findall(r"`([^`]+)`", cell) for cell in line.split("|")[1:3])
            listed |= {name: set(paths) for name in names}
            used = set().union(*(found.get(name, set()) for name in names))
            assert set(paths) == used, f"{names} are used in {sorted(used)}"
    assert found.keys() == listed.keys()
