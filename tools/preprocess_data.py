#!/usr/bin/env python
"""Turn text into the token files that training reads: the same as ``megazero preprocess``."""

import sys

from megazero.cli import main

if __name__ == "__main__":
    sys.exit(main(command="preprocess"))
