"""Rounding errors of real gradients and weight differences by layer, with and without a Hadamard transform.

    python -m benchmarks.loss.rounding_errors [--work runs/loss] [--out docs/results/rounding.md] [--steps 20 100 400]

Trains the model of study.py on its text in one process and rounds what a node's message across nodes would hold: the
fp32 sum of two ranks' bf16 gradients, and the bf16 weights' change by the update. Takes half a minute on one core.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean

import torch

from benchmarks import harness
from benchmarks.loss.data import prepare, train_samples
from benchmarks.loss.run import Settings, learning_rate
from benchmarks.steps import AdamW, llama
from megazero.comm.codec import Blockwise
from megazero.data.sampler import Batches
from megazero.models import Decoder
from megazero.train.parallelize import DTYPES

RANKS = 2  # of the node, whose gradients are summed


def codec(bits: int, block: int, mixes: int = 0) -> Blockwise:
    return Blockwise(bits, block, hadamard=mixes)


GRADIENTS = {
    "INT8": codec(8, 128),
    "INT4": codec(4, 64),
    "INT4 + H": codec(4, 64, 64),
    "INT4 + H32": codec(4, 64, 32),
    "INT4, 128": codec(4, 128),
    "INT4, 128 + H32": codec(4, 128, 32),  # SDP4Bit's
    "INT4, 128 + H128": codec(4, 128, 128),
    "2 bits": codec(2, 64),
    "2 bits + H": codec(2, 64, 64),
}
DIFFERENCES = {
    "INT4": codec(4, 64),
    "INT4 + H": codec(4, 64, 64),
    "INT4, 2048": codec(4, 2048),  # SDP4Bit's
    "2 bits": codec(2, 64),
    "2 bits + H": codec(2, 64, 64),
}
KINDS = {
    "embedding": ("embedding.",),
    "queries, keys, values": ("q_proj", "k_proj", "v_proj"),
    "attention output": ("o_proj",),
    "MLP in": ("gate_proj", "up_proj"),
    "MLP out": ("down_proj",),
    "head": ("head.",),
}
Tensors = dict[str, torch.Tensor]
PAGE = """\
# Rounding errors of messages

    python -m benchmarks.loss.rounding_errors

writes this page.

||sent - exact|| / ||exact|| of the messages that would cross nodes, by layer: a Llama of {parameters:,} parameters
on the text of [loss.md](loss.md), in bf16, {tokens} tokens a step. *H*: a randomised Hadamard transform of 64
elements before rounding (H32, H128: of 32, of 128). A number after the bits is the size of the blocks that share a
scale; without one it is 64, or 128 for INT8. SDP4Bit's settings are *INT4, 128 + H32* and, for differences, *INT4,
2048*.

The transform helps where a few values are large: gradients of the MLP's second matrix in INT4 have an error of
{worst_plain:.2f} without and of {worst_mixed:.2f} with it. With it the errors of all layers are alike. AdamW changes
the weights of a layer by similar amounts, so there the transform makes errors larger.

## Gradients

The mean of steps {steps}.

{gradients}

## Weights' changes

{differences}

## Over the training

All matrices as one vector: first the gradient, then the weights' change.

{progress}

