"""A model whose weights lie flat, as the engine's units do, and AdamW on their fp32 master."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.loss.rounding.formats import BLOCK
from megazero.models import Decoder
from megazero.zero.layout import Slice, UnitLayout, make_layout

BETAS, DECAY, CLIP = (0.9, 0.95), 0.1, 1.0
Batch = tuple[torch.Tensor, torch.Tensor]  # tokens and labels, int64 [b, s]


@dataclass(frozen=True)
class State:
    """Master weights and AdamW's moments, fp32 [n], and how many steps were made."""

    master: torch.Tensor
    moments: tuple[torch.Tensor, torch.Tensor]
    steps: int


class Training:
    """Trains ``model`` in its own dtype. Parameters of at most ``exact`` elements lie in the exact region.

    names: the parameters that are trained; by default all.
    """

    def __init__(
        self, model: Decoder, senders: int, exact: int = 16384, names: Collection[str] | None = None
    ) -> None:
        self.model = model
        for name, p in model.named_parameters():
            p.requires_grad_(names is None or name in names)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
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
        states = [self.optimizer.state[held] for held in self.held]
        moments = [torch.cat([s[name] for s in states]) for name in ("exp_avg", "exp_avg_sq")]
        return State(self.master.clone(), (moments[0], moments[1]), int(states[0]["step"]))

    def restore(self, state: State) -> None:
        self.master.copy_(state.master)
        self.weights.copy_(self.master)
        for held, group in zip(self.held, self.optimizer.param_groups, strict=True):
            mine = self.optimizer.state[held]
            mine["step"].fill_(state.steps)
            for name, moment in zip(("exp_avg", "exp_avg_sq"), state.moments, strict=True):
                mine[name].copy_(moment[group["span"]])


def adamw(master: torch.Tensor, layout: UnitLayout) -> tuple[torch.optim.AdamW, list[nn.Parameter]]:
    """Return AdamW over the regions of ``master`` [n], and them; the exact one (norms) has no weight decay."""
    spans = [slice(start, start + numel) for start, numel in layout.regions]
    held = [nn.Parameter(master[span]) for span in spans]
    groups = [
        {"params": [p], "weight_decay": DECAY * (i == 0), "span": span}
        for i, (p, span) in enumerate(zip(held, spans, strict=True))
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=BETAS, fused=True), held
