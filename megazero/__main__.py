"""python -m megazero COMMAND: the same as the console script."""

import sys

from megazero.cli import main

if __name__ == "__main__":
    sys.exit(main())
