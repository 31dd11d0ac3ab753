"""megatron_core_patch without ranks: words and flags, refusals, versions, the cut at the node boundary, blocks."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from types import SimpleNamespace as Config

import pytest
import torch
import torch.distributed as dist
from megazero.kernels.arena import Arena

import megatron_core_patch
from megatron_core_patch import names, patch
from megatron_core_patch.__main__ import main, parse, split
from megatron_core_patch.carrier import Carrier
from megatron_core_patch.chains import Tile, reduce_columns
from megatron_core_patch.checks import MessageChecks
from megatron_core_patch.options import from_words
from megatron_core_patch.refusals import ddp_problems, module_problems, optimizer_problems, wrapper_problems
from megatron_core_patch.report import Teller, start_line
from megatron_core_patch.tied import exchange_parts, is_tied
from megazero.comm.codec import Blockwise
from megazero.comm.hops import Traffic
from megazero.mesh.grid import INTER, INTRA, AxisSpec
from megazero.mesh.mesh import Axis
from megazero.patches import hops as patch_hops
from megazero.patches.checks import GRADIENTS, WEIGHTS
from megazero.patches.hops import Passing
from megazero.patches.names import lookup
from megazero.patches.two_hops import TwoHops, cut_groups, ranks_on_a_node
from megazero.train.parallelize import make_codecs
from megazero.zero.policy import Codecs

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
    assert list(optimizer_problems(Config(optimizer_cuda_graph=True), exact))
    assert not list(wrapper_problems("DistributedDataParallel"))
    assert list(wrapper_problems("FullyShardedDataParallel"))
    module = torch.nn.Linear(1, 1)
    module.weight.is_managed_by_layer_wise_optimizer = False  # type: ignore[assignment]
    assert not list(module_problems(module))
    module.bias.is_managed_by_layer_wise_optimizer = True  # type: ignore[assignment]
    assert list(module_problems(module))


@pytest.mark.parametrize("version, warned", [("0.16.1", False), ("0.19.2", False), ("0.20.0", True)])
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
    found = [(*lookup(module, path),) for module, paths in names.NEEDED.items() for path in paths]
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
    monkeypatch.setattr(megatron_core_patch, "turn_on", lambda options: on.extend([options, sys.path[0]]))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["--zero-quantized-gradients", str(script), "--bf16"]) == 0
    assert capsys.readouterr().out.split() == ["__main__", "['--bf16']", str(tmp_path)]
    assert on[0].wire == from_words(gradients="int4").wire
    assert on[1] == str(
        tmp_path
    )  # from where megatron.core is imported: a script may lie in a checkout of it


@pytest.mark.parametrize("tied, stages, sent", [(True, 2, 16), (True, 4, 24), (False, 2, 0)])
def test_stages_exchange_this_ranks_shard_of_a_tied_gradient(
    tied: bool, stages: int, sent: int, monkeypatch: pytest.MonkeyPatch
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
    exchange_parts(exchange, [(bucket, hops)] if tied else [], stages, traffic, INTER)
    assert weight.main_grad.shape == (2, 3)
    assert bucket.grad_data.tolist() == ([0, 0, 0, 0, 1, 1, 1, 1] if tied else [1, 1, 1, 1, 1, 1, 0, 0])
    assert traffic.bytes == ({("tied", INTER): sent} if tied else {})


def test_first_steps_are_compared_with_exact_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """One rank of one: what is 'sent' is off by a tenth, then exact; the third step is not looked at."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    watch, hops = MessageChecks(from_words(verify_first_steps=2)), Config(ranks=(0,), index=0)
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
    watch, hops = MessageChecks(from_words(checksum_interval=3)), Config(ranks=(0, 1), index=0)
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
    tile = Tile(torch.zeros(4 * 96), slice(0, 96), two_hops(2, 2, local=1))
    codec = Blockwise(4, 64)
    assert tile.offsets(codec, None, None) == [0, 32, 0, 32] and tile.offsets(codec, 1, 1) == [32]
    assert tile.width(codec) == 128


