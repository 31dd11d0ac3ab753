"""fsdp2_patch without ranks: words, where parameters lie in messages, names of torch's private parts."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.fx.experimental.proxy_tensor import make_fx

import fsdp2_patch
from fsdp2_patch.gradients import ReplicaAllReduce, TwoHopReduceScatter
from fsdp2_patch.group import Group
from fsdp2_patch.packing import Packing
from fsdp2_patch.refusals import not_sharded
from fsdp2_patch.report import start_line
from fsdp2_patch.torch_parts import NEEDED, check_torch
from fsdp2_patch.weights import KeptAllGather
from megatron_core_patch.options import PatchOptions
from megazero.comm.codec import Blockwise, codecs_of
from megazero.comm.hops import Channel, Traffic
from megazero.comm.wire import Codecs
from megazero.config.layout.wire import EXACT_NUMEL
from megazero.kernels.arena import Arena
from megazero.mesh.levels import INTER
from megazero.patches.checks import Differences, refuse_recording
from megazero.patches.names import Replaced, lookup, missing
from megazero.patches.options import MessageOptions, read_words
from megazero.patches.two_hops import TwoHops
from tests import ROOT
from tests.messages import names, refused


def test_words() -> None:
    options = read_words(MessageOptions, "int4-delta", "int4")
    assert options.wire.delta and options.wire.exact_numel == EXACT_NUMEL
    assert read_words(MessageOptions, gradients="int8", exact_numel=0).wire.exact_numel == 0
    options = read_words(
        MessageOptions, gradients="int4", block_size=32.0, ranks_per_node="8", exact_numel=None
    )
    assert (options.zero_block_size, options.ranks_per_node, options.wire.exact_numel) == (32, 8, EXACT_NUMEL)


@pytest.mark.parametrize(
    "given, by, words",
    [
        ({"chunk_numel": 1}, TypeError, ["'chunk_numel'", "nearest"]),  # a word of the other patch's
        ({"weights": "int8", "weight_bits": 4}, TypeError, ["'weight_bits'", "nearest"]),
        ({"exact_numel": -1}, ValueError, ["- exact_numel -1"]),  # by the word, not the flag
        ({"exact_numel": 0}, ValueError, ["exact_numel 0", "weights='int8'", "gradients='int4'"]),
        ({"gradients": "int4", "exact_numel": "few"}, ValueError, ["exact_numel", "'few'"]),
        ({"gradients": "int4", "verify_first_steps": 2.5}, ValueError, ["verify_first_steps", "2.5"]),
        ({"gradients": "int4", "verify_first_steps": None}, ValueError, ["verify_first_steps", "None"]),
        ({"gradients": "int4", "gradient_transform": True}, ValueError, ["gradient_transform", "True"]),
    ],
)
def test_bad_words(given: dict, by: type[Exception], words: list[str]) -> None:
    with refused(*words, by=by):
        read_words(MessageOptions, **given)


@pytest.mark.parametrize("gradients", ["int8", "int4"])
@pytest.mark.parametrize("given", [{}, {"gradient_transform": "none"}, {"gradient_transform": "hadamard"}])
def test_both_patches_mean_the_same_by_the_same_words(gradients: str, given: dict) -> None:
    """The formats of docs/results/loss.md: a transform of 64 in 4 bits by default, or as is said."""
    words = {"gradients": gradients, **given}
    wires = [read_words(kind, **words).wire for kind in (MessageOptions, PatchOptions)]
    assert wires[0] == wires[1]
    codec = codecs_of(wires[0]).gradients.get(INTER)
    mixed = given.get("gradient_transform", "none" if gradients == "int8" else "hadamard") == "hadamard"
    assert isinstance(codec, Blockwise) and codec.hadamard == (64 if mixed else 0)
    assert (codec.bits, codec.form.block) == (int(gradients[3:]), 64)


def test_the_page_lists_every_keyword() -> None:
    page = (ROOT / "docs" / "integrate" / "fsdp2.md").read_text()
    table = page.split("| keyword | values |")[1].split("\n\n")[0]
    listed = {
        word
        for line in table.splitlines()
        for word in re.findall(r"`(\w+)`", line.split("|")[1] if line else "")
    }
    formats = {
        "quantized_weights",
        "weight_bits",
        "quantized_weights_delta",
        "quantized_gradients",
        "gradient_bits",
    }
    options = {field.name.removeprefix("zero_") for field in dataclasses.fields(MessageOptions)} - formats
    assert listed == options - {"gradient_bits_intra_node"} | {"weights", "gradients", "gradients_intra_node"}


@pytest.mark.parametrize("shares", [1, 3])
def test_no_block_holds_elements_of_two_parameters(shares: int) -> None:
    """Parameters of 100, 7, 0, 64 and 5 elements, of which the second and the last are exact."""
    packing = Packing.of([100, 7, 0, 64, 5], [False, True, False, False, True], 64, shares)
    coded, exact = packing.regions
    assert coded.runs == ((0, 100, 0), (107, 64, 128)) and exact.runs == ((100, 7, 0), (171, 5, 7))
    assert coded.numel == 192 and exact.numel == 12
    rows = torch.arange(2 * 176.0).view(2, 176) + 1
    with Arena().frame(rows.device) as frame:
        packed = packing.pack(rows, frame.take)
        assert not packed[0][:, 100:128].any() and not packed[0][:, 192:].any()
        back = torch.zeros_like(rows)
        packing.unpack(packed, back)
        assert torch.equal(back, rows)


def test_exact_neighbours_move_as_one() -> None:
    (region,) = Packing.of([5, 6, 7], [True] * 3, 64, 4).regions
    assert region.runs == ((0, 18, 0),) and region.numel == 20


def test_the_private_parts_are_there_in_this_torch() -> None:
    check_torch()
    assert not list(missing(NEEDED))
    for module, paths in NEEDED.items():
        for path in paths:
            lookup(module, path)


def test_a_name_that_is_replaced_keeps_its_signature() -> None:
    replaced = Replaced()
    for module, paths in NEEDED.items():
        for path in paths:
            replaced.wrap(module, path, lambda original, *rest, **words: original(*rest, **words))
    assert not list(missing(NEEDED))  # as for a second model that is patched
    replaced.restore()
    check_torch()


def test_the_start_line_says_what_a_large_model_keeps() -> None:
    """7 billion elements on a rank, in bf16 from 2 nodes, and sums of both nodes in fp32."""
    policy = SimpleNamespace(param_dtype=torch.bfloat16, reduce_dtype=None)
    size, shard = torch.Size([7_000_000_000]), torch.empty(0, requires_grad=True)
    parameter = SimpleNamespace(sharded_param=shard, mp_policy=policy, padded_sharded_param_size=size)
    two: Any = SimpleNamespace(size=2, index=0)
    channel = Channel(Traffic(), Arena(), shard.device)
    group = Group(
        name="model",
        raw=SimpleNamespace(fsdp_params=[parameter]),
        hops=TwoHops((0, 1, 2, 3), two, two),
        replicas=False,
        exact=frozenset(),
        names={},
        codecs=Codecs(),
        channel=channel,
        differences=Differences("fsdp2_patch"),
        samples=lambda step: (),
        verified_steps=0,
        checksum_interval=0,
    )
    line = start_line([group])
    assert "keeps 28.0 GB of weights" in line and "56.0 GB of sums" in line, line


class MegatronFSDP(torch.nn.Module):
    """Stands for the class of that name."""


def test_a_model_of_another_fsdp_is_named() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MegatronFSDP, "__module__", "megatron_fsdp.megatron_fsdp")
        said = not_sharded(torch.nn.Sequential(MegatronFSDP()))
    names(said, "megatron_fsdp.megatron_fsdp.MegatronFSDP", "fully_shard", "megatron_core_patch")
    names(not_sharded(torch.nn.Sequential(MegatronFSDP())), "fully_shard", "enable()")
    first = FullyShardedDataParallel.__new__(type("First", (FullyShardedDataParallel,), {}))
    torch.nn.Module.__init__(first)
    assert "fully_sharded_data_parallel.FullyShardedDataParallel" in not_sharded(first)


def test_recordings_of_a_step_are_told_apart() -> None:
    """A traced one; a graph that is captured, as CUDA says; and neither."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    refuse_recording(cpu, "patch", torch.ones(1))
    with refused("patch", "compile blocks", by=RuntimeError):
        make_fx(lambda x: (refuse_recording(cpu, "patch", x), x)[1], tracing_mode="fake")(torch.ones(1))
    with refused("patch", "compile blocks", by=RuntimeError), FakeTensorMode():
        refuse_recording(cpu, "patch", torch.ones(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        refuse_recording(cpu, "patch")
        with refused("patch", "disable_cuda_graphs", by=RuntimeError):
            refuse_recording(cuda, "patch")


def test_every_message_of_a_traced_step_is_refused() -> None:
    group: Any = SimpleNamespace()
    scatter = TwoHopReduceScatter(group)
    with FakeTensorMode():
        x = torch.ones(1)
        for send in (
            partial(KeptAllGather(group), x, x, group),
            partial(scatter, x, x, group, None),
            partial(scatter.cross, x),
            partial(ReplicaAllReduce(group).all_reduce, x),
        ):
            with refused("fsdp2_patch", "compile blocks", by=RuntimeError):
                send()


def test_nothing_is_on_without_enable() -> None:
    fsdp2_patch.disable()
    with refused("enable()", by=RuntimeError):
        fsdp2_patch.counters()
