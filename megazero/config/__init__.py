"""The configuration: frozen dataclasses, flags and files made from them, one validation pass.

It imports neither torch nor numpy.
"""

from megazero.config.errors import ConfigError
from megazero.config.layout.shards import LIFETIMES, PRESETS, Shards, resolve_shards
from megazero.config.read.parse import make_config, parse, parse_or_exit, run_command
from megazero.config.run import RunConfig, ScheduleLengths, World

__all__ = [
    "LIFETIMES",
    "PRESETS",
    "ConfigError",
    "RunConfig",
    "ScheduleLengths",
    "Shards",
    "World",
    "make_config",
    "parse",
    "parse_or_exit",
    "resolve_shards",
    "run_command",
]
