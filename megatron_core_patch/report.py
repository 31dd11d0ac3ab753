"""The line at the start: the format of every hop, and why it is exact."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megazero.comm.codec import Codec
from megazero.comm.wire import Codecs
from megazero.mesh.launch import CONNECTIONS, USUAL_CONNECTIONS
from megazero.mesh.objects import gather_objects
from megazero.patches.report import gradient_words, short, weight_words
from megazero.patches.two_hops import TwoHops

# 'dense' or 'expert' parameters, with their group, their buffers, and how many of them are never quantised
Kind = tuple[str, TwoHops, Iterable[Any], int]


class Teller:
    """Prints the line when a kind of parameters first gets a buffer, from as few ranks as know of it."""

    def __init__(self, version: str, codecs: Codecs[Codec], pipeline: Sequence[int]) -> None:
        """pipeline: the ranks that are this rank's pipeline."""
        self.version, self.codecs = version, codecs
        self.later = pipeline[0] == 0
        self.told: set[str] | None = None

    def tell(self, kinds: Iterable[Kind]) -> None:
        """Print the line of those kinds of a model chunk that no chunk had before it.

        The first call is collective over all ranks: of those that have a kind, the lowest prints it. For later
        chunks, of which ranks may have different numbers, no rank is asked: rank 0's pipeline prints, each stage
        its own.
        """
        found = {kind[0]: kind for kind in kinds}
        if self.told is None:
            every: list[list[str]] = gather_objects(list(found))
            first = {name: rank for rank in reversed(range(len(every))) for name in every[rank]}
            new = [kind for name, kind in found.items() if first[name] == dist.get_rank()]
            self.told = set(first)
        else:
            new = [kind for name, kind in found.items() if self.later and name not in self.told]
            self.told.update(found)
        if new:
            print(start_line(self.version, new, self.codecs), flush=True)


def start_line(version: str, kinds: Iterable[Kind], codecs: Codecs[Codec]) -> str:
    """Return the line."""
    told = [_kind(name, hops, list(buffers), exact, codecs) for name, hops, buffers, exact in kinds]
    return f"megatron_core_patch on megatron-core {version}: " + ". ".join(told)


def connections_note(connections: str | None) -> str:
    """Return a note on CUDA_DEVICE_MAX_CONNECTIONS as the environment has it, or '' where it is right."""
    if connections is None or not connections.isdecimal() or int(connections) >= USUAL_CONNECTIONS:
        return ""
    return (
        f"{CONNECTIONS}={connections}: with fewer than {USUAL_CONNECTIONS}, what a rank computes stands behind "
        "messages that wait for other ranks, so they overlap less; where Megatron does not ask for 1 (as it does for "
        "tensor and context parallelism before Blackwell), set more"
    )


def _kind(name: str, hops: TwoHops, buffers: list[Any], exact: int, codecs: Codecs[Codec]) -> str:
    d, nodes, size = len(hops.ranks), hops.inter.size, hops.intra.size
    if d == 1:
        return f"{name} parameters: one data-parallel rank, nothing is sent"
    dtypes = dict.fromkeys((buffer.param_dtype, buffer.grad_dtype) for buffer in buffers)
    params, grads = dict.fromkeys(p for p, _ in dtypes), dict.fromkeys(g for _, g in dtypes)
    where = f"{name} parameters, {d} data-parallel ranks = {nodes} nodes x {size}"
    if exact and not codecs.exact:
        where += (
            f", {exact} of {sum(len(buffer.params) for buffer in buffers)} exact, being small or a router's"
        )
    return (
        f"{where}: gradients {gradient_words(grads, hops, codecs)}; weights {_weights(params, hops, codecs)}"
    )


def _weights(dtypes: Iterable[torch.dtype], hops: TwoHops, codecs: Codecs[Codec]) -> str:
    if codecs.weights is None:
        return f"exact ({', '.join(map(short, dtypes))})"
    if hops.inter.size == 1:
        return "exact as no hop crosses nodes"
    told = []
    for dtype in dtypes:
        if dtype in (torch.bfloat16, torch.float16):
            told.append(f"{weight_words(dtype, codecs)} on every hop")
        elif dtype == torch.uint8:
            told.append("fp8 as they are")
        else:
            told.append(f"{short(dtype)} exact as the optimizer's master weights are in that buffer")
    return ", ".join(told)
