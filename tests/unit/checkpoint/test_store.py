"""The store in one process: round trips, damage, malice, kills, retention."""

import io
import json
import math
import os
import pickle
import shutil
import signal
import sys
import warnings
import weakref
import zlib
from math import prod

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from megazero.checkpoint import directory, manifest, planning, reading, store, writer
from megazero.checkpoint.errors import CheckpointError
from megazero.checkpoint.placement import Placement, RowRange
from megazero.checkpoint.records import SliceRecord
from megazero.convert import inspection
from tests.messages import refused

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    """A power cut is not simulated, so the tests need not wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def record(name, shape, value=None, kinds=("weights",), dtype=torch.float32, **placing):
    placement = Placement.plain(name, shape, **placing)
    n = prod(placement.local_shape)
    seed = zlib.crc32(name.encode())
    made = {}
    for i, kind in enumerate(kinds):
        generator = torch.Generator().manual_seed(seed + i)
        made[kind] = (
            torch.randn(n, generator=generator, dtype=torch.float64)
            if value is None
            else torch.full((n,), value)
        ).to(dtype)
    return SliceRecord(placement, 0, n, made)


def model(value=None, **keywords):
    return [record("embed", (7, 4), value, **keywords), record("norm", (4,), value, **keywords)]


def blank(records):
    """The same slices with NaN in them."""
    return [
        SliceRecord(
            r.placement, r.start, r.stop, {k: torch.full_like(t, torch.nan) for k, t in r.tensors.items()}
        )
        for r in records
    ]


def saved(root, step=100, value=None, **keywords):
    return store.save(root, store.Snapshot(step, model(value), {"loss": 0.1}), **keywords)


def value_of(path):
    return store.load_full(path)["norm"][0].item()


def test_round_trip_of_every_kind_dtype_and_shape(tmp_path):
    kinds = ("weights", "master", "exp_avg", "exp_avg_sq")
    records = [
        record("w", (5, 3), kinds=kinds),
        record("half", (4,), kinds=("weights",), dtype=torch.bfloat16),
        record("double", (2, 3, 2), kinds=kinds, dtype=torch.float64),
        record("scalar", (), kinds=kinds),
        record("empty", (0, 3), kinds=kinds),
    ]
    snapshot = store.Snapshot(
        7,
        records,
        state={"lr": 0.1, "nothing": None},
        rank_tensors={"cpu": torch.get_rng_state(), "n": torch.tensor(3)},
        layout={"tp": 1, "axes": (1, 2)},
        configuration={"hidden": 4},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = store.save(tmp_path / "new" / "root", snapshot)
        assert path.name == "iter_0000007" and store.latest(tmp_path / "new" / "root") == path
        for wanted in (kinds[:1], kinds[1:]):
            targets = blank(records)
            loaded = store.load(path, records=targets, kinds=wanted, layout={"tp": 1, "axes": (1, 2)})
            for source, target in zip(records, targets, strict=True):
                for kind, tensor in target.tensors.items():
                    expected = source.tensors[kind] if kind in wanted else torch.full_like(tensor, torch.nan)
                    torch.testing.assert_close(tensor, expected, rtol=0, atol=0, equal_nan=True)
    assert loaded.state == {"lr": 0.1, "nothing": None}
    assert loaded.rank_tensors is not None
    assert torch.equal(loaded.rank_tensors["cpu"], snapshot.rank_tensors["cpu"])
    assert loaded.rank_tensors["n"] == 3
    assert loaded.manifest.kinds["weights"] == ("bfloat16", "float32", "float64")
    assert loaded.manifest.configuration == {"hidden": 4} and loaded.manifest.step == 7
    assert store.load(path, records=records, layout={"tp": 2}).rank_tensors is None
    full = store.load_full(path, "exp_avg")
    assert full["scalar"].shape == () and torch.equal(full["w"].view(-1), records[0].tensors["exp_avg"])


def test_fused_transposed_and_padded_reload_in_another_form(tmp_path):
    w = torch.arange(24.0).view(6, 4)
    conv1d = Placement("w", (4, 6), (6, 4), (RowRange(0, 6, 0),), transposed=True)
    pieces = [SliceRecord(conv1d, a, b, {"weights": w.view(-1)[a:b]}) for a, b in ((0, 7), (7, 7), (7, 24))]
    path = store.save(tmp_path, store.Snapshot(1, pieces))
    assert torch.equal(store.load_full(path)["w"], w.t())
    # read back with the local rows 3..5 first and two rows of padding
    swapped = Placement("w", (4, 6), (8, 4), (RowRange(0, 3, 3), RowRange(3, 3, 0)), transposed=True)
    target = blank([SliceRecord(swapped, 2, 31, {"weights": torch.empty(29)})])[0]
    store.load(path, records=[target])
    expected = torch.cat([w[3:], w[:3], torch.zeros(2, 4)]).view(-1)[2:31]
    assert torch.equal(target.tensors["weights"], expected)


def test_masters_from_weights_and_in_another_dtype(tmp_path):
    path = saved(tmp_path)
    targets = [record("embed", (7, 4), 0.0, ("weights", "master")), record("norm", (4,), 0.0)]
    store.load(path, records=targets, kinds={"weights": "weights", "master": "weights"})
    assert torch.equal(targets[0].tensors["master"], model()[0].tensors["weights"])
    assert torch.equal(targets[0].tensors["weights"], model()[0].tensors["weights"])
    half = model(0.0, dtype=torch.bfloat16)
    store.load(path, records=half)
    assert torch.equal(half[0].tensors["weights"], model()[0].tensors["weights"].bfloat16())
    with refused("exp_avg", "weights", by=CheckpointError):
        store.load(path, records=model(), kinds=("exp_avg",))


def test_tensors_converted_as_they_are_written_give_the_same_files(tmp_path, monkeypatch):
    """And one box's conversion is held at a time."""
    monkeypatch.setattr(planning, "CHUNK_ELEMENTS", 6)
    master = record("w", (8, 3)).tensors["weights"]
    placement, held, most = Placement.plain("w", (8, 3)), [], []
    value = writer.Writer._value

    def watched(own, chunk):
        tensor = value(own, chunk)
        held.append(weakref.ref(tensor))
        most.append(sum(ref() is not None for ref in held))
        return tensor

    cast = SliceRecord(placement, 0, 24, {"weights": master.bfloat16()})
    lazy = SliceRecord(placement, 0, 24, {"weights": master}, stored={"weights": torch.bfloat16})
    one = store.save(tmp_path / "cast", store.Snapshot(1, [cast]))
    monkeypatch.setattr(writer.Writer, "_value", watched)
    other = store.save(tmp_path / "lazy", store.Snapshot(1, [lazy]))
    for name in ("__0_0.distcp", ".metadata"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
    assert most == [1] * 4


def test_a_description_names_tensors_and_damaged_files(tmp_path):
    other = saved(tmp_path / "two", 4, 1.5)
    words = [line.split() for line in inspection.describe(other, tensors=True)]
    assert {line[-1] for line in words if "crc32" in line} == {"good"}
    file = next(file for file in other.glob("*.distcp"))
    file.write_bytes(b"\xff" + file.read_bytes()[1:])
    assert f"{file.name} DAMAGED" in [f"{w[0]} {w[-1]}" for w in map(str.split, inspection.describe(other))]


def test_another_model_is_named_tensor_by_tensor(tmp_path):
    path = saved(tmp_path)
    others = [record("embed", (9, 4), 0.0), record("head", (2,), 0.0)]
    with pytest.raises(CheckpointError) as caught:
        store.load(path, records=others)
    text = str(caught.value)
    assert "3 of 3 tensors of 'weights' differ" in text
    assert "'embed': model (9, 4), checkpoint (7, 4)" in text
    assert "'head': model (2,), checkpoint absent" in text and "'norm': model absent" in text
    assert (others[0].tensors["weights"] == 0).all()


def test_saved_elements_need_exactly_one_owner(tmp_path):
    whole = record("w", (4, 4), 1.0)
    half = SliceRecord(whole.placement, 0, 8, {"weights": torch.zeros(8)})
    with refused("8 of its 16", by=CheckpointError):
        store.save(tmp_path, store.Snapshot(1, [half]))
    with pytest.raises(CheckpointError, match="owner=False"):
        store.save(tmp_path, store.Snapshot(1, [whole, whole]))
    with refused("20 of its 16", by=CheckpointError):
        store.save(
            tmp_path,
            store.Snapshot(1, [whole, SliceRecord(whole.placement, 4, 8, {"weights": torch.ones(4)})]),
        )
    assert os.listdir(tmp_path) == []
    tied = SliceRecord(whole.placement, 0, 16, {"weights": torch.full((16,), 9.0)}, owner=False)
    assert store.load_full(store.save(tmp_path, store.Snapshot(1, [whole, tied])))["w"].unique().item() == 1.0


def test_records_are_checked():
    placement = Placement.plain("w", (4, 2))
    for start, stop, tensors in (
        (0, 9, {}),
        (3, 2, {}),
        (0, 4, {"weights": torch.zeros(3)}),
        (0, 4, {"weights": torch.zeros(8)[::2]}),
        (0, 1, {"a/b": torch.zeros(1)}),
    ):
        with refused("'w'"):
            SliceRecord(placement, start, stop, tensors)


@pytest.mark.parametrize(
    "name", ["__0_0.distcp", ".metadata", "state.json", "manifest.json", "rank_00000.safetensors"]
)
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_is_caught_and_nothing_is_filled(tmp_path, name, damage):
    snapshot = store.Snapshot(1, model(), {"a": 1}, {"rng": torch.arange(9)}, configuration={"x": "y" * 50})
    path = store.save(tmp_path, snapshot)
    file = path / name
    data = file.read_bytes()
    for place in (0, len(data) // 2, len(data) - 1) if damage == "flip" else (len(data) // 2,):
        if damage == "flip":
            file.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        elif damage == "truncate":
            file.write_bytes(data[:place])
        else:
            file.unlink()
        targets = blank(model())
        with pytest.raises(CheckpointError, match="older|no complete|format"):
            store.load(path, records=targets)
        with pytest.raises(CheckpointError):
            store.verify(path)
        assert all(t.tensors["weights"].isnan().all() for t in targets)
        if damage != "flip" or name == "manifest.json":
            assert store.latest(tmp_path) is None
    file.write_bytes(data)
    store.verify(path)


def test_absent_and_foreign_directories(tmp_path):
    assert store.latest(tmp_path / "none") is None
    with pytest.raises(CheckpointError, match="there is no checkpoint directory"):
        store.load(tmp_path / "none", records=[])
    (tmp_path / "iter_0000005" / "mp_rank_00").mkdir(parents=True)  # Megatron-LM's own
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        store.load_full(tmp_path / "iter_0000005")
    for overwrite in (False, True):
        with pytest.raises(CheckpointError, match="was kept"):
            saved(tmp_path, 5, overwrite=overwrite)
    assert (tmp_path / "iter_0000005" / "mp_rank_00").is_dir()


def test_no_path_of_this_machine_is_stored(tmp_path):
    path = saved(tmp_path)
    assert not any(str(tmp_path).encode() in file.read_bytes() for file in path.iterdir())


def test_existing_step_is_kept_unless_overwriting(tmp_path):
    path = saved(tmp_path, 3, 1.0)
    with pytest.raises(CheckpointError, match="exists already and was kept"):
        saved(tmp_path, 3, 2.0)
    assert value_of(path) == 1.0
    assert value_of(saved(tmp_path, 3, 2.0, overwrite=True)) == 2.0
    assert os.listdir(tmp_path) == ["iter_0000003"]


def test_a_manifest_is_read_once_while_it_stays_the_same(tmp_path, monkeypatch):
    """A start looks at each checkpoint several times; with 1,024 ranks a manifest has 128 kB."""
    paths = [saved(tmp_path, step) for step in (1, 2)]
    reads = []
    text = manifest.read_bytes
    monkeypatch.setattr(manifest, "read_bytes", lambda file: reads.append(file.parent.name) or text(file))
    monkeypatch.setattr(manifest, "_SETTLED_S", -1.0)  # these files are young
    for _ in range(3):
        assert [path.name for path in store.checkpoints(tmp_path)] == [path.name for path in paths]
    assert sorted(reads) == ["iter_0000001", "iter_0000002"]
    saved(tmp_path, 1, 2.0, overwrite=True)
    assert [path.name for path in store.checkpoints(tmp_path)] == ["iter_0000002", "iter_0000001"]


def test_a_young_manifest_is_read_again(tmp_path):
    """Within one tick of its time stamp a file may change once more, to another text of the same length."""
    path = saved(tmp_path, 1)
    file = path / "manifest.json"
    stamp = os.stat(file)
    assert store.read_manifest(path).step == 1
    file.write_bytes(file.read_bytes().replace(b'"step": 1', b'"step": 2'))
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    with pytest.raises(CheckpointError, match="checksum"):
        store.read_manifest(path)


@pytest.mark.parametrize(("ranks", "saved_by"), [(1, 3), (2, 3), (3, 3), (16, 16), (4, 16), (16, 4), (5, 3)])
def test_files_are_checked_by_the_ranks_that_load_them(ranks, saved_by):
    """Each file by one rank; on the layout that saved them each rank checks its own, so storage is read once."""
    series = ["__{}_0.distcp", "rank_{:05d}.safetensors"]
    names = [form.format(rank) for form in series for rank in range(saved_by)]
    small = [".metadata", "state.json", "tokenizer.json"]
    shares = [reading.share_of([*reversed(names + small)], rank, ranks) for rank in range(ranks)]
    assert sorted(name for share in shares for name in share) == sorted(names + small)
    for rank, share in enumerate(shares):
        data = [name for name in share if name.endswith(".distcp")]
        assert data == [f"__{k}_0.distcp" for k in range(saved_by) if k * ranks // saved_by == rank]


def test_latest_is_the_last_saved_even_after_a_roll_back(tmp_path):
    for step in (80, 100, 120, 90):
        saved(tmp_path, step)
    assert [p.name[-3:] for p in store.checkpoints(tmp_path)] == ["080", "100", "120", "090"]
    (tmp_path / "iter_0000090" / "__0_0.distcp").unlink()
    newest = store.latest(tmp_path)
    assert newest is not None and newest.name == "iter_0000120"


def test_retention(tmp_path):
    rule = store.Retention(keep_last=2, interval=30)
    for step in range(10, 80, 10):
        saved(tmp_path, step, retention=rule)
    assert sorted(os.listdir(tmp_path)) == [f"iter_00000{s}" for s in (30, 60, 70)]
    # damaged newer ones do not count: the last good one stays
    for step in (60, 70):
        (tmp_path / f"iter_00000{step}" / "state.json").unlink()
    saved(tmp_path, 20, retention=store.Retention(keep_last=1))
    assert sorted(os.listdir(tmp_path)) == [f"iter_00000{s}" for s in (20, 60, 70)]
    for keywords in ({"keep_last": 0}, {"interval": -1}):
        with refused("at least 1"):
            store.Retention(**keywords)


def test_retention_where_nothing_was_saved_at_the_multiple(tmp_path):
    """The first at or after 30 and 60 stay, whenever they were saved."""
    rule = store.Retention(keep_last=1, interval=30)
    for step in (10, 34, 40, 59, 62, 64):
        saved(tmp_path, step, retention=rule)
    assert [path.name[-2:] for path in store.checkpoints(tmp_path)] == ["34", "62", "64"]


def test_what_is_not_finite_comes_back_from_strict_json(tmp_path):
    state = {"losses": {"lm_loss": math.nan, "eval_lm_loss": 2.5}, "norms": [math.inf, -math.inf]}
    path = store.save(tmp_path, store.Snapshot(1, model(), state))
    text = (path / "state.json").read_text()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    for back in (store.read_state(path), store.stated(path)):
        assert math.isnan(back["losses"].pop("lm_loss"))
        assert back == {"losses": {"eval_lm_loss": 2.5}, "norms": [math.inf, -math.inf]}


def test_unjsonable_state_is_an_error_and_leaves_nothing(tmp_path):
    with pytest.raises(CheckpointError, match="state must be plain JSON"):
        store.save(tmp_path, store.Snapshot(1, model(), {"x": torch.zeros(1)}))
    with pytest.raises(CheckpointError, match="configuration must be plain JSON"):
        store.save(tmp_path, store.Snapshot(1, model(), configuration={"x": {1, 2}}))
    assert os.listdir(tmp_path) == []


def test_everything_is_synced_before_the_rename(tmp_path, monkeypatch):
    order = []
    rename = os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: order.append(os.readlink(f"/proc/self/fd/{fd}")))
    monkeypatch.setattr(os, "rename", lambda a, b: (order.append(f"rename to {b}"), rename(a, b)))
    path = store.save(tmp_path, store.Snapshot(1, model(), {}, {"rng": torch.zeros(1)}))
    at = order.index(f"rename to {path}")
    assert set(os.listdir(path)) <= {os.path.basename(name) for name in order[:at]}
    assert os.path.basename(order[at - 1]).startswith(".iter_0000001.partial-")
    assert os.path.basename(order[at - 2]) == "manifest.json" and order[at + 1] == str(tmp_path)


class Interruption:
    """Acts at the n-th system call of a save that changes or opens something under ``root``."""

    EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")

    def __init__(self, root, at, act):
        self.root, self.left, self.act = str(root), at, act

    def count(self):
        self.left -= 1
        if self.left < 0:
            self.act()

    def audit(self, event, args):
        if event in self.EVENTS and str(args[0]).startswith(self.root):
            self.count()

    def wrap(self, function):
        def call(*args):
            self.count()
            return function(*args)

        return call


def killed_save(root, at, save):
    """Fork; SIGKILL the child at its ``at``-th call. False when the save finished first."""
    child = os.fork()
    if child == 0:
        interruption = Interruption(root, at, lambda: os.kill(os.getpid(), signal.SIGKILL))
        sys.addaudithook(interruption.audit)
        os.fsync = interruption.wrap(os.fsync)
        writer.zlib = type("zlib", (), {"crc32": staticmethod(interruption.wrap(zlib.crc32))})
        code = 1
        try:
            save()
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), "the save failed instead of being killed"
    return status != 0


@pytest.mark.long
@pytest.mark.parametrize("overwrite", [pytest.param(True, marks=pytest.mark.slow), False])
def test_kill_at_every_point_leaves_a_good_checkpoint(tmp_path, overwrite):
    """Overwriting the only checkpoint, and replacing it by the next step with keep_last=1."""
    points = 0
    seen = set()
    while True:
        root = tmp_path / f"{points}"
        saved(root, 1, 1.0)

        def save(root=root):
            step = 1 if overwrite else 2
            saved(root, step, 2.0, overwrite=overwrite, retention=store.Retention(keep_last=1))

        killed = killed_save(root, points, save)
        newest = store.latest(root)
        assert newest is not None, f"nothing to load after a kill at point {points}"
        store.verify(newest)
        seen.add(value_of(newest))
        saved(root, 3, 3.0)  # the next save works and cleans up
        assert not [name for name in os.listdir(root) if name.startswith(".")]
        before_it = store.checkpoints(root)[:-1]
        assert before_it and value_of(before_it[-1]) in (1.0, 2.0)
        if not killed:
            break
        points += 1
    assert points > 20 and seen == {1.0, 2.0}


def test_one_checkpoint_is_named_by_its_folder_or_its_step(tmp_path):
    three, six = saved(tmp_path, 3), saved(tmp_path, 6)
    assert store.find_checkpoint(tmp_path) == six
    assert store.find_checkpoint(three) == store.find_checkpoint(tmp_path, 3) == three
    assert store.find_checkpoint(three, 3) == three
    (three / "manifest.json").unlink()  # damaged: it is still the one that is meant
    assert store.find_checkpoint(three) == store.find_checkpoint(tmp_path, 3) == three
    with refused("step 6", "not of 3", by=CheckpointError):
        store.find_checkpoint(six, 3)
    with refused("step 7", "nearest: 3 or 6", by=CheckpointError):
        store.find_checkpoint(tmp_path, 7)
    os.rename(six, tmp_path / ".iter_0000006.replaced-1a2b3c4d")  # killed while a new one took its place
    assert store.find_checkpoint(tmp_path, 6).name == ".iter_0000006.replaced-1a2b3c4d"


def test_what_cannot_be_removed_yet_takes_no_checkpoints_name(tmp_path, monkeypatch):
    """On NFS, while a writer that hangs has a file open. Under that name no start could save there any more."""
    left = [".iter_0000007.partial-1a2b3c4d", ".iter_0000008.removed-1a2b3c4d"]
    for name in left:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(directory.shutil, "rmtree", lambda *_, **__: None)
    saved(tmp_path, 9)
    assert sorted(os.listdir(tmp_path)) == [*left, "iter_0000009"] and not directory.in_the_way(
        tmp_path, 6, 9
    )


def test_what_is_superseded_is_kept_and_not_in_the_way(tmp_path):
    for step in (1, 2, 3):
        saved(tmp_path, step, float(step))
    (tmp_path / "iter_0000009" / "mp_rank_00").mkdir(parents=True)  # Megatron-LM's own
    shutil.copytree(
        tmp_path / "iter_0000003", tmp_path / ".iter_0000003.replaced-1a2b3c4d"
    )  # not yet deleted
    one = tmp_path / "iter_0000001"
    renamed = directory.supersede(tmp_path, one)
    assert [path.name for path in renamed] == ["iter_0000003.superseded", "iter_0000002.superseded"]
    assert store.latest(tmp_path) == one and not directory.supersede(tmp_path, one)
    saved(tmp_path, 2, 20.0, retention=store.Retention(keep_last=1))
    # taken up again: what was saved since is of another way, though its step is not a later one
    again = directory.supersede(tmp_path, tmp_path / "iter_0000003.superseded")
    assert [path.name for path in again] == ["iter_0000002.superseded.2"]
    names = [
        "iter_0000002.superseded",
        "iter_0000002.superseded.2",
        "iter_0000003.superseded",
        "iter_0000009",
    ]
    assert sorted(os.listdir(tmp_path)) == names and store.latest(tmp_path) is None
    assert value_of(tmp_path / names[0]) == 2.0 and value_of(tmp_path / names[1]) == 20.0
    with refused("step 3", "3.superseded", by=CheckpointError):
        store.find_checkpoint(tmp_path, 3)


# -- files of an attacker --------------------------------------------------------------------------------


class Malice:
    """Makes a folder when it is unpickled."""

    def __init__(self, target):
        self.target = str(target)

    def __reduce__(self):
        return os.mkdir, (self.target,)


def reseal(path, name):
    """What an attacker does: put the right checksums on a changed file."""
    body = json.loads((path / "manifest.json").read_bytes())
    for key in ("format", "version", "crc32"):
        body.pop(key)
    entry = manifest.checksum(path / name)
    body["files"][name] = {"size": entry.size, "crc32": entry.crc32}
    (path / "manifest.json").unlink()
    manifest.write_manifest(path, manifest._parse(body))


def test_malicious_metadata_is_refused_without_running(tmp_path):
    path = saved(tmp_path)
    (path / ".metadata").write_bytes(pickle.dumps(Malice(tmp_path / "owned")))
    reseal(path, ".metadata")
    with pytest.raises(CheckpointError, match="damaged or malicious"):
        store.load(path, records=model())
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("name", ["../secret", "other.distcp"])
def test_metadata_cannot_point_outside(tmp_path, name):
    path = saved(tmp_path)
    metadata = FileSystemReader(path).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = name
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(path, ".metadata")
    with pytest.raises(CheckpointError, match="no description of tensors|manifest does not list"):
        store.load(path, records=model())


def test_malicious_tensor_file_is_refused(tmp_path):
    path = saved(tmp_path)
    target = tmp_path / "owned"
    buffer = io.BytesIO()
    torch.save(Malice(target), buffer)
    data = (path / "__0_0.distcp").read_bytes()
    metadata = FileSystemReader(path).read_metadata()
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, len(buffer.getvalue())
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    (path / "__0_0.distcp").write_bytes(buffer.getvalue() + data)
    for name in (".metadata", "__0_0.distcp"):
        reseal(path, name)
    with pytest.raises(CheckpointError, match="[Ww]eights.only"):
        store.load(path, records=model())
    assert not target.exists()
