"""Outer steps of an engine: against DiLoCo in plain torch, what rounding loses, and an anchor that is taken over."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megazero import zero
from megazero.comm.codec import Blockwise, Identity
from megazero.comm.wire import Sparse
from megazero.mesh.grid import make_grid
from megazero.mesh.mesh import Axis, Mesh, create_mesh
from megazero.zero.outer import OuterSteps
from megazero.zero.slices import Slice
from tests.dist.outer.cases import OuterCase, error, on_ranks, plain, whole
from tests.dist.parity_cases import EXPERTS
from tests.dist.pool import run_ranks

OUTER = {"outer_interval": 2}
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
EXACT = {"fp32": 1e-6, "fp64": 1e-12}
SGD = {"optimizer": "sgd", "lr": 0.05}
LATE = {"outer_interval": 4, "outer_delay": 2}
TIED = {"untie_embeddings_and_output_weights": False}
FALLING = {"outer_lr_decay_style": "linear", "outer_min_lr": 0.1}
CASES = [
    OuterCase("zero3 inside", {**OUTER, **EXPERTS["balanced experts"], "zero_preset": "zero3"}),
    OuterCase(
        "ddp inside, weights, a rate that falls", {**OUTER, **FALLING, "zero_preset": "ddp"}, weights=(3, 1)
    ),
    OuterCase("tp 2, sgd outside", {**OUTER, **TP2, "outer_optimizer": "sgd"}),
    OuterCase("pp 2, tied", {**OUTER, **PP2, **TIED}),
    OuterCase(
        "four, average", {"outer_interval": 3, "outer_optimizer": "average"}, steps=7, weights=(1, 1, 1, 1)
    ),
    OuterCase("late, fp32", {**LATE, **SGD, "zero_preset": "zero3"}, dtype="fp32", steps=9),
]
MORE = [
    OuterCase("two nodes in a replica", {**OUTER, "zero_preset": "zero3"}, world=4),
    OuterCase("late, tp 2 x pp 2", {**LATE, **TP2, **PP2}, world=4, per_node=4, steps=9),
    OuterCase(
        "expert parallel", {**OUTER, **EXPERTS["balanced experts"], "expert_model_parallel_size": 2}, world=4
    ),
]


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.slow)], ids=["core", "more"])
def test_ranks_take_the_steps_of_diloco(cases: list[OuterCase]) -> None:
    """Weights of every replica and of the anchor, norms, how far replicas were apart; the last steps do not meet."""
    for world in sorted({case.world for case in cases}):
        some = [case for case in cases if case.world == world]
        every = run_ranks(world, on_ranks, some, timeout=300)
        for case, seen in zip(some, zip(*every, strict=True), strict=True):
            want, bound = plain(case), EXACT[case.dtype]
            for replica, masters in enumerate(want.masters):
                at = case.name, replica
                assert error(whole(case, seen, replica, "masters"), masters) < (bound, ""), at
                assert error(whole(case, seen, replica, "anchors"), want.anchor) < (bound, ""), at
                for rank in seen:
                    drifts = [(norm, apart[replica]) for norm, apart in want.moved]
                    torch.testing.assert_close(
                        torch.tensor(rank.moved[replica]), torch.tensor(drifts), rtol=1e-4, atol=0
                    )
            assert error(want.masters[0], want.anchor) > (1e-3, ""), "replicas have moved on"
            assert all(len(set(rank.digests)) == 1 for rank in seen), "anchors are the same bits"


def biased() -> tuple[list[list], list[list]]:
    """Experts' biases of two replicas and their anchors, before and after they meet."""
    case = OuterCase("", {**OUTER, **EXPERTS["balanced experts"], "moe_router_enable_expert_bias": True,
                          "moe_router_score_function": "sigmoid", "moe_router_bias_update_rate": 0.1})  # fmt: skip
    (before, after) = (on_ranks([replaced(case, steps)])[0].biases for steps in (1, 2))
    return [[each.tolist() for each in one] for one in before], [
        [each.tolist() for each in one] for one in after
    ]


def replaced(case: OuterCase, steps: int) -> OuterCase:
    return OuterCase(case.name, case.values, steps=steps)


