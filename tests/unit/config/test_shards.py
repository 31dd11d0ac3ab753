"""Presets and shard factors over every small d and h, against the mesh's own rule."""

import dataclasses
import itertools

import pytest

from megazero.config import PRESETS, resolve_shards
from megazero.mesh.grid import shard_problem
from tests.messages import refused

SIZES = [(d, h) for d in (*range(1, 17), 24, 36) for h in range(1, d + 1) if d % h == 0]


def triples(top):
    return itertools.product(range(1, top + 1), range(1, top + 1), range(1, top + 1))


def one_collective_each(factors, d, h):
    """The rule by its reason: the cuts of the data-parallel ranks are a chain in which each divides the next."""
    cuts = sorted({1, *factors, h, d})
    ascending = factors[0] <= factors[1] <= factors[2] <= d and factors[0] >= 1
    return ascending and all(high % low == 0 for low, high in itertools.pairwise(cuts))


@pytest.mark.parametrize("d,h", SIZES)
def test_presets_follow_the_table(d, h):
    table = {"ddp": (1, 1, 1), "zero1": (1, 1, d), "zero2": (1, d, d), "zero3": (d, d, d)}
    table |= {"mics": (h, h, h), "hsdp": (h, h, h), "hpz": (h, d, d), "zeropp": (h, h, d)}
    assert set(table) == set(PRESETS)
    for preset, factors in table.items():
        if h == 1 and preset in ("mics", "hsdp", "hpz"):
            with pytest.raises(ValueError, match="nearest legal preset: zero3"):
                resolve_shards(preset, d, (h,))
            continue
        shards = resolve_shards(preset, d, (h,))
        assert shards.factors == factors
        assert one_collective_each(factors, d, h)
        expected = "use" if factors[0] == factors[2] else "resident" if factors[0] == 1 else "step"
        assert shards.lifetime == expected


@pytest.mark.parametrize("d,h", [(d, h) for d, h in SIZES if d <= 12])
def test_explicit_factors_are_legal_exactly_where_every_cut_divides_the_next(d, h):
    for factors in triples(d + 1):
        assert (not shard_problem(factors, d, (h,))) == one_collective_each(factors, d, h), factors


def test_nearest_factors_are_legal():
    for d, h in [(8, 4), (12, 4), (6, 3)]:
        for factors in triples(d):
            problem = shard_problem(factors, d, (h,))
            assert bool(problem) != one_collective_each(factors, d, h)
            if problem:
                nearest = tuple(map(int, problem.rpartition("nearest legal: ")[2].split(",")))
                assert one_collective_each(nearest, d, h), problem


def test_every_broken_rule_is_named():
    with pytest.raises(ValueError) as error:
        resolve_shards((2, 3, 4), 8, (4,))
    for part in ("P = 2 does not divide G = 3", "G = 3 does not divide OS = 4", "G = 3 neither", "2,4,4"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="three numbers"):
        resolve_shards((2, 4), 8, (4,))


