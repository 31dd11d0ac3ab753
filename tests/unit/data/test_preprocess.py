"""megazero preprocess: the same bytes for any workers, killed or not; clear errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megazero import cli
from megazero.data.indexed import IndexedDataset
from megazero.data.preprocess import Counts, Job, cut, preprocess
from megazero.data.text import find_inputs, json_lines
from megazero.data.tokenizer import check_meta, load_tokenizer
from tests import ROOT
from tests.messages import refused

NULL = Job(("",), ("text",), "NullTokenizer", None, 1000, True, False)
OUTPUTS = ("bin", "idx", "meta.json")


@pytest.fixture
def jsonl(tmp_path: Path) -> str:
    random = np.random.default_rng(0)
    with open(tmp_path / "in.jsonl", "w") as handle:
        for i in range(500):
            words = " ".join(map(str, random.integers(0, 1000, random.integers(0, 40))))
            handle.write(
                json.dumps({"text": words, "other": [str(i), "", "1 2"]}) + "\n" * (1 + (i % 50 == 0))
            )
    return str(tmp_path / "in.jsonl")


def contents(prefix: str) -> list[bytes]:
    return [Path(f"{prefix}.{suffix}").read_bytes() for suffix in OUTPUTS]


def test_tokens_documents_and_empty_ones(jsonl: str, tmp_path: Path) -> None:
    job = replace(NULL, files=(jsonl,), json_keys=("text", "other"))
    outputs, counts = preprocess(job, tmp_path / "o", chunk_bytes=20000)
    assert outputs == [f"{tmp_path}/o_text_document", f"{tmp_path}/o_other_document"]
    texts = [json.loads(line) for line in Path(jsonl).read_text().split("\n") if line]
    data, other = map(IndexedDataset, outputs)
    wanted = [[*map(int, t["text"].split()), 1000] for t in texts if t["text"]]
    assert [data.get(i).tolist() for i in range(len(data))] == wanted
    assert np.diff(data.documents).tolist() == [int(bool(t["text"])) for t in texts]
    assert other.get(0).tolist() == [0] and other.get(1).tolist() == [1, 2, 1000]
    assert np.diff(other.documents).tolist() == [2] * 500
    assert counts == Counts(500, data.tokens + other.tokens, 0)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == []
    check_meta(outputs[0], load_tokenizer("NullTokenizer", vocab_size=1000).info)


@pytest.mark.parametrize("chunk_bytes", [1, 7, 100, 10**6])
def test_lines_are_found_once_however_the_file_is_cut(tmp_path: Path, chunk_bytes: int) -> None:
    text = b"\n".join([b"a", b"", b"bcd" * 9, b" ", b"e", b"f" * 100, b"g"])
    (tmp_path / "x.jsonl").write_bytes(text)
    found = []
    for chunk in cut([str(tmp_path / "x.jsonl")], chunk_bytes):
        found += list(json_lines(chunk.files[0], chunk.start, chunk.stop))
    assert [line.strip() for _, line in found] == [line for line in text.split(b"\n") if line.strip()]
    assert all(text[at:].startswith(line) for at, line in found)


def test_workers_do_not_change_a_byte(jsonl: str, tmp_path: Path) -> None:
    job = replace(NULL, files=(jsonl,))
    results = []
    for workers in (1, 3):
        (output,), _ = preprocess(job, tmp_path / f"w{workers}", workers=workers, chunk_bytes=12000)
        results.append(contents(output))
    assert results[0] == results[1]


@pytest.mark.parametrize("by", [NULL, replace(NULL, append_eod=False)])
def test_killed_while_chunks_are_removed_it_starts_again(
    jsonl: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: Job
) -> None:
    """The record says which chunks are finished: it must not outlive them. ``by``: the job that removes them."""
    job, module = replace(NULL, files=(jsonl,)), "megazero.data.preprocess"
    (whole,), _ = preprocess(job, tmp_path / "whole", chunk_bytes=12000)

    def killed(folder: Path, *_: object) -> None:
        next((tmp_path / "o.parts").glob("*.bin")).unlink() if folder == tmp_path / "o.parts" else None
        raise KeyboardInterrupt

    for step, each in (("_join", job), ("shutil.rmtree", replace(by, files=(jsonl,)))):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(f"{module}.{step}", killed)
            preprocess(each, tmp_path / "o", chunk_bytes=12000)
    (output,), _ = preprocess(job, tmp_path / "o", chunk_bytes=12000)
    assert contents(output) == contents(whole) and not (tmp_path / "o.parts").exists()


@pytest.mark.parametrize("change", ["arguments", "inputs"])
def test_changed_job_starts_again_and_says_so(
    jsonl: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    job = replace(NULL, files=(jsonl,))
    with monkeypatch.context() as patched:
        patched.setattr("megazero.data.preprocess._join", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            preprocess(job, tmp_path / "o", chunk_bytes=12000)
    if change == "arguments":
        job = replace(job, append_eod=False)
    else:
        with open(jsonl, "a") as handle:
            handle.write('{"text": "5"}\n')
    said: list[str] = []
    (output,), _ = preprocess(job, tmp_path / "o", chunk_bytes=12000, say=said.append)
    (fresh,), _ = preprocess(job, tmp_path / "fresh", chunk_bytes=12000)
    assert len(said) == 1 and said[0].startswith("starting again")
    assert contents(output) == contents(fresh)


BAD = {
    "not JSON": b"{oops",
    "a list, not an object": b"[1]",
    "null, not an object": b"null",
    "no key 'text'; it has 'a'": b'{"a": "1"}',
    "'text' holds a number": b'{"text": 5}',
    "'text' holds null": b'{"text": [null]}',
    "not UTF-8": b'{"text": "\xff"}',
    "half a surrogate": b'{"text": "\\ud800"}',
    "outside 0..1000": b'{"text": "2000"}',
}


@pytest.mark.parametrize("message", BAD)
@pytest.mark.parametrize("chunk_bytes", [20, 10**6])
def test_bad_line_is_named_or_left_out(tmp_path: Path, message: str, chunk_bytes: int) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "1"}\n\n{"text": "2"}\n' + BAD[message] + b'\n{"text": "3"}\n')
    job = replace(NULL, files=(str(path),))
    flags = r".*\(--json-keys\).*\(--skip-bad-lines\)"  # of the command, which says what to do
    with pytest.raises(ValueError, match=r"bad.jsonl, line 4: .*" + message + flags):
        preprocess(job, tmp_path / "o", chunk_bytes=chunk_bytes)
    lenient = replace(job, skip_bad_lines=True)
    (output,), counts = preprocess(lenient, tmp_path / "o", chunk_bytes=chunk_bytes, say=lambda _: None)
    assert counts == Counts(3, 6, 1) and len(IndexedDataset(output)) == 3


def test_text_files_and_directories(tmp_path: Path) -> None:
    (tmp_path / "d/e").mkdir(parents=True)
    for name, text in {
        "d/b.txt": "2",
        "d/e/a.txt": "3 4",
        "d/.hidden": "9",
        "d/x.md": "5",
        "c.txt": "1",
    }.items():
        (tmp_path / name).write_text(text)
    files = find_inputs([str(tmp_path / "d"), str(tmp_path / "*.txt")])
    assert [Path(f).name for f in files] == ["b.txt", "a.txt", "x.md", "c.txt"]
    assert len(find_inputs([str(tmp_path / "d")], "*.txt")) == 2
    with pytest.raises(ValueError, match="nothing matches"):
        find_inputs([str(tmp_path / "*.none")])
    with pytest.raises(ValueError, match="this folder holds no file"):
        find_inputs([str(tmp_path / "d")], "*.none")
    (output,), counts = preprocess(replace(NULL, files=files), tmp_path / "o", workers=2, chunk_bytes=2)
    data = IndexedDataset(output)
    assert [data.get(i).tolist() for i in range(4)] == [[2, 1000], [3, 4, 1000], [5, 1000], [1, 1000]]
    (tmp_path / "bad.txt").write_bytes(b"1\n2 \xff")
    with refused("bad.txt, line 2", "UTF-8"):
        preprocess(replace(NULL, files=(str(tmp_path / "bad.txt"),)), tmp_path / "p")


@pytest.mark.parametrize("flags", [("preprocess", "--output-prefix"), ("tokenizer", "--model-prefix")])
def test_files_that_are_no_text_are_counted_or_left_out(
    flags: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real folders hold archives: one start tells of all, and how to go on without them."""
    (folder := tmp_path / "doc").mkdir()
    (folder / "package.json").write_text('{\n"name": "x"\n}\n')
    for number in range(5):
        (folder / f"{number}.gz").write_bytes(b"\x1f\x8b\x08")
    (folder / "numbers").write_text("\n".join(map(str, range(300))))
    name, prefix = flags
    words = [name, "--input", f"{folder}", "--vocab-size", "300", prefix, f"{tmp_path / 'out'}"]
    words += ["--tokenizer-type", "NullTokenizer"] * (name == "preprocess")
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert "6 of 7 files" in said and "and 3 more" in said and "--skip-binary" in said and "--pattern" in said
    assert cli.main([*words, "--skip-binary"]) == 0
    assert "6 of 7 files" in capsys.readouterr().err
    assert cli.main([*words, "--skip-binary", "--pattern", "*.gz"]) == 2


