"""Partitions against brute force on small sizes, BLOOM's own, and what is refused."""

import itertools

import pytest

from megazero.pp.partition import (
    BY_TYPE,
    Costs,
    nearest_layers,
    partition,
    partition_problems,
    partition_table,
)

SIZES = [(n, pp, v) for n in range(1, 10) for pp in range(1, 6) for v in (1, 2) if pp * v <= n]


def counts(*args, **kwargs):
    return tuple(len(stage.layers) for stage in partition(*args, **kwargs))


def splits(num_layers, stages):
    cuts = itertools.combinations(range(1, num_layers), stages - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *cut, num_layers))) for cut in cuts]


def costs_of(layers, costs):
    last = len(layers) - 1
    return [
        costs.layer * k + costs.embedding * (i == 0) + costs.head * (i == last) for i, k in enumerate(layers)
    ]


@pytest.mark.parametrize("num_layers, pp, virtual", SIZES)
@pytest.mark.parametrize("method", ["balanced", "uniform", BY_TYPE])
def test_every_layer_is_on_one_stage_and_stages_loop_over_ranks(num_layers, pp, virtual, method):
    stages = partition(num_layers, pp, virtual, costs=Costs(0.2, 1, 2.5), method=method)
    assert [n for stage in stages for n in stage.layers] == list(range(num_layers))
    assert [stage.index for stage in stages] == list(range(pp * virtual))
    assert [stage.rank for stage in stages] == [i % pp for i in range(pp * virtual)]
    assert all(len(stage.layers) >= 1 for stage in stages)
    assert [stage.embedding for stage in stages] == [i == 0 for i in range(pp * virtual)]
    assert [stage.head for stage in stages] == [i == pp * virtual - 1 for i in range(pp * virtual)]


@pytest.mark.parametrize(
    "costs", [Costs(), Costs(1, 1, 1), Costs(0.1, 1, 0.7), Costs(0, 1, 4), Costs(3, 2, 0)]
)
def test_balanced_is_the_best_of_all_splits(costs):
    for num_layers, stages in [(n, s) for n in range(1, 11) for s in range(1, min(n, 6) + 1)]:
        best = min(
            splits(num_layers, stages),
            key=lambda layers: (
                round(max(costs_of(layers, costs)), 9),
                round(sum(c * c for c in costs_of(layers, costs)), 9),
                layers,  # on a tie fewer layers for earlier stages
            ),
        )
        assert counts(num_layers, stages, costs=costs) == best


def test_known_partitions():
    assert counts(70, 12, method=BY_TYPE) == (5, *[6] * 10, 5)  # BLOOM: 70 + 2 over 12
    assert counts(70, 12, method="uniform") == (5, 5, *[6] * 10)
    assert counts(5, 4) == (1, 1, 1, 2)
    assert counts(22, 4, method=(5, 6, 6, 5)) == (5, 6, 6, 5)
    assert counts(10, 4, first=1, last=2) == (1, 3, 4, 2)
    assert counts(10, 2, last=3) == (7, 3)
    assert counts(3, 1) == (3,)
    assert counts(6, 4, 2) == (0, *[1] * 6, 0)  # an embedding and a head apart
    assert counts(8, 2, method=(0, 8)) == (0, 8)
    assert counts(3, 4, costs=Costs(0, 1, 2)) == (1, 1, 1, 0)
    (only,) = partition(3, 1)
    assert only.embedding and only.head


@pytest.mark.parametrize("first, last", itertools.product([None, 1, 2, 5], repeat=2))
def test_outer_layers_are_kept_or_refused(first, last):
    for num_layers, stages in [(n, s) for n in range(1, 9) for s in range(1, min(n, 4) + 1)]:
        wanted = [
            split
            for split in splits(num_layers, stages)
            if first in (None, split[0]) and last in (None, split[-1])
        ]
        if first is last is None or (stages > 1 and wanted):
            assert counts(num_layers, stages, first=first, last=last) in wanted
        else:
            with pytest.raises(ValueError, match="nearest|leave"):
                partition(num_layers, stages, first=first, last=last)


@pytest.mark.parametrize(
    "args, kwargs, parts",
    [
        ((1, 4), {}, ["1 layers cannot fill 4 stages", "nearest: 3 ranks, or 2 layers"]),
        ((3, 4), {"last": 1}, ["3 layers cannot fill 4 stages", "nearest: 3 ranks, or 4 layers"]),
        ((5, 4, 2), {}, ["8 stages (4 ranks x 2 each)", "nearest: 1 stages per rank, or 6 layers"]),
        ((1, 4, 2), {}, ["nearest: 3 ranks of 1 stage"]),
        ((0, 1), {}, ["must each be at least 1"]),
        ((4, 2), {"method": "even"}, ["'even' is not one of balanced, uniform, type", "nearest: balanced"]),
        ((8, 2), {"method": (5, 4)}, ["their sum is 9, the model has 8", "nearest: 4,4"]),
        ((8, 2), {"method": (3, 4)}, ["their sum is 7", "nearest: 4,4"]),
        ((8, 3), {"method": (4, 0, 4)}, ["at least one layer", "nearest: 3,1,4"]),
        ((8, 2), {"method": (-1, 9)}, ["at least one layer", "nearest: 0,8"]),
        ((8, 2), {"method": (8,)}, ["1 numbers for 2 stages", "nearest: 4,4"]),
        ((8, 2), {"method": (4, 4), "first": 4}, ["leave one out"]),
        ((8, 1), {"last": 8}, ["one stage holds every layer"]),
        ((8, 2), {"first": 3, "last": 3}, ["leave 2 of 8 for the other 0", "nearest: 3 and 5"]),
        ((8, 4), {"first": 9}, ["for the first stage", "nearest: 5"]),
        ((8, 4), {"first": 0, "last": 9}, ["nearest: 1 and 5"]),
        ((8, 4), {"costs": Costs(layer=0)}, ["a layer costs more than 0"]),
        ((8, 4), {"costs": Costs(head=float("inf"))}, ["all finite"]),
    ],
)
def test_faults(args, kwargs, parts):
    with pytest.raises(ValueError) as caught:
        partition(*args, **kwargs)
    for part in parts:
        assert part in str(caught.value)


def test_the_nearest_layers_are_legal():
    for wanted in itertools.product(range(-1, 6), repeat=3):
        nearest = nearest_layers(7, 3, wanted)
        assert not partition_problems(7, 3, 1, nearest)
        if not partition_problems(7, 3, 1, wanted):
            assert nearest == wanted
    assert nearest_layers(7, 3, (10**12, 1, 1)) == (5, 1, 1)


def test_the_table_shows_every_stage():
    costs = Costs(0.0, 2.0, 3.0)
    lines = partition_table(partition(6, 2, 2, costs=costs, method=(2, 1, 2, 1)), costs).splitlines()
    rows = [" ".join(line.split()) for line in lines[1:]]
    assert rows[0] == "0 0 0 to 1 embedding, 2 layers 2.00 80%"
    assert rows[1:3] == ["1 1 2 to 2 1 layer 1.00 40%", "2 0 3 to 4 2 layers 2.00 80%"]
    assert rows[3] == "3 1 5 to 5 1 layer, head 2.50 100%"
