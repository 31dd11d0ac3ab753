"""No forward of an autograd.Function returns a tensor that an operation in place wrote, but through a view."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests import ROOT
from tests.unit.house.test_imports import parsed, sources


def in_place(node: ast.AST) -> bool:
    """Whether an operation returns a tensor that it was given."""
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    return name.endswith("_") and not name.endswith("__") or any(each.arg == "out" for each in node.keywords)


def written(forward: ast.AST) -> Iterator[str]:
    """The names of what was written in place, and of what such an operation returned."""
    for node in ast.walk(forward):
        if isinstance(node, ast.AugAssign):
            yield ast.unparse(node.target)
        elif isinstance(node, ast.Assign) and any(map(in_place, returned(node.value))):
            yield from map(ast.unparse, node.targets)
        elif isinstance(node, ast.Call) and in_place(node):
            yield from (ast.unparse(each.value) for each in node.keywords if each.arg == "out")
            if isinstance(node.func, ast.Attribute):
                yield ast.unparse(node.func.value)


def returned(node: ast.AST | None) -> Iterator[ast.AST]:
    if isinstance(node, ast.IfExp):
        node = ast.Tuple([node.body, node.orelse])
    if isinstance(node, ast.Tuple | ast.List):
        for each in node.elts:
            yield from returned(each)
    elif node is not None:
        yield node


def wrong(tree: ast.AST) -> list[str]:
    """What forwards return and may not: under torch 2.11 compiled, it has no gradient, or another's."""
    found = []
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        if not any(ast.unparse(base).endswith("Function") for base in function.bases):
            continue
        for forward in function.body:
            if isinstance(forward, ast.FunctionDef) and forward.name == "forward":
                names = set(written(forward))
                ends = (node.value for node in ast.walk(forward) if isinstance(node, ast.Return))
                found += [
                    f"{function.name}: {ast.unparse(each)}"
                    for end in ends
                    for each in returned(end)
                    if in_place(each) or ast.unparse(each) in names
                ]
    return found


@pytest.mark.parametrize(
    ("body", "bad"),
    [
        ("return x.mul_(2)", True),
        ("return torch.mul(x, 2, out=torch.empty_like(x))", True),
        ("out = (x * 2).exp_(); return out, x", True),
        ("out = x * 2; out += 1; return out if x.ndim else x", True),
        ("out = torch.empty_like(x); torch.mul(x, 2, out=out); return out", True),
        ("out = x * 2; out.view_as(out).mul_(2); return out", False),
        ("out = torch.empty_like(x); torch.mul(x, 2, out=out.view_as(out)); return out", False),
        ("norm = x.norm().sqrt_(); return x * norm", False),
    ],
)
def test_a_result_in_place_is_found(body: str, bad: bool) -> None:
    lines = "\n        ".join(body.split("; "))
    tree = f"class F(torch.autograd.Function):\n    def forward(ctx, x):\n        {lines}\n"
    assert bool(wrong(ast.parse(tree))) == bad


def test_no_forward_returns_what_was_written_in_place() -> None:
    every = (*sources(), *(path for top in ("benchmarks", "tests") for path in (ROOT / top).rglob("*.py")))
    found = {str(path.relative_to(ROOT)): lines for path in every if (lines := wrong(parsed(path)))}
    assert not found
