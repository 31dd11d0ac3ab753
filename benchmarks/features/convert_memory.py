"""Memory and time of megazero convert in both directions, on a synthetic Llama of so many GB.

    python -m benchmarks.features.convert_memory --gigabytes 2 4 --folder /tmp/convert   # made, and removed again

prints for each direction the anonymous memory above that of a process that has imported everything (the system can
take back pages of files), and the seconds beside a plain copy's. It needs three times the size on the disk.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks import harness


def make_folder(folder: Path, gigabytes: float) -> None:
    """Write a bf16 Llama of about that size, whose weights are cheap to make and not all the same."""
    from megazero.config.model.architecture import architecture_of
    from megazero.config.model.section import make_model
    from megazero.convert.shards import Plain, index_of, plan_shards, write_json, write_shard
    from megazero.models.placements import stored_tensors

    hidden, vocabulary = 2048, 32000
    per_layer = hidden * (2 * hidden + 2 * 512 + 3 * 5632)
    layers = max(1, round((gigabytes * 5e8 - 2 * vocabulary * hidden) / per_layer))
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": 16, "num_query_groups": 4}
    sizes |= {"ffn_hidden_size": 5632, "seq_length": 2048, "vocab_size": vocabulary}
    model = make_model(model_family="llama", **sizes)
    tensors = [Plain(name, torch.bfloat16, shape) for name, shape in stored_tensors(model).items()]

    def pieces(tensor: Plain) -> Iterator[torch.Tensor]:
        row = torch.randn(tensor.shape[-1]).to(tensor.dtype)
        for _ in range(tensor.shape[0] if len(tensor.shape) > 1 else 1):
            row = row.roll(1)
            yield row

    shards = plan_shards(tensors, 5 * 10**8)
    folder.mkdir(parents=True)
    for shard in shards:
        write_shard(folder, shard, pieces, "made", lambda count: None)
    write_json(folder / "model.safetensors.index.json", index_of(shards))
    write_json(folder / "config.json", architecture_of(model).hugging_face.config(model))


def anonymous() -> int:
    """Return the bytes of this process's memory that are in no file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon")


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of a call, and the most MiB of anonymous memory above the start, read every 2 ms."""
    begin = peak = anonymous()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    try:
        work()
    finally:
        seconds = time.perf_counter() - began
        done.set()
        watcher.join()
    return seconds, (peak - begin) / 2**20


def step(name: str, folder: str) -> tuple[float, float]:
    """Convert in one direction in this process; return what ``measured`` does."""
    from megazero.checkpoint.store import find_checkpoint
    from megazero.convert.check import compare_tensors
    from megazero.convert.export import finish, write_folder
    from megazero.convert.importing import Published, write_checkpoint
    from megazero.convert.source import Source

    root = Path(folder)
    torch.zeros(1 << 20).double().sum()  # allocators and threads are there

    def compared() -> None:
        lines = list(compare_tensors(Source(find_checkpoint(root / "ck")), Published.open(root / "out")))
        assert all(line.good for line in lines), lines

    work: dict[str, Callable[[], object]] = {
        "from-hf": lambda: write_checkpoint(Published.open(root / "hf"), root / "ck"),
        "to-hf": lambda: finish(
            write_folder(Source(find_checkpoint(root / "ck")), root / "out", shard_bytes=10**9)
        ),
        "check of tensors": compared,
    }
    return measured(work[name])


def main() -> None:
    parser = harness.parser(__doc__, gigabytes=[2.0, 4.0], folder=Path)
    options = parser.parse_args()
    rows, folder = [], options.folder.resolve()
    for gigabytes in options.gigabytes:
        try:
            make_folder(folder / "hf", gigabytes)
            began = time.perf_counter()
            shutil.copytree(folder / "hf", folder / "copy")
            copy = time.perf_counter() - began
            shutil.rmtree(folder / "copy")
            for name in ("from-hf", "to-hf", "check of tensors"):
                seconds, mib = harness.run(step, name, str(folder), ranks=1, world=False)
                rows.append([f"{gigabytes:g}", name, f"{mib:.0f}", f"{seconds:.1f}", f"{seconds / copy:.1f}"])
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    print(harness.table(["GB", "what", "MiB over start", "s", "x a plain copy"], rows))


if __name__ == "__main__":
    harness.start(main)
