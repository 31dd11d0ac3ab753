"""Checks of what a patch sends: against exact messages in the first steps, by checksums of replicas, by samples of
what gradients lose.

They cost time and memory only in the steps that they check. Recordings of a step are refused.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._guards import detect_fake_mode

from megazero.comm.watch import Errors, LossyGradients, Watch
from megazero.comm.wire import Codecs
from megazero.kernels.fingerprint import fingerprint

# How ``enable`` names what the warning's flags say.
ENABLED_BY = {
    "--zero-gradient-transform hadamard": "gradient_transform='hadamard'",
    "--zero-gradient-bits 8": "gradients='int8'",
    "--zero-gradient-bits-intra-node 8": "gradients_intra_node='int8'",
    "--no-zero-quantized-gradients": "gradients='none'",
}


class Differences:
    """Adds up, by kind, what the messages of a step lost, and prints it on rank 0 under the name ``patch``."""

    def __init__(self, patch: str) -> None:
        self.patch = patch
        self.sums: dict[str, torch.Tensor] = {}  # kind -> squares of the differences, of the exact values
        self.steps: dict[str, int] = {}

    def note(self, kind: str, step: int, sent: torch.Tensor, exact: torch.Tensor, group: Any = None) -> None:
        """Add a message, as it arrived and as it would have been, exactly: any shape, the same for both.

        group: its ranks hold different parts, whose squares are added. This is collective over it.
        """
        pair = (sent.float() - exact.float(), exact.float())
        squares = torch.stack([x.square().sum(dtype=torch.float64) for x in pair])
        if group is not None:
            dist.all_reduce(squares, group=group)
        self.steps[kind] = step
        self.sums[kind] = self.sums[kind] + squares if kind in self.sums else squares

    def tell(self, kind: str) -> None:
        """Print on rank 0 the difference of this kind since the last call."""
        if kind in self.sums:
            lost, whole = self.sums.pop(kind).tolist()
            if dist.get_rank() == 0:
                error = (lost / whole) ** 0.5 if whole else lost**0.5
                print(
                    f"{self.patch}: step {self.steps[kind]}: {kind} differ from exact ones by {error:.2e} "
                    "(norm of the difference / norm)",
                    flush=True,
                )


class GradientSamples:
    """Measures what a patch's gradients lose by rounding, and warns once (``LossyGradients``). On rank 0 alone.

    In every EVERY-th step the messages of one of the patch's parts, in turn, are decoded again. After the warning
    nothing is measured.
    """

    EVERY = 8  # steps

    def __init__(self, patch: str, codecs: Codecs[Any]) -> None:
        self.patch, self.errors, self.gradients = patch, Errors(), LossyGradients(codecs)
        self.on = dist.get_rank() == 0 and bool(codecs.gradients)

    def watches(self, part: int, parts: int, step: int) -> tuple[Watch, ...]:
        """Return what measures the messages of part number ``part`` in this step: nothing if it is not its turn."""
        turn, rest = divmod(step, self.EVERY)
        return (self.errors.sent,) if self.on and not rest and turn % parts == part else ()

    def tell(self, device: torch.device) -> None:
        """Print the warning if it is due, when a step's messages have arrived."""
        if not self.errors.squares:
            return
        lost, exact = self.errors.take(device).tolist()
        line = self.gradients.take((lost / exact) ** 0.5 if exact else None)
        if line:
            self.on = False
            word = next(word for flag, word in ENABLED_BY.items() if line.endswith(flag))
            print(f"{self.patch}: warning: {line} (in enable(): {word})", flush=True)


def compare_replicas(patch: str, params: torch.Tensor, step: int, group: Any) -> None:
    """Raise RuntimeError on every rank of the group unless all hold the same bits of ``params`` [n]. Collective."""
    own = fingerprint(params).reshape(1)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    sums = [int(x) for x in every]
    if len(set(sums)) > 1:
        ranks = dict(zip(dist.get_process_group_ranks(group), sums, strict=True))
        raise RuntimeError(
            f"{patch}: after step {step} data-parallel ranks hold different parameters (checksums by "
            f"rank: {ranks}): a message was lost or changed, or ranks began with different parameters"
        )


def refuse_recording(device: torch.device, patch: str, *tensors: torch.Tensor) -> None:
    """Raise RuntimeError where a step is recorded, so that it would be run again without the host's decisions.

    tensors: what is to be sent. patch: the name that says so.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{patch}: a CUDA graph records a step's collectives once, but the host decides in every step what is "
            "sent: leave data-parallel messages out of the graph (torch.compile without mode='reduce-overhead'; "
            "torchtitan with --training.disable_cuda_graphs; Megatron-LM without CUDA graphs of a full iteration)"
        )
    if torch.compiler.is_compiling() or detect_fake_mode(tensors) is not None:
        raise RuntimeError(
            f"{patch}: a whole step is traced (make_fx, torch.export, a graph trainer), with tensors that have no "
            "values, but the host decides in every step what is sent: compile blocks, or the "
            "model by torch.compile without fullgraph=True, whose graphs end at data-parallel messages"
        )
