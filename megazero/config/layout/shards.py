"""Presets and shard factors say how many data-parallel ranks share one copy of each part of the model state.

P, G and OS are the sharing factors of parameters, accumulated gradients, and optimizer states with master weights.
d is the number of data-parallel ranks, and h is how many of them share a node. Each of P, G, OS divides the next,
OS divides d, and each divides h or is a multiple of it, and so with the ranks of every level above the node, so that
every transition is one collective on one mesh axis.

The presets are the ZeRO stages (Rajbhandari et al. 2020, section 5), MiCS (Zhang et al. 2022, section 3), hpZ
(ZeRO++, Wang et al. 2023, section 3.2) and HSDP (the name of MiCS in FSDP). zeropp is hpZ whose gradients, too,
stay inside the node until the step's last micro-batch; wire.py says what it sends quantised across nodes. On nodes of
one rank zeropp is zero1 with the same messages: that has a use, where the presets of one node's ranks have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from megazero.config.nearest import around, common_divisors
from megazero.mesh.grid import copy_lifetime, shard_problem


class Preset(NamedTuple):
    """One preset. ``p``, ``g`` and ``os`` are '1', 'h' or 'd'.

    ``stage`` is DeepSpeed's number for it. With ``partitioned``, P may be chosen. With ``quantised``, changes of
    weights and gradients are sent quantised across nodes where nothing else is said.
    """

    p: str
    g: str
    os: str
    stage: int | None = None
    partitioned: bool = False
    quantised: bool = False


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "ddp": Preset("1", "1", "1", stage=0),
        "zero1": Preset("1", "1", "d", stage=1),
        "zero2": Preset("1", "d", "d", stage=2),
        "zero3": Preset("d", "d", "d", stage=3),
        "mics": Preset("h", "h", "h"),
        "hsdp": Preset("h", "h", "h"),
        "hpz": Preset("h", "d", "d", partitioned=True),
        "zeropp": Preset("h", "h", "d", partitioned=True, quantised=True),
    }
)
STAGE_PRESETS = {preset.stage: name for name, preset in PRESETS.items() if preset.stage is not None}
IN_NODE = tuple(name for name, preset in PRESETS.items() if preset.p == "h")  # P is ranks of one node
OVER_ALL = tuple(name for name, preset in PRESETS.items() if preset.os == "d")  # OS is all ranks
PARTITIONED = tuple(name for name, preset in PRESETS.items() if preset.partitioned)
QUANTISED = tuple(name for name, preset in PRESETS.items() if preset.quantised)
DEFAULT_PRESET = "zero1"  # the fewest bytes of the exact presets, and less memory than ddp
AUTO = "auto"  # chosen by the planner at the start; until then it is judged as zero1, which is always legal
LIFETIMES = ("use", "step", "resident", "gathered")
GRADIENT_LIFETIMES = ("micro-batch", "step")  # of whole gradients


@dataclass(frozen=True)
class Shards:
    """The resolved factors, and how long the P copy lives.

    The copy lives for a 'use', for a 'step' (to the last backward), or it is 'resident'. With ``keep_gathered``,
    full parameters live from their first use in a step to its end. With ``whole_gradients``, gradients are
    accumulated whole and reduced once per step; G then says nothing but what is left after the step.
    """

    p: int
    g: int
    os: int
    lifetime: str
    keep_gathered: bool = False
    whole_gradients: bool = False

    @property
    def factors(self) -> tuple[int, int, int]:
        return self.p, self.g, self.os


def resolve_shards(
    policy: str | tuple[int, ...],
    d: int,
    near: Sequence[int],
    lifetime: str | None = None,
    partition: int | None = None,
    delta: bool = False,
    gradients: str | None = None,
    instances: int = 1,
) -> Shards:
    """Return the factors and lifetime of a preset's name or of an explicit (P, G, OS).

    ``near``: how many of the d ranks share each level below the whole, first h, those of a node. ``partition`` is
    the P of hpz and zeropp where it is not h; zeropp's G is not less. With ``delta``, differences of weights are
    sent where they cross nodes. ``instances`` is by how many a preset's d is divided
    (--num-distributed-optimizer-instances).

    Where P = OS the lifetime is always 'use', whatever is asked, since the P copy is the optimizer's own slice.
    Elsewhere None takes the default. The default is 'resident' for P = 1, where the full parameters exist anyway,
    and where differences are sent, which need the last copy; otherwise it is 'step'. 'gathered' is that default
    with full parameters kept through the step. ``gradients`` is how long whole gradients live, None for a
    'micro-batch'. Raises ValueError, which names the nearest legal choice.
    """
    if d % instances:
        raise ValueError(
            f"--num-distributed-optimizer-instances {instances} does not divide {d} data-parallel ranks; nearest: "
            f"{around(common_divisors(d), instances)}"
        )
    p, g, os = (
        _preset_factors(policy, d // instances, near, partition)
        if isinstance(policy, str)
        else _triple(policy)
    )
    if problem := shard_problem((p, g, os), d, near):
        raise ValueError(problem)
    if lifetime is not None and lifetime not in LIFETIMES:
        raise ValueError(f"parameter lifetime {lifetime!r} is not one of {', '.join(LIFETIMES)}")
    if (keep := lifetime == "gathered") and p == 1:
        raise ValueError(
            "parameter lifetime 'gathered' needs P > 1: with P = 1 every rank has full parameters anyway; nearest "
            "legal: resident"
        )
    whole = gradients == "step"
    if whole and g == 1:
        raise ValueError(
            "gradient lifetime 'step' needs G > 1: with G = 1 gradients are whole and reduced once per step anyway; "
            "nearest legal: leave it out"
        )
    wanted = None if keep else lifetime
    lives = copy_lifetime(p, os, wanted, delta and weights_cross(os, near[0]))
    return Shards(p, g, os, lives, keep, whole)


def weights_cross(os: int, h: int) -> bool:
    """Tell whether some refresh or gather of the weights goes across nodes."""
    return os > h


def _triple(policy: tuple[int, ...]) -> tuple[int, int, int]:
    if len(policy) != 3:
        raise ValueError(f"shard factors are three numbers P,G,OS, got {len(policy)}: {policy}")
    return policy[0], policy[1], policy[2]


def _preset_factors(preset: str, d: int, near: Sequence[int], partition: int | None) -> tuple[int, int, int]:
    table = {**PRESETS, AUTO: PRESETS["zero1"]}
    if preset not in table:
        raise ValueError(f"preset {preset!r} is not one of {', '.join(PRESETS)}")
    h, most, chosen = near[0], near[-1], table[preset]
    sizes = {"1": 1, "h": h, "d": d}
    p = partition or h if chosen.partitioned else sizes[chosen.p]
    room = min(p, most)
    if preset in IN_NODE and room == 1 and not (chosen.quantised and h == 1):
        nearest = f"factors: --zero-shard 1,{h},{d}" if chosen.quantised else "preset: zero3"
        raise ValueError(
            f"preset {preset} shards parameters over ranks of one node, but only {room} data-parallel rank shares a "
            f"node here; nearest legal {nearest}"
        )
    if chosen.partitioned and p > most:
        raise ValueError(
            f"a partition of {partition} ranks would straddle nodes: {h} data-parallel ranks share one; "
            f"nearest: --zero-hpz-partition-size {most}"
        )
    return p, max(sizes[chosen.g], p if chosen.g == "h" else 1), sizes[chosen.os]
