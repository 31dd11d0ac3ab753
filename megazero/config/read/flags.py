"""Turns a command line into a layer, and prints --help. It does not use argparse, and this is why.

argparse, tyro (import 0.14 s) and jsonargparse (0.21 s) stop at the first fault, so a script with three misspelt
flags takes three submissions to repair. They also cannot name the nearest flag. Megatron's syntax is small: `--name
value`, `--name=value`, `--name v1 v2 ...`, `--name` and `--no-name`. Reading it here is shorter than bending any of
them. It reports every fault at once, together with those of the values, and costs no import.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from megazero.config.options.fields import MANY, Option, default_text, fault, section_options
from megazero.config.read.sources import Layer, Switch, Unknown, all_switches, switches
from megazero.config.run import all_options, section_types

Section = TypeVar("Section")

FILES = {
    "config": "run.yaml: defaults that flags override",
    "deepspeed-config": "ds.json: weaker than --config, but for clipping and the loss scale",
}


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
        if len(words) != 1 or key in flags.files:
            layer.errors.append(f"{word} takes one file and stands once, got {' '.join(words) or 'none'}")
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
    if words and (many or len(words) == 1):
        layer.put(opt, words if many else words[0], word)
    else:
        got = " ".join(words) or "none"
        if not words and opt.section == "data":
            got += "; if a variable of the script stands there, it is empty"
        layer.errors.append(f"{word} takes {'at least one value' if many else 'one value'}, got {got}")
        layer.failed.add(opt.name)


def spelling(opt: Option) -> str:
    """Return how the option is typed: '--lr NUMBER', '--swiglu | --no-swiglu'."""
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
    return " | ".join([f"{opt.flag} {value}", *others])


def options_help(options: Iterable[Option]) -> Iterator[str]:
    """Yield the lines of a --help that list these options."""
    for opt in options:
        default = default_text(opt)
        yield f"  {spelling(opt)}\n        {opt.help}{f' [{default}]' if default else ''}"


def section_text(cls: type) -> str:
    """Return a section's docstring without its indentation, which Python keeps up to 3.12."""
    return inspect.cleandoc(cls.__doc__ or "")


def help_text(program: str) -> str:
    """Return the help of all flags, by section."""
    lines = [f"usage: {program} [flags]   (Megatron's names; docs/flags.md has the same list)"]
    lines += ["  --nproc-per-node N starts N ranks on this machine, without a launcher"]
    lines += ["  --local-rank N, which some launchers add, is read with their variables", "", "files"]
    lines += [f"  --{key} FILE\n        {text}" for key, text in FILES.items()]
    for section, cls in section_types().items():
        lines += ["", f"{section}: {section_text(cls)}"]
        lines += options_help(opt for opt in all_options().values() if opt.section == section)
    lines += [
        "",
        "Megatron's other flags are taken, too, or refused with what to do instead: docs/megatron.md",
    ]
    return "\n".join(lines)
