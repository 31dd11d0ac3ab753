"""The command line is: megazero COMMAND. A command is imported when it is called, and torch only when it needs it."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from megazero.config.nearest import did_you_mean
from megazero.log.safe_stream import guard_streams
from megazero.mesh.launch import is_first


class Command(NamedTuple):
    """A command of the command line.

    help: one line that says what it does. module: its ``main(argv) -> exit status`` is the command; it answers --help
    without torch.
    """

    help: str
    module: str


COMMANDS = {
    "verify": Command(
        "prove a configuration: run it shrunk on local ranks against one rank, and write a certificate",
        "megazero.verify.command",
    ),
    "plan": Command(
        "find the fastest layout of a model on a cluster, before it is booked", "megazero.plan.command"
    ),
    "calibrate": Command(
        "measure collectives, codecs and a model's modules on the ranks at hand: the planner's cluster file",
        "megazero.calibrate.command",
    ),
    "convert": Command("checkpoints to and from Hugging Face, and from Megatron", "megazero.convert.command"),
}


_PROFILE = re.compile("^--profile[-_](?=rounds|micro|largest|fresh)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status: 0 is good, 1 a check failed, 2 the command line is wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:  # else another program calls, whose streams are its own
        guard_streams()
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0 if words else 2
    name, *rest = _renamed(words)
    if name not in COMMANDS:
        near = did_you_mean(name, COMMANDS, "megazero ")
        print(f"megazero {name} does not exist{near}\n\n{_help()}", file=sys.stderr)
        return 2
    return import_module(COMMANDS[name].module).main(rest)


def _renamed(words: list[str]) -> list[str]:
    """Return a command line in today's words: ``profile`` and four of its flags had names that training has, too."""
    if words[0] != "profile":
        return words
    if is_first():
        print(
            "megazero profile is now megazero calibrate, and --profile-rounds is --calibrate-rounds",
            file=sys.stderr,
        )
    return ["calibrate", *(_PROFILE.sub("--calibrate-", word) for word in words[1:])]


def _help() -> str:
    lines = ["usage: megazero COMMAND [flags]   (megazero COMMAND --help)", "", "commands"]
    return "\n".join([*lines, *(f"  {name:<9} {command.help}" for name, command in COMMANDS.items())])
