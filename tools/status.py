#!/usr/bin/env python
"""Report the state of runs: the same as ``megazero status``."""

import sys

from megazero.cli import main

if __name__ == "__main__":
    sys.exit(main(command="status"))
