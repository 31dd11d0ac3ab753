#!/usr/bin/env python
"""Check nodes without a run: the same as ``megazero check-nodes``."""

import sys

from megazero.cli import main

if __name__ == "__main__":
    sys.exit(main(command="check-nodes"))
