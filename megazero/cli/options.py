"""Flags of ``megazero verify`` itself, taken out before the rest is read as training reads it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megazero.config import ConfigError, RunConfig, World, parse

VERIFY_HELP = """usage: megazero verify TRAINING FLAGS [--config FILE] [flags below]

Takes the flags of training (python -m megazero.config --help lists them). Runs the configuration, its sizes shrunk
and its structure kept, on local ranks: exactly, against one rank; then as configured. Writes certificate.json and
certificate.md. Exit status 0: every check holds; 1: one does not, and is named; 2: the configuration is wrong.

  --world-size N       ranks of the training (default: tensor x pipeline parallel size x 2)
  --ranks-per-node N   ranks of a node (default: all of them; the same flag as in training)
  --verify-output DIR  where the certificate goes (default: certificate)
  --verify-steps N     optimizer steps of each run, 4 to 100 (default: 4)
  --verify-ranks N     local ranks at most; a larger world is run in a sub-layout (default: 16)"""

STEPS, MOST_STEPS, RANKS, OUTPUT = 4, 100, 16, "certificate"
_NUMBERS = {"world-size": (1, None), "verify-steps": (STEPS, MOST_STEPS), "verify-ranks": (1, 256)}


@dataclass(frozen=True)
class Request:
    """config: as training would have it on ``world``. steps, ranks, output: of the verification."""

    config: RunConfig
    world: World
    steps: int = STEPS
    ranks: int = RANKS
    output: str = OUTPUT


def read_request(argv: Sequence[str]) -> Request:
    """The command line after ``verify``. Raises ConfigError with every fault at once, as training does."""
    own, rest, errors = _split(argv)
    numbers = {name: _number(name, text, errors) for name, text in own.items() if name in _NUMBERS}
    try:
        alone = parse(rest)
    except ConfigError as error:
        raise ConfigError([*errors, *error.errors]) from None
    parallel = alone.parallel
    size = numbers.get("world-size")
    world_size = size or 2 * parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    world = World(world_size, world_size)
    try:
        config = parse(rest, world)
    except ConfigError as error:
        raise ConfigError([*errors, *error.errors]) from None
    if errors:
        raise ConfigError(errors)
    steps, ranks = numbers.get("verify-steps"), numbers.get("verify-ranks")
    return Request(
        config,
        World(world_size, config.ranks_per_node(world)),
        steps or STEPS,
        ranks or RANKS,
        own.get("verify-output", OUTPUT),
    )


def _split(argv: Sequence[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """Own flags by name, the other words in their order, errors. The last of several wins, as in training."""
    own: dict[str, str] = {}
    rest: list[str] = []
    errors: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, has_value, value = word.removeprefix("--").replace("_", "-").partition("=")
        if not word.startswith("--") or name not in (*_NUMBERS, "verify-output"):
            rest.append(word)
        elif has_value:
            own[name] = value
        elif words and not words[0].startswith("--"):
            own[name] = words.pop(0)
        else:
            errors.append(f"--{name} takes one value, got none")
    return own, rest, errors


def _number(name: str, text: str, errors: list[str]) -> int | None:
    low, high = _NUMBERS[name]
    value = int(text) if text.isascii() and text.isdigit() else None
    if value is None:
        errors.append(f"--{name} takes a whole number, got {text!r}")
    elif value < low:
        errors.append(f"--{name} {value} must be at least {low}; nearest: {low}")
    elif high is not None and value > high:
        errors.append(f"--{name} {value} must be at most {high}; nearest: {high}")
    else:
        return value
    return None
