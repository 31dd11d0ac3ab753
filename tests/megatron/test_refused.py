"""What the patch refuses, met inside megatron-core itself: by message, and with nothing patched afterwards.

A minute on 2 cores:

    python -m pytest tests/megatron/test_refused.py -m slow
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import megatron_core_patch
from megatron_core_patch.names import NEEDED
from megazero.patches.names import lookup
from tests.dist.pool import run_ranks
from tests.megatron.case import Case
from tests.megatron.cases import EXACT, INT8_INT4
from tests.megatron.training import Formats, Job, megatron_ranks
from tests.messages import names

pytest.importorskip("megatron.core")

# Class of megatron-core's configuration, what its fields are set to, and the flag that the refusal names.
DDP, MODEL, ADAM = "DistributedDataParallelConfig", "TransformerConfig", "OptimizerConfig"
OLDER = {"use_megatron_fsdp": "use_custom_fsdp"}  # fields, and what they were called up to 0.13
GRAPHS = "graphs of a full iteration"  # in the words of this version: ``graphs``
MXFP8 = {"reuse_grad_buf_for_mxfp8_param_ag": True, "fp8_param_gather": True}
REMAINDERS = {"use_precision_aware_optimizer": True, "store_param_remainders": True}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (DDP, {"use_distributed_optimizer": False}, "--use-distributed-optimizer"),
    (DDP, {"num_distributed_optimizer_instances": 2}, "--num-distributed-optimizer-instances 2"),
    (DDP, {"use_megatron_fsdp": True}, "--use-megatron-fsdp"),
    (DDP, {"nccl_ub": True}, "--use-nccl-ub"),
    (DDP, MXFP8, "--reuse-grad-buf-for-mxfp8-param-ag"),
    (MODEL, {GRAPHS: False}, "full_iteration"),
    (MODEL, {GRAPHS: True}, "full_iteration"),
    (ADAM, {"optimizer_cpu_offload": True}, "--optimizer-cpu-offload"),
    (ADAM, REMAINDERS, "--use-precision-aware-optimizer"),
]


@pytest.mark.slow
def test_every_refusal() -> None:
    """-m slow"""
    case = Case(dp=2, ranks_per_node=1)
    every = run_ranks(case.world, every_refusal, case, timeout=200)
    for (*_, said), *answers in zip(REFUSED, *every, strict=True):
        for message, was_on, is_off in answers:
            assert message.count("megatron_core_patch: ") == 1 and said in message, (said, message)
            assert was_on and is_off, said


def every_refusal(case: Case) -> list[tuple[str, bool, bool]]:
    return [refusal(case, INT8_INT4, owner, fields) for owner, fields, _ in REFUSED]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, words",
    [
        (Case(dp=3, tp=2, ranks_per_node=3), ["[0, 2, 4]", "[1, 2]", "nodes of 3"]),
        (Case(dp=3, ranks_per_node=2), ["3 ranks", "2 ranks per node"]),
    ],
)
def test_nodes_that_are_not_alike(case: Case, words: list[str]) -> None:
    """-m slow"""
    for message, was_on, is_off in run_ranks(case.world, refusal, case, EXACT, DDP, {}, timeout=120):
        names(message, *words)
        assert was_on and is_off


@pytest.mark.slow
def test_nothing_else_is_refused() -> None:
    """The same job without such an option is built, and the patch stays on. -m slow"""
    case = Case(dp=2, ranks_per_node=1)
    assert run_ranks(2, refusal, case, INT8_INT4, ADAM, {}, timeout=120) == [("", True, False)] * 2


def refusal(case: Case, formats: Formats, owner: str, fields: Mapping[str, Any]) -> tuple[str, bool, bool]:
    """Build a job with the patch on; return the refusal, whether names were replaced, and whether all are back."""
    with megatron_ranks(case):
        own = meanings()
        megatron_core_patch.enable(**formats, ranks_per_node=case.ranks_per_node)
        was_on, message = all(a is not b for a, b in zip(own, meanings(), strict=True)), ""
        try:
            with configured(owner, fields):
                Job(case)
        except ValueError as error:
            message = str(error)
        finally:
            is_off = all(a is b for a, b in zip(own, meanings(), strict=True))
            megatron_core_patch.disable()
        dist.barrier()  # a rank that refuses early would drop groups that others still connect
        return message, was_on, is_off


def meanings() -> list[Any]:
    """Return what the names mean that are wrapped for as long as the patch is on."""
    found = [(*lookup(module, path), NEEDED[module][path]) for module in NEEDED for path in NEEDED[module]]
    return [
        getattr(owner, name)
        for owner, name, parameters in found
        if parameters is not None and not name.endswith("_if_dtensor")
    ]


def graphs(config: Any, older: bool) -> dict[str, Any]:
    """Return the fields by which this version's TransformerConfig asks for graphs of a full iteration."""
    known = {field.name for field in dataclasses.fields(config)}
    if "cuda_graph_modules" in known and not older:  # from 0.18 on
        return {"cuda_graph_impl": "full_iteration"}
    if "cuda_graph_impl" in known:
        return {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}
    return {"enable_cuda_graph": True, "cuda_graph_scope": "full_iteration"}


@contextmanager
def configured(owner: str, fields: Mapping[str, Any]) -> Iterator[None]:
    """Let every configuration of a class of megatron-core's have these fields.

    They are set after its own checks, as some ask for TransformerEngine; torch's AdamW stands for its optimizer, and
    for the one that offloads.
    """
    from megatron.core import optimizer
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig, cuda_graphs, transformer_layer

    config = {DDP: DistributedDataParallelConfig, MODEL: TransformerConfig, ADAM: OptimizerConfig}[owner]
    check = config.__post_init__
    older = fields.get(GRAPHS)

    def and_then_set(self: Any) -> None:
        if older is not None:  # as a user says it: the version's own checks make of it what they do
            vars(self).update(graphs(config, older))
        check(self)
        for name, value in fields.items() if older is None else ():
            known = name if hasattr(self, name) else OLDER.get(name, name)
            assert hasattr(self, known), name
            setattr(self, known, value)

    def no_manager(*_: Any, **__: Any) -> None:
        """Stand for a CudaGraphManager, which asks for a GPU's random numbers."""

    def adam(params: Any, **_: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params)

    with (
        mock.patch.object(config, "__post_init__", and_then_set),
        mock.patch.object(cuda_graphs, "CudaGraphManager", no_manager),
        mock.patch.object(transformer_layer, "CudaGraphManager", no_manager, create=True),  # up to 0.14
        mock.patch.object(optimizer, "Adam", adam),
        mock.patch.object(optimizer, "USING_PYTORCH_OPTIMIZER", False, create=True),  # not before 0.15
        mock.patch.object(optimizer, "is_te_min_version", lambda _: True),
        mock.patch.object(optimizer, "HybridDeviceOptimizer", adam),
    ):
        yield
