"""Saving and loading over several ranks: any slicing into any other, errors and kills on one rank."""

import os
import resource
import signal
from math import prod

import pytest
import torch
import torch.distributed as dist

from megazero.checkpoint import store
from megazero.checkpoint.errors import CheckpointError
from megazero.checkpoint.placement import Placement, RowRange
from megazero.checkpoint.records import SliceRecord
from tests.dist.pool import run_ranks

KINDS = ("weights", "master", "exp_avg", "exp_avg_sq")
VOCABULARY, HIDDEN = 13, 8
SHAPES = {
    "embed": (VOCABULARY, HIDDEN),
    "qkv": (HIDDEN, 3 * HIDDEN),  # stored transposed and fused
    "out": (HIDDEN, HIDDEN),
    "norm": (HIDDEN,),
    "scale": (),
}


def full_value(name, kind):
    """The stored tensor, by its names alone; fp32 for weights, fp64 for the rest."""
    n = prod(SHAPES[name])
    start = 1000 * sorted(SHAPES).index(name) + 100000 * KINDS.index(kind)
    dtype = torch.float32 if kind == "weights" else torch.float64
    return torch.arange(start, start + n, dtype=dtype).view(SHAPES[name])


def placements(tp, rank):
    """A small tensor-parallel model: padded vocabulary, fused and transposed qkv, row parallel, replicated."""
    rows = -(-VOCABULARY // tp) + 1  # more padding than needed: the last rank may hold nothing but padding
    part = HIDDEN // tp
    segments = tuple(RowRange(i * part, part, i * HIDDEN + rank * part) for i in range(3))
    return [
        Placement.plain("embed", SHAPES["embed"], (rows, HIDDEN), rank * rows),
        Placement("qkv", SHAPES["qkv"], (3 * part, HIDDEN), segments, transposed=True),
        Placement("out", SHAPES["out"], (HIDDEN, part), (RowRange(0, HIDDEN, 0),), offset1=rank * part),
        Placement.plain("norm", SHAPES["norm"]),
        Placement.plain("scale", SHAPES["scale"]),
    ]


def local_value(placement, kind):
    """The rank's tensor from the stored one, row by row, padding zero: independent of the boxes."""
    stored = full_value(placement.name, kind)
    stored = stored.t() if placement.transposed else stored
    local = torch.zeros(placement.local_shape, dtype=stored.dtype)
    if not placement.local_shape:
        return stored.reshape(1)
    for s in placement.segments:
        rows = stored[s.stored : s.stored + s.length]
        if local.dim() == 2:
            rows = rows[:, placement.offset1 : placement.offset1 + local.shape[1]]
        local[s.local : s.local + s.length] = rows
    return local.reshape(-1)


def records(tp, rank, world_size, replicas=1):
    """Tensor parallel inside, flat shards outside, replicas outermost; cuts fall anywhere."""
    shards = world_size // tp // replicas
    tp_rank, shard, replica = rank % tp, rank // tp % shards, rank // tp // shards
    made = []
    for placement in placements(tp, tp_rank):
        n = prod(placement.local_shape)
        size = -(-n // shards)  # later shards of small tensors are empty
        start, stop = min(n, shard * size), min(n, (shard + 1) * size)
        tensors = {kind: local_value(placement, kind)[start:stop].contiguous() for kind in KINDS}
        tp_replica = placement.name in ("norm", "scale") and tp_rank > 0
        made.append(SliceRecord(placement, start, stop, tensors, owner=not replica and not tp_replica))
    return made


def save_on_ranks(root, tp, replicas=1, step=1, overwrite=False, keep_last=None, idle=()):
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    active = [r for r in range(size) if r not in idle]
    ours = records(tp, active.index(rank), len(active), replicas) if rank in active else []
    snapshot = store.Snapshot(
        step,
        ours,
        state={"samples": 5 * step},
        rank_tensors={"rng": torch.tensor([rank])},
        layout={"tp": tp, "size": size},
    )
    rule = store.Retention(keep_last)
    return str(store.save(root, snapshot, group=dist.group.WORLD, overwrite=overwrite, retention=rule))


def load_on_ranks(path, tp, replicas=1, kinds=KINDS):
    """Load into NaN and compare with the values computed here; returns what else was loaded."""
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    targets = records(tp, rank, size, replicas)
    expected = [{k: t.clone() for k, t in record.tensors.items()} for record in targets]
    for record in targets:
        for tensor in record.tensors.values():
            tensor.fill_(torch.nan)
    loaded = store.load(
        path, records=targets, group=dist.group.WORLD, kinds=kinds, layout={"tp": tp, "size": size}
    )
    for record, values in zip(targets, expected, strict=True):
        for kind in kinds:
            assert torch.equal(record.tensors[kind], values[kind]), (record, kind)
    rng = None if loaded.rank_tensors is None else loaded.rank_tensors["rng"].item()
    return loaded.state["samples"], rng, loaded.manifest.world_size


@pytest.mark.first(2)
@pytest.mark.parametrize(
    "tp, replicas, idle", [(2, 1, ()), (1, 1, ()), (4, 1, ()), (2, 2, ()), (1, 1, (0, 2))]
)
def test_any_slicing_loads_into_any_other(tmp_path, tp, replicas, idle):
    (path,) = set(run_ranks(4, save_on_ranks, tmp_path, tp, replicas, idle=idle))
    assert not [name for name in os.listdir(tmp_path) if name != "iter_0000001"]
    for world_size, other_tp, other_replicas in (
        (1, 1, 1),
        (2, 1, 1),
        (2, 2, 1),
        (4, 2, 1),
        (4, 1, 2),
        (4, 4, 1),
    ):
        results = run_ranks(world_size, load_on_ranks, path, other_tp, other_replicas)
        same = (world_size, other_tp) == (4, tp)
        assert results == [(5, rank if same else None, 4) for rank in range(world_size)]
    for kind, tensors in store.load_kinds(path, KINDS).items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, full_value(name, kind)), (name, kind)


def load_other_models(path):
    """Rank 1 alone has another shape; rank 0 alone has a tensor more. Both ranks must say both."""
    ours = records(1, 0, 1)
    name, shape = (("extra", (2,)), ("norm", (HIDDEN + 1,)))[dist.get_rank()]
    ours.append(SliceRecord(Placement.plain(name, shape), 0, shape[0], {"weights": torch.zeros(shape)}))
    with pytest.raises(CheckpointError) as caught:
        store.load(path, records=ours, group=dist.group.WORLD)
    return str(caught.value)


def load_damaged(path):
    with pytest.raises(CheckpointError) as caught:
        store.load(path, records=records(1, dist.get_rank(), 2), group=dist.group.WORLD)
    return str(caught.value)


def test_wrong_or_damaged_checkpoints_raise_the_same_on_every_rank(tmp_path):
    (path,) = set(run_ranks(2, save_on_ranks, tmp_path, 2))
    (text,) = set(run_ranks(2, load_other_models, path))
    assert "2 of 6 tensors" in text and "'extra': model (2,), checkpoint absent" in text
    assert "'norm': model (9,), checkpoint (8,)" in text
    for name in ("__1_0.distcp", "rank_00000.safetensors", ".metadata"):
        file = os.path.join(path, name)
        with open(file, "r+b") as stream:
            data = bytearray(stream.read())
            data[len(data) // 2] ^= 1
            stream.seek(0)
            stream.write(data)
        (text,) = set(run_ranks(2, load_damaged, path))
        assert f"'{name}' has checksum" in text and "rank" in text
        data[len(data) // 2] ^= 1
        with open(file, "wb") as stream:
            stream.write(data)
    store.verify(path)
    os.unlink(os.path.join(path, "__1_0.distcp"))
    (text,) = set(run_ranks(2, load_damaged, path))
    assert "'__1_0.distcp' is missing" in text
    (text,) = set(run_ranks(2, load_damaged, os.path.join(tmp_path, "nothing")))
    assert "there is no checkpoint directory" in text


def save_with_little_space(root):
    """The kernel refuses rank 2's writes past 2000 bytes: a full disk as seen by one rank."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if dist.get_rank() == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(CheckpointError) as caught:
            save_on_ranks(root, 1, step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return str(caught.value)


def save_unowned(root):
    ours = [r for r in records(1, dist.get_rank(), 2) if dist.get_rank() or r.placement.name != "norm"]
    with pytest.raises(CheckpointError) as caught:
        store.save(root, store.Snapshot(2, ours), group=dist.group.WORLD)
    return str(caught.value)


def test_a_failing_write_on_one_rank_fails_everywhere_and_harms_nothing(tmp_path):
    run_ranks(4, save_on_ranks, tmp_path, 1)
    (text,) = set(run_ranks(4, save_with_little_space, tmp_path))
    assert "rank 2: OSError: [Errno 27] File too large" in text and "older ones are unharmed" in text
    (text,) = set(run_ranks(2, save_unowned, tmp_path))
    assert "norm' (8,): the owners' records hold 4 of its 8 elements" in text
    assert os.listdir(tmp_path) == ["iter_0000001"]
    run_ranks(2, load_on_ranks, str(store.latest(tmp_path)), 1)


def save_in_subgroup(root):
    """A group that is not the world: ranks 1 and 3 save together, 0 and 2 elsewhere."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    odd, index = dist.get_rank() % 2, dist.get_rank() // 2
    snapshot = store.Snapshot(odd, records(1, index, 2))
    path = store.save(os.path.join(root, str(odd)), snapshot, group=groups[odd])
    store.load(path, records=records(2, index, 2), group=groups[odd], kinds=KINDS)
    alone = store.save(os.path.join(root, f"alone{dist.get_rank()}"), store.Snapshot(0, records(1, 0, 1)))
    return store.verify(path).world_size, store.verify(alone).world_size


def test_groups_other_than_the_world(tmp_path):
    assert run_ranks(4, save_in_subgroup, tmp_path) == [(2, 1)] * 4


def save_shared_rows(root):
    """[q | k] with one key head for two ranks: each holds its own q rows and the same k rows."""
    rank = dist.get_rank()
    placement = Placement("qk", (6, 3), (4, 3), (RowRange(0, 2, 2 * rank), RowRange(2, 2, 4)))
    local = torch.arange(18.0).view(6, 3)[[2 * rank, 2 * rank + 1, 4, 5]].reshape(-1)
    ours = [SliceRecord(placement, a, b, {"weights": local[a:b]}) for a, b in ((0, 7), (7, 12))]
    path = store.save(root, store.Snapshot(0, ours), group=dist.group.WORLD)
    for record in ours:
        record.tensors["weights"].zero_()
    store.load(path, records=ours, group=dist.group.WORLD)
    return torch.equal(store.load_full(path)["qk"], torch.arange(18.0).view(6, 3)), local.tolist()


def test_rows_held_by_two_ranks_are_written_once(tmp_path):
    results = run_ranks(2, save_shared_rows, tmp_path)
    assert [whole for whole, _ in results] == [True, True]
    for rank, (_, local) in enumerate(results):
        assert local == [*range(6 * rank, 6 * rank + 6), *range(12, 18)]
