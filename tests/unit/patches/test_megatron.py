"""megatron_core_patch without ranks: words and flags, refusals, versions, the cut at the node boundary, blocks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from types import SimpleNamespace as Config
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_core_patch
from megatron_core_patch import names, patch, report
from megatron_core_patch.__main__ import main, parse, split
from megatron_core_patch.carrier import Carrier, Sync
from megatron_core_patch.chains import gather_coded, gather_exact, reduce_exact, reduce_rows
from megatron_core_patch.checks import MessageChecks
from megatron_core_patch.layout import Columns, cut_bucket
from megatron_core_patch.options import PatchOptions
from megatron_core_patch.refusals import (
    ddp_problems,
    module_problems,
    optimizer_problems,
    wrapper_problems,
)
from megatron_core_patch.report import Teller, start_line
from megatron_core_patch.tied import exchange_parts, is_tied
from megazero.comm import codec as codec_module
from megazero.comm import hops as hops_module
from megazero.comm.codec import Blockwise, codecs_of
from megazero.comm.hops import Channel, Traffic
from megazero.comm.wire import Codecs
from megazero.kernels.arena import Arena
from megazero.mesh.grid import AxisSpec
from megazero.mesh.levels import INTER, INTRA
from megazero.mesh.mesh import Axis
from megazero.patches.names import lookup
from megazero.patches.options import read_words
from megazero.patches.two_hops import TwoHops, cut_groups, ranks_on_a_node, settings_like
from megazero.zero.rounding import GRADIENTS, WEIGHTS
from tests.messages import refused

from_words = partial(read_words, PatchOptions)
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
        ({"gradients": "int4", "gradients_intra_node": "int8"}, "--zero-quantized-gradients --zero-gradient-bits 4 "
         "--zero-gradient-bits-intra-node 8"),
    ],
)  # fmt: skip
def test_words_mean_what_flags_mean(words: dict, flags: str) -> None:
    assert from_words(**words).wire == parse(flags.split()).wire


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--zero-weight-bits 4", ["--zero-weight-bits 4", "--zero-quantized-weights"]),
        ("--zero-gradient-bits 3 --zero-quantized-gradients", ["--zero-gradient-bits 3", "8, 4"]),
        ("--zero-quantized-weights --zero-block-size 128", ["--zero-block-size 128", "nearest: 64"]),
        ("--bf16", ["--bf16", "no flag of megatron_core_patch"]),
        ("--zero-gradient-error-bound 0.1", ["--zero-gradient-error-bound was removed", "--zero-gradient-bits 8"]),
    ],
)  # fmt: skip
def test_bad_flags(flags: str, words: list[str]) -> None:
    with refused(*words):
        parse(flags.split())


@pytest.mark.parametrize(
    "given, words",
    [
        ({"weights": "fp8", "gradients": "int3"}, ["weights='fp8'", "gradients='int3'"]),
        ({"weights": "int4", "weight_transform": "hadamard"}, ["weight_transform was removed"]),
    ],
)
def test_bad_words(given: dict, words: list[str]) -> None:
    with refused(*words):
        from_words(**given)


def test_the_script_and_its_words_are_its_own() -> None:
    words = ["--zero-quantized-gradients", "pretrain_gpt.py", "--zero-quantized-weights", "--bf16"]
    assert split(words) == (words[:1], words[1:])


@pytest.mark.parametrize(
    "words, said",
    [
        ("--zero-quantized-gradients", "no script"),
        ("--zero-quantized-gradients absent.py", "absent.py"),
        ("--zero-gradient-bits 4 absent.py", "--zero-quantized-gradients"),
    ],
)
def test_the_launcher_reports_mistakes(words: str, said: str, capsys: pytest.CaptureFixture) -> None:
    assert main(words.split()) == 2
    assert said in capsys.readouterr().err


REMAINDERS = Config(use_precision_aware_optimizer=True, store_param_remainders=True)
NAMED = [Config(name="full_iteration")]  # as an enum
# What is asked of the patch, and the flag that its answer names; without one nothing is refused.
ANSWERS: list[tuple[Iterator[str], str]] = [
    (ddp_problems(Config(**GOOD), Config(cuda_graph_scope="full")), ""),
    (ddp_problems(Config(**{**GOOD, "use_distributed_optimizer": False}), Config()), "--use-distributed-optimizer"),
    (ddp_problems(Config(**{**GOOD, "num_distributed_optimizer_instances": 2}), Config()), "instances 2"),
    (ddp_problems(Config(**{**GOOD, "use_megatron_fsdp": True}), Config()), "--use-megatron-fsdp"),
    (ddp_problems(Config(**{**GOOD, "nccl_ub": True}), Config()), "--use-nccl-ub"),
    (ddp_problems(Config(**{**GOOD, "reuse_grad_buf_for_mxfp8_param_ag": True}), Config()), "mxfp8"),
    # Whole iterations as CUDA graphs, in the words of 0.14, 0.15, 0.16 and 0.18; and graphs of layers.
    *(
        (ddp_problems(Config(**GOOD), Config(**words)), said)
        for words, said in (
            ({"enable_cuda_graph": True, "cuda_graph_scope": "full_iteration"}, "full_iteration"),
            ({"cuda_graph_impl": "local", "cuda_graph_scope": ["CudaGraphScope.full_iteration"]}, "full_iteration"),
            ({"cuda_graph_impl": "local", "cuda_graph_scope": NAMED}, "full_iteration"),
            ({"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []}, "full_iteration"),
            ({"cuda_graph_impl": "local", "cuda_graph_scope": [Config(name="full_iteration_inference")]}, ""),
            ({"cuda_graph_impl": "local", "cuda_graph_scope": "attn,mlp"}, ""),
            ({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": []}, ""),
        )
    ),
    (optimizer_problems(REMAINDERS, from_words()), ""),
    (optimizer_problems(REMAINDERS, from_words("int8")), "--use-precision-aware-optimizer"),
    (optimizer_problems(Config(fp16=True), from_words("int8")), ""),
    (optimizer_problems(Config(optimizer_cpu_offload=True), from_words()), "--optimizer-cpu-offload"),
    (optimizer_problems(Config(optimizer_cuda_graph=True), from_words()), "--optimizer-cuda-graph"),
    (wrapper_problems("DistributedDataParallel"), ""),
    (wrapper_problems("FullyShardedDataParallel"), "--use-distributed-optimizer"),
    (wrapper_problems("MegatronFSDP"), "fsdp2_patch"),
    (wrapper_problems("FsdpModule"), "fsdp2_patch"),
    (wrapper_problems("LayerWiseDistributedOptimizer"), "megazero's own Muon"),
]  # fmt: skip


@pytest.mark.parametrize("problems, said", ANSWERS)
def test_what_is_refused(problems: Iterator[str], said: str) -> None:
    found = list(problems)
    assert len(found) == bool(said) and said in "".join(found)


def test_parameters_of_a_layer_wise_optimizer_are_refused() -> None:
    module = torch.nn.Linear(1, 1)
    assert not list(module_problems(module))
    module.bias.is_managed_by_layer_wise_optimizer = True  # type: ignore[assignment]
    assert list(module_problems(module))


@pytest.mark.parametrize("module, name", [*names.MEGATRON_FSDP.items(), names.LAYER_WISE])
def test_classes_that_communicate_by_themselves_are_refused(module: str, name: str) -> None:
    """Megatron-FSDP's two versions, megatron-core's and PyPI's, and layer-wise optimizers: where they are there."""
    if not names.exists(module, name):
        pytest.skip(f"there is no {module}.{name}")
    owner, _ = lookup(module, name)
    kind = getattr(owner, name)
    before = kind.__init__
    megatron_core_patch.enable(gradients="int4")
    assert kind.__init__ is not before
    with refused("megatron_core_patch", "layer-wise" if "Layer" in name else name):
        kind.__init__(object.__new__(kind))
    assert kind.__init__ is before


