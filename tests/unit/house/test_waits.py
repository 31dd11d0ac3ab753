"""Every place where a rank waits for others sets ``waiting``: else the watchdog names this rank at a hang, too."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests import ROOT
from tests.unit.house.test_imports import parsed

# No watchdog runs there.
UNWATCHED = (
    *("calibrate/", "patches/", "verify/", "mesh/local_ranks.py"),
    "train/evaluate_command.py",
)
# Called inside a wait, or where the host does not wait.
INSIDE = {("comm/lane.py", "_landed"), ("pp/links.py", "_finish"), ("mesh/objects.py", "_exchanged")}
COLLECTIVES = {
    *(
        f"dist.{name}"
        for name in ("all_gather", "all_reduce", "all_to_all_single", "barrier", "broadcast", "gather")
    ),
    *(f"dist.{name}" for name in ("send", "recv", "init_process_group")),
    *("all_gather_flat", "reduce_scatter_flat"),
}


def waits_in(node: ast.AST, inside: bool = False, function: str = "") -> Iterator[tuple[int, str, bool]]:
    """Yield line and function of every wait for other ranks below, and whether ``waiting`` is set there."""
    if isinstance(node, ast.FunctionDef):
        inside |= any("waiting" in ast.unparse(each) for each in node.decorator_list)
        function = node.name
    if isinstance(node, ast.With):
        inside |= any("wait" in ast.unparse(item.context_expr) for item in node.items)
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        waits = called in COLLECTIVES and "async_op=True" not in ast.unparse(node)
        if waits or called.endswith("work.wait"):
            yield node.lineno, function, inside
    for child in ast.iter_child_nodes(node):
        yield from waits_in(child, inside, function)


def test_who_waits_for_other_ranks_says_so() -> None:
    found = {
        (str(path.relative_to(ROOT / "megazero")), function, line): inside
        for path in (ROOT / "megazero").rglob("*.py")
        for line, function, inside in waits_in(parsed(path))
    }
    assert len(found) > 20
    silent = [
        f"{file}:{line} {function}"
        for (file, function, line), inside in found.items()
        if not inside and not file.startswith(UNWATCHED) and (file, function) not in INSIDE
    ]
    assert silent == []
