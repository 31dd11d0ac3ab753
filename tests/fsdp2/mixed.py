"""FSDP2 whose parameters have mixed-precision policies of their own, as torch will have it (pytorch #196626).

From that pull request's description: parameters of several compute dtypes are gathered in one buffer of bytes, and
their gradients, of several dtypes, are cast into a reduce-scatter input of the one reduce_dtype. torch 2.13 has the
buffer of bytes, for parameters of several dtypes; what it has not stands here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

from fsdp2_patch.torch_parts import param_groups


def give_norms_fp32(model: torch.nn.Module) -> None:
    """Let norms be computed in fp32 and all else in bf16, and all be reduced in fp32."""
    for p in (p for _, groups in param_groups(model) for group in groups for p in group.fsdp_params):
        is_norm = isinstance(p._module_info.module, torch.nn.LayerNorm)
        p.mp_policy = MixedPrecisionPolicy(torch.float32 if is_norm else torch.bfloat16, torch.float32)


@contextmanager
def policies_of_parameters() -> Iterator[None]:
    """Let FSDP2 take each parameter's own ``mp_policy``."""

    def dtypes(self: Any) -> None:
        for p in self.fsdp_params:
            p.init_dtype_attrs(p.mp_policy)
        (self._orig_dtype,) = {p.orig_dtype for p in self.fsdp_params}
        (self._reduce_dtype,) = {p.reduce_dtype or p.orig_dtype for p in self.fsdp_params}

    def inputs(params: list[Any]) -> list[list[torch.Tensor]]:
        return [[p._sharded_param_data.to(p.param_dtype or p.orig_dtype)] for p in params]

    reduce = _fsdp_param_group.foreach_reduce

    @wraps(reduce)
    def cast_and_reduce(params: list[Any], grads: list[torch.Tensor], *rest: Any, **words: Any) -> Any:
        grads[:] = [grad.float() for grad in grads]
        return reduce(params, grads, *rest, **words)

    with (
        mock.patch.object(_fsdp_param_group.FSDPParamGroup, "_init_mp_dtypes", dtypes),
        mock.patch.object(_fsdp_collectives, "_get_param_all_gather_inputs", inputs),
        mock.patch.object(_fsdp_param_group, "foreach_reduce", cast_and_reduce),
    ):
        yield
