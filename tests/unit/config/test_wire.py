"""What the hops send: formats, where they apply, what is refused, and the line that says so."""

from dataclasses import replace

import pytest

from megazero.comm.codec import codec_of
from megazero.comm.wire import Coding, mixes
from megazero.config import ConfigError, World, make_config
from megazero.config.layout.wire import MIXED
from megazero.config.layout.wire_rules import LARGEST_BLOCK, LEAST_BLOCK
from megazero.config.summary import describe
from megazero.kernels import format as kernel_format
from megazero.kernels import hadamard as kernel_hadamard
from megazero.mesh.levels import INTER, INTRA
from megazero.plan.rounding import HADAMARD, INT4, SDP4BIT
from megazero.plan.rounding import ZEROPP as PUBLISHED_ZEROPP
from tests.messages import names
from tests.sizes import SMALL

TWO_NODES, ONE_NODE = World(8, 4), World(4, 4)
RACK = "inter_rack"
ZEROPP = {"zero_preset": "zeropp"}
INT8 = {**ZEROPP, "zero_quantized_weights_delta": False}
BOTH = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
DELTA = {"zero_quantized_weights_delta": True}
SUMS = Coding(4, 64, hadamard=64)  # of gradients across nodes, by default


def config(world=TWO_NODES, **changes):
    return make_config({**SMALL, **changes}, world)


def wire(world=TWO_NODES, **changes):
    return config(world, **changes).wire(world)


def errors(world=TWO_NODES, **changes):
    with pytest.raises(ConfigError) as caught:
        config(world, **changes)
    return caught.value.errors


def summary(world=TWO_NODES, **changes):
    (line,) = [each for each in describe(config(world, **changes), world) if "ZeRO: " in each]
    return line.strip()


# -- formats -----------------------------------------------------------------------------------------


