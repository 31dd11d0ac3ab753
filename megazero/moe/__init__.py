"""Mixtures of experts on plain tensors: which experts a token goes to, the rows of each expert, grouped products."""

from megazero.moe.balance import Balance, BalanceLosses
from megazero.moe.context import ExpertParallel
from megazero.moe.dispatch import Dispatch, LevelCounts, RowCounts, TwoLevels, dispatch_to
from megazero.moe.grouped import grouped_linear, weighted
from megazero.moe.routing import Decision, Router, route

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
    "dispatch_to",
    "grouped_linear",
    "route",
    "weighted",
]
