"""An option is described once, in its dataclass: its default, help, choices and range.

Flags, keys and docs are made from that description.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import operator
import re
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, dataclass, field, replace
from enum import Flag, auto
from typing import Any, TypeVar

from megazero.config.errors import ConfigError
from megazero.config.nearest import misspelt
from megazero.families import FAMILIES

Section = TypeVar("Section")


KEPT, SHORT = "kept", "short"  # what Option.small may be beside a value


class Resume(Flag):
    """What another value of an option means where a run goes on from a checkpoint."""

    FREE = 0  # nothing
    BEGINS = auto()  # the run begins elsewhere or otherwise, so it does not go on from what it has saved
    BY_NAME = auto()  # so does a run that names its checkpoint: it goes back to that one
    ORDER = auto()  # the same count of consumed samples is other samples
    UPDATE = auto()  # the update or the loss is another one


BEGINS, BY_NAME, ORDER, UPDATE = Resume


@dataclass(frozen=True)
class Option:
    """One configuration field, seen as an option.

    ``kind`` is 'int', 'float', 'bool', 'str', or 'ints', 'floats' or 'strs', which take one or more values (MANY).
    ``needed``: its section always has a value, and no default. A user says it (``required``), or it is derived.
    ``low`` and ``high`` are inclusive bounds; ``above`` and ``below`` are exclusive ones.
    ``word`` is a text that a number's option takes, too.
    ``strict``: it is an error where it has no effect; else there is a note. All options of a section whose class says
    ``STRICT`` are. Megatron's options are not: its scripts give them, and Megatron ignores them.
    ``needs``: what it needs to have an effect (options/needs.py), after what its class says (``NEEDS``). What a class
    says is a value for all its options, or values by a name, or by the beginning of names up to a _.
    ``small``: its value in a small, short run (verify/shrink.py: small_value), by default what its class says
    (``SMALL``): the whole run's (KEPT), or the default, because it means nothing there (SHORT). Of a whole number it
    is the most.
    ``resume``: what another value means at a resume, by default what its class says (``RESUME``).
    ``entry``: makes a word of an entry of a YAML list, which may be a mapping, and raises ValueError for another.
    ``consts`` holds further flags without a value, by the value they set (--bf16 sets 'bf16').
    ``aliases`` are other names of the same flag. ``negative`` is the name of the flag that sets a boolean to false,
    or a list to none.
    ``place`` names a word of a command that has no flag: DIR in ``megazero convert to-hf CHECKPOINT DIR``.
    """

    name: str
    section: str
    kind: str
    default: Any
    help: str
    choices: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    needed: bool = False
    required: bool = False
    word: str = ""
    entry: Callable[[Any], str] | None = None
    strict: bool = False
    needs: tuple[str, ...] = ()
    small: Any = KEPT
    resume: Resume = Resume.FREE
    consts: Mapping[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    negative: str = ""
    place: str = ""

    @property
    def key(self) -> str:
        return self.name.replace("_", "-")

    @property
    def flag(self) -> str:
        return "--" + self.key

    @property
    def may_be_none(self) -> bool:
        """Tell whether it is a list that may have no entries, which its negative flag says."""
        return self.kind in MANY and not (self.default or self.required)

    @property
    def negative_key(self) -> str:
        return self.negative or "no-" + self.key


def option(default: Any, help: str, **meta: Any) -> Any:
    """Return a dataclass field that is an option. ``meta`` holds fields of Option.

    ``default``: MISSING if every section has a value that was said or derived; None if a section may have none.
    """
    return field(default=default, metadata={"help": help, **meta})


def option_of(section: type, name: str, **other: Any) -> Any:
    """Return a dataclass field that is an option of another section, but for its ``other`` meta.

    So both sections have one default, one range and, unless ``help`` is given, one text.
    """
    (found,) = (f for f in dataclasses.fields(section) if f.name == name)
    return field(default=found.default, metadata={**found.metadata, **other})


KINDS = {"int": "int", "int | str": "int", "float": "float", "bool": "bool", "str": "str"}
KINDS |= {"tuple[int, ...]": "ints", "tuple[float, ...]": "floats", "tuple[str, ...]": "strs"}
MANY = ("ints", "floats", "strs")


def section_options(section: str, cls: type) -> list[Option]:
    """Return the options of one dataclass, in the order in which they are written."""
    return [
        Option(
            name=f.name,
            section=section,
            kind=KINDS[str(f.type).removesuffix(" | None")],
            default=None if f.default is MISSING else f.default,
            needed=f.default is MISSING,
            **{**_shared(cls, f.name), **f.metadata, "needs": _needs(cls, f)},
        )
        for f in dataclasses.fields(cls)
    ]


def _shared(cls: type, name: str) -> dict[str, Any]:
    """Return the meta of a field that its class says: STRICT, SMALL and RESUME."""
    found = {column.lower(): _of_class(cls, column, name) for column in ("STRICT", "SMALL", "RESUME")}
    return {key: values[-1] for key, values in found.items() if values}


def _needs(cls: type, of: dataclasses.Field[Any]) -> tuple[str, ...]:
    """Return the needs of a field: those that its class says of its name, then its own."""
    found = [*_of_class(cls, "NEEDS", of.name), of.metadata.get("needs", ())]
    return tuple(need for needs in found for need in ((needs,) if isinstance(needs, str) else needs))


def _of_class(cls: type, column: str, name: str) -> list[Any]:
    """Return what a class says of an option in a column: one value for all, or values by names (Option)."""
    said = getattr(cls, column, {})
    if not isinstance(said, Mapping):
        return [said]
    return [each for key, each in said.items() if name == key or key[-1] == "_" and name.startswith(key)]


def section_of(cls: type[Section], values: Mapping[str, Any]) -> Section:
    """Make a section of values by option name, of which others and None are left out.

    Raises ConfigError, which names every value that such a section must have.
    """
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    said = {f.name: values[f.name] for f in fields if values.get(f.name) is not None}
    missing = [f.name for f in fields if f.default is MISSING and f.name not in said]
    if missing:
        raise ConfigError([f"--{name.replace('_', '-')} is required" for name in missing])
    return cls(**said)


class Unjudged(Exception):
    """A rule reads an option that has no legal value yet."""


def guarded(section: Section, broken: AbstractSet[str]) -> Section:
    """Return the section as rules may read it: reading an option of ``broken`` raises Unjudged."""
    if not broken & vars(section).keys():
        return section

    class Guarded(type(section)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name in broken:
                raise Unjudged(name)
            return super().__getattribute__(name)

    copy = object.__new__(Guarded)
    copy.__dict__.update(vars(section))
    return copy


def convert(opt: Option, raw: Any) -> Any:
    """Return the value of ``opt`` that a flag's text or a YAML value means.

    Raises ValueError with the rule that is broken.
    """
    if opt.kind in MANY:
        return _convert_many(opt, raw)
    if isinstance(raw, list | tuple | dict):
        raise ValueError(f"takes one value, got {raw!r}")
    if opt.kind == "str":
        if not isinstance(raw, str):  # YAML reads 9:1 and yes as other things than text
            raise ValueError(f"takes text, got {raw!r}; put it in quotes")
        return raw
    if opt.kind == "bool":
        if not isinstance(raw, bool):
            raise ValueError(f"takes true or false, got {raw!r}")
        return raw
    return raw if opt.word and raw == opt.word else _number(opt.kind, raw, opt.word)


def _convert_many(opt: Option, raw: Any) -> tuple[Any, ...] | None:
    """Return the values; the default for none, if that is none."""
    items = list(raw) if isinstance(raw, list | tuple) else [raw]  # a mapping is one entry
    if opt.entry is not None:
        return tuple(map(opt.entry, items))
    if opt.kind == "strs":  # numbers are weights of a blend
        return tuple(str(item) for item in items)
    if all(isinstance(item, str) for item in items):
        items = [" ".join(items)]  # a shell cuts [1 2] in two
    pieces = [piece for item in items for piece in (_pieces(item) if isinstance(item, str) else [item])]
    if not pieces and opt.default:
        raise ValueError("takes at least one number, got none")
    if not pieces:
        return opt.default
    return tuple(_number(opt.kind.removesuffix("s"), piece) for piece in pieces)


def _pieces(text: str) -> list[Any]:
    """Split text at commas and spaces, also within one pair of brackets. Others are of lists and tuples of Python,
    whose sums and products count, as in Megatron's ([1]*5+[0])*8. Raises ValueError.
    """
    plain = re.sub(r"^\s*[\[(]([^\[\]()*+]*)[\])]\s*$", r"\1", text)
    if not plain.strip().startswith(("(", "[")):
        return plain.replace(",", " ").split()

    def items(node: ast.expr) -> list[Any]:
        """Return the numbers of an expression."""
        match node:
            case ast.Constant(value=int() | float()):
                return [node.value]
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return [-value]
            case ast.List() | ast.Tuple():
                return [item for element in node.elts for item in items(element)]
            case ast.BinOp(op=ast.Add()):
                return items(node.left) + items(node.right)
            case ast.BinOp(op=ast.Mult(), right=ast.Constant(value=int() as count)) if 0 <= count < 1 << 12:
                return items(node.left) * count
        raise ValueError(f"takes numbers or a list of Python, got {text!r}")

    try:
        return items(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError(f"takes numbers or a list of Python, got {text!r}") from None


def _number(kind: str, raw: Any, word: str = "") -> int | float:
    rule = f"takes {'a whole number' if kind == 'int' else 'a number'}{f' or {word}' if word else ''}"
    if (
        isinstance(raw, bool)
        or raw is None
        or (kind == "int" and isinstance(raw, float) and not raw.is_integer())
    ):
        raise ValueError(f"{rule}, got {raw!r}")
    try:
        value = int(raw) if kind == "int" else float(raw)
        finite = math.isfinite(value)
    except (TypeError, ValueError, OverflowError):  # the last: a whole number that no float holds
        raise ValueError(f"{rule}, got {raw!r}") from None
    if not finite:
        raise ValueError(f"takes a finite number, got {raw!r}")
    return value


def show(value: Any) -> str:
    """Return a value as it is typed after a flag."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(str, value)) if value and isinstance(value[0], str) else ",".join(map(str, value))
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    return "unset" if value is None else str(value)