def test_constants_are_those_of_the_kernels():
    for block in (LEAST_BLOCK, LARGEST_BLOCK):
        kernel_format.Format(4, block)
    for block in (LEAST_BLOCK // 2, LARGEST_BLOCK * 2):
        with pytest.raises(ValueError):
            kernel_format.Format(4, block)


def test_nothing_is_quantised_unless_asked_for():
    for preset in ("ddp", "zero1", "zero2", "zero3", "mics", "hpz"):
        plain = wire(zero_preset=preset)
        assert not plain.codings and plain.block == 64 and plain.exact_numel == 0


def test_zeropp_sends_differences_at_4_bits_against_resident_copies():
    whole = wire(**ZEROPP)
    assert whole.weights == Coding(4, 64) and whole.gradients.get(INTER) == SUMS and whole.delta
    assert whole.gradients.get(INTRA) is None
    assert whole.block == 64 and whole.exact_numel == 16384
    assert config(**ZEROPP).shards(TWO_NODES).lifetime == "resident"
    for same in (DELTA, BOTH, {"zero_params_lifetime": "resident"}, {"zero_quantized_weights": True}):
        assert wire(**ZEROPP, **same) == whole
    assert wire(zero_shard=(4, 4, 8), **BOTH, **DELTA) == whole
    eight = wire(**ZEROPP, zero_weight_bits=8)
    assert eight.weights == Coding(8, 128) and eight.delta
    only = wire(**ZEROPP, zero_quantized_gradients=False)
    assert only.codings == [Coding(4, 64)] and only.delta


def test_zeropp_without_quantised_weights_has_no_differences():
    for off in ({}, {"zero_quantized_weights_delta": False}):
        chosen = config(**ZEROPP, zero_quantized_weights=False, **off)
        assert chosen.wire(TWO_NODES).codings == [SUMS]
        assert not chosen.wire(TWO_NODES).delta and chosen.shards(TWO_NODES).lifetime == "step"


def test_zeropp_in_int8_and_its_parts():
    whole = wire(**INT8)
    assert whole.weights == Coding(8, 128) and whole.gradients.get(INTER) == SUMS
    assert whole.gradients.get(INTRA) is None and not whole.delta
    assert whole.block == 128 and whole.exact_numel == 16384
    assert wire(**INT8, zero_quantized_gradients=False).codings == [Coding(8, 128)]
    for factors in ((4, 4, 8), (1, 1, 8)):
        assert wire(zero_shard=factors, **BOTH) == whole
    dropped = config(**ZEROPP, zero_params_lifetime="step")  # no copy to which differences could be added
    assert dropped.wire(TWO_NODES) == whole
    for chosen in (dropped, config(**INT8)):
        assert chosen.shards(TWO_NODES).lifetime == "step"
    assert config(**INT8, zero_params_lifetime="resident").wire(TWO_NODES) == whole


def test_every_choice_arrives():
    chosen = wire(
        **INT8,
        zero_weight_bits=4,
        zero_gradient_bits=4,
        zero_gradient_bits_intra_node=8,
        zero_block_size=256,
        zero_exact_numel=0,
    )
    assert chosen.weights == Coding(4, 256) and chosen.gradients.get(INTRA) == Coding(8, 256, hadamard=128)
    assert chosen.gradients.get(INTER) == Coding(4, 256, hadamard=128)
    assert chosen.block == 256 and chosen.exact_numel == 0
    assert not chosen.delta
    assert wire(**ZEROPP, zero_block_size=16).block == 64


def test_a_transform_mixes_the_smallest_block_of_its_hops():
    """Between two hops with one transform nothing is transformed."""
    mixed = wire(**ZEROPP, zero_gradient_bits_intra_node=8)
    assert mixed.gradients.get(INTER) == Coding(4, 64, hadamard=64) and mixed.weights == Coding(4, 64)
    assert mixed.gradients.get(INTRA) == Coding(8, 128, hadamard=64)
    for block, size in ((8, 8), (128, 128), (2048, 128)):
        sized = wire(**ZEROPP, zero_block_size=block).gradients.get(INTER)
        assert sized == Coding(4, block, hadamard=size)
        assert kernel_hadamard.Hadamard(size).size == size == min(MIXED, block)


@pytest.mark.parametrize(
    "changes, size",
    [
        ({}, 64),
        ({"zero_gradient_bits": 8}, 0),
        ({"zero_gradient_bits": 8, "zero_gradient_bits_intra_node": 8}, 0),
        ({"zero_gradient_bits": 8, "zero_gradient_bits_intra_node": 4}, 64),
        ({"zero_gradient_transform": "none"}, 0),
        ({"zero_gradient_transform": "hadamard", "zero_gradient_bits": 8}, 128),
    ],
)
def test_few_bits_are_transformed_unless_that_is_named(changes, size):
    """However they are asked for; weights never are."""
    asked = [
        ZEROPP,
        {"zero_preset": "ddp", **BOTH},
        {"zero_shard": (4, 4, 8), "zero_quantized_gradients": True},
    ]
    for layout in asked:
        chosen = wire(**layout, **changes)
        assert chosen.gradients.get(INTER).hadamard == size and mixes(chosen.gradients.get(INTER)) == (
            size > 0
        )
        assert chosen.weights is None or chosen.weights.hadamard == 0
    plain = replace(chosen.gradients.get(INTER), hadamard=0)
    for n, exact in ((128, 0), (4096, 17), (2**20, 3)):  # the same bytes
        assert codec_of(plain).message_numel(n, exact) == codec_of(chosen.gradients.get(INTER)).message_numel(
            n, exact
        )


def test_gradients_in_few_bits_without_a_transform_are_noted_with_the_published_gaps():
    def gaps(**changes):
        return [note for note in config(**changes).notes if "Published gaps" in note]

    named = {"zero_gradient_transform": "none"}
    (note,) = gaps(**ZEROPP, **named)
    for published in (*SDP4BIT, PUBLISHED_ZEROPP):
        assert f"{published.gap(INT4):+.2f}".removesuffix("%") in note and published.model in note
    for published in SDP4BIT:
        assert f"{published.gap(HADAMARD):+.2f}" in note
    planned = {"zero_preset": "auto", "cluster": "a100"}
    assert gaps(**planned, **named, loss_policy="zeropp")
    for silent in (
        ZEROPP,
        named,  # nothing is quantised, which none asks for
        {**ZEROPP, **named, "zero_gradient_bits": 8},
        {**ZEROPP, **named, "zero_quantized_gradients": False},
        {**planned, **named},
    ):
        assert not gaps(**silent), silent


def test_delta_refresh_implies_quantised_weights_and_resident_copies():
    assert wire(**ZEROPP, **DELTA, zero_weight_bits=2).weights == Coding(2, 64)
    alone = config(zero_preset="hpz", **DELTA)
    assert (
        alone.wire(TWO_NODES).weights == Coding(4, 64) and alone.wire(TWO_NODES).gradients.get(INTER) is None
    )
    assert alone.wire(TWO_NODES).delta and alone.shards(TWO_NODES).lifetime == "resident"
    assert config(zero_preset="hpz", **BOTH).shards(TWO_NODES).lifetime == "step"


# -- hops that do not exist --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [ZEROPP, INT8, {"zero_preset": "hpz", **BOTH, **DELTA}, {"zero_preset": "ddp", **BOTH}]
)
def test_on_one_node_nothing_is_quantised_and_the_summary_says_so(changes):
    plain = wire(ONE_NODE, **changes)
    assert not plain.codings and not plain.delta and plain.exact_numel == 0
    line = summary(ONE_NODE, **changes)
    assert "on 4 data-parallel ranks of 1 node" in line
    assert "INT4 across nodes, but no gradients cross nodes here): inside nodes exact" in line
    assert "but no weights cross nodes here): " in line
    assert config(ONE_NODE, **changes).shards(ONE_NODE).lifetime == "use"


