"""The command ``megazero convert``: checkpoints to Hugging Face and back, and from Megatron, checked."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megazero.convert.options import read_options


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 is good, 1 a check does not hold, 2 nothing was converted."""
    try:
        options = read_options(sys.argv[1:] if argv is None else argv)
    except SystemExit as ended:  # argparse's --help, or its word on a wrong command line
        return int(ended.code or 0)
    from megazero.convert.conversions import CONVERSIONS  # brings torch, which --help does not need

    try:
        return CONVERSIONS[options.command](options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
