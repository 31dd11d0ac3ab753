"""Turns a command line into a layer, and prints --help. It does not use argparse, and this is why.

argparse, tyro (import 0.14 s) and jsonargparse (0.21 s) stop at the first fault, so a script with three misspelt
flags takes three submissions to repair. They also cannot name the nearest flag. Megatron's syntax is small: `--name
value`, `--name=value`, `--name v1 v2 ...`, `--name` and `--no-name`. Reading it here is shorter than bending any of
them. It reports every fault at once, together with those of the values, and costs no import.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megazero.config.errors import ConfigError
from megazero.config.nearest import did_you_mean
from megazero.config.options.fields import (
    MANY,
    Option,
    Section,
    default_text,
    fault,
    of_script,
    section_options,
)
from megazero.config.read.sources import Layer, Switch, Unknown, all_switches, switches
from megazero.config.run import all_options, section_types

FILES = {
    "config": "run.yaml: defaults that flags override",
    "deepspeed-config": "ds.json: weaker than --config, but for clipping and the loss scale",
}
FLAGS = "FLAGS"  # the place of flags that a command hands on


@dataclass
class Flags:
    """A command line after reading: the layer of its values, the files it names, whether it asks for help."""

    layer: Layer = field(default_factory=lambda: Layer("flags"))
    files: dict[str, str] = field(default_factory=dict)
    help: bool = False


def read_flags(argv: Sequence[str]) -> Flags:
    """Read Megatron-style flags. Faults are collected in the layer's errors and never raised."""
    flags = Flags()
    for typed in _groups(argv):
        if _is_flag(typed[0]):
            _put(flags, *_flag_and_values(typed))
        else:
            strays = (f"{word!r} does not belong to a flag; flags start with --" for word in typed)
            flags.layer.errors.extend(strays)
    return flags


def read_section(cls: type[Section], argv: Sequence[str]) -> tuple[Section, list[str], list[str]]:
    """Read the flags of one section alone, which a command may have beside those of training.

    Returns three things: the section, where a value with a fault is replaced by the default; the other words, in
    their order; and the faults.
    """
    options = section_options(cls.__name__, cls)
    known, layer, rest = switches(options), Layer("flags"), list[str]()
    for typed in _groups(argv):
        word, words = _flag_and_values(typed)
        switch = known.get(_key(word)) if word.startswith("--") else None
        if switch is None:
            rest += typed
        else:
            _put_switch(layer, switch, word, words)
    said = {o.name: fault(o, layer.values.get(o.name, o.default)) for o in options}
    faults = {name: text for name, text in said.items() if text}
    good = {name: value for name, value in layer.values.items() if name not in faults}
    return cls(**good), rest, [*layer.errors, *faults.values()]


def read_arguments(cls: type[Section], argv: Sequence[str]) -> Section:
    """Read the command line of a command that has no flags of training. Raises ConfigError with every fault.

    Words without a flag fill the section's places, in the order of its fields. Beside places each flag takes one
    value, and a flag of several values stands again for each. A last place FLAGS takes unknown flags and
    their values.
    """
    options = section_options(cls.__name__, cls)
    places = [opt for opt in options if opt.place]
    known, layer, words = switches(opt for opt in options if not opt.place), Layer("flags"), list[str]()
    for typed in _groups(argv):
        word, values = _flag_and_values(typed)
        switch = known.get(_key(word)) if word.startswith("--") else None
        if not _is_flag(word):
            words += typed
        elif switch is not None:
            count = _count_taken(switch, typed, values, bool(places))
            option = switch.option  # of several values each may have a flag of its own
            earlier = layer.values.get(option.name, ()) if option.kind == "strs" else ()
            _put_switch(layer, switch, word, [*earlier, *values[:count]])
            words += values[count:]
        elif places and places[-1].place == FLAGS:
            words += typed
        else:
            layer.errors.append(f"{word} does not exist{did_you_mean(_key(word), known, '--')}")
            words += typed[1:] if places else []
    left = _fill(layer, places, words)
    wanted = [
        opt for opt in options if opt.required and opt.name not in layer.values | dict.fromkeys(layer.failed)
    ]
    layer.errors += _strays(left, wanted)
    faults = [fault(opt, layer.values.get(opt.name, opt.default)) for opt in options if not opt.place]
    if errors := [*layer.errors, *filter(None, faults)]:
        raise ConfigError(errors)
    return cls(**layer.values)


def _count_taken(switch: Switch, typed: Sequence[str], values: Sequence[str], places: bool) -> int:
    """Return how many of the words behind a flag are its values: the others fill places."""
    if not places:
        return len(values)
    return 1 if switch.sets is None or "=" in typed[0] else 0


def _fill(layer: Layer, places: Sequence[Option], words: list[str]) -> list[str]:
    """Put words into the places, in turn. Returns those that are left."""
    for opt in places:
        many = opt.kind in MANY
        taken, words = (words, []) if many else (words[:1], words[1:])
        if taken:
            layer.put(opt, taken if many else taken[0], opt.place)
        elif opt.needed:
            layer.errors.append(f"{opt.place} is required: {opt.help}")
    return words


def _strays(words: Sequence[str], wanted: Sequence[Option]) -> Iterator[str]:
    """Yield the error of each word that belongs to no flag. wanted: the required flags that are not given."""
    for number, word in enumerate(words):
        near = wanted[min(number, len(wanted) - 1)].flag if wanted else ""
        yield f"{word!r} does not belong to a flag; flags start with --{f'; nearest: {near} {word}' if near else ''}"


def _groups(argv: Sequence[str]) -> Iterator[list[str]]:
    """Yield the words of each flag, which are itself and then its values.

    If the first group has no flag, its words belong to none.
    """
    group: list[str] = []
    for word in argv:
        if _is_flag(word) and group:
            yield group
            group = []
        group.append(word)
    if group:
        yield group


