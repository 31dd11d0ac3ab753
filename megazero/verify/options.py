"""The flags of ``megazero verify`` beside those of training. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megazero.config import ConfigError, RunConfig, World, begun, parse
from megazero.config.layout.shards import AUTO
from megazero.config.options.fields import option, section_options
from megazero.config.read.flags import options_help, read_section
from megazero.config.run import all_options

USAGE = """usage: megazero verify TRAINING FLAGS [--config FILE] [flags below]

Proves a configuration of training (megazero train --help lists its flags). Local ranks run it with smaller sizes and
the same structure: first with exact messages, compared with one rank; then as configured. It writes certificate.json
and certificate.md. Exit status 0: every check holds; 1: a check fails, and is named; 2: the configuration is wrong.
"""


@dataclass(frozen=True)
class VerifyConfig:
    """The verification itself."""

    world_size: int | None = option(
        None, "ranks of the training (default: tensor x pipeline parallel size x 2)", low=1
    )
    verify_output: str = option("certificate", "folder of the certificate")
    verify_steps: int = option(4, "optimizer steps of each run, 4 to 100", low=4, high=100)
    verify_ranks: int = option(
        16, "largest number of local ranks, up to 256; a larger world runs in a sub-layout", low=1, high=256
    )


@dataclass(frozen=True)
class VerifyRequest:
    """The request of the command line.

    config: the configuration as training would have it on ``world``. options: those of the verification.
    """

    config: RunConfig
    world: World
    options: VerifyConfig


def help_text() -> str:
    """Return what ``megazero verify --help`` prints."""
    known = all_options()
    options = [*section_options("verify", VerifyConfig), known["ranks_per_node"], known["level_sizes"]]
    return "\n".join([USAGE, *options_help(options)])


def read_request(argv: Sequence[str]) -> VerifyRequest:
    """Read the command line after ``verify``. Raises ConfigError with every fault at once, as training does."""
    options, rest, errors = read_section(VerifyConfig, argv)
    try:
        parallel = parse(rest).parallel
        size = options.world_size or (2 * parallel.model_ranks * parallel.context_parallel_size)
        world = World(size, size)
        config = begun(parse(rest, world), world)
    except ConfigError as error:
        raise ConfigError([*errors, *error.errors]) from None
    if config.zero.zero_preset == AUTO:
        errors.append(
            "--zero-preset auto is no layout yet: verify the flags that `megazero plan` prints for the same run"
        )
    if errors:
        raise ConfigError(errors)
    return VerifyRequest(config, World(size, config.ranks_per_node(World(size, size))), options)
