"""Mamba-2 (Dao and Gu 2024, arXiv 2405.21060), as Nemotron-H has it: a state of each head, no keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Any

from megazero.config.model.mixers.mixer import CHUNK, Mixer, TokenWork
from megazero.config.model.parameters import (
    DECAY,
    TIME_STEP,
    Backbone,
    ParameterSpec,
    column,
    convolution,
    row,
)
from megazero.config.nearest import multiples_around
from megazero.config.options.fields import option
from megazero.families.family import MAMBA_PARTS, mamba
from megazero.families.layer_kinds import MAMBA

KERNEL = 4  # tokens that the convolution sees
NEEDED = f"mixers = {MAMBA}: M in --hybrid-layer-pattern"


@dataclass(frozen=True, kw_only=True)
class MambaOptions(Backbone):
    """Its options."""

    mamba_num_heads: int = option(
        MISSING,
        "Mamba-2: heads (default: so many that they are twice as wide as the residual stream)",
        low=1,
        needs=NEEDED,
    )
    mamba_head_dim: int = option(64, "Mamba-2: width of a head", low=1, small=4, needs=NEEDED)
    mamba_state_dim: int = option(128, "Mamba-2: rows of a head's state", low=1, small=4, needs=NEEDED)
    mamba_num_groups: int = option(
        8, "Mamba-2: groups of heads that write to and read their states alike", low=1, small=4, needs=NEEDED
    )
    mamba_min_time_step: float = option(
        0.0, "Mamba-2: shorter time steps count as this (by family)", low=0, needs=NEEDED
    )

    @property
    def mamba_size(self) -> int:
        """Return the width of all heads of a token."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def mamba_states_size(self) -> int:
        """Return the width of what all groups write by, or read by, of a token."""
        return self.mamba_num_groups * self.mamba_state_dim


def _groups(c: MambaOptions) -> Iterator[str]:
    """Report heads that do not share the groups evenly."""
    heads, groups = c.mamba_num_heads, c.mamba_num_groups
    if heads % groups:
        yield (
            f"--mamba-num-heads {heads} is no multiple of --mamba-num-groups {groups}; nearest: "
            f"{multiples_around(heads, groups)}"
        )


@dataclass(frozen=True)
class StateSpace(Mixer):
    """Mamba-2 in one model. Its five input linears lie by group of heads, so ranks have consecutive rows."""

    c: MambaOptions

    module = "megazero.models.mixers.mamba:Mamba"
    rules = (_groups,)
    names = mamba("linear_attn")

    @classmethod
    def derived(cls, done: Mapping[str, Any]) -> dict[str, Any]:
        hidden, width = done.get("hidden_size"), done.get("mamba_head_dim") or MambaOptions.mamba_head_dim
        return {"mamba_num_heads": max(1, 2 * hidden // width)} if hidden and width > 0 else {}

    def parameters(self) -> tuple[ParameterSpec, ...]:
        c, heads = self.c, self.c.mamba_num_heads
        sizes = dict(zip(MAMBA_PARTS, self._sizes, strict=True))
        return (
            ParameterSpec("attention.A_log", (heads,), 0, law=DECAY),
            ParameterSpec("attention.dt_bias", (heads,), 0, law=TIME_STEP),
            ParameterSpec("attention.D", (heads,), 0, mean=1.0),
            *(p for part, n in sizes.items() for p in column(c, f"attention.{part}_proj", n, bias=False)),
            *(
                p
                for part in MAMBA_PARTS[1:4]
                for p in convolution(f"attention.{part}_conv", sizes[part], KERNEL, bias=True)
            ),
            ParameterSpec("attention.norm.weight", (c.mamba_size,), 0, mean=1.0),
            *row(c, "attention.out_proj", c.mamba_size, bias=False),
        )

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Return the rows of each of MAMBA_PARTS."""
        inner, states = self.c.mamba_size, self.c.mamba_states_size
        return inner, inner, states, states, self.c.mamba_num_heads

    @property
    def heads(self) -> None:
        return None

    @property
    def work(self) -> TokenWork:
        c, heads, inner, states = self.c, self.c.mamba_num_heads, self.c.mamba_size, self.c.mamba_states_size
        state, mixed = inner * c.mamba_state_dim, inner + 2 * states
        # Of x, b and c the linears' outputs, padded and convolved ones; out_proj's input.
        kept = 3 * mixed + inner
        # b and c; x, times its steps, and what of it the state before a chunk adds; products of b and c, their
        # decays, both together; states.
        products = CHUNK * (2 * heads + c.mamba_num_groups)
        wide = 2 * states + 3 * inner + products + 4 * heads + 2 * state // CHUNK
        gated = 5 * inner  # what the norm begins with, the gate, its SiLU, their product, that over its norm
        # The state is decayed, added to and read.
        token = 3 * state + mixed * KERNEL
        moved = 2 * (kept + wide + gated)
        return TokenWork(
            moved, kept, 0, inner, taken=c.hidden_size, core=-mixed, token=token, wide=wide, gated=gated
        )

    @property
    def words(self) -> str:
        c = self.c
        return (
            f"Mamba-2 of {c.mamba_num_heads} heads of {c.mamba_head_dim} in {c.mamba_num_groups} groups, "
            f"states of {c.mamba_state_dim}"
        )

    def shared(self) -> tuple[dict[str, int], dict[str, int]]:
        return {"--mamba-num-groups": self.c.mamba_num_groups}, {}
