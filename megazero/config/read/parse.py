"""Makes a RunConfig from argv. Every fault is reported at once.

Flags override the YAML file, which overrides the DeepSpeed JSON file, which overrides the defaults.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megazero.config.errors import ConfigError
from megazero.config.foreign import megatron
from megazero.config.layout.elastic import fit
from megazero.config.nearest import did_you_mean
from megazero.config.options.fields import Section, typed
from megazero.config.read.beginning import Beginning, read_beginning
from megazero.config.read.completion import Known
from megazero.config.read.files import read_yaml
from megazero.config.read.flags import Flags, arguments_help, help_text, read_arguments, read_flags
from megazero.config.read.resolve import resolve
from megazero.config.read.sources import Layer, merge
from megazero.config.run import REMOVED, RunConfig, World, all_options
from megazero.config.validate import judge


def parse(argv: Sequence[str], world: World | None = None) -> RunConfig:
    """Return the resolved, validated configuration of a command line (without the program's name).

    Without a world, whatever needs its size stays unchecked, and a global batch that is not given stays None.
    No checkpoint is read: with --load, the words are checked one by one, and ``begun`` completes and judges the rest.
    Raises ConfigError with every fault. --help prints and leaves through SystemExit(0), as argparse does.
    """
    flags = read_flags(argv)
    if flags.help:
        print(help_text())
        raise SystemExit(0)
    return make_run(read_layers(flags), world)


def begun(config: RunConfig, world: World | None = None, beginning: Beginning | None = None) -> RunConfig:
    """Return a configuration of ``parse`` or ``make_config``, completed by the folders of --load and --save.

    beginning: what ``read_beginning`` found, on this rank or on another one; None reads it here. Without --load, or
    if this is done, the configuration comes back as it is. Raises ConfigError with every fault.
    """
    said = config.said
    if said is None:
        return config
    assert isinstance(said, Layer)
    try:
        return _judged(said, world, read_beginning(config.values()) if beginning is None else beginning)
    except OSError as error:
        # No mistake of the user: the cause keeps the operating system's number.
        unread = f"{error.filename or said.values.get('load')} cannot be read: {error.strerror or error}"
        raise ConfigError([*said.errors, unread]) from error


def read_layers(flags: Flags) -> Layer:
    """Return the values of flags and of the files that they name. Faults are in the layer's errors."""
    layers = []
    if "deepspeed-config" in flags.files:
        from megazero.config.foreign.deepspeed import read_deepspeed  # 2 ms, which --help does not pay

        layers.append(read_deepspeed(flags.files["deepspeed-config"]))
    if "config" in flags.files:
        layers.append(read_yaml(flags.files["config"]))
    for layer in (*layers, flags.layer):
        settle(layer)
    return merge([*layers, flags.layer])


def settle(layer: Layer) -> None:
    """Settle a source's words that are no options: flags of Megatron, or errors with what was probably meant."""
    taken = []
    for word in layer.unknown:
        key, said = word.key, word.said
        if said is False and f"no-{key}" in megatron.flags():
            key, said = f"no-{key}", []  # a switch that is on by default, off
        removed = REMOVED.get(key.removeprefix("no-").replace("-", "_"))
        if removed is not None:
            off = said in (False, None, [removed.off]) or key.startswith("no-")
            if not off:
                layer.errors.append(f"{word.prefix}{key} was removed: {removed.cure}")
        elif key not in megatron.flags():
            from megazero.config.foreign.typos import suggestion  # 3 ms, only after an error

            layer.errors.append(
                f"{word.prefix}{key} does not exist{suggestion(key, word.prefix, word.others)}"
            )
        elif isinstance(said, Sequence):  # a switch of Megatron that is off says nothing
            taken.append((key, f"{word.prefix}{key}", said))
    megatron.take(layer, taken)


def parse_or_exit(argv: Sequence[str], world: World | None = None) -> RunConfig:
    """Parse for a program's main, --load included. Print the faults on stderr and exit with status 2."""
    try:
        return begun(parse(argv, world), world)
    except ConfigError as error:
        print(f"{error}\n--help lists every flag", file=sys.stderr)
        raise SystemExit(2) from None


def run_command(
    name: str, argv: Sequence[str], usage: Callable[[], str], run: Callable[[], int], rank: int = 0
) -> int:
    """Run a command and return its exit status. It is 2 for a ValueError or OSError, whose text is printed.

    usage: the text of --help. rank: rank 0 speaks for all; the others wait a second, because a launcher ends all
    ranks with the first that leaves.
    """
    if "-h" in argv or "--help" in argv:
        print(usage())
        return 0
    try:
        return run()
    except (ValueError, OSError) as error:
        listed = isinstance(error, ConfigError)
        said = f"{error}\n--help lists the flags of {name}" if listed else f"error: {error}"
        if rank:
            time.sleep(1)
        else:
            print(said, file=sys.stderr, flush=True)
        return 2


def run_with_arguments(
    name: str, argv: Sequence[str], usage: str, cls: type[Section], run: Callable[[Section], int]
) -> int:
    """Run a command whose words are the section ``cls``, and return its exit status.

    usage: the beginning of --help, which lists the section's flags below it.
    """

    return run_command(name, argv, lambda: arguments_help(usage, cls), lambda: run(read_arguments(cls, argv)))


def make_config(values: Mapping[str, Any], world: World | None = None) -> RunConfig:
    """Return the resolved, validated configuration of values by field name. None means "not said".

    As ``parse``, it reads no checkpoint. Raises ConfigError with every fault.
    """
    return make_run(_said(values), world)


def unjudged(values: Mapping[str, Any]) -> RunConfig:
    """Return the completed configuration of values by field name, of which no rule has been asked.

    For the planner: it changes a few options thousands of times, and asks the rules (validate.py: judge) where
    that matters. Raises ConfigError if a value is not of its option's kind, or one is missing.
    """
    layer = _said(values)
    config, missing, done = resolve(Known.of(layer, None, Beginning()))
    errors = [*layer.errors, *done.errors]
    if errors or missing:
        raise ConfigError(errors + judge(config, None, done.failed, missing).errors)
    return config


def _said(values: Mapping[str, Any]) -> Layer:
    """Return values by field name as a source, whose faults are in its errors."""
    layer = Layer("values")
    for name, value in values.items():
        if name in all_options() and value is None:
            continue
        if name in all_options():
            layer.put(all_options()[name], value, name)
        else:
            layer.errors.append(f"{name} does not exist{did_you_mean(name, all_options())}")
    settle(layer)
    return layer


def make_run(said: Layer, world: World | None = None) -> RunConfig:
    """Do as ``parse`` does with the values of ``read_layers``, which a command may have changed.

    ``said`` is in the configuration where what --load names is still to be read.
    """
    if said.unread:
        raise ConfigError(said.errors)
    if said.values.get("load") is None:
        return _judged(said, world, Beginning())
    if said.errors:
        raise ConfigError(said.errors)
    return replace(resolve(Known.of(said, world, None))[0], said=said)


def _judged(said: Layer, world: World | None, beginning: Beginning) -> RunConfig:
    config, missing, done = resolve(Known.of(said, world, beginning))
    errors = [*said.errors, *done.errors]
    if errors or missing or world is None:
        verdict = judge(config, world, done.failed, missing)
    else:
        config, verdict = fit(config, world, beginning.consumed if beginning.goes_on(config.values()) else 0)
    if errors := [*errors, *verdict.errors]:
        raise ConfigError([line + _not_typed(line, config, done.loaded) for line in errors])
    return replace(config, notes=(*config.notes, *verdict.notes))


def _not_typed(line: str, config: RunConfig, loaded: Collection[str]) -> str:
    """Return which options of an error line --load gave, or ''."""
    options = [all_options()[name] for name in loaded]
    named = [typed(o, config.get(o.name)) for o in options if re.search(rf"{o.flag}(?![\w-])", line)]
    return f" (from --load {config.checkpoint.load}: {' '.join(named)})" if named else ""
