"""Products of rows that are grouped by expert with each expert's matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_ALIGNED = 16  # bytes, of which torch's kernel takes whole multiples in a row (pytorch/pytorch#172440)


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return ``rows`` [n, in] times the matrices of their experts, [n, out].

    weight: [experts, out, in]. ends: int32 [experts], where each expert's rows end, the first expert's first. An
    expert without rows gets a gradient of zeros.
    """
    kernel = rows.dtype != torch.float64 and all(
        n * rows.dtype.itemsize % _ALIGNED == 0 for n in weight.shape[1:]
    )
    if kernel:
        return F.grouped_mm(rows, weight.transpose(-2, -1), offs=ends)
    stops = ends.tolist()
    groups = [rows[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
    return torch.cat([F.linear(own, matrix) for own, matrix in zip(groups, weight.unbind(), strict=True)])
