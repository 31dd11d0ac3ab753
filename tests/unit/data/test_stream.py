"""Streams: one order for any ranks, workers and restarts; every record once an epoch; mistakes name their place."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megazero.config.options.sections import DataConfig
from megazero.data import records, stream
from megazero.data.gpt import SampleSpec
from megazero.data.indexed import IndexedWriter, token_dtype
from megazero.data.sampler import Batches
from megazero.data.store import FileStore
from megazero.data.stream import StreamSource, furthest, stream_parts
from megazero.data.tokenizer import NullTokenizer

WORDS, LENGTH = 60_000, 16
SPEC = SampleSpec(LENGTH, 7, NullTokenizer(WORDS).info)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces and runs of a few documents."""
    monkeypatch.setattr(records, "PIECE_BYTES", 900)
    monkeypatch.setattr(stream, "RUN_BYTES", 200)


def documents(number: int, seed: int = 0) -> list[list[int]]:
    """Documents of 1 to 29 tokens, no two of which are equal."""
    lengths, words = np.random.default_rng(seed).integers(1, 30, number), count(seed * 10_000)
    return [[next(words) for _ in range(n)] for n in lengths]


def write_lines(path: Path, texts: list[list[int]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"text": " ".join(map(str, text))}) + "\n" for text in texts))
    return path


def opened(*words: object, **options: Any) -> StreamSource:
    options = {"stream_workers": 0, "stream_shards": 12, "tokenizer_type": "NullTokenizer", **options}
    data = DataConfig(data_source="stream", train_data_path=tuple(map(str, words)), **options)
    source = stream_parts(data)["train"](SPEC, 0, 0)
    assert isinstance(source, StreamSource)
    return source


def taken(source: StreamSource, samples: int) -> list[Any]:
    return [sample["tokens"] for sample in source.batch(samples, range(samples))]


