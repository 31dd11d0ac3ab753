"""The command line is: megazero COMMAND. A command is imported when it is called, and torch only when it needs it.

What a command does lies in the package that owns it. The packages train, convert, plan, calibrate and verify read
their commands' words themselves (command.py); else a file here reads them, calls the package and prints.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

import megazero
from megazero.config.read.flags import pick
from megazero.log.safe_stream import guard_streams


class Command(NamedTuple):
    """A command of the command line.

    help: one line that says what it does. module: its ``main(argv) -> exit status`` is the command; it answers --help
    without torch.
    """

    help: str
    module: str


COMMANDS = {
    "train": Command("Train a model, or continue its training.", "megazero.train.command"),
    "evaluate": Command("Measure a checkpoint's losses on data.", "megazero.train.evaluate_command"),
    "generate": Command("Continue a text with a trained model.", "megazero.cli.generate"),
    "preprocess": Command("Turn text into the token files that training reads.", "megazero.cli.preprocess"),
    "tokenizer": Command("Train a SentencePiece tokenizer on text.", "megazero.cli.tokenizer"),
    "flags": Command("Explain a flag of megazero or Megatron, or a key of DeepSpeed.", "megazero.cli.flags"),
    "status": Command("Report the state, progress and restarts of runs.", "megazero.cli.status"),
    "report": Command(
        "Draw runs as one HTML file: curves, time, bytes, memory, layout.", "megazero.cli.report"
    ),
    "inspect": Command("Describe a checkpoint and check its files.", "megazero.cli.inspect"),
    "convert": Command(
        "Convert checkpoints to and from Hugging Face, and from Megatron.", "megazero.convert.command"
    ),
    "plan": Command("Find the fastest layout of a model on a cluster.", "megazero.plan.command"),
    "calibrate": Command("Measure a cluster for the planner.", "megazero.calibrate.command"),
    "verify": Command("Prove a configuration on local ranks against one rank.", "megazero.verify.command"),
    "check-nodes": Command(
        "Check devices and shared storage of nodes, without a run.", "megazero.cli.check_nodes"
    ),
}


def main(argv: Sequence[str] | None = None, command: str | None = None) -> int:
    """Run a command and return the exit status: 0 is good, 1 a check failed, 2 the command line is wrong.

    argv: the words of the command line (default: this process's). command: the name of the command, if the words are
    those after it.
    """
    words = [*([command] if command else []), *(sys.argv[1:] if argv is None else argv)]
    if argv is None:  # else another program calls, and its streams are its own
        guard_streams()
    if words[:1] == ["--version"]:
        print(f"megazero {megazero.__version__}")
        return 0
    table = {name: command.help for name, command in COMMANDS.items()}
    name, status = pick("megazero", table, words, ("COMMAND --help", "--version"))
    return import_module(COMMANDS[name].module).main(words[1:]) if name else status
