"""megatron_core_patch without ranks: words and flags, refusals, versions, the cut at the node boundary, blocks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace as Config

import pytest
import torch

import megatron_core_patch
from megatron_core_patch import names
from megatron_core_patch.__main__ import parse, split
from megatron_core_patch.chains import Tile
from megatron_core_patch.options import from_words
from megatron_core_patch.refusals import ddp_problems, optimizer_problems, wrapper_problems
from megatron_core_patch.two_hops import TwoHops, ranks_on_a_node
from megazero.comm.codec import Blockwise
from megazero.mesh.grid import INTER, INTRA, AxisSpec
from megazero.mesh.mesh import Axis

ROOT = Path(__file__).resolve().parents[2]
GOOD = {
    "use_distributed_optimizer": True,
    "num_distributed_optimizer_instances": 1,
    "use_megatron_fsdp": False,
    "nccl_ub": False,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
}


@pytest.mark.parametrize(
    "words, flags",
    [
        ({}, ""),
        ({"weights": "int8", "gradients": "int4"}, "--zero-quantized-weights --zero-quantized-gradients"),
        ({"weights": "int4-delta"}, "--zero-quantized-weights-delta"),
        ({"gradients": "int2", "gradients_intra_node": "int8"}, "--zero-quantized-gradients --zero-gradient-bits 2 "
         "--zero-gradient-bits-intra-node 8"),
    ],
)  # fmt: skip
def test_words_mean_what_flags_mean(words: dict, flags: str) -> None:
    assert from_words(**words).wire == parse(flags.split()).wire


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--zero-weight-bits 4", "--zero-weight-bits has no effect without --zero-quantized-weights"),
        ("--zero-gradient-bits 3 --zero-quantized-gradients", "is not one of 8, 4, 2"),
        ("--zero-quantized-weights --zero-block-size 128", "a power of two from 8 to 64"),
        ("--no-zero-quantized-weights --zero-quantized-weights-delta", "leave one out"),
        ("--bf16", "--bf16 is no flag of megatron_core_patch"),
    ],
)
def test_bad_flags(flags: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(flags.split())


def test_bad_words() -> None:
    with pytest.raises(ValueError, match="weights='fp8' is no format.*(?s:.)*gradients='int3' is no format"):
        from_words("fp8", "int3")


def test_the_script_and_its_words_are_its_own() -> None:
    words = ["--zero-quantized-gradients", "pretrain_gpt.py", "--zero-quantized-weights", "--bf16"]
    assert split(words) == (words[:1], words[1:])


def test_the_launcher_reports_mistakes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_core_patch", "--zero-gradient-bits", "4", "absent.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and "no effect without --zero-quantized-gradients" in done.stderr


@pytest.mark.parametrize(
    "bad, said",
    [
        ({"use_distributed_optimizer": False}, "add --use-distributed-optimizer"),
        ({"num_distributed_optimizer_instances": 2}, "instances 2"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp"),
        ({"nccl_ub": True}, "--use-nccl-ub"),
        ({"reuse_grad_buf_for_mxfp8_param_ag": True}, "mxfp8"),
    ],
)
def test_refused_configurations(bad: dict, said: str) -> None:
    assert not list(ddp_problems(Config(**GOOD), Config(cuda_graph_scope="full")))
    (problem,) = ddp_problems(Config(**{**GOOD, **bad}), Config())
    assert said in problem


def test_whole_iterations_as_cuda_graphs_are_refused() -> None:
    for scope in ("full_iteration", ["CudaGraphScope.full_iteration"]):
        assert list(ddp_problems(Config(**GOOD), Config(cuda_graph_scope=scope)))


def test_refused_optimizers_and_wrappers() -> None:
    exact, quantised = from_words(), from_words("int8")
    remainders = Config(use_precision_aware_optimizer=True, store_param_remainders=True)
    assert not list(optimizer_problems(remainders, exact)) and list(optimizer_problems(remainders, quantised))
    assert list(optimizer_problems(Config(optimizer_cpu_offload=True), exact))
    assert not list(wrapper_problems("DistributedDataParallel"))
    assert list(wrapper_problems("FullyShardedDataParallel"))


@pytest.mark.parametrize("version, warned", [("0.16.1", False), ("0.17.0", True)])
def test_versions(version: str, warned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    core = pytest.importorskip("megatron.core")
    monkeypatch.setattr(core, "__version__", version)
    assert bool(names.check_names()[1]) == warned


def test_older_versions_and_missing_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    core = pytest.importorskip("megatron.core")
    with monkeypatch.context() as patch:
        patch.setattr(core, "__version__", "0.12.3")
        with pytest.raises(ValueError, match=r"0\.12\.3 is older than 0\.13"):
            megatron_core_patch.enable()
    from megatron.core.distributed import param_and_grad_buffer

    monkeypatch.delattr(param_and_grad_buffer, "dist_all_gather_func")
    with pytest.raises(ValueError, match="dist_all_gather_func"):
        megatron_core_patch.enable()
    with pytest.raises(RuntimeError, match="is not on"):
        megatron_core_patch.counters()


def test_every_name_is_given_back() -> None:
    pytest.importorskip("megatron.core")
    found = [(*names.lookup(module, path),) for module, paths in names.NEEDED.items() for path in paths]
    before = [getattr(owner, name) for owner, name in found]
    megatron_core_patch.enable()
    assert [getattr(owner, name) for owner, name in found] != before
    megatron_core_patch.disable()
    assert [getattr(owner, name) for owner, name in found] == before


def test_groups_are_cut_at_the_node() -> None:
    assert ranks_on_a_node([0, 2, 4, 6], 4) == 2 and ranks_on_a_node([1, 5], 4) == 1
    with pytest.raises(ValueError, match="every node holds equally many"):
        ranks_on_a_node([0, 1, 2], 2)
    with pytest.raises(ValueError, match="goes back to a node"):
        ranks_on_a_node([0, 2, 1, 3], 2)


def test_blocks_lie_on_the_buckets_grid() -> None:
    """Shards of 96 elements: the second begins in the middle of a block of 64."""
    inter = Axis(AxisSpec("inter", "data", 2, 1, INTER), 0, (0, 2), None, None)
    intra = Axis(AxisSpec("intra", "data", 2, 1, INTRA), 1, (0, 1), None, None)
    tile = Tile(torch.zeros(4 * 96), slice(0, 96), TwoHops((0, 1, 2, 3), inter, intra))
    codec = Blockwise(4, 64)
    assert tile.offsets(codec, None, None) == [0, 32, 0, 32] and tile.offsets(codec, 1, 1) == [32]
    assert tile.width(codec) == 128
