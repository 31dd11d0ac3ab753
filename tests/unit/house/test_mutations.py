"""The table of seeded faults fits the code, and their tests are run."""

from __future__ import annotations

import ast

import pytest

from tests import ROOT
from tests.mutations import Mutation, mutations


def test_every_mutation_is_still_one_change_and_its_test_is_there() -> None:
    for each in mutations():
        text = (ROOT / each.path).read_text()
        assert ast.dump(ast.parse(each.apply(text))) != ast.dump(ast.parse(text)), each.old
        file, _, name = each.test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(), each.test


def test_a_text_that_is_not_there_once_is_refused() -> None:
    for old in ("gone", "once"):
        with pytest.raises(ValueError, match="times, not once"):
            Mutation("module.py", old, "", "", "").apply("once, and once more")
