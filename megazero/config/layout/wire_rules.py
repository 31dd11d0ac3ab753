"""Rules between the options of quantised messages. They hold whatever the size of the world."""

from __future__ import annotations

from collections.abc import Iterator

from megazero.config.layout.shards import AUTO, PRESETS
from megazero.config.layout.wire import quantizes_gradients, quantizes_weights
from megazero.config.nearest import nearest_power_of_two
from megazero.config.options.fields import show
from megazero.config.options.sections import ZeroConfig
from megazero.config.run import RunConfig
from megazero.mesh.levels import links_of

LEAST_BLOCK, LARGEST_BLOCK = 8, 2048  # of kernels/format.py
ALWAYS_P_IS_OS = tuple(name for name, preset in PRESETS.items() if preset.p == preset.os)


def may_quantise(preset: str | None, loss_policy: str | None) -> bool:
    """Tell whether the planner may quantise what is not asked for."""
    return preset == AUTO and loss_policy not in (None, "exact")


def message_facts(zero: ZeroConfig, planned: bool = False) -> dict[str, bool]:
    """Return which messages may be quantised, as needs call it.

    planned: the planner may quantise what is not asked for.
    """
    return {
        "sends_weights": quantizes_weights(zero) or planned,
        "sends_gradients": quantizes_gradients(zero) or planned,
    }


def legal_block(zero: ZeroConfig, largest: int = LARGEST_BLOCK) -> Iterator[str]:
    block = zero.zero_block_size
    if block is None:
        return
    if block < 1 or block & (block - 1) or not LEAST_BLOCK <= block <= largest:
        yield (
            f"--zero-block-size {block} must be a power of two from {LEAST_BLOCK} to {largest}; nearest: "
            f"{nearest_power_of_two(block, LEAST_BLOCK, largest)}"
        )


def links_have_bits(config: RunConfig) -> Iterator[str]:
    """Report more formats of gradients than there are links across nodes."""
    bits, links = config.zero.zero_gradient_bits or (), links_of(len(config.parallel.level_sizes))[1:]
    if len(bits) > len(links):
        yield (
            f"--zero-gradient-bits {show(bits)}: gradients cross {len(links)} kind{'s' * (len(links) > 1)} of link "
            f"between nodes by --level-sizes; nearest: {show(bits[: len(links)])}"
        )


def unquantised_changes(zero: ZeroConfig) -> Iterator[str]:
    if zero.zero_quantized_weights_delta and zero.zero_quantized_weights is False:
        yield (
            "--zero-quantized-weights-delta sends quantised weights, which --no-zero-quantized-weights switches off; "
            "leave one out"
        )


def delta_refresh(config: RunConfig) -> Iterator[str]:
    """Report what contradicts an explicit --zero-quantized-weights-delta. zeropp's default gives way instead."""
    zero = config.zero
    if not zero.zero_quantized_weights_delta:
        return
    flag, shard = "--zero-quantized-weights-delta", zero.zero_shard
    yield from unquantised_changes(zero)
    if zero.zero_preset in ALWAYS_P_IS_OS or (shard and shard[0] == shard[-1]):
        what = f"preset {zero.zero_preset}" if zero.zero_preset else f"P = OS = {shard[0] if shard else ''}"
        yield (
            f"{flag} needs a refresh from optimizer shards to larger parameter shards (P < OS), which {what} does "
            "not have; nearest: --zero-preset zeropp"
        )
    if zero.zero_params_lifetime in ("use", "step"):
        yield (
            f"{flag} needs the parameter shards of the last step, but --zero-params-lifetime "
            f"{zero.zero_params_lifetime} drops them; nearest: resident"
        )