def test_megatrons_fsdp_is_refused_before_it_builds_anything() -> None:
    """It makes groups and buffers of its own before it calls the wrapper that DistributedDataParallel has, too."""
    distributed = pytest.importorskip("megatron.core.distributed")
    older = "megatron.core.distributed.custom_fsdp"  # up to 0.13, whose class calls the wrapper first
    config = Config(use_megatron_fsdp=True)
    for name in ("FullyShardedDataParallel", "TorchFullyShardedDataParallel"):
        megatron_core_patch.enable(gradients="int4")
        try:
            with refused(name, "--use-distributed-optimizer"):
                owner = distributed if hasattr(distributed, name) else importlib.import_module(older)
                getattr(owner, name)(config, config, torch.nn.Linear(1, 1))
        finally:
            megatron_core_patch.disable()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    pytest.importorskip("megatron.core")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@contextmanager
def patched(**words: Any) -> Iterator[patch.Patch]:
    on = patch.Patch(from_words(ranks_per_node=1, **words), switch_off=lambda: None)
    try:
        yield on
    finally:
        on.remove()


def test_the_order_of_calls_is_refused(one_rank: None) -> None:
    """enable() twice, behind DistributedDataParallel, and a model chunk whose groups are not those of the first."""
    megatron_core_patch.enable(gradients="int4")
    try:
        with refused("on already", "disable()", by=RuntimeError):
            megatron_core_patch.enable(gradients="int4")
    finally:
        megatron_core_patch.disable()
    with patched(gradients="int4") as on:
        with refused("enable()", "after DistributedDataParallel", by=RuntimeError):
            on._carrier  # noqa: B018
        built(on, torch.nn.Linear(1, 1), [Bucket()])
        with refused("enable()", "after DistributedDataParallel", by=RuntimeError):
            on._carrier.state(Bucket())
        with pytest.MonkeyPatch.context() as ranks, refused("[0, 3]", "same process groups"):
            ranks.setattr(dist, "get_process_group_ranks", lambda _: [0, 3])
            on._carrier.hops_of(dist.group.WORLD)
        on.options = from_words(gradients="int4", gradients_intra_node="int8", exact_numel=0)
        with refused("gradients_intra_node", "leave it out"):
            on._build_optimizer(lambda self, config: None, Config(), Config())