def of_script(flag: str) -> str:
    """Say where a flag without its value comes from: a line of a script whose variable is empty."""
    variable = flag.lstrip("-").replace("-", "_").upper()
    return f"; perhaps a variable of the script is empty, in a line such as {flag} ${variable}"


def stand_in(opt: Option) -> Any:
    """Return a legal value of an option that has no default, so that others can be judged without it."""
    return opt.choices[0] if opt.choices else False if opt.kind == "bool" else 1


def typed(opt: Option, value: Any) -> str:
    """Return the flag that gives ``opt`` this value; 'no --flag' if it is unset."""
    if value is None:
        return f"no {opt.flag}"
    if isinstance(value, bool):
        return opt.flag if value else f"--{opt.negative_key}"
    return f"{opt.flag} {show(value)}"


def default_text(opt: Option) -> str:
    """Return the default in words, or '' if the help already says it."""
    if opt.required:
        return "required"
    by_family = {name: f.defaults[opt.name] for name, f in FAMILIES.items() if opt.name in f.defaults}
    if by_family:
        others = [show(opt.default)] if len(by_family) < len(FAMILIES) else []
        return ", ".join(others + [f"{name}: {show(value)}" for name, value in by_family.items()])
    return "" if opt.default is None or opt.default == () else f"default: {show(opt.default)}"