def test_input_without_a_token_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="holds no text"):
        preprocess(replace(NULL, files=(f"{tmp_path / 'empty.txt'}",)), tmp_path / "o")
    assert [path.name for path in tmp_path.glob("o*")] == []


def command(*arguments: str) -> list[str]:
    tool = str(ROOT / "tools/preprocess_data.py")
    return [sys.executable, tool, "--tokenizer-type", "NullTokenizer", "--vocab-size", "1000", *arguments]


def test_killed_process_continues(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = json.dumps({"text": " ".join(["12 345"] * 2000)}) + "\n"
    (tmp_path / "in.jsonl").write_text(line * 650)  # 9 MB, 3 chunks
    arguments = ["--input", str(tmp_path / "in.jsonl"), "--append-eod", "--output-prefix"]
    running = subprocess.Popen(
        command(*arguments, str(tmp_path / "o")),
        env=environment,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("o.parts/*.done")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    assert not (tmp_path / "o_text_document.idx").exists()
    again = subprocess.run(
        command(*arguments, str(tmp_path / "o")), env=environment, capture_output=True, text=True, check=True
    )
    assert "continuing:" in again.stderr and again.stdout.strip() == f"{tmp_path}/o_text_document"
    whole = replace(NULL, files=(str(tmp_path / "in.jsonl"),))
    (output,), _ = preprocess(whole, tmp_path / "whole")
    assert contents(output) == contents(f"{tmp_path}/o_text_document")
