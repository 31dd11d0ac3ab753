"""Writes docs/pays.html, the page that says without a server whether quantised messages pay on a link.

python -m benchmarks.planning.pays                 plans every model, cluster and batch: about an hour of a processor
python -m benchmarks.planning.pays --text          writes the page anew from the plans that are in it
"""

from __future__ import annotations

import json
import random
import shlex
from dataclasses import replace
from itertools import product
from multiprocessing import Pool
from typing import Any

from benchmarks import harness
from benchmarks.planning.page import LLAMA, LLAMA_8B, LLAMA_70B, QWEN
from benchmarks.results import DOCS
from megazero.files import write_text
from megazero.plan.options import read_request, with_stand_ins
from megazero.plan.page import Case, document

PAGE = DOCS / "pays.html"
QWEN3 = (
    "--model-family qwen3 --num-query-groups 8 --kv-channels 128 --seq-length 8192 --vocab-size 151936 --bf16"
)
SHAPES = {
    "Llama 3.2 1B": f"{LLAMA} --num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32",
    "Llama 3.2 3B": f"{LLAMA} --num-layers 28 --hidden-size 3072 --ffn-hidden-size 8192 --num-attention-heads 24",
    "Llama 3.1 8B": LLAMA_8B,
    "Qwen3 14B": f"{QWEN3} --num-layers 40 --hidden-size 5120 --ffn-hidden-size 17408 --num-attention-heads 40",
    "Qwen3 32B": f"{QWEN3} --num-layers 64 --hidden-size 5120 --ffn-hidden-size 25600 --num-attention-heads 64",
    "Llama 3.1 70B": LLAMA_70B,
    "Qwen3 30B-A3B": f"{QWEN} --seq-length 4096",
    "OLMoE 7B-A1B": (
        "--model-family qwen3_moe --num-layers 16 --hidden-size 2048 --num-attention-heads 16 --kv-channels 128 "
        "--ffn-hidden-size 1024 --num-experts 64 --moe-router-topk 8 --moe-ffn-hidden-size 1024 "
        "--vocab-size 50304 --seq-length 4096 --bf16"
    ),
}
CLUSTERS = {"h100": (2, 4), "two-sparks": (2,)}  # cluster files, and numbers of their nodes
SAMPLES = (1, 4, 16)  # of a GPU in a step
# Questions by name. Rates that messages reached are given as those of a line of which they reach 80%.
NAMED = (
    ("2 nodes of 8 H100, TCP that reaches 9.1 Gb/s, a mixture", "Qwen3 30B-A3B", "h100", 2, 64, 9.1 / 0.8),
    ("two DGX Sparks, RDMA that reaches 23.7 GB/s", "Llama 3.2 3B", "two-sparks", 2, 8, 23.7 * 8 / 0.8),
    ("two DGX Sparks, 10 Gb/s Ethernet", "Llama 3.2 3B", "two-sparks", 2, 8, 10),
    ("4 nodes of 8 H100 at 100 Gb/s, an 8B", "Llama 3.1 8B", "h100", 4, 128, 100),
)


def cases() -> list[Case]:
    """Return every shape on every cluster, with every batch."""
    found = []
    for (shape, words), (name, counts), samples in product(SHAPES.items(), CLUSTERS.items(), SAMPLES):
        request = read_request(shlex.split(f"{words} --cluster {name} --global-batch-size 1"))
        for nodes in counts:
            cluster = replace(request.cluster, nodes=nodes)
            values = {**with_stand_ins(request.values), "global_batch_size": samples * cluster.world_size}
            found.append(Case(shape, values, cluster))
    return found


def questions(asked: list[Case]) -> list[dict[str, Any]]:
    names = {
        name: read_request(shlex.split(f"{LLAMA_8B} --cluster {name} --global-batch-size 1")).cluster.name
        for name in CLUSTERS
    }
    keys = ("name", "shape", "cluster", "nodes", "batch", "rate", "delay")
    return [
        dict(zip(keys, (title, shape, names[cluster], *rest, 0), strict=True))
        for title, shape, cluster, *rest in NAMED
    ]


def plan(number: int) -> dict[str, Any]:
    return cases()[number].cell(random.Random(number))


def main() -> None:
    options = harness.parser(__doc__, text=(False, "plan nothing"), processes=2).parse_args()
    asked, cells = cases(), list[dict[str, Any]]()
    if options.text:
        cells = json.loads(PAGE.read_text("utf-8").split("const DATA = ")[1].split(";\n")[0])["cells"]
    else:
        with Pool(options.processes) as pool:
            for cell in pool.imap(plan, range(len(asked))):
                cells.append(cell)
                print(
                    f"{len(cells)} of {len(asked)}: {cell['shape']}, {cell['nodes']} x {cell['cluster']}",
                    flush=True,
                )
    write_text(PAGE, document(asked, cells, questions(asked)))


if __name__ == "__main__":
    harness.start(main)
