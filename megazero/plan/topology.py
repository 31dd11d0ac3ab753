"""Reads which nodes lie under which switch, from SLURM's files or a plain list.

SLURM's are topology.conf and the output of ``scontrol show topology``. A plain list has a line for each leaf switch
with its nodes, by name or as SLURM writes them (gpu[01-16,20]); a name of the switch and a colon may come first.
Everything that is wrong with a file is reported at once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

from megazero.bounded import read_bytes
from megazero.config.errors import ConfigError
from megazero.config.nearest import did_you_mean

NAMES = ("switchname", "blockname")
SIZES = ("blocksizes", "aggregatedblock")  # lines on blocks as a whole: SLURM's way to pack jobs, no switches
MOST_NODES = 1 << 20  # that a line may name: a slip of a digit is not to fill the memory


@dataclass
class Topology:
    """Switches by name. leaves: each leaf's nodes, in the file's order. above: the switch over a switch."""

    leaves: dict[str, tuple[str, ...]] = field(default_factory=dict)
    above: dict[str, str] = field(default_factory=dict)

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(node for nodes in self.leaves.values() for node in nodes)

    def path(self, leaf: str) -> tuple[str, ...]:
        """Return the switches from the top down to a leaf."""
        out = [leaf]
        while out[-1] in self.above and self.above[out[-1]] not in out:
            out.append(self.above[out[-1]])
        return tuple(reversed(out))


def read_topology(path: str) -> Topology:
    """Read a file. Raises ConfigError with every fault."""
    try:
        text = read_bytes(path).decode("utf-8")
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise ConfigError([f"--topology {path} cannot be read: {said}"]) from None
    return parse_topology(text, path)


def parse_topology(text: str, where: str) -> Topology:
    """Return the topology that a text describes. Raises ConfigError with every fault; ``where`` begins each."""
    errors: list[str] = []
    topology = Topology()
    uplinks: dict[str, tuple[str, ...]] = {}
    for number, line in _lines(text):
        if line.partition("=")[0].strip().lower() in SIZES:
            continue
        try:
            name, nodes, switches = _line(line, number)
        except ValueError as error:
            errors.append(f"{where}, line {number}: {error}")
            continue
        if name in topology.leaves or name in uplinks:
            errors.append(f"{where}, line {number}: switch {name} stands twice")
        elif switches:
            uplinks[name] = switches
        else:
            topology.leaves[name] = nodes
    for name, below in uplinks.items():
        for switch in below:
            if switch not in topology.leaves and switch not in uplinks:
                near = did_you_mean(switch, [*topology.leaves, *uplinks])
                errors.append(f"{where}: switch {name} is over {switch}, which has no line{near}")
            topology.above[switch] = name
    if not errors:
        twice = sorted(node for node, number in Counter(topology.nodes).items() if number > 1)
        errors += [f"{where}: node {node} lies under two leaf switches" for node in twice]
    if not errors and not topology.leaves:
        errors.append(
            f"{where} names no leaf switch: a line is SwitchName=s1 Nodes=gpu[01-16], or s1: gpu[01-16]"
        )
    if errors:
        raise ConfigError(errors)
    return topology


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines with their numbers, without comments. A backslash at the end joins a line to the next."""
    joined, begun = "", 1
    for number, raw in enumerate(text.splitlines(), 1):
        begun = begun if joined else number
        joined += raw.partition("#")[0].rstrip()
        if joined.endswith("\\"):
            joined = joined[:-1] + " "
            continue
        if joined.strip():
            yield begun, joined.strip()
        joined = ""
    if joined.strip():
        yield begun, joined.strip()


def _line(line: str, number: int) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Return a switch's name, its nodes and the switches below it. Raises ValueError."""
    if "=" not in line:
        name, colon, rest = line.partition(":")
        listed = rest if colon else line
        return (name.strip() if colon else f"line {number}"), _nodes(listed), ()
    words = dict(_assignment(word) for word in line.split())
    names = [words[key] for key in NAMES if key in words]
    if not names:
        raise ValueError(f"no SwitchName in {line!r}")
    switches = expand(words["switches"]) if "switches" in words else ()
    if not switches and "nodes" not in words:
        raise ValueError(f"switch {names[0]} has neither Nodes nor Switches")
    return names[0], () if switches else _nodes(words["nodes"]), switches


def _assignment(word: str) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    if not equals or not value:
        raise ValueError(f"{word!r} is not of the form Key=Value")
    return key.lower(), value


def _nodes(text: str) -> tuple[str, ...]:
    nodes = tuple(node for word in text.split() for node in expand(word))
    if not nodes:
        raise ValueError("no nodes")
    return nodes


def expand(text: str) -> tuple[str, ...]:
    """Return the hosts of a SLURM node list: 'gpu[08-09],login' gives gpu08, gpu09, login. Raises ValueError."""
    out: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text):
        if not part:
            continue
        pieces = re.split(r"\[([^\[\]]*)\]", part)
        if any("[" in piece or "]" in piece for piece in pieces[::2]):
            raise ValueError(f"{part!r} is no node list: brackets do not match")
        choices = [_numbers(p, part) if i % 2 else [p] for i, p in enumerate(pieces)]
        if len(out) + prod(map(len, choices)) > MOST_NODES:
            raise ValueError(f"{part!r} is no node list: it names more than {MOST_NODES:,} nodes")
        out += ["".join(chosen) for chosen in product(*choices)]
    return tuple(out)


def _numbers(text: str, part: str) -> Sequence[str]:
    out: list[str] = []
    for span in text.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", span.strip())
        if found is None:
            raise ValueError(f"{part!r} is no node list: {span!r} is neither a number nor a range")
        first, last = found[1], found[2] or found[1]
        if not 0 <= int(last) - int(first) < MOST_NODES - len(out):
            raise ValueError(f"{part!r} is no node list: the range {span} does not go upward, or is too long")
        out += [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)]
    return out


def check_nodes(topology: Topology, wanted: Sequence[str], number: int) -> list[str]:
    """Return what is wrong with these nodes (empty: all of the topology's) for a run of ``number`` nodes."""
    known = set(topology.nodes)
    missing = [node for node in wanted if node not in known]
    errors = [
        f"--topology-nodes: the topology has no {node}{did_you_mean(node, topology.nodes)}"
        for node in missing[:5]
    ]
    if len(missing) > 5:
        errors.append(f"--topology-nodes: the topology lacks {len(missing) - 5} more of these nodes")
    if len(set(wanted)) < len(wanted):
        errors.append("--topology-nodes: a node stands twice")
    have = len(wanted or topology.nodes)
    if not errors and have != number:
        what = "--topology-nodes names" if wanted else "the topology has"
        cure = f"--nodes {have}" if have < number or wanted else f"--topology-nodes with {number} of them"
        errors.append(f"{what} {have} nodes, and the plan is for {number}; nearest: {cure}")
    return errors