@pytest.mark.parametrize("version, warned", [("0.16.1", False), ("0.19.2", False), ("0.20.0", True)])
def test_versions(version: str, warned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    core = pytest.importorskip("megatron.core")
    monkeypatch.setattr(core, "__version__", version)
    assert bool(names.check_names()[1]) == warned


def test_older_versions_and_missing_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    core = pytest.importorskip("megatron.core")
    with monkeypatch.context() as patch:
        patch.setattr(core, "__version__", "0.12.3")
        with refused("0.12.3", "0.13"):
            megatron_core_patch.enable()
    from megatron.core.distributed import param_and_grad_buffer

    monkeypatch.delattr(param_and_grad_buffer, "dist_all_gather_func")
    with refused("dist_all_gather_func"):
        megatron_core_patch.enable()
    with refused("enable()", by=RuntimeError):
        megatron_core_patch.counters()


def test_it_says_what_it_needs_where_megatron_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with refused("needs megatron-core"):
        megatron_core_patch.enable()


def test_messages_of_a_traced_step_are_refused() -> None:
    carrier: Any = Config(channel=Config(device=torch.device("cpu")))
    with FakeTensorMode(), refused("megatron_core_patch", "torch.compile", by=RuntimeError):
        Sync(carrier, Config(buckets=[Config(grad_data=torch.ones(1))]), None)


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
        with refused("step 3", "different parameters", "rank", by=RuntimeError):
            check()
    else:
        check()


def test_groups_are_cut_at_the_node() -> None:
    assert ranks_on_a_node([0, 2, 4, 6], 4) == 2 and ranks_on_a_node([1, 5], 4) == 1
    with refused("[0, 1, 2]", "equally many"):
        ranks_on_a_node([0, 1, 2], 2)
    with refused("[0, 2, 1, 3]", "neighbours"):
        ranks_on_a_node([0, 2, 1, 3], 2)


EXACT_AT = [(128, 192), (6400, 6528)]  # of a bucket: parameters that are not quantised


@pytest.mark.parametrize(
    "nodes, size, n", [(2, 2, 4096), (2, 2, 4064), (3, 2, 1088), (1, 3, 3008), (4, 1, 96), (2, 2, 32)]
)
def test_every_element_moves_once_and_no_block_holds_two_parameters(nodes: int, size: int, n: int) -> None:
    """Shards that are multiples of a block, and others; rows of less than a block are exact."""
    d = nodes * size
    moved = torch.zeros(d * n, dtype=torch.int64)
    pieces, beside = cut_bucket(
        d * n, EXACT_AT, two_hops(nodes, size), lambda m: [slice(i, min(m, i + 512)) for i in range(0, m, 512)],
        torch.device("cpu"),
    )  # fmt: skip
    for piece in pieces:
        for rank, blocks in enumerate(piece.blocks):
            for low, high in blocks:
                assert rank * n <= low * 64 and high * 64 <= (rank + 1) * n
                assert not any(low * 64 < end and begin < high * 64 for begin, end in EXACT_AT)
                moved[low * 64 : high * 64] += 1
    for rank, ranges in enumerate(beside.ranges if beside else []):
        for low, high in ranges:
            assert rank * n <= low and high <= (rank + 1) * n
            moved[low:high] += 1
    assert bool((moved == 1).all())


@pytest.mark.parametrize("local, node", [(0, 0), (1, 2)])
def test_pieces_are_packed_and_put_back(local: int, node: int) -> None:
    """A bucket of 6 rows, of which some have fewer coded blocks than others."""
    hops = two_hops(3, 2, local, node)
    values = torch.arange(6 * 4000, dtype=torch.float32)
    pieces, beside = cut_bucket(
        len(values), EXACT_AT, hops, lambda m: [slice(0, 1024), slice(1024, m)], values.device
    )
    take = lambda numel, dtype: torch.full((numel,), -1, dtype=dtype)  # noqa: E731
    back, own = torch.zeros_like(values), torch.zeros_like(values)
    for piece in pieces:
        rows, place = piece.rows(values, take)
        assert rows.shape == (2, 3, piece.width) and place == 1
        piece.store(rows[place][node], own)
        gathered = take(6 * piece.width, values.dtype).view(6, -1)
        piece.load_all(values, gathered)
        assert torch.equal(gathered[piece.place()][: piece.own(values).numel()], piece.own(values))
        piece.store_all(gathered, back, take)
    assert beside is not None
    for whole, ranges in ((back, beside.all), (own, beside.own)):
        whole.index_copy_(0, ranges.index(), values[ranges.index()])
    assert torch.equal(back, values)
    mine = slice(hops.index * 4000, (hops.index + 1) * 4000)
    assert torch.equal(own[mine], values[mine]) and int((own != 0).sum()) <= 4000


class CountsOperations(TorchDispatchMode):
    """Counts what is asked of torch."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def operations(nodes: int, size: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many operations each chain of a bucket takes, whose shards are no multiples of 64.

    Nothing is sent. Codecs and sums are one kernel each on a GPU, and are not counted.
    """
    for name in ("encode", "decode", "decode_add", "decode_sum"):
        monkeypatch.setattr(Blockwise, name, lambda *_, out=None, **__: out)
    monkeypatch.setattr(codec_module, "sum_rows", lambda *_: None)
    monkeypatch.setattr(hops_module, "start_exchange", lambda *_: None)
    monkeypatch.setattr(hops_module, "start_gather", lambda *_: None)
    monkeypatch.setattr(dist, "all_to_all_single", lambda *_, **__: None)
    d, n = nodes * size, 1000
    hops, bucket = two_hops(nodes, size), torch.zeros(d * n)
    pieces, beside = cut_bucket(d * n, EXACT_AT, hops, lambda m: [slice(0, m)], bucket.device)
    channel = Channel(Traffic(), Arena(), bucket.device)
    codec, found = Blockwise(4, 64), {}
    held = torch.zeros(pieces[0].own(bucket).numel())
    assert beside is not None
    chains = {
        "gradients": lambda: reduce_rows(pieces[0], bucket, Codecs(gradients={INTER: codec}), 1.0, channel),
        "weights": lambda: gather_coded(pieces[0], bucket, codec, held, channel),
        "exact gradients": lambda: reduce_exact(beside, bucket, 1.0, channel),
        "exact weights": lambda: gather_exact(beside, bucket, channel),
    }
    for name, chain in chains.items():
        list(chain())  # makes positions
        with CountsOperations() as counted:
            list(chain())
        found[name] = counted.count
    return found


def test_operations_do_not_grow_with_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of 8 ranks, and 64 nodes of them: 512 ranks took 1,034 operations with a copy of each row."""
    few, many = (operations(nodes, 8, monkeypatch) for nodes in (2, 64))
    assert many == few and max(many.values()) < 100, (few, many)


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


def two_hops(nodes: int, size: int, local: int = 0, node: int = 0) -> TwoHops:
    """The group of the first ranks, seen by one of them; it has no communicators."""
    inter = Axis(
        AxisSpec("inter", "data", nodes, 1, INTER), node, tuple(range(0, nodes * size, size)), None, None
    )
    intra = Axis(AxisSpec("intra", "data", size, 1, INTRA), local, tuple(range(size)), None, None)
    return TwoHops(tuple(range(nodes * size)), inter, intra)


@pytest.mark.parametrize("dtype, nodes, size", [(torch.float16, 2, 1), (torch.bfloat16, 1, 3)])
def test_averages_are_rounded_once(
    dtype: torch.dtype, nodes: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks send what this one does. Two of fp16's largest have a sum that fp16 lacks."""
    monkeypatch.setattr(hops_module, "start_exchange", echo)
    d = nodes * size
    values = torch.linspace(-65504.0, 65504.0, 64).to(dtype)
    grads, hops = values.repeat(d), two_hops(nodes, size)
    channel = Channel(Traffic(), Arena(), torch.device("cpu"))
    list(reduce_rows(Columns(hops, slice(0, 64)), grads, Codecs(), 1 / d, channel))
    assert torch.equal(grads[:64], values)


def test_groups_wait_as_long_as_megatrons(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data-parallel group has a time of its own."""
    given: list = []
    monkeypatch.setattr(
        patch, "cut_groups", lambda *args: given.append(args[3]["dense"].timeout) or cut_groups(*args)
    )
    group = dist.new_group([0], timeout=timedelta(minutes=47))
    ddp = Config(module=torch.nn.Linear(1, 1), intra_dp_cp_group=group, pp_group=dist.group.WORLD)
    patch.Patch._make_carrier(Config(options=from_words(ranks_per_node=1), traffic=Traffic()), ddp)
    assert given == [timedelta(minutes=47)]


class NamedNCCL:
    """Stands for NCCL's process group where torch has none."""

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = Config(cga_cluster_size=None, max_ctas=None, min_ctas=None, net_name=None)
            self._timeout = timedelta(minutes=10)


def test_groups_have_the_options_of_megatrons(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of ``nccl_communicator_config_path`` and ``high_priority_stream_groups``, new ones for every group."""
    cpu, new_group, made = torch.device("cpu"), dist.new_group, list[Any]()
    world = settings_like(dist.group.WORLD, cpu)  # type: ignore[arg-type]
    assert world.options() is None
    monkeypatch.setattr(dist, "ProcessGroupNCCL", NamedNCCL, raising=False)
    given = NamedNCCL.Options(is_high_priority_stream=True)
    given.config.max_ctas, given.config.net_name = 8, "IB"
    group: Any = Config(_get_backend=lambda _: Config(options=given))

    def note(ranks: list[int], *, pg_options: Any, **words: Any) -> Any:
        made.append(pg_options)
        return new_group(ranks, **words)

    monkeypatch.setattr(dist, "new_group", note)
    cut_groups({"dense": [0], "expert": [0]}, 1, cpu, {"dense": settings_like(group, cpu)})
    with_options = [options for options in made if options is not None]
    assert len(with_options) == 4 == len(set(map(id, with_options)))
    config = {"cga_cluster_size": None, "max_ctas": 8, "min_ctas": None, "net_name": "IB"}
    for options in with_options:
        assert options.is_high_priority_stream and options._timeout == timedelta(minutes=10)
        assert vars(options.config) == config


class Bucket:
    """One of a weight that another pipeline stage holds, too."""

    def __init__(self) -> None:
        self.grad_data = torch.zeros(64)
        weight = torch.nn.Parameter(torch.zeros(8, 8))
        weight.shared_embedding = True  # type: ignore[attr-defined]
        weight.main_grad = self.grad_data.view(8, 8)  # type: ignore[attr-defined]
        self.params_list = [weight]


def built(on: patch.Patch, module: torch.nn.Module, buckets: Sequence[Any]) -> None:
    """Have a patch see Megatron build its DistributedDataParallel of a module, on one rank."""
    world = dist.group.WORLD
    bucket_group = Config(buckets=buckets, intra_distributed_optimizer_instance_group=world)
    ddp = Config(
        module=module, intra_dp_cp_group=world, pp_group=world, buffers=[], expert_parallel_buffers=[],
        bucket_groups=[bucket_group], expert_parallel_bucket_groups=[],
    )  # fmt: skip
    on._build(lambda self, config, ddp_config, module: None, ddp, Config(), Config(**GOOD), module)


def test_a_restart_in_the_process_renews_what_the_first_start_made() -> None:
    """Megatron-LM's --inprocess-restart destroys all groups and builds everything again in the same process."""
    pytest.importorskip("megatron.core")
    found = []
    with patched() as on:
        for _ in range(2):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            buckets = [Bucket(), Bucket()]
            built(on, torch.nn.Linear(1, 1), buckets)
            assert set(on.tied) == set(buckets) and all(bucket in on.carrier.held for bucket in buckets)  # type: ignore[union-attr]
            found.append(on.carrier)
            dist.destroy_process_group()
        assert found[0] is not found[1]
        del buckets
        assert not on.tied  # nor is a bucket kept alive


def test_the_next_enable_takes_the_communicators_of_the_last(one_rank: None) -> None:
    """``disable()`` cannot destroy them; a job that turns the patch on and off would gather them."""
    groups = []
    for _ in range(3):
        with patched() as on:
            built(on, torch.nn.Linear(1, 1), [Bucket()])
        groups.append(len(dist.distributed_c10d._world.pg_names))
    assert groups[0] > 1 and len(set(groups)) == 1


@pytest.mark.parametrize("widths, effect", [((1, 300), True), ((300, 1), True), ((1, 1), False)])
def test_what_has_an_effect_on_some_model_chunk_is_not_refused(
    one_rank: None, widths: tuple[int, int], effect: bool
) -> None:
    """Parameters of width 1 are sent exactly, those of width 300 are not."""
    with patched(gradients="int4") as on:
        for width in widths:
            built(on, torch.nn.Linear(width, width), [Bucket()])
        with nullcontext() if effect else refused("1 configuration error", "exact_numel=16384"):
            on._build_optimizer(lambda self, config: None, Config(), Config())


def test_routers_and_small_parameters_are_exact() -> None:
    module = torch.nn.ModuleDict(
        {
            "router": torch.nn.Linear(64, 64, bias=False),
            "wide": torch.nn.Linear(64, 64),
            "norm": torch.nn.LayerNorm(64),
        }
    )
    names = {name for name, p in module.named_parameters() if p in patch.exact_parameters(module, 64)}
    assert names == {"router.weight", "wide.bias", "norm.weight", "norm.bias"}


def echo(axis: Axis, out: torch.Tensor, messages: torch.Tensor, traffic: Traffic) -> None:
    """The other ranks send what this one does."""
    out.copy_(messages)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_kind_has_a_line_when_it_first_gets_a_buffer(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Ranks 0 and 1 are stages of a pipeline, of which the second alone has experts; rank 2 is of another."""
    stages = {0: ["dense"], 1: ["dense", "expert"], 2: ["dense"]}

    def gather(own: list) -> list:
        return [stages[r] if r != rank else own for r in range(3)]

    monkeypatch.setattr(report, "gather_objects", gather)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    buffers = [Config(param_dtype=torch.bfloat16, grad_dtype=torch.float32)]
    kind = lambda name: (name, two_hops(2, 1), buffers, 0)  # noqa: E731
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
            "gradients int8 (blocks of 64, Hadamard transform of 64) inside a node, nothing across nodes",
        ),
    ):
        codecs = codecs_of(from_words(gradients="int4", **words).wire)
        assert said in start_line("0.16.1", [("dense", two_hops(1, 2), buffers, 0)], codecs)
