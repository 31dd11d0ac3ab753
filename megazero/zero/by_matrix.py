"""The contract of optimizers that step whole matrices.

ZeRO gives every rank a slice of each weight. So a step has three parts: ``fold`` and ``apply`` are elementwise and
run on slices, ``direction`` runs on a whole matrix, wherever that is put together (zero/matrix_updates.py).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

MATRIX = "matrix"  # marks a group whose parameters are stepped as matrices


class ByMatrix(torch.optim.Optimizer):
    """The contract. Groups marked ``MATRIX`` are stepped by matrix, the others by ``rest``, an elementwise optimizer.

    ``rest`` has the same group objects and the same ``state``. A parameter of a marked group is 2-D, or in the engine
    a flat slice. State tensors have its shape and start as zeros.
    """

    rest: torch.optim.Optimizer

    @abstractmethod
    def message_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that ``direction`` takes and returns, for weights of this dtype."""

    @abstractmethod
    def open_state(self, param: torch.Tensor) -> dict[str, Any]:
        """Return the parameter's state, which is made if there is none."""

    @abstractmethod
    def fold(self, param: torch.Tensor) -> torch.Tensor:
        """Take ``param.grad`` into the state. Returns, in the parameter's shape, what ``direction`` needs."""

    @abstractmethod
    def direction(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the update of a whole matrix [rows, columns], in the same shape and dtype."""

    @abstractmethod
    def apply(
        self, weights: torch.Tensor, direction: torch.Tensor, shape: tuple[int, int], group: Mapping[str, Any]
    ) -> None:
        """Take the update into weights, elementwise. shape: the whole matrix's. group: with rate and weight decay."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step whole parameters, on one rank."""
        assert closure is None
        for group in self.param_groups:
            for p in group["params"] if group.get(MATRIX) else ():
                if p.grad is not None:
                    update = self.direction(self.fold(p).to(self.message_dtype(p.dtype)))
                    self.apply(p, update, tuple(p.shape), group)
        self.rest.step()
