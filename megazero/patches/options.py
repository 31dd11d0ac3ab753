"""What a user of a patch asks for: megazero's flags for formats, how messages are watched, and the same as words."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from megazero.config.errors import ConfigError
from megazero.config.layout.wire import (
    EXACT_NUMEL,
    OF_BOTH,
    OF_FEEDBACK,
    OF_GRADIENTS,
    OF_WEIGHTS,
    Wire,
    asked_for,
)
from megazero.config.layout.wire_rules import LEAST_BLOCK, unbiased
from megazero.config.options.fields import fault, option, section_options
from megazero.config.options.sections import BITS, ROUNDINGS, TRANSFORMS, ZeroConfig

BLOCK = 64  # elements: Megatron starts parameters at multiples of it, so that no block holds two parameters
GRADIENTS = ("none", *(f"int{bits}" for bits in BITS))
GRADIENTS_INTRA_NODE = ("none", "int8", "int4")
WEIGHTS = (*GRADIENTS, *(f"int{bits}-delta" for bits in BITS))


@dataclass(frozen=True)
class MessageOptions:
    """What is sent how between data-parallel ranks, in megazero's words, and how that is watched."""

    zero_quantized_weights: bool | None = option(
        None,
        "send weights quantised where a data-parallel group crosses nodes (Megatron: bf16 and fp16 parameters)",
    )
    zero_weight_bits: int | None = option(
        None, "bits of a quantised weight (default: 8; 4 for differences)", choices=BITS
    )
    zero_quantized_weights_delta: bool | None = option(
        None,
        "quantise the weights' change since the last gather instead of the weights: fewer bits at less error, for 2 "
        "bytes of each parameter of the optimizer's shard. Implies --zero-quantized-weights",
    )
    zero_quantized_gradients: bool | None = option(None, "send gradients quantised where they cross nodes")
    zero_gradient_bits: int | None = option(
        None, "bits of a quantised gradient across nodes (default: 4)", choices=BITS
    )
    zero_gradient_bits_intra_node: int | None = option(
        None, "bits of a quantised gradient inside a node (default: not quantised there)", choices=(8, 4)
    )
    zero_gradient_rounding: str = option(
        "nearest", "how gradients are rounded: to nearest, or at random, without bias", choices=ROUNDINGS[:2]
    )
    zero_weight_clip_search: int = option(
        0,
        "scales tried per block of weights; the one with the least error is sent. 0: the largest value decides",
        low=0,
        high=64,
    )
    zero_gradient_clip_search: int = option(
        0, "the same for gradients; not with stochastic rounding", low=0, high=64
    )
    zero_weight_transform: str = option(
        "none",
        "transform of quantised weights, or of their changes: a randomised Hadamard transform spreads outliers over "
        "a block before that is encoded",
        choices=TRANSFORMS,
    )
    zero_gradient_transform: str = option("none", "the same of quantised gradients", choices=TRANSFORMS)
    zero_exact_numel: int | None = option(
        None,
        "parameters with at most this many elements on a tensor-parallel rank are sent exactly (default: "
        f"{EXACT_NUMEL})",
        low=0,
    )
    zero_block_size: int | None = option(
        None,
        f"elements that share a scale, a power of two from {LEAST_BLOCK} to {BLOCK} (default: {BLOCK})",
    )
    ranks_per_node: int | None = option(
        None, "override of the node size that the launcher says: one machine can pretend to be several", low=1
    )
    zero_verify_first_steps: int = option(
        0, "steps in which every message is sent exactly, too, and the differences are printed", low=0
    )
    zero_checksum_interval: int = option(
        0, "steps between comparisons of the parameters' bits across data-parallel ranks; 0: never", low=0
    )

    @property
    def wire(self) -> Wire:
        """Return the formats that are asked for, as megazero reads these flags."""
        return asked_for(self._zero)

    @property
    def _zero(self) -> ZeroConfig:
        names = {f.name for f in dataclasses.fields(ZeroConfig)} & {f.name for f in dataclasses.fields(self)}
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return ZeroConfig(**{"zero_block_size": BLOCK, **given})


