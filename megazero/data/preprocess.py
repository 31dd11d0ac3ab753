"""Turns raw text into indexed files, in chunks that any number of workers make and a killed run finds again.

The inputs alone decide how they are cut, so the output does not depend on the workers. A finished chunk lies in
PREFIX.parts/ until the files are joined. The file job.json there says what the chunks were made from.
"""

from __future__ import annotations

import glob
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megazero.bounded import read_json
from megazero.data.chat_template import ChatTemplate
from megazero.data.indexed import IndexedWriter, mask_prefix, token_dtype
from megazero.data.text import Text, is_json, json_lines, line_number, read_line, read_text, text_at
from megazero.data.tokenizer import Tokenizer, load_tokenizer, write_meta
from megazero.files import exclusive, replacing

CHUNK_BYTES = 4 << 20
RECORD = "job.json"  # in PREFIX.parts/
Encoded = tuple[ArrayLike, list[int]]  # tokens of a document, lengths of its sequences
CHATS, MASK = "chats", "mask"  # keys of conversations and of what the loss counts of them


@dataclass(frozen=True)
class Job:
    """What to make. Everything here changes the output, so a resumed run must have the same.

    ``files`` are in order. A .jsonl, .json or .ndjson file holds one JSON object a line, any other file is one
    document. With ``chats`` the lines are conversations, as ChatTemplate encodes them, in place of texts.
    """

    files: tuple[str, ...]
    json_keys: tuple[str, ...]
    tokenizer_type: str
    tokenizer_model: str | None
    vocab_size: int | None
    append_eod: bool
    skip_bad_lines: bool
    vocab_file: str | None = None
    merge_file: str | None = None
    chats: bool = False

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(
            self.tokenizer_type,
            self.tokenizer_model,
            self.vocab_size,
            vocab_file=self.vocab_file,
            merge_file=self.merge_file,
        )

    def outputs(self, prefix: str | Path, tokens: np.dtype[Any]) -> dict[str, tuple[str, np.dtype[Any]]]:
        """Return the prefix and the dtype of each output by key. ``tokens`` is the dtype of tokens."""
        if not self.chats:
            return {key: (f"{prefix}_{key}_document", tokens) for key in self.json_keys}
        output = f"{prefix}_{CHATS}_document"  # the last that is written: where it is, its mask is
        return {MASK: (mask_prefix(output), np.dtype(np.uint8)), CHATS: (output, tokens)}


@dataclass(frozen=True)
class Chunk:
    """Either lines of one JSON file that begin in bytes [start, stop), or whole text files (stop 0)."""

    number: int
    files: tuple[str, ...]
    start: int = 0
    stop: int = 0


@dataclass(frozen=True)
class Counts:
    """``counted`` is the number of tokens of conversations that the loss counts."""

    documents: int = 0
    tokens: int = 0
    skipped: int = 0
    counted: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))


def cut(files: Sequence[str], chunk_bytes: int = CHUNK_BYTES) -> list[Chunk]:
    """Cut the files into chunks of about ``chunk_bytes`` of input each."""
    chunks: list[Chunk] = []
    texts: list[str] = []
    gathered = 0

    def flush() -> None:
        nonlocal gathered
        if texts:
            chunks.append(Chunk(len(chunks), tuple(texts)))
        texts.clear()
        gathered = 0

    for file in files:
        size = os.path.getsize(file)
        if is_json(file):
            flush()
            for start in range(0, size, chunk_bytes):
                chunks.append(Chunk(len(chunks), (file,), start, min(start + chunk_bytes, size)))
        else:
            texts.append(file)
            gathered += size
            if gathered >= chunk_bytes:
                flush()
    flush()
    return chunks


