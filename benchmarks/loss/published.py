"""What others measured at size, as the pages say it: megazero/plan/rounding.py has the figures."""

from __future__ import annotations

from benchmarks import harness
from megazero.plan.rounding import DATA_POWER, DATA_TERM, FIRST_HALF, HADAMARD, INT4, NO_INT4, SDP4BIT, ZEROPP


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
