"""This module makes a RunConfig from argv. Every fault is reported at once.

Flags override the YAML file, which overrides the DeepSpeed JSON file, which overrides the defaults.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megazero.config.errors import ConfigError
from megazero.config.foreign.deepspeed import read_deepspeed
from megazero.config.layout.elastic import fit
from megazero.config.nearest import did_you_mean
from megazero.config.read.files import read_yaml
from megazero.config.read.flags import help_text, read_flags
from megazero.config.read.resolve import resolve
from megazero.config.read.sources import Layer, merge
from megazero.config.run import RunConfig, World, all_options
from megazero.config.validate import find_errors, ignored


def parse(argv: Sequence[str], world: World | None = None) -> RunConfig:
    """Return the resolved, validated configuration of a command line (without the program's name).

    Without a world, whatever needs its size stays unchecked, and a global batch that is not given stays None.
    Raises ConfigError with every fault. --help prints and leaves through SystemExit(0), as argparse does.
    """
    flags = read_flags(argv)
    if flags.help:
        print(help_text(os.path.basename(sys.argv[0])))
        raise SystemExit(0)
    readers = {"deepspeed-config": read_deepspeed, "config": read_yaml}
    layers = [read(flags.files[key]) for key, read in readers.items() if key in flags.files]
    return _finish(merge([*layers, flags.layer]), world)


def parse_or_exit(argv: Sequence[str], world: World | None = None) -> RunConfig:
    """Parse for a program's main: print the faults on stderr and exit with status 2."""
    try:
        return parse(argv, world)
    except ConfigError as error:
        print(f"{error}\n--help lists every flag", file=sys.stderr)
        raise SystemExit(2) from None


def make_config(values: Mapping[str, Any], world: World | None = None) -> RunConfig:
    """Return the resolved, validated configuration of values by field name. None means "not said".

    Raises ConfigError with every fault.
    """
    layer = Layer("values")
    for name, value in values.items():
        if name in all_options() and value is None:
            continue
        if name in all_options():
            layer.put(all_options()[name], value, name)
        else:
            layer.errors.append(f"{name} does not exist{did_you_mean(name, all_options())}")
    return _finish(layer, world)


def _finish(said: Layer, world: World | None) -> RunConfig:
    config, faults = resolve(said, world)
    errors = [*said.errors, *faults]
    if errors or world is None:
        errors += find_errors(config, world, skip=said.failed)
    else:
        config, errors = fit(config, world)
    if errors:
        raise ConfigError(errors)
    config = replace(config, notes=(*config.notes, *ignored(config)))
    asked = config.zero.zero_params_lifetime
    known = world if config.knows_nodes(world) else None
    if asked not in (None, "gathered") and known and asked != config.shards(known).lifetime:
        note = (
            f"--zero-params-lifetime {asked} is 'use' here: P = OS, the P copy is the optimizer's own slice"
        )
        config = replace(config, notes=(*config.notes, note))
    return config
