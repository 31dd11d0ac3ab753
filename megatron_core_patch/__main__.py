"""``python -m megatron_core_patch FLAGS SCRIPT ARGS``: run a training script of Megatron's with the patch on.

Under a launcher: ``torchrun ... -m megatron_core_patch --zero-quantized-gradients ... pretrain_gpt.py ARGS``. The
flags of the patch stand before the script; what follows it is the script's own.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import megatron_core_patch
from megatron_core_patch.options import PatchOptions
from megazero.config.errors import ConfigError
from megazero.config.options.fields import section_options
from megazero.config.read.flags import options_help, read_section
from megazero.config.run import REMOVED
from megazero.patches.options import check


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words of the patch, and the script with its own. The script is the first word that ends in .py."""
    for i, word in enumerate(words):
        if word.endswith(".py") and not word.startswith("-"):
            return words[:i], words[i:]
    return words, []


def parse(words: list[str]) -> PatchOptions:
    """Return the options that flags mean. Raises ConfigError with all faults."""
    options, rest, faults = read_section(PatchOptions, words)
    for word in rest:
        removed = REMOVED.get(word.removeprefix("--").replace("-", "_"))
        why = f"was removed: {removed.cure}" if removed else "is no flag of megatron_core_patch"
        faults.append(f"{word} {why}; flags of the script follow the script")
    if faults:
        raise ConfigError(faults)
    return check(options)


def main(words: list[str]) -> int:
    """Run the script; return the exit status, which is 2 for a mistake in the flags."""
    own, script = split(words)
    if "--help" in own or "-h" in own or not words:
        print("usage: torchrun ... -m megatron_core_patch [flags] SCRIPT.py [the script's arguments]")
        print("\n".join(options_help(section_options("patch", PatchOptions))))
        return 0
    try:
        options = parse(own)
        if not script:
            raise ConfigError(["no script: name one that ends in .py, behind the flags"])
        if not Path(script[0]).is_file():
            raise ConfigError([f"script {script[0]} is not there"])
        # As python does for a script, and before megatron.core is imported: the script may lie in a checkout of it.
        sys.path[0] = str(Path(script[0]).resolve().parent)
        megatron_core_patch.turn_on(options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    sys.argv[:] = script
    runpy.run_path(script[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
