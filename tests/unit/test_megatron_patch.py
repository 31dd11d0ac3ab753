"""megatron_core_patch without ranks: words and flags, refusals, versions, the cut at the node boundary, blocks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from types import SimpleNamespace as Config

import pytest
import torch

import megatron_core_patch
from megatron_core_patch import names
from megatron_core_patch.__main__ import main, parse, split
from megatron_core_patch.chains import Tile
from megatron_core_patch.options import from_words
from megatron_core_patch.refusals import ddp_problems, optimizer_problems, wrapper_problems
from megatron_core_patch.tied import exchange_parts, is_tied
from megatron_core_patch.two_hops import TwoHops, ranks_on_a_node
from megatron_core_patch.watch import GRADIENTS, WEIGHTS, Watch
from megazero.comm.codec import Blockwise
from megazero.comm.traffic import Traffic
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


def test_the_launcher_runs_the_script_with_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    script = tmp_path / "job.py"
    script.write_text("import sys\nprint(__name__, sys.argv[1:], sys.path[0])")
    on: list = []
    monkeypatch.setattr(megatron_core_patch, "turn_on", on.append)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["--zero-quantized-gradients", str(script), "--bf16"]) == 0
    assert capsys.readouterr().out.split() == ["__main__", "['--bf16']", str(tmp_path)]
    assert on[0].wire == from_words(gradients="int4").wire


@pytest.mark.parametrize("tied", [True, False])
def test_stages_exchange_this_ranks_shard_of_a_tied_gradient(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Megatron's function does, with an addition for its all-reduce: of two ranks' shards, rank 1's alone."""
    finalize = ModuleType("finalize")
    finalize._unshard_if_dtensor = lambda grad: grad  # type: ignore[attr-defined]
    finalize._reshard_if_dtensor = lambda grad, like: grad  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, names.FINALIZE, finalize)
    bucket = Config(grad_data=torch.zeros(8), params_list=[Config(shared_embedding=tied)])
    weight = Config(main_grad=bucket.grad_data[:6].view(2, 3))
    assert is_tied(bucket) == tied

    def exchange() -> None:
        part = finalize._unshard_if_dtensor(weight.main_grad)
        part.add_(1)
        weight.main_grad = finalize._reshard_if_dtensor(part, weight.main_grad)

    traffic, hops = Traffic(), Config(ranks=(0, 1), index=1)
    exchange_parts(exchange, [(bucket, hops)] if tied else [], traffic, INTER)
    assert weight.main_grad.shape == (2, 3)
    assert bucket.grad_data.tolist() == ([0, 0, 0, 0, 1, 1, 1, 1] if tied else [1, 1, 1, 1, 1, 1, 0, 0])
    assert traffic.bytes == ({("tied", INTER): 16} if tied else {})


def test_first_steps_are_compared_with_exact_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """One rank of one: what is 'sent' is off by a tenth, then exact; the third step is not looked at."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    watch, hops = Watch(from_words(verify_first_steps=2)), Config(ranks=(0,), index=0)
    copy = lambda out, source, **_: out.copy_(source)  # noqa: E731
    for updates, factor in ((0, 1.1), (1, 1.0), (2, 1.1)):
        bucket = Config(grad_data=torch.ones(4), param_data=torch.ones(4, dtype=torch.bfloat16))
        checks = watch.gradients(bucket, hops, updates, copy, None, None)
        checks += watch.weights(bucket, hops, updates + 1, copy, None)
        assert len(checks) == (0 if updates == 2 else 2)
        bucket.grad_data.mul_(factor)
        for check in checks:
            check()
        watch.tell(GRADIENTS)
        watch.tell(WEIGHTS)
    told = capsys.readouterr().out
    assert "step 1: gradients differ from exact ones by 1.00e-01" in told
    assert "step 2: gradients differ from exact ones by 0.00e+00" in told and "step 3" not in told
    assert "step 1: weights differ from exact ones by 0.00e+00" in told


@pytest.mark.parametrize("change", [0, 1])
def test_checksums_tell_replicas_apart(change: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank's checksum is that of parameters of which one has another last bit, or of the same."""

    def gather(every: list, own: torch.Tensor, group: object) -> None:
        every[0].copy_(own)
        every[1].copy_(own + change)

    monkeypatch.setattr(torch.distributed, "all_gather", gather)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda _: 2)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda _: [0, 1])
    watch, hops = Watch(from_words(checksum_interval=3)), Config(ranks=(0, 1), index=0)
    bucket = Config(param_data=torch.randn(10, dtype=torch.bfloat16))
    assert not watch.weights(bucket, hops, 2, None, None)
    (check,) = watch.weights(bucket, hops, 3, None, None)
    if change:
        with pytest.raises(RuntimeError, match="after step 3 data-parallel ranks hold different parameters"):
            check()
    else:
        check()


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