Options = TypeVar("Options", bound=MessageOptions)


def check(options: Options) -> Options:
    """Return the options. Raises ConfigError, a ValueError, with all their faults."""
    faults = [fault(opt, getattr(options, opt.name)) for opt in section_options("patch", type(options))]
    errors = [text for text in faults if text] or list(_contradictions(options))
    if errors:
        raise ConfigError(errors)
    return options


def _contradictions(options: MessageOptions) -> Iterator[str]:
    weights = options.zero_quantized_weights or options.zero_quantized_weights_delta
    if options.zero_quantized_weights is False and options.zero_quantized_weights_delta:
        yield (
            "--zero-quantized-weights-delta sends quantised weights, which --no-zero-quantized-weights switches off; "
            "leave one out"
        )
    coded, feedback = weights or options.zero_quantized_gradients, options.wire.feedback
    needs = {
        "--zero-quantized-weights": (weights, (*OF_WEIGHTS, "zero_weight_error_bound")),
        "--zero-quantized-gradients": (
            options.zero_quantized_gradients,
            (*OF_GRADIENTS, "zero_gradient_error_bound", "zero_quantized_gradients_until_step"),
        ),
        "--zero-gradient-rounding feedback": (feedback, OF_FEEDBACK),
        "a quantised format": (coded, OF_BOTH),
    }
    usual = {f.name: f.default for f in dataclasses.fields(options)}
    for needed, (given, names) in needs.items():
        for name in names:
            if name in usual and getattr(options, name) != usual[name] and not given:
                yield f"--{name.replace('_', '-')} has no effect without {needed}: add that, or leave it out"
    yield from unbiased(options._zero)
    block = options.zero_block_size
    if block is not None and (block & (block - 1) or not LEAST_BLOCK <= block <= BLOCK):
        yield f"--zero-block-size {block} must be a power of two from {LEAST_BLOCK} to {BLOCK}"


def read_words(
    kind: type[Options],
    weights: str = "none",
    gradients: str = "none",
    *,
    gradients_intra_node: str = "none",
    **others: Any,
) -> Options:
    """Return the options that these words mean. Raises ConfigError with all faults, TypeError for an unknown keyword.

    weights: 'none', or 'int8', 'int4', 'int2', each also with '-delta' for differences. gradients: 'none', 'int8',
    'int4' or 'int2' across nodes. gradients_intra_node: 'none', 'int8' or 'int4'. The others are the flags of
    their names, with --zero- before them.
    """
    errors = [
        f"{name}={word!r} is no format; {name} takes {', '.join(map(repr, legal))}"
        for name, word, legal in (
            ("weights", weights, WEIGHTS),
            ("gradients", gradients, GRADIENTS),
            ("gradients_intra_node", gradients_intra_node, GRADIENTS_INTRA_NODE),
        )
        if word not in legal
    ]
    if errors:
        raise ConfigError(errors)
    coded: dict[str, Any] = {
        "zero_quantized_weights": weights != "none" or None,
        "zero_weight_bits": _bits(weights),
        "zero_quantized_weights_delta": weights.endswith("-delta") or None,
        "zero_quantized_gradients": gradients != "none" or None,
        "zero_gradient_bits": _bits(gradients),
        "zero_gradient_bits_intra_node": _bits(gradients_intra_node),
    }
    names = {f.name.removeprefix("zero_"): f.name for f in dataclasses.fields(kind) if f.name not in coded}
    for name in others.keys() - names.keys():
        raise TypeError(f"unexpected keyword {name!r}; nearest: one of {', '.join(sorted(names))}")
    return check(kind(**coded, **{names[name]: value for name, value in others.items()}))


def _bits(word: str) -> int | None:
    found = re.match(r"int(\d)", word)
    return int(found[1]) if found else None
