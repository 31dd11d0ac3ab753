"""Mixtures of experts on plain tensors: which experts a token goes to, the rows of each expert."""

from megazero.moe.balance import Balance, BalanceLosses
from megazero.moe.context import ExpertParallel
from megazero.moe.dispatch import Dispatch, LevelCounts, RowCounts, TwoLevels, dispatch_to
from megazero.moe.routing import Decision, Router, biased, evened, route, weighted

__all__ = [
    "Balance",
    "BalanceLosses",
    "Decision",
    "Dispatch",
    "ExpertParallel",
    "LevelCounts",
    "Router",
    "RowCounts",
    "TwoLevels",
    "biased",
    "dispatch_to",
    "evened",
    "route",
    "weighted",
]
