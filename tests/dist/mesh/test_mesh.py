"""Groups and communicators of real ranks: all are made before the first step, whatever groups there were before."""

from __future__ import annotations

from graphlib import TopologicalSorter
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.comm import hops
from megazero.comm.hops import Traffic
from megazero.config import World, make_config
from megazero.mesh.mesh import Axis, all_gather_flat, create_mesh
from megazero.train.distributed import make_mesh
from megazero.train.parallelize import MicroBatch, build_decoder, build_pipeline, shard_decoder
from megazero.train.trainer import Trainer
from tests.dist.pool import run_ranks
from tests.dist.runs import train
from tests.sizes import TINY

SHORT = {"train_iters": 3, "eval_iters": 1, "eval_interval": 1, "log_interval": 1}
Communicator = tuple[str, tuple[int, ...]]  # the group's name; ranks of a pair, or () for all of the group
WORLD = World(4, 2)


class Recorder(TorchDispatchMode):
    """Notes the communicator, as NCCL has them, of every collective and message, and its kind."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[Communicator] = []
        self.kinds: list[tuple[Communicator, str]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name.startswith("c10d."):
            (group,) = (dist.ProcessGroup.unbox(a) for a in args if "ProcessGroup" in str(type_of(a)))
            pair = ()
            if name.startswith(("c10d.send", "c10d.recv")):
                pair = tuple(sorted((dist.get_rank(), dist.get_global_rank(group, args[2]))))
            self.used.append((group.group_name, pair))
            self.kinds.append((self.used[-1], name.split(".")[1]))
        return func(*args, **(kwargs or {}))


def type_of(value: Any) -> Any:
    return value._type() if isinstance(value, torch.ScriptObject) else None


def communicators(values: dict[str, Any]) -> tuple[list[Communicator], list[Communicator]]:
    """In a run: those used before the first iteration and those used from then on, each once, in order."""
    recorder, run, start = Recorder(), Trainer.run, []

    def marked(self: Trainer) -> None:
        start.append(len(recorder.used))
        run(self)

    Trainer.run = marked  # type: ignore[method-assign]
    try:
        with recorder:
            train(values)
    finally:
        Trainer.run = run  # type: ignore[method-assign]
    first, later = recorder.used[: start[0]], recorder.used[start[0] :]
    return list(dict.fromkeys(first)), list(dict.fromkeys(later))


def gathered_as_on_cuda(axis: Axis, out: torch.Tensor, own: torch.Tensor, group: Any) -> dist.Work:
    """Over gloo two ranks swap their messages by an exchange."""
    return all_gather_flat(out, own, group=group, async_op=True)


def kinds(values: dict[str, Any]) -> tuple[set[Any], set[Any]]:
    """Of mesh, engine and pipeline: the kinds of collectives on each communicator before the first of two steps, and
    those in the steps."""
    config = make_config({**TINY, **values, "ranks_per_node": 2}, WORLD)
    with Recorder() as recorder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(hops, "_gathered", gathered_as_on_cuda)
        mesh = make_mesh(config, WORLD, torch.device("cpu"))
        decoder = build_decoder(config, mesh, Traffic())
        engine = shard_decoder(decoder, config, mesh)
        pipeline = build_pipeline(decoder, engine, config, mesh)
        count, before = config.num_micro_batches(WORLD), set(recorder.kinds)
        recorder.kinds.clear()
        tokens = torch.zeros(1, 12, dtype=torch.int64)
        for _ in range(2):
            engine.begin_step(count, 96, pipeline.program(count))
            pipeline.step([MicroBatch(tokens, tokens, torch.ones(1, 12))] * count)
            engine.step()
    in_steps = set(recorder.kinds)
    if mesh.tp.size > 1:  # on CPUs a sum that is scattered is an exchange and a sum
        assert mesh.tp.gather_group is not None
        tp = mesh.tp.gather_group.group_name, ()
        in_steps = {
            (tp, "_reduce_scatter_base_") if use == (tp, "alltoall_base_") else use for use in in_steps
        }
    return before, in_steps


def gathered(per_node: int) -> list[list[float]]:
    mesh = create_mesh(shards=(1, 1, 1), ranks_per_node=per_node)
    return mesh.gather_rows(torch.tensor([mesh.rank, -1.0], dtype=torch.float64)).tolist()


@pytest.mark.parametrize("world, per_node", [(4, 1), (4, 2), (4, 4), (6, 2), (6, 3)])
def test_rows_come_by_rank_from_nodes_of_any_size(world: int, per_node: int) -> None:
    rows = [[float(rank), -1.0] for rank in range(world)]
    assert run_ranks(world, gathered, per_node) == [rows] * world


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "layout, groups",
    [
        # data parallel (gather, reduce), the ends of a tied pipeline, its two directions, all ranks
        (
            {
                "pipeline_model_parallel_size": 2,
                "zero_preset": "zero3",
                "ranks_per_node": 1,
                "untie_embeddings_and_output_weights": False,
            },
            6,
        ),
        # the two axes of hpz (gather, reduce), the two of scalars, all ranks
        ({"zero_preset": "hpz", "ranks_per_node": 2}, 7),
        # tensor parallel, the pipeline's two directions, all ranks
        ({"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2}, 4),
    ],
    ids=["pp2-dp2", "hpz", "pp2-tp2"],
)
def test_every_communicator_is_made_before_the_first_step_and_in_one_order(layout, groups, tmp_path):
    order: dict[Communicator, set[Communicator]] = {}
    for first, later in run_ranks(4, communicators, {**layout, **SHORT, "log_dir": str(tmp_path)}):
        assert set(later) <= set(first), "made in the middle of the run"
        assert len({name for name, _ in first}) == groups
        for before, after in pairwise(first):
            order.setdefault(after, set()).add(before)
    list(TopologicalSorter(order).static_order())  # raises where ranks that make them would wait in a ring


@pytest.mark.first(4)
@pytest.mark.parametrize(
    "values",
    [
        {"zero_preset": "ddp"},  # sums that come back over the axes of replicas
        {"zero_preset": "mics"},
        {"zero_preset": "zeropp", "zero_exact_numel": 64},
        {"zero_preset": "zero2", "optimizer": "muon"},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {
            "pipeline_model_parallel_size": 2,
            "zero_preset": "zero2",
            "untie_embeddings_and_output_weights": False,
        },
    ],
    ids=["ddp", "mics", "zeropp", "muon", "sequence parallel", "tied pipeline"],
)
def test_what_a_communicator_carries_in_a_step_it_has_carried_before(values: dict[str, Any]) -> None:
    """NCCL connects at the first collective of a kind: the ranks wait for each other, and memory is allocated."""
    for before, in_steps in run_ranks(4, kinds, values):
        assert in_steps and in_steps <= before, in_steps - before


def unequal(extra: int) -> list[float]:
    """A program made groups of its own on rank 0 alone, before it asks for a mesh; what the mesh's axes sum."""
    if dist.get_rank() == 0:
        for _ in range(extra):
            dist.new_group([0], use_local_synchronization=True)
    sums = []
    for _ in range(2):  # the second finds equal numbers
        mesh = create_mesh(pp=3, ends=True)
        one = torch.ones(1)
        for axis in (mesh.pp, mesh.ends):
            if axis is not None:
                dist.all_reduce(one, group=axis.reduce_group)
        sums.append(one.item())
    return sums


@pytest.mark.parametrize("extra", [1, 3])
def test_ranks_that_belong_to_unequally_many_groups_make_a_mesh(extra):
    first, middle, last = run_ranks(3, unequal, extra, timeout=5)
    assert first == last == [6.0, 6.0] and middle == [3.0, 3.0]
