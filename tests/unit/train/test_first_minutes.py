"""What a rank does on its CUDA device before it trains: which one it takes, whether kernels run. By fakes."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megazero.kernels import dispatch
from megazero.mesh.launch import Launch
from megazero.ops.memory import use_libraries
from megazero.train import distributed
from megazero.zero import elementwise
from megazero.zero.elementwise import default_adamw
from tests.messages import refused

CUDA = torch.device("cuda", 0)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Any:
    """How many devices torch sees."""

    def see(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))

    return see


def gathered(monkeypatch: pytest.MonkeyPatch, others: Sequence[object]) -> None:
    """This rank is the first, and the others say these."""
    monkeypatch.setattr(distributed, "gather_objects", lambda own: [own, *others])


def test_a_rank_that_sees_one_gpu_alone_takes_it(seen: Any) -> None:
    rank = Launch(rank=3, world_size=4, local_rank=3, local_world_size=4)
    seen(1)
    assert distributed.pick_device("auto", rank) == CUDA  # of srun --gpus-per-task=1
    seen(4)
    assert distributed.pick_device("cuda", rank) == torch.device("cuda", 3)
    seen(2)
    with refused("local rank 3", "sees 2"):
        distributed.pick_device("auto", rank)


def test_ranks_that_share_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered(monkeypatch, [("n0", "GPU-b"), ("n1", "GPU-a")])
    distributed.refuse_shared_gpus("n0", "GPU-a")
    gathered(monkeypatch, [("n0", "GPU-b"), ("n0", "GPU-a")])
    with refused("ranks 0, 2 of n0", "GPU-a"):
        distributed.refuse_shared_gpus("n0", "GPU-a")
    monkeypatch.setenv("NCCL_HOSTID", "0")  # as a rehearsal on one GPU has them
    gathered(monkeypatch, [("1", "GPU-a"), ("2", "GPU-a")])
    distributed.refuse_shared_gpus("n0", "GPU-a")


class NoCompiler:
    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nmore")


def test_where_one_rank_cannot_build_kernels_all_take_references_and_torchs_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "AVAILABLE", True)
    monkeypatch.setattr(dispatch, "LACKING", "")
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.ones(1))  # no device here
    monkeypatch.setattr(elementwise, "fused_adamw", lambda groups, **options: "torch's")
    monkeypatch.setattr(elementwise, "OnePassAdamW", lambda groups, lr=0.0: "one pass")
    weights = [{"params": [SimpleNamespace(is_cuda=True, dtype=torch.float32)]}]

    monkeypatch.setattr(dispatch, "_touch", {(1,): list})
    gathered(monkeypatch, ["", ""])
    assert distributed.try_kernels(CUDA) == () and default_adamw(lr=0.1)(weights) == "one pass"

    gathered(monkeypatch, ["", "Triton: FileNotFoundError: gcc"])  # this one could
    (note,) = distributed.try_kernels(CUDA)
    assert "no Triton kernel runs on 1 ranks, the first is rank 2: Triton: FileNotFoundError: gcc" in note
    assert not dispatch.AVAILABLE and default_adamw(lr=0.1)(weights) == "torch's"

    monkeypatch.setattr(dispatch, "AVAILABLE", True)
    monkeypatch.setattr(dispatch, "_touch", NoCompiler())
    gathered(monkeypatch, ["", ""])
    (note,) = distributed.try_kernels(CUDA)
    assert (
        "rank 0: Triton: RuntimeError: Failed to find C compiler. Please specify via CC environment" in note
    )
    dispatch._warn_of_references.cache_clear()
    with pytest.warns(RuntimeWarning, match="Failed to find C compiler.*references.*gcc, python3-dev"):
        dispatch._warn_of_references()
    dispatch._warn_of_references.cache_clear()


def test_autograds_thread_launches_a_kernel_of_torchs_own_before_its_first_product() -> None:
    """That makes the device's context current there; without one cuBLAS warns (of device 0, in a backward)."""
    called: list[str] = []

    class Calls(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(str(func).split(".")[1])
            return func(*args, **(kwargs or {}))

    with Calls():
        use_libraries(torch.device("cpu"))
    forward, backward = called.index("mm"), called.index("mm", called.index("expand"))
    assert forward < called.index("expand") < backward  # the gradient of the sum is a view
    assert (
        "pow" in called[called.index("expand") : backward] and "mul" in called[called.index("pow") : backward]
    )
