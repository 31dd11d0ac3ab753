"""Schedules: legal on every small size, equal to torch's and Megatron's; broken ones are refused."""

import dataclasses
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from megazero.pp.schedules import (
    SCHEDULES,
    Action,
    Kind,
    in_order,
    make_schedule,
    needs,
    peak_activations,
    schedule_problem,
    sends,
)
from tests.pipeline_walk import check_schedule

SIZES = [
    (name, pp, virtual, m)
    for name in SCHEDULES
    for pp in (1, 2, 3, 4, 5, 8)
    for virtual in range(1, 5)
    for m in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
    if not schedule_problem(name, pp, virtual, m)
]
F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741


def words(actions):
    return " ".join(f"{a.kind}{a.micro_batch}" for a in actions)


def test_known_orders():
    assert words(make_schedule("1f1b", 3, 1, 4)[0]) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert words(make_schedule("1f1b", 3, 1, 4)[2]) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert words(make_schedule("gpipe", 2, 1, 3)[1]) == "F0 F1 F2 B0 B1 B2"
    assert words(make_schedule("zb-h1", 3, 1, 4)[0]) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert words(make_schedule("zb-h1", 3, 1, 4)[1]) == "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3"
    assert words(make_schedule("zb-h1", 3, 1, 4)[2]) == "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"
    assert words(make_schedule("1f1b", 4, 1, 2)[0]) == "F0 F1 B0 B1"
    interleaved = [(a.kind, a.stage, a.micro_batch) for a in make_schedule("interleaved", 2, 2, 2)[1]]
    assert interleaved == [
        (F, 1, 0), (F, 1, 1), (F, 3, 0), (B, 3, 0), (F, 3, 1), (B, 3, 1), (B, 1, 0), (B, 1, 1),
    ]  # fmt: skip
    for name in ("1f1b", "interleaved", "zb-h1"):
        assert words(make_schedule(name, 1, 1, 2)[0]) == "F0 B0 F1 B1"


@pytest.mark.parametrize("name, pp, virtual, m", SIZES)
def test_every_schedule_is_complete_ends_and_sends_what_is_needed(name, pp, virtual, m):
    schedule = make_schedule(name, pp, virtual, m)
    check_schedule(schedule, pp, virtual, m)
    assert sum(map(len, schedule)) == len(list(in_order(schedule, pp * virtual)))
    messages = sends(schedule, pp)
    assert set(messages) == {(a, b) for a in range(pp) for b in range(pp) if a != b}
    sent = [message for pair in messages.values() for message in pair]
    crossing = pp * virtual - 1 if pp > 1 else 0
    assert len(sent) == len(set(sent)) == 2 * crossing * m
    for (source, target), pair in messages.items():
        produced = [(a.kind == F, a.stage, a.micro_batch) for a in schedule[source] if a.kind != W]
        places = [produced.index((x.kind == "activation", x.source_stage, x.micro_batch)) for x in pair]
        assert places == sorted(places)
        assert all(x.source_stage % pp == source and x.target_stage % pp == target for x in pair)
        assert all(x.target_stage - x.source_stage == (1 if x.kind == "activation" else -1) for x in pair)


@pytest.mark.parametrize("name, pp, virtual, m", SIZES)
def test_peaks(name, pp, virtual, m):
    peaks, ours = [], peak_activations(name, pp, virtual, m)
    for actions in make_schedule(name, pp, virtual, m):
        held = [0]
        for action in actions:
            held.append(held[-1] + {F: 1, I: 0, B: -1, W: -1}[action.kind])
        peaks.append(max(held))
        assert held[-1] == 0
    assert tuple(peaks) == ours
    if name == "1f1b":
        assert ours == tuple(min(pp - rank, m) for rank in range(pp))
    if name == "zb-h1":
        assert max(ours) == max(peak_activations("1f1b", pp, 1, m))


def theirs(order):
    """Torch's computations as ours, without its idle slots and its other steps."""
    kinds = {kind.value: kind for kind in Kind}
    found = [a for a in order if a is not None and a.computation_type.value in kinds]
    return [Action(kinds[a.computation_type.value], a.stage_index, a.microbatch_index) for a in found]


@pytest.mark.parametrize(
    "name, pp, m", [(n, p, m) for n, p, v, m in SIZES if v == 1 and m >= p > 1 and n in ("gpipe", "1f1b")]
)
def test_orders_are_torchs(name, pp, m):
    """Torch's 1F1B needs as many micro-batches as stages, and numbers the last rank's forwards from 1."""
    cls = torch_schedules.ScheduleGPipe if name == "gpipe" else torch_schedules.Schedule1F1B
    orders = cls._get_pipeline_order(SimpleNamespace(_num_stages=pp, _n_microbatches=m))
    for rank, actions in enumerate(make_schedule(name, pp, 1, m)):
        shift = 1 if name == "1f1b" and rank == pp - 1 else 0
        ours = [dataclasses.replace(a, micro_batch=a.micro_batch + shift * (a.kind == F)) for a in actions]
        assert theirs(orders[rank]) == ours


