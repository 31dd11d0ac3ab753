"""State has one writer: nobody but the owner assigns to what a unit is, and to its weights, gradients and masters."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT
from tests.unit.house.test_imports import imports, module_name, parsed, sources

ZERO = ROOT / "megazero" / "zero"
OWNERS = {
    "Form": "form.py",
    "Unit": "unit.py",
    "Master": "masters.py",
    "Weights": "weights.py",
    "Gradients": "gradients.py",
}


# Attributes of other classes that have a name of theirs; ``grad`` of Parameters is torch's.
OTHERS = {"transit.ticket", "step.gradients"}


def class_named(name: str) -> ast.ClassDef:
    every = ast.walk(parsed(ZERO / OWNERS[name]))
    return next(node for node in every if isinstance(node, ast.ClassDef) and node.name == name)


def written(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes that are assigned to or deleted, in tuples and loops, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield node


def is_own(target: ast.Attribute) -> bool:
    return isinstance(target.value, ast.Name) and target.value.id == "self"


def attributes(name: str) -> set[str]:
    """What an owner's instances hold: its fields, and what its methods assign."""
    cls = class_named(name)
    fields = {
        node.target.id
        for node in cls.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return fields | {target.attr for target in written(cls) if is_own(target)}


STATE = set().union(*map(attributes, OWNERS))


def foreign(tree: ast.AST) -> list[str]:
    """Assignments to the owners' attributes through anything but ``self``, and past a frozen class's own refusal."""
    found = [ast.unparse(target) for target in written(tree) if target.attr in STATE and not is_own(target)]
    theirs = {each for each in found if each.endswith(".grad") and not each.endswith("gradients.grad")}
    found = [each for each in found if each not in OTHERS | theirs]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "object.__setattr__"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and name.value in STATE:
                found.append(ast.unparse(node))
    return found


def uses_zero(path: Path) -> bool:
    """Whether a file can have a unit in its hands."""
    named = (name for name, _ in imports(parsed(path), module_name(path), path.name == "__init__.py"))
    return path.parent == ZERO or any(name.startswith("megazero.zero") for name in named)


@pytest.mark.parametrize(
    "line",
    ["unit.weights.version = 1", "held.staging, held.staged = None, None", "del u.full", "for unit.part in x: pass",
     "each.backwards += 1", "unit.gradients.grad = x", "self.weights.ticket = x",
     "object.__setattr__(unit, 'tied', True)"],
)  # fmt: skip
def test_a_foreign_write_is_found(line: str) -> None:
    assert foreign(ast.parse(line))
    assert not foreign(ast.parse("self.version = 1; unit.weights.refreshed(); version = full = 2"))


def test_units_are_frozen() -> None:
    for name in ("Form", "Unit"):
        (decorator,) = class_named(name).decorator_list
        assert "frozen=True" in ast.unparse(decorator)


def test_only_owners_write_their_state() -> None:
    assert {"name", "value", "version", "full", "copy", "ticket", "grad", "staging"} <= STATE
    every = (*sources(), *(ROOT / "benchmarks").rglob("*.py"))
    users = [path for path in every if uses_zero(path)]
    assert len(users) > 30
    found = {path.relative_to(ROOT).as_posix(): lines for path in users if (lines := foreign(parsed(path)))}
    assert not found


def test_owners_write_each_other_by_their_verbs() -> None:
    """A file that has an owner assigns by ``self`` in the owner's own class alone."""
    for name, file in OWNERS.items():
        outside = [
            node
            for node in parsed(Path(ZERO / file)).body
            if not isinstance(node, ast.ClassDef) or node.name != name
        ]
        assert not [ast.unparse(target) for node in outside for target in written(node)], file
