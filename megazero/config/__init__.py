"""The configuration: frozen dataclasses, flags and files made from them, one validation pass.

It imports neither torch nor numpy.
"""

from megazero.config.errors import ConfigError
from megazero.config.layout.shards import PRESETS, resolve_shards
from megazero.config.read.flags import read_arguments
from megazero.config.read.parse import (
    begun,
    make_config,
    parse,
    parse_or_exit,
    run_command,
    run_with_arguments,
    unjudged,
)
from megazero.config.run import RunConfig, World

__all__ = [
    "PRESETS",
    "ConfigError",
    "RunConfig",
    "World",
    "begun",
    "make_config",
    "parse",
    "parse_or_exit",
    "read_arguments",
    "resolve_shards",
    "run_command",
    "run_with_arguments",
    "unjudged",
]
