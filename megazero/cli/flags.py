"""The command ``megazero flags``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megazero.config.foreign.explain import difference_lines, differences, explain
from megazero.config.foreign.typos import suggestion

USAGE = """usage: megazero flags [WORD ...]
       megazero flags --use-distributed-optimizer moe-grouped-gemm zero_optimization.stage

Explains flags of megazero and Megatron, and keys of a DeepSpeed file: what they mean here, why they change nothing,
or what to do instead, removed flags included. Without a word it lists what a flag of Megatron's name does otherwise
here. megazero train --help lists megazero's own flags. Exit status 0; 2: a word is unknown.
"""


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0, or 2 if a word is unknown."""
    if {"--help", "-h"} & {*argv}:
        print(USAGE)
        return 0
    lines = {word: [*explain(word)] for word in argv} if argv else {"": [*difference_lines(differences())]}
    for word, said in lines.items():
        if said:
            print("\n".join(said))
        else:
            print(f"{word} is no flag{suggestion(word.lstrip('-'))}", file=sys.stderr)
    return 0 if all(lines.values()) else 2
