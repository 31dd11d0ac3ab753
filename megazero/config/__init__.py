"""This package holds the configuration: frozen dataclasses, flags and files made from them, one validation pass.

It imports neither torch nor numpy.
"""

from megazero.config.errors import ConfigError
from megazero.config.parse import make_config, parse, parse_or_exit
from megazero.config.run import RunConfig, ScheduleLengths, World
from megazero.config.shards import LIFETIMES, PRESETS, Shards, resolve_shards

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
]
