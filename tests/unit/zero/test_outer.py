"""Outer steps: the defaults of an own loop, and checkpoints of other runs. No ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megazero.checkpoint.errors import CheckpointError
from megazero.config.options.sections import OuterConfig
from megazero.train.parallelize import make_outer
from megazero.train.state.origin import _replicas
from megazero.train.state.progress import Progress
from megazero.zero import Outer
from tests.messages import refused


def test_an_own_loop_has_the_defaults_of_the_flags() -> None:
    assert Outer() == make_outer(OuterConfig())
    with refused("momentum=1", "wires=0"):
        Outer(momentum=1.0, wires=0)


def test_a_run_says_that_it_leaves_others_or_comes_to_some_and_old_checkpoints_why_they_cannot_go_on() -> (
    None
):
    alone: Any = SimpleNamespace(state={}, progress=Progress(), path="here")
    among: Any = SimpleNamespace(state={}, progress=Progress(meeting={"dealt": {}}), path="here")
    assert not list(_replicas(False, alone)) and not list(_replicas(True, among))
    (comes,), (leaves,) = _replicas(True, alone), _replicas(False, among)
    assert "begins from its weights and moments" in comes and "goes on without other replicas" in leaves
    old: Any = SimpleNamespace(state={"replicas": [{}, {}]}, progress=Progress(), path="here")
    with refused("'here'", "2 outer replicas of one launch", "--finetune", by=CheckpointError):
        list(_replicas(True, old))
