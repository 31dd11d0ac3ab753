"""The command line: megazero COMMAND. No torch until a command needs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megazero.cli.options import VERIFY_HELP

HELP = """usage: megazero COMMAND [flags]   (megazero COMMAND --help)

commands
  verify    prove a configuration: run it shrunk on local ranks against one rank, and write a certificate"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status: 0 good, 1 a check failed, 2 the command line is wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(HELP)
        return 0 if words else 2
    command, *rest = words
    if command != "verify":
        print(f"megazero {command} does not exist; nearest: megazero verify\n\n{HELP}", file=sys.stderr)
        return 2
    if "-h" in rest or "--help" in rest:
        print(VERIFY_HELP)
        return 0
    from megazero.cli.verify import command as verify

    return verify(rest)