def test_biases_of_experts_are_a_part_of_the_anchor() -> None:
    """They follow a replica's own tokens between meetings; a meeting takes the mean."""
    (before, after), other = run_ranks(2, biased, timeout=120)
    assert other == (before, after), "all ranks have the same"
    assert before[0] != before[1] and any(any(map(abs, each)) for each in before[0])
    assert all(not any(anchor) for one in before for anchor in one[1::2])
    for one in after:
        assert one[0::2] == one[1::2] == after[0][0::2] and any(any(bias) for bias in one)


# -- rounding ----------------------------------------------------------------------------------------

CODECS = {
    "exact": None,
    "bf16": Identity(torch.bfloat16),
    "8": Blockwise(8),
    "4": Blockwise(4),
    "2": Blockwise(2),
    "topk": Sparse(),
}
WIDTH = {
    "exact": 4.0,
    "bf16": 2.0,
    "8": 1 + 2 / 128,
    "4": 0.5 + 2 / 64,
    "2": 0.25 + 2 / 64,
    "topk": 84 / 4096,
}
NUMEL = 256 * 512


def moved(
    shards: tuple[int, int, int], name: str, wires: int, frozen: bool = False
) -> tuple[float, float, float]:
    """Three outer steps of two replicas with feedback.

    Returns what is missing, relatively (the replicas' ways with the residuals of before, less what the anchor moved
    with the residuals of after); a rank's bytes by those of the formula; the size of the last residual.
    """
    codec = CODECS[name]
    policy = zero.Policy(outer=zero.Outer(0.0, False, codec, feedback=float(codec is not None), wires=wires))
    both: list[OuterSteps] = []
    for _ in range(2):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 512, bias=False) for _ in range(1 + frozen)))
        model[-1].requires_grad_(not frozen)
        mesh = create_mesh(shards=shards, ranks_per_node=2)
        engine = zero.shard(model, mesh=mesh, policy=policy, units=[*model])
        assert engine.outer is not None
        both.append(engine.outer)
    unit = both[0].units[0]
    layout, axes = unit.layout, unit.axes

    def own(values: torch.Tensor) -> torch.Tensor:
        """The part that this rank alone of its replica sends."""
        return Slice(layout, values, axes.os).rows(axes.all, 1)[0].view(-1)

    def kept() -> torch.Tensor:
        found = [steps.anchors[steps.units[0]].residual for steps in both]
        return torch.stack(
            [torch.zeros(layout.level_numel(axes.all)) if each is None else each for each in found]
        )

    missing = 0.0
    for step in range(3):
        ways = []
        for replica, steps in enumerate(both):
            torch.manual_seed(100 * step + replica)
            ways.append(torch.randn(NUMEL) * (1 + replica))
            (piece,) = layout.pieces(axes.os)
            steps.units[0].master.value.add_(ways[-1][piece.span])
        before = both[0].anchors[unit].value.clone()
        wanted = kept().sum(0) + sum(own(before - steps.units[0].master.value) for steps in both)
        packed = [steps.pack() for steps in both]
        for steps, sent in zip(both, packed, strict=True):
            steps.take_up([[*each.messages] for each in packed], (1, 1), 1.0, sent)
        got = 2 * own(before - both[0].anchors[unit].value) + kept().sum(0)
        missing = max(missing, ((got - wanted).norm() / wanted.norm()).item())
        assert both[0].digest(wires - 1) == both[1].digest(wires - 1)
    sent = both[0].message_bytes * wires / (WIDTH[name] * NUMEL / mesh.dp_size)
    return missing, sent, (kept().norm() / ways[-1].norm()).item()


def all_moved(cases: list[tuple]) -> list[tuple]:
    return [moved(*case) for case in cases]


def test_what_rounding_loses_is_sent_later_and_bytes_are_those_of_the_formula() -> None:
    cases = [((2, 2, 2), name, 1) for name in CODECS] + [
        ((1, 1, 1), "4", 1),
        ((2, 2, 2), "4", 2),
        ((1, 2, 2), "8", 1, True),
    ]
    every = run_ranks(2, all_moved, cases, timeout=120)
    for case, ranks in zip(cases, zip(*every, strict=True), strict=True):
        for missing, share, lost in ranks:
            assert missing < 1e-6, (case, missing)
            assert share == pytest.approx(1, abs=0.01), case
            assert (lost == 0) == (case[1] == "exact") and lost < 2, (case, lost)


