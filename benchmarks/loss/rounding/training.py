"""A model whose weights lie flat, as the engine's units do, and AdamW on their fp32 master."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from benchmarks.loss.rounding.formats import BLOCK
from megazero.models import Decoder
from megazero.zero.layout import UnitLayout, make_layout
from megazero.zero.slices import Slice

BETAS, DECAY, CLIP = (0.9, 0.95), 0.1, 1.0
Batch = tuple[torch.Tensor, torch.Tensor]  # tokens and labels, int64 [b, s]


State = tuple[torch.Tensor, dict[str, Any]]  # master weights fp32 [n], and the optimizer's state


class Training:
    """Trains ``model`` in its own dtype. Parameters of at most ``exact`` elements lie in the exact region."""

    def __init__(self, model: Decoder, senders: int, exact: int = 16384) -> None:
        self.model, trained = model, dict(model.named_parameters())
        self.layout = make_layout(
            {name: p.shape for name, p in trained.items()},
            block=BLOCK,
            sizes=(senders,),
            indices=(0,),
            exact=frozenset(name for name, p in trained.items() if p.numel() <= exact),
        )
        first = next(iter(trained.values()))
        self.weights, self.gradient = (first.new_zeros(self.layout.numel) for _ in range(2))
        for name, p in trained.items():
            part = Slice(self.layout, self.weights, 0).parts[name]
            part.copy_(p.detach())
            p.data, p.grad = part, Slice(self.layout, self.gradient, 0).parts[name]
        self.master = self.weights.float()
        self.optimizer, self.held = adamw(self.master, self.layout)

    def gradient_of(self, batches: Iterable[Batch]) -> torch.Tensor:
        """Return the gradient fp32 [n] of the mean loss over all tokens of the batches, which are equally long."""
        total, count = torch.zeros_like(self.master), 0
        for tokens, labels in batches:
            self.gradient.zero_()
            self.model(tokens, labels).mean().backward()
            total.add_(self.gradient)
            count += 1
        return total.div_(count)

    def update(self, gradient: torch.Tensor, rate: float) -> None:
        """Clip and apply a gradient fp32 [n]."""
        gradient = gradient * (CLIP / gradient.norm().clamp(min=CLIP))
        for held, group in zip(self.held, self.optimizer.param_groups, strict=True):
            held.grad, group["lr"] = gradient[group["span"]], rate
        self.optimizer.step()
        self.weights.copy_(self.master)

    @torch.no_grad()
    def loss(self, batches: Iterable[Batch]) -> float:
        """Return the mean loss of all tokens of batches of equal length, nats per token."""
        return float(torch.stack([self.model(*batch).mean() for batch in batches]).mean())

    def state(self) -> State:
        """Return a copy of what training has reached."""
        return self.master.clone(), copy.deepcopy(self.optimizer.state_dict())

    def restore(self, state: State) -> None:
        master, optimizer = state
        self.master.copy_(master)
        self.weights.copy_(self.master)
        self.optimizer.load_state_dict(copy.deepcopy(optimizer))


def adamw(master: torch.Tensor, layout: UnitLayout) -> tuple[torch.optim.AdamW, list[nn.Parameter]]:
    """Return AdamW over the regions of ``master`` [n], and them; the exact one (norms) has no weight decay."""
    spans = [slice(start, start + numel) for start, numel in layout.regions]
    held = [nn.Parameter(master[span]) for span in spans]
    groups = [
        {"params": [p], "weight_decay": DECAY * (i == 0), "span": span}
        for i, (p, span) in enumerate(zip(held, spans, strict=True))
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=BETAS, fused=True), held