def global_batches(sources: list[StreamSource], batches: int, state: Any) -> Iterator[tuple[bytes, Any]]:
    """Yield the tokens of each global batch of 8, as data-parallel ranks take them, with the state behind it."""
    for source in sources:
        source.load_state(state)
    ranks = len(sources)
    loaders = [Batches(source, micro_batch_size=2, rank=r, size=ranks) for r, source in enumerate(sources)]
    for _ in range(batches):
        steps = [loader.next_step(4 // ranks) for loader in loaders]
        rows = [step[m]["tokens"] for m in range(4 // ranks) for step in steps]
        yield (
            np.concatenate(rows).tobytes(),
            json.loads(json.dumps(furthest([each.state for each in loaders]))),
        )
    for loader in loaders:
        loader.close()


def test_ranks_workers_and_kills_leave_one_order(tmp_path: Path) -> None:
    """The first 200 global batches: over 1, 2 and 4 ranks, with 0, 1 and 3 workers, and killed thrice on the way."""
    for i in range(3):
        write_lines(tmp_path / "data" / f"{i}.jsonl", documents(150, i))
    blend = ("0.3", tmp_path / "data/0.jsonl", "0.7", tmp_path / "data")

    def digest(ranks: int, workers: int, *kills: int) -> str:
        state, parts = 0, list[bytes]()
        for batches in np.diff([0, *kills, 200]).tolist():
            sources = [opened(*blend, stream_workers=workers) for _ in range(ranks)]
            made, states = zip(*global_batches(sources, batches, state), strict=True)
            parts, state = [*parts, *made], states[-1]
        assert len(set(parts)) == len(parts) == 200
        return hashlib.sha256(b"".join(parts)).hexdigest()

    wanted = digest(1, 0)
    assert {digest(2, 0), digest(4, 0), digest(1, 1), digest(2, 3), digest(4, 0, 3, 50, 121)} == {wanted}


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_rank_s_state_is_a_true_one(tmp_path: Path, ranks: int) -> None:
    """Also where shards have several readers (3 ranks of micro-batches of 2, 8 shards), and after skipped samples."""
    path = write_lines(tmp_path / "a.jsonl", documents(200))
    sources = [opened(path, stream_shards=8) for _ in range(ranks)]
    for _ in range(5):
        for rank, source in enumerate(sources):
            source.batch(2 * ranks, range(2 * rank, 2 * rank + 2))
    states = [source.state() for source in sources]
    for source in sources:
        source.batch(4, range(0))
    whole = opened(path, stream_shards=8)
    whole.batch(10 * ranks, range(0))
    after = taken(whole, 4)
    wanted = [*after, *taken(whole, 8)]
    for state in (*states, furthest(states)):
        again = opened(path, stream_shards=8)
        again.load_state(state)
        assert np.array_equal(taken(again, 12), wanted)
    for source in sources:
        assert np.array_equal(taken(source, 8), wanted[4:])


def indexed(path: Path, texts: list[list[int]]) -> Path:
    with IndexedWriter(path, dtype=token_dtype(WORDS)) as writer:
        for text in texts:
            writer.add_document([*text, WORDS])
    return path


def parquet(path: Path, texts: list[list[int]]) -> Path:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"text": [" ".join(map(str, text)) for text in texts]})
    arrow.parquet.write_table(table, path, row_group_size=7)
    return path


@pytest.mark.parametrize("write", [write_lines, parquet, indexed], ids=["lines", "parquet", "indexed"])
@pytest.mark.parametrize("shuffled", [True, False])
def test_an_epoch_has_every_document_once(tmp_path: Path, write: Any, shuffled: bool) -> None:
    if write is parquet:
        pytest.importorskip("pyarrow.parquet")
    texts = documents(90)
    path = write(
        tmp_path / ("a.jsonl" if write is write_lines else "a.parquet" if write is parquet else "a"), texts
    )
    source = opened(path, stream_shards=1, stream_shuffle=shuffled)
    tokens = sum(len(text) + 1 for text in texts)
    epochs = np.concatenate(taken(source, 2 * tokens // LENGTH + 2))[: 2 * tokens].reshape(2, tokens)
    seen = [[tuple(d[:-1]) for d in np.split(e, np.flatnonzero(e == WORDS) + 1) if len(d)] for e in epochs]
    plain = [tuple(text) for text in texts]
    assert sorted(seen[0]) == sorted(seen[1]) == sorted(plain)
    assert (seen[0] == plain) is (seen[0] == seen[1]) is not shuffled


def test_weights_hold_in_every_stretch(tmp_path: Path) -> None:
    paths = [write_lines(tmp_path / f"{i}.jsonl", documents(40, i)) for i in range(3)]
    source = opened("5", paths[0], "3", paths[1], "2", paths[2])
    turns = np.array([member for member, _ in source._keys(12_345, 1000)])
    for stretch in turns.reshape(10, 100):
        assert np.abs(np.bincount(stretch) - [50, 30, 20]).max() <= 4


def test_a_broken_record_is_named_or_counted(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", documents(60))
    lines = path.read_text().splitlines()
    lines[40], lines[52] = '{"text": "5 6"', '{"words": "5"}'
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"a.jsonl, line (41: not JSON|53: no key 'text')"):
        taken(opened(path), 100)
    source = opened(path, skip_bad_lines=True, stream_shards=1)
    with pytest.warns(UserWarning, match="2 bad records left out"):
        found = np.concatenate(taken(source, 3 * sum(len(line.split()) for line in lines) // LENGTH))
    assert source.state()["shards"]["0.0"][3] >= 4 and (found == WORDS).sum() > 2 * 58
    for broken, words in (
        ("b.jsonl", "hold no text"),
        ("b.txt", "no file there is one of"),
        ("c", "no file there"),
    ):
        (tmp_path / "b.jsonl").write_text('{"text": ""}\n')
        (tmp_path / "b.txt").write_text("5")
        with pytest.raises(ValueError, match=words):
            taken(opened(tmp_path / broken), 1)


class Halves:
    """Encodes plain text, and counts its even words alone."""

    key = "text"

    def __init__(self, plain: Any) -> None:
        self.plain = plain

    def __call__(self, record: Any) -> Any:
        ids, _ = self.plain(record)
        return ids, ids % 2 == 0


def test_masks_of_records_and_changes_of_texts_reach_the_samples(tmp_path: Path) -> None:
    """Among them from a worker process. A change, as of fill in the middle, knows the number of its sample."""
    source = opened(write_lines(tmp_path / "a.jsonl", documents(60)), stream_workers=1)
    source.reading = replace(source.reading, encode=Halves(source.reading.encode))
    for sample in source.batch(20, range(20)):
        assert np.array_equal(sample["loss_mask"], sample["labels"] % 2 == 0)
    source.spec = replace(SPEC, change=lambda text, seed, number: np.full_like(text, 100 * seed + number))
    assert [sample["tokens"][0] for sample in source.batch(8, range(4, 6))] == [724, 725]


def test_another_place_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", documents(60))
    source = opened(path)
    taken(source, 5)
    state = source.state()
    for other in (opened(path, stream_shards=3), opened(write_lines(path, documents(61)))):
        with pytest.raises(ValueError, match="are others than when the checkpoint was written"):
            other.load_state(state)
    with pytest.raises(ValueError, match="stands at 17 of data of another kind"):
        source.load_state(17)
    with pytest.raises(ValueError, match="different files"):
        furthest([state, {**state, "stream": "other"}])


def test_a_failing_store_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    memory, waits = fsspec.filesystem("memory"), list[float]()
    memory.pipe("/corpus/a.jsonl", b"0123456789")
    fetch, left = type(memory).cat_file, [3]

    def failing(self: Any, path: str, **span: Any) -> bytes:
        left[0] -= 1
        if left[0] >= 0:
            raise ConnectionError("reset by peer")
        return fetch(self, path, **span)

    monkeypatch.setattr(type(memory), "cat_file", failing)
    store = FileStore(tmp_path / "cache", waits.append)
    with pytest.warns(UserWarning, match="memory://corpus/a.jsonl: asked again in 2 s .reset by peer."):
        assert store.read("memory://corpus/a.jsonl", 2, 6) == b"2345"
    assert waits == [0.5, 1.0, 2.0]
    left[0] = 10**9
    assert FileStore(tmp_path / "cache").read("memory://corpus/a.jsonl", 2, 6) == b"2345"  # kept
    with (
        pytest.warns(UserWarning),
        pytest.raises(ValueError, match="a.jsonl: the store has failed for 5 minutes"),
    ):
        store.read("memory://corpus/a.jsonl", 0, 6)
    assert sum(waits) > 300


class Weather:
    """A WSGI application in front of a store's, which is slow and answers one request in five with an error."""

    def __init__(self, app: Any) -> None:
        self.app, self.requests, self.refused = app, 0, 0

    def __call__(self, environ: Any, start: Any) -> Any:
        time.sleep(0.01)
        self.requests += 1
        if environ["REQUEST_METHOD"] == "GET" and self.requests % 5 == 0:
            self.refused += 1
            start("503 Slow Down", [("Content-Length", "0")])
            return [b""]
        return self.app(environ, start)


@pytest.mark.slow
def test_a_store_that_is_slow_fails_and_dies_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An S3 server that refuses one request in five and is away for ten seconds, read by two workers."""
    moto = pytest.importorskip("moto.server")
    s3fs, serving = pytest.importorskip("s3fs"), pytest.importorskip("werkzeug.serving")
    weather = Weather(moto.DomainDispatcherApplication(moto.create_backend_app))
    server = serving.make_server("127.0.0.1", 0, weather, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    said = {"ENDPOINT_URL": f"http://127.0.0.1:{server.port}", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}
    for name, value in {**said, "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    s3fs.S3FileSystem.clear_instance_cache()
    store, write = s3fs.S3FileSystem(), write_lines
    store.mkdir("corpus")
    for i in range(2):
        store.put_file(write(tmp_path / "data" / f"{i}.jsonl", documents(150, i)), f"corpus/{i}.jsonl")
    local, remote = opened(tmp_path / "data"), opened("s3://corpus", stream_workers=2)
    wanted, found = taken(local, 600), taken(remote, 200)
    server.shutdown()
    server.server_close()
    back = list[Any]()

    def come_back() -> None:
        back.append(serving.make_server("127.0.0.1", server.port, weather, threaded=True))
        back[0].serve_forever()

    timer = threading.Timer(10, come_back)
    timer.daemon = True
    timer.start()
    found += taken(remote, 400)
    assert back and weather.refused > 10
    back[0].shutdown()
    assert np.array_equal(found, wanted)