def lone_mesh() -> Mesh:
    """A mesh of this process alone, beside those of all ranks."""
    grid = make_grid(1, 1)
    axes = {spec.name: Axis(spec, 0, (0,), None, None) for spec in grid.axes}
    return Mesh(grid, 0, torch.device("cpu"), axes)


def of_other_sizes() -> bool:
    """A replica of two ranks and one of one, which sends a message for each of them. Whether both come to one
    anchor."""
    engines = []
    for alone in (False, True):
        torch.manual_seed(0)
        mesh = lone_mesh() if alone else create_mesh(shards=(1, 1, 2))
        policy = zero.Policy(block=8, outer=zero.Outer(codec=Blockwise(8, 8), feedback=1.0, wires=1 + alone))
        engines.append(zero.shard(torch.nn.Linear(24, 33), mesh=mesh, policy=policy))
    both, alone = (engine.outer for engine in engines)
    place = zero.DataAxes.of(engines[0].mesh).place
    for step in range(3):
        torch.manual_seed(step)
        for engine, way in zip(engines, torch.randn(2, alone.units[0].layout.numel), strict=True):
            (unit,) = engine.units
            for piece in unit.layout.pieces(unit.axes.os):
                unit.master.value.add_(way[piece.span])
        ours, theirs = both.pack(), alone.pack()
        every = [torch.empty_like(ours.messages) for _ in range(2)]
        dist.all_gather(every, ours.messages)
        pair = [row for rank in every for row in rank]
        both.take_up([[*ours.messages], [theirs.messages[place]]], (1, 3), 0.7, ours)
        alone.take_up([pair, [*theirs.messages]], (1, 3), 0.7, theirs)
    return both.digest(0) == alone.digest(place) and bool(alone.anchors[alone.units[0]].momentum.any())


def test_replicas_of_one_and_of_two_ranks_come_to_one_anchor() -> None:
    assert run_ranks(2, of_other_sizes) == [True, True]


def taken_over() -> list[bool]:
    """A replica that was left out keeps what it learned; one that comes takes the anchor, by ranges, and is the
    same."""
    both = []
    for _ in range(2):
        torch.manual_seed(0)
        mesh = create_mesh(shards=(1, 1, 2), ranks_per_node=2)
        engine = zero.shard(
            torch.nn.Linear(64, 33), mesh=mesh, policy=zero.Policy(block=8, outer=zero.Outer())
        )
        assert engine.outer is not None
        both.append(engine)
    one, other = (engine.outer for engine in both)
    for engine, way in zip(both, (1.0, 5.0), strict=True):
        engine.units[0].master.value.add_(way)
    sent = one.pack()
    for steps, own, keep in ((one, sent, False), (other, None, True)):
        steps.take_up([[*sent.messages]], (4,), 0.5, own, keep=keep)
    unit, stranger = (engine.units[0] for engine in both)
    equal = one.digest(0) == other.digest(0)
    moved = stranger.master.value - other.anchors[stranger].value
    kept = bool((moved - 5.0).abs().max() < 1e-5) and bool(
        (unit.master.value == one.anchors[unit].value).all()
    )
    size = one.anchor_bytes(0)
    one.anchors[unit].value.add_(1.0)
    one.anchors[unit].momentum.add_(2.0)
    wire = torch.frombuffer(
        bytearray(b"".join(one.read_anchor(0, at, 100) for at in range(0, size, 100))), dtype=torch.uint8
    )
    other.adopt([wire])
    pairs = zip(one.anchors[unit].shared, other.anchors[stranger].shared, strict=True)
    return [
        equal,
        kept,
        all(torch.equal(a, b) for a, b in pairs),
        bool((stranger.master.value == one.anchors[unit].value).all()),
    ]


def test_an_anchor_is_taken_over() -> None:
    assert run_ranks(2, taken_over) == [[True] * 4] * 2