def test_lifetimes():
    assert resolve_shards("hpz", 8, (4,)).lifetime == "step"
    assert resolve_shards("hpz", 8, (4,), "resident").lifetime == "resident"
    assert resolve_shards("hpz", 8, (8,)).lifetime == "use"  # one node: hpz is zero3
    assert resolve_shards("zero3", 8, (4,), "resident").lifetime == "use"
    assert resolve_shards("zeropp", 8, (4,)).lifetime == "step"
    assert resolve_shards("zeropp", 8, (4,), delta=True).lifetime == "resident"
    assert (
        resolve_shards((2, 4, 4), 4, (4,), delta=True).lifetime == "step"
    )  # one node: differences are not sent
    with pytest.raises(ValueError, match="nearest legal: step"):
        resolve_shards("zero1", 8, (4,), "use")
    for policy, h, delta in (
        ("hpz", 4, False),
        ("zero3", 4, False),
        ("zeropp", 4, True),
        ("zeropp", 4, False),
    ):
        default = resolve_shards(policy, 8, (h,), delta=delta)
        gathered = resolve_shards(policy, 8, (h,), "gathered", delta=delta)
        assert gathered.keep_gathered and not default.keep_gathered
        assert dataclasses.replace(gathered, keep_gathered=False) == default
    for policy in ("ddp", "zero1", "zero2", (1, 4, 8)):
        with pytest.raises(ValueError, match="'gathered' needs P > 1.*nearest legal: resident"):
            resolve_shards(policy, 8, (4,), "gathered")
    for policy in ("zero2", "zero3", "hpz", "zeropp"):
        whole = resolve_shards(policy, 8, (4,), gradients="step")
        assert whole == dataclasses.replace(resolve_shards(policy, 8, (4,)), whole_gradients=True)
        assert resolve_shards(policy, 8, (4,), gradients="micro-batch") == resolve_shards(policy, 8, (4,))
    for policy in ("ddp", "zero1"):
        with pytest.raises(
            ValueError, match="gradient lifetime 'step' needs G > 1.*nearest legal: leave it out"
        ):
            resolve_shards(policy, 8, (4,), gradients="step")
    with pytest.raises(ValueError, match="'sep' is not one of use, step, resident, gathered"):
        resolve_shards("zero1", 8, (4,), "sep")


def test_hpz_partition_size():
    assert resolve_shards("hpz", 8, (4,), partition=2).factors == (2, 8, 8)
    with pytest.raises(ValueError, match="nearest legal: 4,8,8"):
        resolve_shards("hpz", 8, (4,), partition=3)
    with pytest.raises(ValueError, match="nearest legal preset: zero3"):
        resolve_shards("hpz", 8, (4,), partition=1)
    assert resolve_shards("zeropp", 8, (4,), partition=2).factors == (2, 4, 8)
    with pytest.raises(ValueError, match="--zero-shard 1,4,8"):
        resolve_shards("zeropp", 8, (4,), partition=1)
    for preset in ("hpz", "zeropp"):  # a partition of 8 fits the factors' rule, but not one node
        with pytest.raises(ValueError, match="straddle nodes.*nearest: --zero-hpz-partition-size 4"):
            resolve_shards(preset, 8, (4,), partition=8)


def test_instances_divide_what_a_preset_shares_over_all_ranks():
    """Megatron's instances are runs of consecutive data-parallel ranks (parallel_state: intra-partial groups)."""
    d, h, instances = 8, 4, 2
    groups = [range(d)[i * (d // instances) : (i + 1) * (d // instances)] for i in range(instances)]
    for preset, factors in (("zero1", (1, 1, 4)), ("zero2", (1, 4, 4)), ("zero3", (4, 4, 4))):
        shards = resolve_shards(preset, d, (h,), instances=instances)
        assert shards.factors == factors and all(len(group) == shards.os for group in groups)
    assert resolve_shards("hpz", 8, (2,), instances=2).factors == (2, 4, 4)
    with refused("--num-distributed-optimizer-instances 3", "8 data-parallel", "2 or 4"):
        resolve_shards("zero1", 8, (4,), instances=3)


def test_a_partition_may_be_the_ranks_of_a_rack():
    """Of 8 data-parallel ranks 2 share a node, 4 a rack. zeropp's gradients stay where its parameters are."""
    assert resolve_shards("hpz", 8, (2, 4), partition=4).factors == (4, 8, 8)
    assert resolve_shards("zeropp", 8, (2, 4), partition=4).factors == (4, 4, 8)
    assert resolve_shards("zeropp", 8, (1, 2), partition=2).factors == (2, 2, 8)
    assert resolve_shards("zeropp", 8, (2, 4)).factors == (2, 2, 8)
    with refused("straddle", "--zero-hpz-partition-size 4"):
        resolve_shards("zeropp", 8, (2, 4), partition=8)
    with refused("G = 3", "per rack", "nearest legal: 4,4,8"):
        resolve_shards("zeropp", 8, (2, 4), partition=3)