def preprocess(
    job: Job,
    output_prefix: str | Path,
    *,
    workers: int = 1,
    chunk_bytes: int = CHUNK_BYTES,
    say: Callable[[str], None] = print,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[str], Counts]:
    """Make OUTPUT_KEY_document.bin, .idx and .meta.json for every key. Returns their prefixes and the counts.
    With ``job.chats`` the key is CHATS, and a mask lies beside it (data/chats.py).

    Interrupted and called again with the same job, it continues. With another job, or changed inputs, it says so and
    starts again. Raises ValueError for bad input, naming file and line.
    """
    if job.chats and (texts := [file for file in job.files if not is_json(file)]):
        raise ValueError(f"{texts[0]}: conversations are JSON lines (.jsonl, .json or .ndjson), one on each")
    info = job.tokenizer().info
    prefix = Path(output_prefix)
    parts = prefix.with_name(prefix.name + ".parts")
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(prefix.with_name(f".{prefix.name}.lock")):
        parts.mkdir(exist_ok=True)
        chunks = cut(job.files, chunk_bytes)
        done = _claim(parts, job, info.fingerprint, chunk_bytes, say)
        left = [chunk for chunk in chunks if chunk.number not in done]
        if done:
            say(f"continuing: {len(done)} of {len(chunks)} chunks are finished")
        progress(len(done), len(chunks))
        for count, (number, counts) in enumerate(_run(job, left, parts, workers), len(done) + 1):
            done[number] = counts
            progress(count, len(chunks))
        total = sum(done.values(), Counts())
        if not total.tokens:
            _remove(parts)
            raise ValueError(
                f"the input holds no text: {len(job.files)} files have {total.documents} empty documents and "
                f"{total.skipped} bad lines; name others with --input"
            )
        outputs = job.outputs(prefix, token_dtype(info.vocab_size))
        for key, (output, dtype) in outputs.items():
            _join(output, key, chunks, parts, dtype)
            if key != MASK:
                write_meta(output, info)
        _remove(parts)
        return [output for key, (output, _) in outputs.items() if key != MASK], total


def _claim(
    parts: Path, job: Job, fingerprint: str, chunk_bytes: int, say: Callable[[str], None]
) -> dict[int, Counts]:
    """Return the chunks that an earlier run of the same job finished. A folder of another job is emptied."""
    stats = [os.stat(file) for file in job.files]
    identity = json.dumps(
        {
            **asdict(job),
            "inputs": [[s.st_size, s.st_mtime_ns] for s in stats],
            "tokenizer": fingerprint,
            "chunk_bytes": chunk_bytes,
        }
    ).encode()
    record = parts / RECORD
    if record.exists() and record.read_bytes() == identity:
        finished = {}
        for path in sorted(parts.glob("*.done")):
            finished[int(path.stem)] = Counts(**read_json(path))
        return finished
    if any(parts.iterdir()):
        say(
            f"starting again: {parts} was made with other arguments or from inputs that have changed, or not wholly "
            "removed"
        )
        _remove(parts)
        parts.mkdir()
    with replacing(record) as handle:
        handle.write(identity)
    return {}


def _remove(parts: Path) -> None:
    """Remove a job's folder, its record first: a kill halfway must not leave chunks that seem finished."""
    (parts / RECORD).unlink(missing_ok=True)
    shutil.rmtree(parts)