@pytest.mark.parametrize(
    "n, given, pieces",
    [
        (100, None, [100]),
        (2**18 + 1, None, [2**18, 1]),
        (4 * 300_000, None, [300_032] * 3 + [299_904]),  # a quarter, in whole blocks
        (2**25, None, [2**23] * 4),  # of 4 ranks, so of 2^25 elements in all
        (200, 1, [64, 64, 64, 8]),
        (200, 400, [64, 64, 64, 8]),  # of 4 ranks: 100 of each, in whole blocks below that
    ],
)
def test_buckets_move_in_pieces(n: int, given: int | None, pieces: list[int]) -> None:
    """Of a shard of n elements."""
    columns = Carrier._columns(Config(options=from_words(chunk_numel=given)), n, two_hops(2, 2))
    assert [part.stop - part.start for part in columns] == pieces
    assert [part.start for part in columns] == [sum(pieces[:i]) for i in range(len(pieces))]


def two_hops(nodes: int, size: int, local: int = 0) -> TwoHops:
    """The group of the first ranks, seen by a rank of the first node; it has no communicators."""
    inter = Axis(
        AxisSpec("inter", "data", nodes, 1, INTER), 0, tuple(range(0, nodes * size, size)), None, None
    )
    intra = Axis(AxisSpec("intra", "data", size, 1, INTRA), local, tuple(range(size)), None, None)
    return TwoHops(tuple(range(nodes * size)), inter, intra)


@pytest.mark.parametrize("dtype, nodes, size", [(torch.float16, 2, 1), (torch.bfloat16, 1, 3)])
def test_averages_are_rounded_once(
    dtype: torch.dtype, nodes: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks send what this one does. Two of fp16's largest have a sum that fp16 lacks."""

    def echo(axis: Axis, out: torch.Tensor, messages: torch.Tensor, traffic: Traffic) -> None:
        out.copy_(messages)

    monkeypatch.setattr(patch_hops, "start_exchange", echo)
    d = nodes * size
    values = torch.linspace(-65504.0, 65504.0, 64).to(dtype)
    grads, hops = values.repeat(d), two_hops(nodes, size)
    passing = Passing(Traffic(), Arena(), torch.device("cpu"))
    list(reduce_columns(Tile(grads, slice(0, 64), hops), Codecs(), 1 / d, passing))
    assert torch.equal(grads[:64], values)


def test_groups_wait_as_long_as_megatrons(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, whose data-parallel group has a time of its own."""
    given: list = []
    monkeypatch.setattr(patch, "cut_groups", lambda *args: given.append(args[3]) or cut_groups(*args))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ddp = Config(
            module=torch.nn.Linear(1, 1),
            intra_dp_cp_group=dist.new_group([0], timeout=timedelta(minutes=47)),
            pp_group=dist.group.WORLD,
        )
        patch.Patch._make_carrier(Config(options=from_words(ranks_per_node=1), traffic=Traffic()), ddp)
    finally:
        dist.destroy_process_group()
    assert given == [timedelta(minutes=47)]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_kind_has_a_line_when_it_first_gets_a_buffer(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Ranks 0 and 1 are stages of a pipeline, of which the second alone has experts; rank 2 is of another."""
    stages = {0: ["dense"], 1: ["dense", "expert"], 2: ["dense"]}

    def gather(out: list, own: list) -> None:
        out[:] = [stages[r] if r != rank else own for r in range(3)]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    buffers = [Config(param_dtype=torch.bfloat16, grad_dtype=torch.float32)]
    kind = lambda name: (name, two_hops(2, 1), buffers)  # noqa: E731
    teller = Teller("0.16.1", Codecs(), [2] if rank == 2 else [0, 1])
    teller.tell(map(kind, stages[rank]))
    told = capsys.readouterr().out
    assert ("dense parameters" in told) == (rank == 0) and ("expert parameters" in told) == (rank == 1)
    for new in (True, False):  # chunks after the first one
        teller.tell(map(kind, ("dense", "expert", "other")))
        told = capsys.readouterr().out
        assert ("other parameters" in told) == (new and rank != 2)
        assert "dense parameters" not in told and "expert parameters" not in told


def test_the_line_says_what_one_node_quantises() -> None:
    buffers = [Config(param_dtype=torch.bfloat16, grad_dtype=torch.bfloat16)]
    for words, said in (
        ({}, "gradients exact bf16 inside a node, not quantised as no hop crosses nodes"),
        (
            {"gradients_intra_node": "int8"},
            "gradients int8 (blocks of 64) inside a node, nothing across nodes",
        ),
    ):
        codecs = make_codecs(from_words(gradients="int4", **words).wire)
        assert said in start_line("0.16.1", [("dense", two_hops(1, 2), buffers)], codecs)