INTERLEAVED = [(pp, v, m) for n, pp, v, m in SIZES if n == "interleaved" and pp > 1]


@pytest.mark.parametrize(
    "pp, m", [(pp, m) for n, pp, v, m in SIZES if n == "zb-h1" and pp > 1 and m % pp == 0]
)
def test_zero_bubble_order_is_torchs(pp, m):
    """Torch's ZB1P of one stage per rank; its first rank computes I, then W where ours computes B."""
    stand_in = SimpleNamespace(
        n_local_stages=1, pp_group_size=pp, microbatches_per_round=pp, _n_microbatches=m
    )
    for rank, actions in enumerate(make_schedule("zb-h1", pp, 1, m)):
        order = torch_schedules.ScheduleInterleavedZeroBubble._calculate_single_rank_operations(
            stand_in, rank
        )
        split = [(I, W) if a.kind == B else (a.kind,) for a in actions]
        ours = [
            dataclasses.replace(a, kind=k) for a, kinds in zip(actions, split, strict=True) for k in kinds
        ]
        assert theirs(order) == ours


@pytest.mark.parametrize("pp, virtual, m", INTERLEAVED)
def test_interleaved_order_is_megatrons(pp, virtual, m):
    megatron = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    table = megatron.get_schedule_table(m, virtual, pp)
    for rank, actions in enumerate(make_schedule("interleaved", pp, virtual, m)):
        group = SimpleNamespace(size=lambda: pp, rank=lambda rank=rank: rank)
        stand_in = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=virtual)
        total, _, warmup, left = megatron.get_pp_rank_microbatches(m, virtual, pp, p2p_communicator=stand_in)
        forwards = [Action(F, chunk * pp + rank, k) for k, chunk in table]
        backwards = [Action(B, (virtual - 1 - chunk) * pp + rank, k) for k, chunk in table]
        order = forwards[:warmup]
        for k in range(left):
            order += [forwards[warmup + k], backwards[k]]
        assert order + backwards[left:total] == list(actions)


@pytest.mark.parametrize(
    "args, part",
    [
        (("1f1b", 4, 2, 8), "one stage per rank, not 2; nearest: interleaved"),
        (("1f1", 4, 1, 8), "'1f1' is not one of"),
        (("interleaved", 4, 1, 8), "nearest: 1f1b"),
        (("interleaved", 4, 2, 6), "multiple of 4 micro-batches (4 pipeline ranks), not 6; nearest: 4 or 8"),
        (("interleaved", 4, 2, 3), "nearest: 4"),
        (("interleaved", 1, 2, 3), "need more than one rank; nearest: 1"),
        (("gpipe", 2, 1, 0), "at least 1"),
    ],
)
def test_sizes_that_are_refused(args, part):
    assert part in schedule_problem(*args)
    with pytest.raises(ValueError) as caught:
        make_schedule(*args)
    assert part in str(caught.value)


def replaced(schedule, rank, actions):
    return (*schedule[:rank], tuple(actions), *schedule[rank + 1 :])


SMALL = [size for size in SIZES if size[1] <= 4 and size[3] <= 6]


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_mutated_schedules_are_refused(data):
    name, pp, virtual, m = data.draw(st.sampled_from(SMALL))
    schedule = make_schedule(name, pp, virtual, m)
    rank = data.draw(st.integers(0, pp - 1))
    actions = list(schedule[rank])
    i = data.draw(st.integers(0, len(actions) - 1))
    what = data.draw(st.sampled_from(["drop", "double", "move", "kind", "stage", "micro-batch"]))
    if what == "drop":
        mutated = replaced(schedule, rank, actions[:i] + actions[i + 1 :])
    elif what == "double":
        mutated = replaced(schedule, rank, [*actions, actions[i]])
    elif what == "move":
        other = (rank + 1) % pp
        mutated = replaced(schedule, rank, actions[:i] + actions[i + 1 :])
        mutated = replaced(mutated, other, [*mutated[other], actions[i]])
        if other == rank:
            return
    else:
        change = {
            "kind": {"kind": F if actions[i].kind != F else B},
            "stage": {"stage": actions[i].stage + pp * virtual},
            "micro-batch": {"micro_batch": (actions[i].micro_batch + 1) % m if m > 1 else -1},
        }[what]
        changed = dataclasses.replace(actions[i], **change)
        mutated = replaced(schedule, rank, [*actions[:i], changed, *actions[i + 1 :]])
    with pytest.raises(ValueError, match="rank|stage"):
        check_schedule(mutated, pp, virtual, m)


def test_needs():
    assert needs(Action(F, 0, 3), 4) == ()
    assert needs(Action(F, 2, 3), 4) == (Action(F, 1, 3),)
    assert needs(Action(B, 3, 1), 4) == (Action(F, 3, 1),)
    assert needs(Action(I, 1, 1), 4) == (Action(F, 1, 1), Action(I, 2, 1))
    assert needs(Action(W, 1, 1), 4) == (Action(I, 1, 1),)
