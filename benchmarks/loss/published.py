"""What others measured at size: final losses with rounded gradients, and how many tokens they are worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks import harness

# What the number of tokens adds to a loss (Hoffmann et al. 2022): DATA_TERM / tokens ** DATA_POWER nats.
DATA_TERM, DATA_POWER = 410.7, 0.28


@dataclass(frozen=True)
class Published:
    """Losses of one model, in nats per token: of exact messages, and of others by name."""

    paper: str
    model: str
    parameters: float
    tokens: float
    exact: float
    losses: Mapping[str, float]

    def gap(self, name: str) -> float:
        """Return how far a loss is above exact, in % of it."""
        return 100 * (self.losses[name] / self.exact - 1)

    def least_speed(self, name: str) -> float:
        """Return how much faster steps must be before they gain: exact messages need so many times fewer tokens."""
        reached = DATA_TERM / self.tokens**DATA_POWER
        behind = reached + max(0.0, self.losses[name] - self.exact)
        return (behind / reached) ** (1 / DATA_POWER)


INT4, HADAMARD = "INT4 gradients", "INT4 gradients, Hadamard"
DELTA = "INT4 gradients, Hadamard; INT4 of differences"
FIRST_HALF, NO_INT4 = "INT4 gradients in the first half", "no INT4"
# Wang et al. 2023 (arXiv 2306.10209), Table 5: hpz and INT8 weights throughout.
ZEROPP = Published(
    "ZeRO++", "350M", 350e6, 30e9, 2.121762, {INT4: 2.165584, FIRST_HALF: 2.134013, NO_INT4: 2.121653}
)
# Jia et al. 2024 (arXiv 2410.15526), Table 1, and the scripts beside it: 80,000 iterations of 256 samples of 2,048.
SDP4BIT = tuple(
    Published("SDP4Bit", model, numel, 80_000 * 256 * 2048, exact, {INT4: a, HADAMARD: b, DELTA: c})
    for model, numel, exact, a, b, c in (
        ("125M", 125e6, 2.29392, 2.30479, 2.29528, 2.29590),
        ("350M", 350e6, 2.08719, 2.09551, 2.08912, 2.08964),
        ("1.3B", 1.3e9, 1.92774, 1.95075, 1.93134, 1.93238),
    )
)


def table() -> str:
    """Return every published loss as a row."""
    rows = [
        [p.paper, p.model, f"{p.tokens / 1e9:.0f}B", name, f"{loss:.4f}", f"{p.exact:.4f}",
         f"{p.gap(name):+.2f}%", f"{p.least_speed(name):.2f}"]
        for p in (ZEROPP, *SDP4BIT)
        for name, loss in p.losses.items()
    ]  # fmt: skip
    return harness.table(
        ["", "model", "tokens", "rounded", "loss", "exact", "gap", "steps gain if faster by"], rows
    )


SETTINGS = f"""
    ZeRO++: Wang et al. 2023, Table 5; both hops in INT4, beside INT8 weights and hpz. SDP4Bit: Jia et al. 2024,
    Table 1; blocks of 128 to 512, 8 bits inside nodes. Preset zeropp has blocks of 64 and bf16 inside nodes. A run's
    tokens leave {DATA_TERM} / tokens^{DATA_POWER} nats of loss (Chinchilla's fit)."""


def sentences() -> str:
    """Return the published gaps in words."""

    def listed(name: str, form: str) -> str:
        values = [form.format(p.gap(name), p.least_speed(name), p.model) for p in SDP4BIT]
        return f"{', '.join(values[:-1])} and {values[-1]}"

    z = ZEROPP
    return (
        f"ZeRO++ ({z.model}, {z.tokens / 1e9:.0f}B tokens) ends at {z.losses[INT4]:.4f} with INT4 gradients beside "
        f"{z.exact:.4f} exact, {z.gap(INT4):+.2f}%; at {z.losses[FIRST_HALF]:.4f} with INT4 in the first half alone; "
        f"at {z.losses[NO_INT4]:.4f} without. SDP4Bit has {listed(INT4, '{0:+.2f}% at {2}')} for INT4 gradients, and "
        f"{listed(HADAMARD, '{0:+.2f}%')} with a Hadamard transform, which is `--zero-gradient-transform hadamard` "
        "here. By Chinchilla's data term, exact messages reach these losses with fewer tokens, so a step gains only "
        f"where it is faster by more than {z.least_speed(INT4):.2f} (ZeRO++), {listed(INT4, '{1:.2f}')} (SDP4Bit), "
        f"{listed(HADAMARD, '{1:.2f}')} (Hadamard)."
    )