def test_each_format_needs_its_own_hop():
    mics = wire(zero_preset="mics", **BOTH)
    assert mics.weights is None and mics.gradients.get(INTER) == SUMS
    inside = wire(ONE_NODE, zero_quantized_gradients=True, zero_gradient_bits_intra_node=8)
    assert inside.gradients.get(INTRA) == Coding(8, 128, hadamard=64) and inside.gradients.get(INTER) is None
    across = wire(World(4, 1), zero_quantized_gradients=True, zero_gradient_bits_intra_node=8)
    assert across.gradients.get(INTRA) is None and across.gradients.get(INTER) == SUMS
    tensor_parallel = {"tensor_model_parallel_size": 4, **BOTH}
    assert wire(World(8, 4), **tensor_parallel).codings == [Coding(8, 128), SUMS]
    assert not wire(World(4, 4), **tensor_parallel).codings
    assert "nothing is sent or quantised" in summary(World(4, 4), **tensor_parallel)


# -- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world, tp", [(World(4, 1), 1), (TWO_NODES, 4)])
def test_zeropp_on_nodes_of_one_rank_is_zero1_with_the_same_messages(world, tp):
    said = {"tensor_model_parallel_size": tp, "global_batch_size": 8}
    zeropp = config(world, **ZEROPP, **said)
    equal = config(world, zero_preset="zero1", zero_quantized_gradients=True, **DELTA, **said)
    assert zeropp.shards(world) == equal.shards(world) and zeropp.shards(world).factors[:2] == (1, 1)
    assert zeropp.wire(world) == equal.wire(world) and zeropp.wire(world).delta
    assert any("is zero1 with quantised messages" in note for note in zeropp.notes)
    assert not any("one data-parallel rank" in note for note in (*equal.notes, *config(**ZEROPP).notes))
    for preset in ("hsdp", "mics", "hpz"):  # those would have no use
        assert "nearest legal preset: zero3" in errors(world, zero_preset=preset, **said)[0]
    assert "straddle nodes" in errors(world, **ZEROPP, zero_hpz_partition_size=2, **said)[0]


def test_numeric_choices_are_numbers_in_files_too():
    with pytest.raises(ConfigError, match="takes a whole number"):
        make_config({**SMALL, **ZEROPP, "zero_weight_bits": "eight"})
    assert make_config({**SMALL, **ZEROPP, "zero_weight_bits": "4"}).zero.zero_weight_bits == 4


def test_each_link_has_its_format():
    """4 nodes of 2 ranks in 2 racks: bits for the links across nodes, the lowest first; the last for all others."""
    racks = {**ZEROPP, "level_sizes": (2,)}
    for bits, sent in ((None, (4, 4)), ((8,), (8, 8)), ((8, 4), (8, 4))):
        found = wire(World(8, 2), **racks, zero_gradient_bits=bits).gradients
        assert {link: coding.bits for link, coding in found.items()} == dict(
            zip((INTER, RACK), sent, strict=True)
        )
        mixed = {coding.hadamard for coding in found.values()}
        assert mixed == ({0} if sent == (8, 8) else {64}), (
            "one transform, so that nothing is mixed between hops"
        )
    one_rack = wire(World(4, 2), **racks, zero_gradient_bits=(8, 4)).gradients
    assert [*one_rack] == [INTER], "a world in one rack has no other link"
    said = summary(World(8, 2), **racks, zero_gradient_bits=(8, 4), zero_hpz_partition_size=4)
    names(
        said, "P,G,OS = 4,4,8", "across nodes INT8 with every micro-batch", "across racks INT4 once per step"
    )
    for changes, about in (
        ({**ZEROPP, "zero_gradient_bits": (8, 4)}, ("1 kind of link", "nearest: 8")),
        ({**racks, "zero_gradient_bits": (8, 7)}, ("7 is not one of 8, 4",)),
        ({"level_sizes": (3,)}, ("--level-sizes 3", "nearest: 2")),
    ):
        (line,) = errors(World(8, 2), **changes)
        names(line, *about)


# -- the summary -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({}, ["preset zero1", "P,G,OS = 1,1,8", "inside and across nodes exact"]),
        ({"zero_preset": "ddp"}, ["weights: never sent", "across nodes exact once"]),
        ({"zero_preset": "zero3", **BOTH}, ["gathers", "INT8", "128", "INT4 with every micro-batch"]),
        ({"zero_shard": (2, 4, 8)}, ["--zero-shard", "P,G,OS = 2,4,8", "inside nodes exact with every"]),
        ({**ZEROPP, "zero_quantized_weights": False}, ["weights (--no-zero-quantized-weights)"]),
        ({**ZEROPP, **BOTH}, ["(--zero-quantized-weights)", "(--zero-quantized-gradients)"]),
        ({**ZEROPP, **DELTA}, ["resident", "(--zero-quantized-weights-delta)", "changes as INT4 once"]),
        (
            {**ZEROPP, "zero_gradient_bits_intra_node": 8},
            ["inside nodes INT8 with every", "Hadamard", "INT4 once"],
        ),
        ({**ZEROPP, "zero_gradient_transform": "none"}, ["INT4 once per step (blocks of 64, no transform)"]),
        ({**ZEROPP, "zero_gradient_bits": 8}, ["INT8 once per step (blocks of 128, no transform)"]),
        ({"zero_shard": (2, 2, 2)}, ["inside nodes exact with every micro-batch and once per step"]),
    ],
)
def test_summary_says_what_each_hop_sends(changes, parts):
    names(summary(**changes), *parts)
