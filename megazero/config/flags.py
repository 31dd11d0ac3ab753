"""Command line -> layer, and --help. No argparse, and this is why.

argparse, tyro (import 0.14 s) and jsonargparse (0.21 s) stop at the first fault, so a script with three misspelt
flags takes three submissions to repair, and cannot name the nearest flag. Megatron's syntax is small: `--name value`,
`--name=value`, `--name v1 v2 ...`, `--name` and `--no-name`. Reading it here is shorter than bending any of them,
reports every fault at once together with those of the values, and costs no import.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from megazero.config.fields import Option, show
from megazero.config.layers import FACTS, Layer, all_switches
from megazero.config.run import all_options, section_types
from megazero.families import FAMILIES

FILES = {
    "config": "run.yaml: defaults that flags override",
    "deepspeed-config": "ds.json: weaker than --config",
}


@dataclass
class Flags:
    """A read command line: the layer of its values, the files it names, whether help was asked for."""

    layer: Layer = field(default_factory=lambda: Layer("flags"))
    files: dict[str, str] = field(default_factory=dict)
    help: bool = False


def read_flags(argv: Sequence[str]) -> Flags:
    """Read Megatron-style flags. Faults are collected in the layer's errors, never raised."""
    flags, i = Flags(), 0
    while i < len(argv) and not _is_flag(argv[i]):
        flags.layer.errors.append(f"{argv[i]!r} does not belong to a flag; flags start with --")
        i += 1
    while i < len(argv):
        word, has_value, inline = argv[i].partition("=")
        i += 1
        words = [inline] if has_value else []
        while i < len(argv) and not _is_flag(argv[i]):
            words.append(argv[i])
            i += 1
        _put(flags, word, words)
    return flags


def _is_flag(word: str) -> bool:
    return word.startswith("-") and re.fullmatch(r"-[\d.].*", word) is None and word != "-"


def _put(flags: Flags, word: str, words: list[str]) -> None:
    layer, key = flags.layer, word.lstrip("-").replace("_", "-")
    switch = all_switches().get(key)
    if word == "-h" or key == "help":
        flags.help = True
    elif not word.startswith("--"):
        layer.unknown(key, word[: len(word) - len(word.lstrip("-"))])
        layer.errors[-1] += " (flags start with --)"
    elif key in FILES:
        if len(words) != 1 or key in flags.files:
            layer.errors.append(f"{word} takes one file and stands once, got {' '.join(words) or 'none'}")
        else:
            flags.files[key] = words[0]
    elif key in FACTS:
        _refuse_values(layer, word, words)
        layer.facts.append(key)
    elif switch is None:
        layer.unknown(key, "--", ("help", *FILES))
    elif switch.sets is not None:
        _refuse_values(layer, word, words)
        layer.put(switch.option, switch.sets, word)
    else:
        _put_values(layer, switch.option, word, words)


def _put_values(layer: Layer, opt: Option, word: str, words: list[str]) -> None:
    many = opt.kind in ("ints", "strs")
    if words and (many or len(words) == 1):
        layer.put(opt, words if many else words[0], word)
    else:
        layer.errors.append(
            f"{word} takes {'at least one value' if many else 'one value'}, got {' '.join(words) or 'none'}"
        )
        layer.failed.add(opt.name)


def _refuse_values(layer: Layer, word: str, words: list[str]) -> None:
    if words:
        layer.errors.append(f"{word} takes no value, got {' '.join(words)}")


def spelling(opt: Option) -> str:
    """How the option is typed: '--lr NUMBER', '--swiglu | --no-swiglu'."""
    if opt.kind == "bool":
        on, off = opt.flag, f"--{opt.negative_key}"
        return off + " | " + on if opt.default is True else on + " | " + off
    kinds = {"int": "N", "float": "X", "ints": "N,N,...", "strs": "TEXT ...", "str": "TEXT"}
    value = "{" + ",".join(map(str, opt.choices)) + "}" if opt.choices else kinds[opt.kind]
    others = [f"--{alias} {value}" for alias in opt.aliases] + [f"--{const}" for const in opt.consts]
    return " | ".join([f"{opt.flag} {value}", *others])


def default_text(opt: Option) -> str:
    """The default in words, '' if the help already says it."""
    if opt.required:
        return "required"
    by_family = {name: f.defaults[opt.name] for name, f in FAMILIES.items() if opt.name in f.defaults}
    if by_family:
        others = [show(opt.default)] if len(by_family) < len(FAMILIES) else []
        return ", ".join(others + [f"{name}: {show(value)}" for name, value in by_family.items()])
    return "" if opt.default is None or opt.default == () else f"default: {show(opt.default)}"


def help_text(program: str) -> str:
    """All flags by section."""
    lines = [f"usage: {program} [flags]   (Megatron's names; docs/flags.md has the same list)", "", "files"]
    lines += [f"  --{key} FILE\n        {text}" for key, text in FILES.items()]
    for section, cls in section_types().items():
        lines += ["", f"{section}: {(cls.__doc__ or '').strip()}"]
        for opt in all_options().values():
            if opt.section == section:
                default = default_text(opt)
                lines.append(f"  {spelling(opt)}\n        {opt.help}{f' [{default}]' if default else ''}")
    lines += ["", "accepted because they always hold"]
    lines += [f"  --{key}\n        {text}" for key, text in FACTS.items()]
    return "\n".join(lines)