def _flag_and_values(typed: Sequence[str]) -> tuple[str, list[str]]:
    word, has_value, inline = typed[0].partition("=")
    return word, [*([inline] if has_value else []), *typed[1:]]


def _key(word: str) -> str:
    return word.lstrip("-").replace("_", "-")


def _is_flag(word: str) -> bool:
    return word.startswith("-") and re.fullmatch(r"-[\d.].*", word) is None and word != "-"


def _put(flags: Flags, word: str, words: list[str]) -> None:
    layer, key = flags.layer, _key(word)
    switch = all_switches().get(key)
    if word == "-h" or key == "help":
        flags.help = True
    elif not word.startswith("--"):
        layer.errors.append(f"{word} is no flag: flags start with --; nearest: --{key}")
    elif key in FILES:
        if len(words) != 1 or not words[0] or key in flags.files:
            got = " ".join(words) or f"none{of_script(word)}"
            layer.errors.append(f"{word} takes one file and stands once, got {got}")
        else:
            flags.files[key] = words[0]
    elif switch is None:
        layer.unknown.append(Unknown(key, "--", words, ("help", *FILES)))
    else:
        _put_switch(layer, switch, word, words)


def _put_switch(layer: Layer, switch: Switch, word: str, words: list[str]) -> None:
    if switch.sets is None:
        _put_values(layer, switch.option, word, words)
    elif words:
        layer.errors.append(f"{word} takes no value, got {' '.join(words)}")
        layer.failed.add(switch.option.name)
    else:
        layer.put(switch.option, switch.sets, word)


def _put_values(layer: Layer, opt: Option, word: str, words: list[str]) -> None:
    many = opt.kind in MANY
    if any(words) and (many or len(words) == 1):
        layer.put(opt, words if many else words[0], word)
    else:
        got = " ".join(words) or f"none{of_script(word)}"
        layer.errors.append(f"{word} takes {'at least one value' if many else 'one value'}, got {got}")
        layer.failed.add(opt.name)


def spelling(opt: Option) -> str:
    """Return how the option is typed: '--lr NUMBER', '--swiglu | --no-swiglu'."""
    if opt.place:
        return opt.place + (" ..." if opt.kind in MANY else "")
    if opt.kind == "bool":
        on, off = opt.flag, f"--{opt.negative_key}"
        return off + " | " + on if opt.default is True else on + " | " + off
    kinds = {
        "int": "N",
        "float": "X",
        "ints": "N,N,...",
        "floats": "X,X,...",
        "strs": "TEXT ...",
        "str": "TEXT",
    }
    choices = [kinds[opt.kind], opt.word] if opt.word else opt.choices
    value = "{" + ",".join(map(str, choices)) + "}" if choices else kinds[opt.kind]
    others = [f"--{alias} {value}" for alias in opt.aliases] + [f"--{const}" for const in opt.consts]
    others += [f"--{opt.negative_key}"] if opt.may_be_none else []
    return " | ".join([f"{opt.flag} {value}", *others])


def options_help(options: Iterable[Option]) -> Iterator[str]:
    """Yield the lines of a --help that list these options."""
    for opt in options:
        default = default_text(opt)
        yield f"  {spelling(opt)}\n        {opt.help}{f' [{default}]' if default else ''}"


def arguments_help(usage: str, cls: type) -> str:
    """Return the --help of a command whose command line ``read_arguments`` reads."""
    return "\n".join([usage, *options_help(section_options(cls.__name__, cls))])


def pick(
    program: str, commands: Mapping[str, str], argv: Sequence[str], also: Sequence[str] = ("COMMAND --help",)
) -> tuple[str, int]:
    """Return the command that the first word names; else '' and the exit status, after --help or a wrong word.

    commands: one line about each command, by its name. also: further command lines for the usage.
    """
    width = max(map(len, commands))
    usage = [f"usage: {program} COMMAND [words]", *(f"       {program} {words}" for words in also), ""]
    table = "\n".join([*usage, *(f"  {name:<{width}}  {text}" for name, text in commands.items())])
    first = argv[0] if argv else ""
    if first in commands:
        return first, 0
    if first in ("", "-h", "--help"):
        print(table)
        return "", 0 if first else 2
    near = did_you_mean(first, commands, f"{program} ")
    print(f"{program} {first} does not exist{near}\n\n{table}", file=sys.stderr)
    return "", 2


def section_text(cls: type) -> str:
    """Return a section's docstring without its indentation, which Python keeps up to 3.12."""
    return inspect.cleandoc(cls.__doc__ or "")


USAGE = """usage: megazero train [--nproc-per-node N] [--config FILE] [flags below]
       torchrun --nproc-per-node N ... -m megazero train [flags below]
       srun megazero train [flags below]

Trains a model, or continues its training. Flags have Megatron's names. --nproc-per-node starts N ranks on this
machine; without it and without a launcher there is one rank. --local-rank, which some launchers add, is read.
docs/reference/flags.md has this list, docs/guide/training.md the launchers, docs/guide/slurm.md exit statuses.

files"""


def help_text() -> str:
    """Return the help of all flags, by section."""
    lines = [USAGE]
    lines += [f"  --{key} FILE\n        {text}" for key, text in FILES.items()]
    for section, cls in section_types().items():
        lines += ["", f"{section}: {section_text(cls)}"]
        lines += options_help(opt for opt in all_options().values() if opt.section == section)
    lines += [
        "",
        "Megatron's other flags are taken, too, or refused with what to do instead: megazero flags WORD",
    ]
    return "\n".join(lines)
