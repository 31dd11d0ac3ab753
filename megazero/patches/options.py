"""The options of a patch, formats of messages and checks of them: as megazero's flags, and as words of ``enable``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from megazero.config.errors import ConfigError
from megazero.config.layout.wire import PLAIN, Wire, asked_for, is_plain
from megazero.config.layout.wire_rules import LEAST_BLOCK, legal_block, message_facts, unquantised_changes
from megazero.config.options.fields import convert, fault, option, option_of, section_options
from megazero.config.options.needs import without_effect
from megazero.config.options.sections import BITS, BITS_OF_GRADIENTS, ParallelConfig, ZeroConfig
from megazero.config.run import REMOVED

BLOCK = 64  # elements: Megatron starts parameters at multiples of it, so that no block holds two parameters
GRADIENTS = ("none", *(f"int{bits}" for bits in BITS_OF_GRADIENTS))
WEIGHTS = ("none", *(f"int{bits}" for bits in BITS), *(f"int{bits}-delta" for bits in BITS))
# The words of read_words for flags that it does not take by name.
WORDS = {
    "zero_quantized_weights": "weights='int8'",
    "zero_quantized_weights_delta": "weights='int4-delta'",
    "zero_quantized_gradients": "gradients='int4'",
    "zero_weight_bits": "weights",
    "zero_gradient_bits": "gradients",
    "zero_gradient_bits_intra_node": "gradients_intra_node",
}


@dataclass(frozen=True)
class MessageOptions:
    """The formats of messages between data-parallel ranks, by megazero's flags, and checks of these messages."""

    zero_quantized_weights: bool | None = option_of(
        ZeroConfig,
        "zero_quantized_weights",
        help="send weights quantised where a data-parallel group crosses nodes (Megatron: bf16 and fp16 parameters)",
    )
    zero_weight_bits: int | None = option_of(ZeroConfig, "zero_weight_bits")
    zero_quantized_weights_delta: bool | None = option_of(
        ZeroConfig,
        "zero_quantized_weights_delta",
        help="quantise the weights' change since the last gather instead of the weights: fewer bits at less error, "
        "for 2 bytes of each parameter of the optimizer's shard. Implies --zero-quantized-weights",
    )
    zero_quantized_gradients: bool | None = option_of(
        ZeroConfig, "zero_quantized_gradients", help="send gradients quantised where they cross nodes"
    )
    zero_gradient_bits: int | None = option_of(ZeroConfig, "zero_gradient_bits")
    zero_gradient_bits_intra_node: int | None = option_of(ZeroConfig, "zero_gradient_bits_intra_node")
    zero_gradient_transform: str | None = option_of(
        ZeroConfig,
        "zero_gradient_transform",
        help="transform of quantised gradients: a randomised Hadamard transform spreads outliers over a block before "
        "that is encoded (default: hadamard where a hop sends 4 bits or fewer)",
    )
    zero_exact_numel: int | None = option_of(ZeroConfig, "zero_exact_numel")
    zero_block_size: int | None = option_of(
        ZeroConfig,
        "zero_block_size",
        help=f"elements that share a scale, a power of two from {LEAST_BLOCK} to {BLOCK} (default: {BLOCK})",
    )
    ranks_per_node: int | None = option_of(ParallelConfig, "ranks_per_node")
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
    def note(self) -> str:
        """What the user is told of these formats at the start, or ''."""
        return PLAIN if is_plain(self._zero) else ""

    @property
    def _zero(self) -> ZeroConfig:
        names = {f.name for f in dataclasses.fields(ZeroConfig)} & {f.name for f in dataclasses.fields(self)}
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.zero_gradient_bits is not None:
            given["zero_gradient_bits"] = (self.zero_gradient_bits,)  # of the one link across nodes
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
    zero = options._zero
    own = section_options("patch", type(options))
    yield from unquantised_changes(zero)
    yield from (line for _, line in without_effect(own, vars(options), message_facts(zero), {}))
    yield from legal_block(zero, BLOCK)


def read_words(
    kind: type[Options],
    weights: str = "none",
    gradients: str = "none",
    *,
    gradients_intra_node: str = "none",
    **others: Any,
) -> Options:
    """Return the options that these words mean. Raises ConfigError with all faults, TypeError for an unknown keyword.

    weights: 'none', or 'int8', 'int4', 'int2', each also with '-delta' for differences. gradients: 'none', 'int8' or
    'int4' across nodes; of 4 bits they are transformed, unless gradient_transform='none' is given.
    gradients_intra_node: 'none', 'int8' or 'int4'. The others are the flags of
    their names, with --zero- before them. Errors name the words, not the flags.
    """
    errors = [
        f"{name}={word!r} is no format; {name} takes {', '.join(map(repr, legal))}"
        for name, word, legal in (
            ("weights", weights, WEIGHTS),
            ("gradients", gradients, GRADIENTS),
            ("gradients_intra_node", gradients_intra_node, GRADIENTS),
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
    gone = [name for name in others if name not in names and f"zero_{name}" in REMOVED]
    if gone:
        raise ConfigError([f"{name} was removed: {REMOVED[f'zero_{name}'].cure}" for name in gone])
    for name in others.keys() - names.keys():
        raise TypeError(f"unexpected keyword {name!r}; nearest: one of {', '.join(sorted(names))}")
    values = _converted(kind, {names[name]: value for name, value in others.items()})
    try:
        return check(kind(**coded, **values))
    except ConfigError as error:
        said = WORDS | {field: name for name, field in names.items()}
        words = {f"--{field.replace('_', '-')}": name for field, name in said.items()}
        raise ConfigError(
            [re.sub(r"--[a-z-]+", lambda m: words.get(m[0], m[0]), line) for line in error.errors]
        ) from None


def _converted(kind: type[Options], given: dict[str, Any]) -> dict[str, Any]:
    """Return the values as a configuration file's are read. Raises ConfigError for those of another kind."""
    values, errors = dict[str, Any](), []
    for opt in section_options("patch", kind):
        if opt.name not in given:
            continue
        value = given[opt.name]
        try:
            values[opt.name] = value if value is None and opt.default is None else convert(opt, value)
        except ValueError as error:
            errors.append(f"{opt.name.removeprefix('zero_')} {error}")
    if errors:
        raise ConfigError(errors)
    return values


def _bits(word: str) -> int | None:
    found = re.match(r"int(\d)", word)
    return int(found[1]) if found else None
