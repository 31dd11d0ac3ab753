"""Wrong flags made of right ones by seeded edits, and whether the suggestion is the right one.

python -m tests.unit.wrong_flags [--seed N] [--count N] [--show N] prints the share that is right.
"""

from __future__ import annotations

import argparse
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass

from megazero.config.foreign.elsewhere import deepspeed_names, torchtitan_names
from megazero.config.foreign.megatron.table import rows
from megazero.config.foreign.suggest import suggestion
from megazero.config.read.sources import all_switches
from megazero.config.run import all_options

OLD_PREFIXES = ("model", "train", "ds", "zero", "no", "use", "megatron")


@dataclass(frozen=True)
class Wrong:
    """A flag that does not exist, the name that it was made of, how, and what of the suggestion is right (any)."""

    key: str
    name: str
    edit: str
    right: tuple[str, ...]


def wrong_flags(seed: int, count: int) -> list[Wrong]:
    """Return ``count`` wrong flags: half of Megatron's names, the rest of DeepSpeed's and torchtitan's.

    One in ten is letters by chance, for which no suggestion is right.
    """
    rng = random.Random(seed)
    megatron = sorted({*all_switches(), *rows()})
    sources = [megatron, megatron, sorted(deepspeed_names()), sorted(torchtitan_names())]
    exists = {*megatron, *deepspeed_names(), *torchtitan_names()}
    edits = [_drop, _add, _swap, _replace, _dash, _word, _plural, _prefix]
    found: list[Wrong] = []
    while len(found) < count:
        if len(found) % 10 == 9:
            letters = rng.choices(string.ascii_lowercase + "-", k=rng.randrange(6, 24))
            found.append(Wrong("x" + "".join(letters), "", "chance", ()))
            continue
        name, edit = rng.choice(sources[len(found) % len(sources)]), rng.choice(edits)
        key = edit(name, rng)
        if len(name) > 3 and len(key) > 2 and key not in exists and not key.startswith("-"):
            found.append(Wrong(key, name, edit.__name__, _right(name)))
    return found


def _right(name: str) -> tuple[str, ...]:
    """Return what a right suggestion contains, one of them: the name as its program writes it, or what it is here."""
    written = (f"--{name}",) if name in all_switches() or name in rows() else ()
    here = deepspeed_names().get(name) or torchtitan_names().get(name)
    return (*written, *([all_options()[here].flag] if here else []), name.replace("-", "_"))


def _drop(name: str, rng: random.Random) -> str:
    i = rng.randrange(len(name))
    return name[:i] + name[i + 1 :]


def _add(name: str, rng: random.Random) -> str:
    i = rng.randrange(1, len(name))
    return name[:i] + rng.choice(string.ascii_lowercase) + name[i:]


def _swap(name: str, rng: random.Random) -> str:
    i = rng.randrange(len(name) - 1)
    return name[:i] + name[i + 1] + name[i] + name[i + 2 :]


def _replace(name: str, rng: random.Random) -> str:
    i = rng.randrange(len(name))
    return name[:i] + rng.choice(string.ascii_lowercase) + name[i + 1 :]


def _dash(name: str, rng: random.Random) -> str:
    """Leave a dash out, or write an _ that joins two words wrongly."""
    places = [i for i, letter in enumerate(name) if letter in "-."]
    if not places:
        return name
    i = rng.choice(places)
    return name[:i] + rng.choice(["", "--", "."]) + name[i + 1 :]


def _word(name: str, rng: random.Random) -> str:
    words = name.split("-")
    if len(words) < 3:
        return name
    del words[rng.randrange(len(words))]
    return "-".join(words)


def _plural(name: str, rng: random.Random) -> str:
    words = name.split("-")
    i = rng.randrange(len(words))
    words[i] = words[i][:-1] if words[i].endswith("s") and len(words[i]) > 3 else words[i] + "s"
    return "-".join(words)


def _prefix(name: str, rng: random.Random) -> str:
    prefix = rng.choice(OLD_PREFIXES)
    return name.removeprefix(f"{prefix}-") if name.startswith(f"{prefix}-") else f"{prefix}-{name}"


def mistakes(wrong: Sequence[Wrong]) -> list[tuple[Wrong, str]]:
    """Return the wrong flags whose suggestion is not right, with the suggestion."""
    said = [(each, suggestion(each.key)) for each in wrong]
    return [(each, text) for each, text in said if not _right_suggestion(each, text)]


def _right_suggestion(wrong: Wrong, text: str) -> bool:
    return any(_has(text, right) for right in wrong.right) if wrong.right else not text


def _has(text: str, right: str) -> bool:
    return right in text.replace("(", " ").replace(";", " ").split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--show", type=int, default=0, help="how many mistakes to print")
    args = parser.parse_args()
    wrong = wrong_flags(args.seed, args.count)
    bad = mistakes(wrong)
    for each, text in bad[: args.show]:
        print(f"--{each.key} ({each.edit} of {each.name}){text}")
    print(f"seed {args.seed}: {1 - len(bad) / len(wrong):.1%} of {len(wrong)} right")


if __name__ == "__main__":
    main()