def _run(job: Job, chunks: list[Chunk], parts: Path, workers: int) -> Iterator[tuple[int, Counts]]:
    """Make the chunks, in any order. The first error stops the rest."""
    if workers <= 1 or len(chunks) <= 1:
        encode = Encoder(job, parts)
        yield from map(encode, chunks)
        return
    # spawned, not forked: tokenizers and sentencepiece keep threads that do not survive a fork
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(chunks)), context)
    try:
        waiting = {pool.submit(_work, job, parts, chunk) for chunk in chunks}
        while waiting:
            finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in finished)
    except BrokenProcessPool:
        raise ValueError(
            "a worker process died (out of memory?); the same command continues, try fewer workers"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@lru_cache(maxsize=1)
def _encoder(job: Job, parts: Path) -> Encoder:
    """Return the process's one encoder: loading a tokenizer for every chunk would cost more than encoding it."""
    return Encoder(job, parts)


def _work(job: Job, parts: Path, chunk: Chunk) -> tuple[int, Counts]:
    return _encoder(job, parts)(chunk)


class Encoder:
    """Turns a chunk into files NUMBER-KEY.bin and .npz, and at last NUMBER.done with the counts."""

    def __init__(self, job: Job, parts: Path) -> None:
        self.job, self.parts = job, parts
        self.tokenizer = job.tokenizer()
        self.chats = ChatTemplate(self.tokenizer) if job.chats else None
        self.outputs = job.outputs("", token_dtype(self.tokenizer.info.vocab_size))

    def __call__(self, chunk: Chunk) -> tuple[int, Counts]:
        tokens: dict[str, list[NDArray[Any]]] = {key: [] for key in self.outputs}
        lengths: dict[str, list[int]] = {key: [] for key in self.outputs}
        documents: dict[str, list[int]] = {key: [] for key in self.outputs}
        total = Counts()
        for encoded in self._documents(chunk):
            if encoded is None:
                total += Counts(skipped=1)
                continue
            for key, (ids, sizes) in encoded.items():
                tokens[key].append(np.asarray(ids, self.outputs[key][1]))
                lengths[key] += sizes
                documents[key].append(len(sizes))
                total += Counts(counted=int(np.sum(ids))) if key == MASK else Counts(tokens=sum(sizes))
            total += Counts(documents=1)
        for key in self.outputs:
            with replacing(_part(self.parts, chunk, key, "bin")) as handle:
                handle.write(b"".join(piece.tobytes() for piece in tokens[key]))
            with replacing(_part(self.parts, chunk, key, "npz")) as handle:
                bounds = np.array(documents[key], np.int64)
                np.savez(handle, lengths=np.array(lengths[key], np.int32), documents=bounds)
        with replacing(self.parts / f"{chunk.number:08d}.done") as handle:
            handle.write(json.dumps(asdict(total)).encode())
        return chunk.number, total

    def _encode(self, text: Text) -> Encoded:
        return encode_document(self.tokenizer, text, self.job.append_eod)

    def _documents(self, chunk: Chunk) -> Iterator[dict[str, Encoded] | None]:
        """Yield the tokens by key of every document, or None for a line that is left out."""
        if not chunk.stop:
            for file in chunk.files:
                text = read_text(file)
                yield {key: self._encode(text) for key in self.job.json_keys}
            return
        (file,) = chunk.files
        for at, line in json_lines(file, chunk.start, chunk.stop):
            try:
                yield self._encode_record(read_line(line))
            except ValueError as error:
                if not self.job.skip_bad_lines:
                    keys = "" if self.chats else ", name keys that it has (--json-keys)"
                    raise ValueError(
                        f"{file}, line {line_number(file, at)}: {error}; mend the line{keys}, or leave such lines "
                        "out (--skip-bad-lines)"
                    ) from None
                yield None

    def _encode_record(self, record: Mapping[str, Any]) -> dict[str, Encoded]:
        if self.chats is None:
            return {key: self._encode(text_at(record, key)) for key in self.job.json_keys}
        ids, counted = self.chats.encode(record)
        return {MASK: (counted, [len(ids)]), CHATS: (ids, [len(ids)])}


def encode_document(tokenizer: Tokenizer, text: Text, append_eod: bool) -> Encoded:
    """Return a document's tokens and its sequences' lengths: one, or one for each string of a list."""
    pieces = [tokenizer.encode(piece) for piece in ([text] if isinstance(text, str) else text)]
    pieces = [piece for piece in pieces if piece]
    if pieces and append_eod:
        pieces[-1] = [*pieces[-1], tokenizer.info.eod]
    return [token for piece in pieces for token in piece], [len(piece) for piece in pieces]


def _part(parts: Path, chunk: Chunk, key: str, suffix: str) -> Path:
    return parts / f"{chunk.number:08d}-{key}.{suffix}"


def _join(output: str, key: str, chunks: list[Chunk], parts: Path, dtype: np.dtype[Any]) -> None:
    target = Path(output)
    for stale in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):  # of a run killed while joining
        stale.unlink()
    with IndexedWriter(output, dtype=dtype) as writer:
        for chunk in chunks:
            with np.load(_part(parts, chunk, key, "npz"), allow_pickle=False) as index:
                raw = _part(parts, chunk, key, "bin").read_bytes()
                writer.add_encoded(raw, index["lengths"], index["documents"])
