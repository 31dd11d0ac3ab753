#!/usr/bin/env python
"""Say what a checkpoint is, whether its files are whole, and how two checkpoints differ.

python tools/inspect_checkpoint.py runs/a/checkpoint
python tools/inspect_checkpoint.py runs/a/checkpoint/iter_0001000 runs/a/checkpoint/iter_0002000
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megazero.log.safe_stream import guard_streams


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("checkpoint", type=Path, help="folder given to --save in training, or one of its iter_* folders")
    add("other", type=Path, nargs="?", help="print what is different in this one instead")
    add("--ckpt-step", type=int, metavar="N", help="iteration of the first one (default: the newest)")
    add("--tensors", action="store_true", help="list every tensor")
    add("--no-check", action="store_true", help="do not read the files to check their bytes")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 whole (or equal), 1 damaged (or different), 2 there is nothing to look at."""
    options = parse(arguments)
    from megazero.checkpoint.store import find_checkpoint
    from megazero.config.secrets import redact
    from megazero.convert.inspection import DAMAGED, describe, differences

    try:
        path = find_checkpoint(options.checkpoint, options.ckpt_step)
        if options.other is not None:
            lines = list(differences(path, find_checkpoint(options.other)))
            print(redact("\n".join(lines)) or "no difference")
            return 1 if lines else 0
        lines = list(describe(path, options.tensors, not options.no_check))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(redact("\n".join(lines)))
    return 1 if any(line.endswith(DAMAGED) for line in lines) else 0


if __name__ == "__main__":
    guard_streams()
    sys.exit(main())
