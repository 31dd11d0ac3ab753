"""The study of the outer optimizer's rules: what a meeting does, and the page."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks.loss.outer_rules import INTERVALS, MOMENTA, RATES, Branch, Run, branches, page


def test_replicas_go_on_from_the_anchor_that_the_rule_has_stepped() -> None:
    anchor = [torch.tensor([1.0, 2.0])]
    rule = torch.optim.SGD(anchor, lr=0.5, momentum=0.9, nesterov=True)
    run = Run.__new__(Run)
    run.replicas = [SimpleNamespace(params=[torch.tensor(own)]) for own in ([3.0, 2.0], [1.0, 4.0])]
    run._meet(anchor, rule)
    # Differences to the anchor are -1 and -1 on average; the first Nesterov step takes 1.9 of them.
    assert torch.allclose(anchor[0], torch.tensor([1.95, 2.95]))
    assert all(torch.equal(replica.params[0], anchor[0]) for replica in run.replicas)


def test_the_page_has_every_gap() -> None:
    every = list(branches(["AdamW"], [1, 2]))
    assert len(set(every)) == len(every) == 2 * (1 + len(INTERVALS) * len(RATES) * len(MOMENTA))
    losses = {branch: 2.0 + 0.01 * branch.interval * branch.momentum * branch.seed for branch in every}
    text = page(losses, "the command")
    assert "| 0.7 | +0.00 (+0.00 to +0.00) | +3.00 (+2.00 to +4.00) |" in text  # every 8 steps
    assert "every 32 steps. All replicas in every step: 2.0000." in text and "mean of 2 seeds" in text
    with pytest.raises(KeyError):
        page({Branch("AdamW", 1): 2.0}, "the command")