{changes}
"""


def rounded(coding: Blockwise, rows: torch.Tensor) -> torch.Tensor:
    """Return rows [m, n] as their messages decode."""
    n = rows.shape[1]
    filled = torch.nn.functional.pad(rows, (0, -n % coding.form.block))
    decoded = torch.empty_like(filled)
    coding.decode(coding.encode(filled), decoded)
    return decoded[:, :n]


def error(coding: Blockwise, x: torch.Tensor) -> float:
    """Return ||decoded - x|| / ||x|| of one parameter."""
    row = x.view(1, -1)
    return float((rounded(coding, row) - row).norm() / row.norm())


def steps(
    folder: Path, settings: Settings, wanted: list[int], ranks: int = RANKS
) -> Iterator[tuple[int, Decoder, Tensors, Tensors]]:
    """Train, and yield for each wanted step its number, the model after it, and by matrix the gradient and the
    weight's change in fp32. ranks: how many ranks' micro-batches are summed."""
    model = Decoder(llama(settings), dtype=DTYPES[settings.dtype])
    model.initialize(1)
    optimizer = AdamW(model.parameters(), master=settings.dtype != "fp32")
    rate = learning_rate(settings)
    matrices = {name: p for name, p in model.named_parameters() if p.numel() > settings.exact}
    data = train_samples(folder, settings.sequence, 1, max(wanted) * ranks * settings.micro_batch)
    with Batches(data, micro_batch_size=settings.micro_batch, rank=0, size=1) as batches:
        for step in range(1, max(wanted) + 1):
            optimizer.optimizer.param_groups[0].update(lr=rate(step - 1), betas=(0.9, 0.95))
            sums: Tensors = {}
            for batch in batches.next_step(ranks):
                for name, gradient in gradients_of(model, batch, settings.tokens).items():
                    sums[name] = sums.get(name, torch.zeros(())) + gradient
            for name, p in model.named_parameters():
                p.grad = sums[name].to(p.dtype)
            held = {name: p.detach().clone() for name, p in matrices.items()}
            optimizer.step()
            if step in wanted:
                changed = {name: p.detach().float() - held[name].float() for name, p in matrices.items()}
                yield step, model, {name: sums[name] for name in matrices}, changed


def gradients_of(model: Decoder, batch: Tensors, divisor: int) -> Tensors:
    """Return the fp32 gradients of the batch's summed losses over ``divisor``, and clear the model's."""
    (model(batch["tokens"], batch["labels"]).sum() / divisor).backward()
    found = {}
    for name, p in model.named_parameters():
        assert p.grad is not None
        found[name], p.grad = p.grad.float(), None
    return found


def of_kind(coding: Blockwise, seen: Iterable[Tensors], kind: str) -> float:
    """Return the mean error over steps and layers of a kind."""
    return fmean(
        error(coding, x)
        for tensors in seen
        for name, x in tensors.items()
        if any(word in name for word in KINDS[kind])
    )


def by_kind(codecs: dict[str, Blockwise], seen: list[Tensors]) -> str:
    """Return a table of kinds of layers by codecs."""
    rows = [[kind, *(f"{of_kind(c, seen, kind):.4f}" for c in codecs.values())] for kind in KINDS]
    return harness.table(["layer", *codecs], rows)


def by_step(codecs: dict[str, Blockwise], seen: dict[int, Tensors]) -> str:
    rows = []
    for step, tensors in seen.items():
        whole = torch.cat([x.view(-1) for x in tensors.values()])
        rows.append([str(step), *(f"{error(c, whole):.4f}" for c in codecs.values())])
    return harness.table(["step", *codecs], rows)


def main() -> None:
    options = harness.parser(
        __doc__, work=Path("runs/loss"), out=harness.DOCS / "results" / "rounding.md", steps=[20, 100, 400]
    ).parse_args()
    settings = Settings()
    folder = prepare(options.work, settings.text, settings.vocabulary)
    torch.set_num_threads(1)
    gradients: dict[int, Tensors] = {}
    changes: dict[int, Tensors] = {}
    for step, _, gradients[step], changes[step] in steps(folder, settings, options.steps):
        print(f"step {step}", flush=True)
    largest = [of_kind(GRADIENTS[name], gradients.values(), "MLP out") for name in ("INT4", "INT4 + H")]
    page = PAGE.format(
        worst_plain=largest[0],
        worst_mixed=largest[1],
        steps=", ".join(map(str, gradients)),
        parameters=sum(p.numel() for p in settings.decoder().parameters()),
        tokens=RANKS * settings.micro_batch * settings.sequence,
        gradients=by_kind(GRADIENTS, list(gradients.values())),
        differences=by_kind(DIFFERENCES, list(changes.values())),
        progress=by_step(GRADIENTS, gradients),
        changes=by_step(DIFFERENCES, changes),
    )
    options.out.write_text(page)
    print(page)


if __name__ == "__main__":
    harness.start(main)