def fault(opt: Option, value: Any) -> str:
    """Return the range or choice that a value of ``opt``, or one of several, breaks, or '' if it breaks none."""
    if value is None:
        return f"{opt.flag} is required" if opt.required else ""
    if opt.kind in MANY:
        one = replace(opt, kind=opt.kind.removesuffix("s"))
        return next(filter(None, (fault(one, each) for each in value)), "")
    if opt.choices and value not in opt.choices:
        choices = [str(choice) for choice in opt.choices]
        if opt.kind == "int":
            nearest = f"; nearest: {min(opt.choices, key=lambda choice: abs(choice - value))}"
        else:
            nearest = misspelt(str(value), choices)
        return f"{opt.flag} {value} is not one of {', '.join(choices)}{nearest}"
    return _out_of_range(opt, value) if opt.kind in ("int", "float") and value != opt.word else ""


def _out_of_range(opt: Option, value: float) -> str:
    """Return the range that a number breaks, or ''."""
    bounds = (
        ("at least", opt.low, operator.ge),
        ("at most", opt.high, operator.le),
        ("above", opt.above, operator.gt),
        ("below", opt.below, operator.lt),
    )
    for words, bound, within in bounds:
        if bound is not None and not within(value, bound):
            near = _near_bound(opt, value, bound, words)
            return f"{opt.flag} {show(value)} must be {words} {show(bound)}{near}"
    return ""


def _near_bound(opt: Option, value: float, bound: float, words: str) -> str:
    """Return what to do about a number beyond a bound."""
    # Below 0, and at 0 where it may be left out, it often stands for "none" or "all", as no neighbour does.
    if words == "at least" and value <= 0 and opt.default is None and not opt.needed:
        return "; or leave it out"
    if words == "at most" or words == "at least" and value >= 0:
        return f"; nearest: {show(bound)}"
    default = default_text(opt).removeprefix("default: ")
    return f"; the default is {default}" if default and not opt.required else ""
