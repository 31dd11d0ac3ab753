#!/usr/bin/env python
"""Describe a checkpoint, or compare two: the same as ``megazero inspect``."""

import sys

from megazero.cli import main

if __name__ == "__main__":
    sys.exit(main(command="inspect"))
